"""How a sample call is written down: draws, samples, and the reasons why a true rule is not claimed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from hapx.ir import CONTINUOUS, OpCall, Ref, TorchConst


class Values(Enum):
    """How an operand is drawn. IDS: integers below `limit`; DISTINCT: indices along dim `limit` that do not meet; SPECIAL: normal with infinities
    and nans; SHARES: positive, rows sum to 1; DEFINITE: symmetric matrices without small eigenvalues."""

    NORMAL = "normal"
    POSITIVE = "positive"
    UNIT = "unit"
    ABOVE_ONE = "above one"
    SIGNS = "signs"
    ORDERED = "ordered"
    IDS = "ids"
    SPECIAL = "special"
    DISTINCT = "distinct"
    SHARES = "shares"
    BOOL = "bool"
    DEFINITE = "definite"


class Reason(Enum):
    """Why a true rule is not claimed."""

    INTEGER_PARTIAL = "integer partial"
    DEGENERATE_SIZE = "degenerate size"
    VALUE = "depends on value"
    LAYOUT = "layout"
    ZERO_GRADIENT = "zero gradient"
    RANDOM = "random, never Partial"


@dataclass(frozen=True, slots=True)
class Draw:
    """One operand. `grad`: whether a gradient is asked for (floating operands only). `mutated`: a buffer of the model that the call may change.
    `scale`: of normal numbers."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    values: Values = Values.NORMAL
    limit: int = 0
    grad: bool = True
    mutated: bool = False
    scale: float = 1.0

    @property
    def requires_grad(self) -> bool:
        return self.grad and self.dtype in CONTINUOUS

    def stored(self) -> Draw:
        """The same as a buffer that the call may change."""
        return replace(self, mutated=True)


@dataclass(frozen=True, slots=True)
class Sample:
    """`draws`: operands by the name of their Ref. `excuse`: why rules that are true for this call are not claimed, if any are. `whole`: operands
    of which no pieces are tried beyond the claims, because the kernel checks no shapes and reads memory that is not its own."""

    call: OpCall
    draws: tuple[tuple[str, Draw], ...]
    excuse: Reason | None = None
    whole: frozenset[str] = frozenset()

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{n}: {d.dtype}{list(d.shape)}{'' if d.requires_grad else ' no grad'}{' stored' if d.mutated else ''}" for n, d in self.draws
        )
        constants = ", ".join(f"{k}={v}" for k, v in self.call.args if not isinstance(v, Ref | tuple))
        return f"{self.call.target}({shapes}{'; ' + constants if constants else ''})"


def t(*shape: int, values: Values = Values.NORMAL, grad: bool = True, dtype: str = "float64") -> Draw:
    return Draw(shape, dtype, values, grad=grad)


def positive(*shape: int, grad: bool = True) -> Draw:
    return Draw(shape, values=Values.POSITIVE, grad=grad)


def unit(*shape: int, grad: bool = True) -> Draw:
    return Draw(shape, values=Values.UNIT, grad=grad)


def signs(*shape: int) -> Draw:
    """1 and -1."""
    return Draw(shape, values=Values.SIGNS, grad=False)


def above(*shape: int) -> Draw:
    """Numbers above 1."""
    return Draw(shape, values=Values.ABOVE_ONE)


def ids(*shape: int, limit: int) -> Draw:
    return Draw(shape, "int64", Values.IDS, limit)


def permuted(*shape: int, dim: int = -1) -> Draw:
    """Indices along `dim` that do not meet."""
    return Draw(shape, "int64", Values.DISTINCT, dim)


def ordered(*shape: int) -> Draw:
    """Numbers that ascend along the last dim, without a gradient."""
    return Draw(shape, values=Values.ORDERED, grad=False)


def booleans(*shape: int) -> Draw:
    return Draw(shape, "bool", Values.BOOL)


def dtype(name: str) -> TorchConst:
    return TorchConst("dtype", name)


def sample(target: str, excuse: Reason | None = None, /, **args: Any) -> Sample:
    """A sample of `target`: Draws (and lists of them, or None) become operands, everything else constants."""
    values: list[tuple[str, Any]] = []
    draws: list[tuple[str, Draw]] = []
    for name, value in args.items():
        if isinstance(value, Draw):
            draws.append((name, value))
            values.append((name, Ref(name)))
        elif isinstance(value, list):
            members = [(f"{name}{i}" if d is not None else None, d) for i, d in enumerate(value)]
            draws += [(n, d) for n, d in members if n is not None]
            values.append((name, tuple(None if n is None else Ref(n) for n, _ in members)))
        else:
            values.append((name, value))
    name = target if target.startswith("hapx_ops.") else f"aten.{target}"
    return Sample(OpCall(name if name.count(".") == 2 else f"{name}.default", tuple(values)), tuple(draws), excuse)


def words(text: str) -> list[str]:
    return text.split()
