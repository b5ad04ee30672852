"""The triples of a node, each made when it is asked for.

In: a node, the shapes of its triples, which it shares with all nodes that are alike. Out: a sequence of triples. A search looks at the triples of one
node of each kind, and programs have one per node: of the others nobody ever asks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from hapx.ir import Node, OpCall, TensorRef
from hapx.plan import Triple
from hapx.states import Cut, Placement, Property
from hapx.theory.factors import in_all_forms
from hapx.theory.registry import LocalCall, lookup


@dataclass(frozen=True, slots=True)
class Shape:
    """A triple without names and form: what alike nodes share."""

    pre: tuple[Placement, ...]
    post: tuple[Placement, ...]
    variants: tuple[str, ...]
    work: tuple[Cut | None, ...]


@dataclass(frozen=True, eq=False)
class Shapes:
    """The shapes of alike nodes, one entry per triple; which form of its body each has; by placements before and after, their numbers."""

    shapes: tuple[Shape, ...]
    forms: tuple[int, ...]
    numbers: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], list[int]]

    @staticmethod
    def of(shapes: Iterable[tuple[Shape, int]]) -> Shapes:
        """Of shapes with the number of forms of each."""
        found: list[tuple[Shape, int]] = []
        numbers: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], list[int]] = {}
        for shape, forms in shapes:
            for form in range(forms):
                numbers.setdefault((shape.pre, shape.post), []).append(len(found))
                found.append((shape, form))
        return Shapes(tuple(s for s, _ in found), tuple(form for _, form in found), numbers)


class Names:
    """The properties of a theory: one object for a tensor in a placement, of which most are one object, too."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Property] = {}

    def __getstate__(self) -> dict[str, object]:
        return {"_known": {}}  # in another process objects have other identities

    def __call__(self, refs: tuple[TensorRef, ...], placements: tuple[Placement, ...]) -> tuple[Property, ...]:
        return tuple([self._known.get((r.name, id(p))) or self._new(r.name, p) for r, p in zip(refs, placements, strict=True)])

    def of(self, name: str, placement: Placement) -> Property:
        return self._known.get((name, id(placement))) or self._new(name, placement)

    def _new(self, name: str, placement: Placement) -> Property:
        # properties hold their placements: the identity of these stands for them
        found = self._known[name, id(placement)] = Property(name, placement)
        return found


class Triples(Sequence[Triple]):
    """Triples of a node, each made by `_one` when it is asked for."""

    @overload
    def __getitem__(self, number: int) -> Triple: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[Triple, ...]: ...
    def __getitem__(self, number: int | slice) -> Triple | tuple[Triple, ...]:
        which = range(len(self))[number]
        return tuple(map(self._one, which)) if isinstance(which, range) else self._one(which)

    @abstractmethod
    def _one(self, number: int) -> Triple:
        """number: from 0 to below the length."""


class NodeTriples(Triples):
    """All triples of a node."""

    def __init__(self, node: Node, number: int, offset: int, tensors: tuple[TensorRef, ...], alike: Shapes, names: Names):
        """number: of the node in its graph; offset: of the graph's first node in the whole model. tensors: that it reads, one per occurrence."""
        self.node, self.number, self.offset, self.tensors, self.alike, self.names = node, number, offset, tensors, alike, names
        self._made: dict[int, Triple] = {}

    def __len__(self) -> int:
        return len(self.alike.shapes)

    def _one(self, number: int) -> Triple:
        found = self._made.get(number)
        if found is None:
            found = self._made[number] = self._triple(number)
        return found

    def __contains__(self, triple: object) -> bool:
        return isinstance(triple, Triple) and any(self[k] == triple for k in self.like(triple))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, NodeTriples) and tuple(self) == tuple(other))

    __hash__ = None  # type: ignore[assignment]

    def like(self, triple: Triple) -> Iterator[int]:
        """Numbers of those with the same placements."""
        placed = (tuple([p.placement for p in own]) for own in (triple.pre, triple.post))
        yield from self.alike.numbers.get(tuple(placed), ())  # type: ignore[arg-type]

    def _triple(self, number: int) -> Triple:
        shape = self.alike.shapes[number]
        call = body(self.node, self.number + self.offset, self.tensors, shape)
        assert call is not None, f"alike nodes differ: {self.node}"
        pre, post = self.names(self.tensors, shape.pre), self.names(self.node.outputs, shape.post)
        return Triple(self.number, pre, post, in_all_forms(call)[self.alike.forms[number]], shape.work)


def body(node: Node, index: int, tensors: tuple[TensorRef, ...], shape: Shape) -> OpCall | None:
    """What runs on a device; None where nothing does what the shape says."""
    entry = lookup(node.call)
    if entry is None or entry.body is None:
        assert not any(shape.variants), f"{node.call.target} has variants {shape.variants} but no body"
        return node.call
    return entry.body(LocalCall(node, index, tensors, shape.pre, shape.post, shape.variants))
