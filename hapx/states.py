"""States of a tensor on the devices of a mesh (HAP section 4.1, extended by `Invariant`).

A reference tensor e of the single-device graph lives on the devices of a mesh axis as local tensors e_j:

- `Replicated`  every e_j = e; each device may go on differently, so its cotangents add up (dual: `Partial`).
- `Invariant`   every e_j = e, and every device does the same with it (dual: `Invariant`).
- `Sharded`     concatenating the e_j along a dim, block by block, gives e (dual: the same).
- `Partial`     the e_j sum to e (dual: `Replicated`).

A *placement* is one state per mesh axis, a *property* is (tensor, placement).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self


class _Hashed:
    """Values that are keys everywhere and hold others that are: their hash is found once. It is no field: it is not compared, shown or saved."""

    __slots__ = ("_hash",)

    def _found(self, values: tuple[object, ...]) -> int:
        found = hash(values)
        object.__setattr__(self, "_hash", found)
        return found


@dataclass(frozen=True, slots=True)
class Row:
    """One vector of shares along a mesh axis: what the balancer chooses (or `even`: equal, not chosen)."""

    kind: Literal["compute", "storage", "even"]
    segment: int
    axis: int

    def __str__(self) -> str:
        return f"{self.kind}{self.segment}@{self.axis}"


@dataclass(frozen=True, slots=True)
class Cut(_Hashed):
    """How a dim is cut along a row's axis: `units` grains are dealt out. Equal cuts have equal lengths, for every tensor."""

    row: Row
    units: int

    def __hash__(self) -> int:
        try:
            return self._hash  # type: ignore[no-any-return, attr-defined]
        except AttributeError:
            return self._found((self.row, self.units))


class _Single:
    """There is one value of such a class: it is compared and found as fast as can be."""

    __slots__ = ()
    _values: ClassVar[dict[type, Any]] = {}

    def __new__(cls) -> Self:
        found: Self = cls._values.setdefault(cls, object.__new__(cls))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Replicated(_Single):
    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, eq=False)
class Invariant(_Single):
    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True, slots=True, eq=False)
class Partial(_Single):
    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True)
class Sharded(_Hashed):
    """Dim `dim` of size outer x cut.units x inner; each of the `outer` blocks is cut alike, in grains of `inner` elements."""

    dim: int
    outer: int
    inner: int
    cut: Cut

    def __str__(self) -> str:
        blocks = f"{self.outer}x" if self.outer > 1 else ""
        grain = f"x{self.inner}" if self.inner > 1 else ""
        star = "*" if self.cut.row.kind == "storage" else ""
        segment = f".{self.cut.row.segment}" if self.cut.row.segment else ""
        return f"S{self.dim}[{blocks}{self.cut.units}{grain}]{star}{segment}"

    def __hash__(self) -> int:
        try:
            return self._hash  # type: ignore[no-any-return, attr-defined]
        except AttributeError:
            return self._found((self.dim, self.outer, self.inner, self.cut))

    @property
    def factor(self) -> tuple[int, int, int, int]:
        """What is split: a dim, and which factor of it."""
        return self.dim, self.outer, self.inner, self.cut.units

    def same_split(self, other: Sharded) -> bool:
        """Whether both split the same factor of the same dim (possibly along different axes)."""
        return self.factor == other.factor


State = Replicated | Invariant | Partial | Sharded

REPLICATED, INVARIANT, PARTIAL = Replicated(), Invariant(), Partial()


@dataclass(frozen=True, slots=True)
class Placement(_Hashed):
    """One state per mesh axis. `nest`: order in which axes that split the same factor of a dim apply (outermost first);
    axes not listed apply in axis order."""

    states: tuple[State, ...]
    nest: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = ",".join(map(str, self.states))
        return f"{text}|nest{''.join(map(str, self.nest))}" if self.nest else text

    def __hash__(self) -> int:
        try:
            return self._hash  # type: ignore[no-any-return, attr-defined]
        except AttributeError:
            return self._found((self.states, self.nest))

    def order(self) -> tuple[int, ...]:
        """Axes in the order in which they cut."""
        return self.nest + tuple(a for a in range(len(self.states)) if a not in self.nest)

    def with_state(self, axis: int, state: State) -> Placement:
        return Placement(self.states[:axis] + (state,) + self.states[axis + 1 :], self.nest)

    def gathered(self, axes: Iterable[int]) -> Placement:
        """The placement with no shards along some axes: what is in shards there is Replicated instead."""
        placement = self
        for axis in axes:
            if isinstance(placement.states[axis], Sharded):
                placement = placement.with_state(axis, REPLICATED)
        return placement


@dataclass(frozen=True, slots=True)
class Property(_Hashed):
    """A tensor of the single-device graph, in a placement."""

    tensor: str
    placement: Placement

    def __hash__(self) -> int:
        try:
            return self._hash  # type: ignore[no-any-return, attr-defined]
        except AttributeError:
            return self._found((self.tensor, self.placement))

    def __str__(self) -> str:
        return f"{self.tensor}:{self.placement}"


def is_recut(source: State, target: State) -> bool:
    """Whether a conversion leaves the split of a dim as it is and changes only how much of it each device has (another ratio row)."""
    both = isinstance(source, Sharded) and isinstance(target, Sharded) and source.same_split(target)
    return both and source != target


def dual(state: State) -> State:
    """State of the cotangent of a tensor in `state`."""
    if isinstance(state, Replicated):
        return PARTIAL
    if isinstance(state, Partial):
        return REPLICATED
    return state
