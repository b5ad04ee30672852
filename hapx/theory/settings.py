"""Meshes of a few pretended devices with uneven lengths, on which the audit executes triples. Pure data.

Invariant: the lengths of a cut depend on its units only, so equal cuts have equal lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from hapx.plan import Axis, Mesh
from hapx.states import Cut


class Dealt(dict[Cut, tuple[int, ...]]):
    """Lengths of every cut of an uneven axis: `first` units to the first device with any, the rest to the last; `zero` gets none."""

    def __init__(self, size: int, zero: int | None, first: int):
        super().__init__()
        self.size, self.zero, self.first = size, zero, first

    def __missing__(self, cut: Cut) -> tuple[int, ...]:
        sharing = [d for d in range(self.size) if d != self.zero]
        lengths = [0] * self.size
        rest = cut.units
        for d in sharing[:-1]:
            lengths[d] = min(self.first, rest - 1) if rest > 1 else rest
            rest -= lengths[d]
        lengths[sharing[-1]] = rest
        self[cut] = tuple(lengths)
        return self[cut]


@dataclass(frozen=True)
class Setting:
    """A mesh and how its cuts are dealt out."""

    mesh: Mesh
    lengths: Dealt

    def __str__(self) -> str:
        zero = f", none for device {self.lengths.zero}" if self.lengths.zero is not None else ""
        return f"{self.mesh.name}, uneven{zero}"

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Coordinates of all devices."""
        return tuple(product(*map(range, self.mesh.sizes)))


def line(size: int, zero: int | None = None, first: int = 1) -> Setting:
    """One axis of `size` devices."""
    return Setting(Mesh(f"flat {size}", (Axis("d", size, "devices"),), tuple(range(size)), 0), Dealt(size, zero, first))


def grid(a: int, b: int) -> Setting:
    """Two axes, the first uneven."""
    axes = (Axis("a", a, "machines"), Axis("b", b, "devices"))
    return Setting(Mesh(f"{a}x{b}", axes, tuple(range(a * b)), 0), Dealt(a, None, 1))
