"""Operator signatures over named indices, parsed once into frozen objects.

`"input: * k, weight: n k, bias: n -> * n"`: operands by schema name, each with one token per dim.
lowercase token: an index that may be split; UPPERCASE: whole; `*`: any number of leading dims, aligned from the right and
broadcast as numpy does. Outputs follow `->`, separated by commas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Operand:
    name: str
    tokens: tuple[str, ...]

    def indices(self, rank: int) -> tuple[str, ...]:
        """One index name per dim of a tensor of `rank` dims; starred dims are named "*1", "*2", ... from the right."""
        if "*" not in self.tokens:
            assert len(self.tokens) == rank, (self, rank)
            return self.tokens
        where = self.tokens.index("*")
        starred = rank - (len(self.tokens) - 1)
        assert starred >= 0, (self, rank)
        return self.tokens[:where] + tuple(f"*{starred - i}" for i in range(starred)) + self.tokens[where + 1 :]


@dataclass(frozen=True, slots=True)
class Signature:
    operands: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


def may_split(index: str) -> bool:
    """Whether an index may be split (starred or lowercase)."""
    return index.startswith("*") or index.islower()


@cache
def parse(text: str) -> Signature:
    """The signature that `text` writes. A malformed one is a programmer's mistake (AssertionError)."""
    left, arrow, right = text.partition("->")
    assert arrow, f"no -> in signature {text!r}"
    operands = []
    for part in filter(None, (p.strip() for p in left.split(","))):
        name, colon, tokens = part.partition(":")
        assert colon, f"operand {part!r} has no name in {text!r}"
        operands.append(Operand(name.strip(), tuple(tokens.split())))
    outputs = tuple(Operand(f"out{i}", tuple(p.split())) for i, p in enumerate(right.split(",")))
    for o in (*operands, *outputs):
        assert o.tokens.count("*") <= 1, f"two stars in {text!r}"
        assert all(t == "*" or t.isalnum() for t in o.tokens), f"bad token in {text!r}"
    return Signature(tuple(operands), outputs)
