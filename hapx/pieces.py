"""Which elements of a tensor a device of one mesh and a device of another both hold, as boxes of index runs.

In: two layouts of one tensor. Out: `Box`es: per dim, where the common elements lie in the local tensor of either side. Invariant: a layout cuts the
tensor into disjoint pieces, each whole on all devices that differ only along axes that do not cut; the boxes of all pairs of pieces are the tensor,
every element once. Geometry comes from `hapx.layout.local_indices`, asked in grains that no cut divides; the rest is numpy on runs, no loop sees an
element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hapx.errors import PlanError
from hapx.layout import Lengths, compatible, local_indices, local_shape
from hapx.plan import Mesh
from hapx.states import Partial, Placement, Sharded

Runs = tuple[tuple[int, int], ...]
"""Local indices along a dim, ascending: [start, stop) each."""

Pieces = Mapping[tuple[int, ...], tuple[int, ...]]
"""Devices by piece: per dim, the number of a part."""

Ints = npt.NDArray[np.int64]


def length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def head_and_tail(runs: Runs, count: int) -> tuple[Runs, Runs]:
    """The first `count` indices, and the others."""
    head: list[tuple[int, int]] = []
    for k, (start, stop) in enumerate(runs):
        if count < stop - start:
            middle = ((start, start + count),) if count else ()
            return (*head, *middle), ((start + count, stop), *runs[k + 1 :])
        head.append((start, stop))
        count -= stop - start
    return tuple(head), ()


@dataclass(frozen=True, slots=True)
class Box:
    """Elements that lie at `take` of the source's local tensor and at `put` of the target's (per dim, in the same order)."""

    take: tuple[Runs, ...]
    put: tuple[Runs, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def split(self, count: int) -> tuple[Box, Box | None]:
        """A first part of at least `count` elements, cut along the first dim that is cut there exactly, else along the longest; and the rest."""
        size = self.size
        if count >= size:
            return self, None
        exact = [d for d, n in enumerate(self.shape) if n > 1 and count * n % size == 0]
        dim = exact[0] if exact else max(range(len(self.shape)), key=lambda d: self.shape[d])
        rows = -(-count * self.shape[dim] // size)
        if rows == self.shape[dim]:
            return self, None
        take, put = head_and_tail(self.take[dim], rows), head_and_tail(self.put[dim], rows)
        return self._with(dim, take[0], put[0], rows), self._with(dim, take[1], put[1], self.shape[dim] - rows)

    def _with(self, dim: int, take: Runs, put: Runs, rows: int) -> Box:
        return Box(_put(self.take, dim, take), _put(self.put, dim, put), _put(self.shape, dim, rows))


T = TypeVar("T")


def _put(row: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*row[:at], value, *row[at + 1 :])


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor on the devices of a mesh: every axis leaves it whole or cuts it. `lengths`: units of each cut, per coordinate."""

    mesh: Mesh
    placement: Placement
    lengths: Lengths

    @property
    def whole_axes(self) -> tuple[int, ...]:
        """Axes along which all devices have the same elements."""
        return tuple(a for a, s in enumerate(self.placement.states) if not isinstance(s, Sharded))

    def splits(self, dim: int) -> tuple[Sharded, ...]:
        return tuple(s for s in self.placement.states if isinstance(s, Sharded) and s.dim == dim)

    def local_shape(self, shape: Sequence[int], device: int) -> tuple[int, ...]:
        return local_shape(shape, self.placement, self.mesh.sizes, self.lengths, self.mesh.coordinates(device))

    def pieces(self, num_dims: int) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Devices that hold each piece, in the order of the mesh. A piece: per dim, the number of its part along that dim."""
        holders: dict[tuple[int, ...], list[int]] = {}
        sizes = self.mesh.sizes
        cutting = [[a for a, s in enumerate(self.placement.states) if isinstance(s, Sharded) and s.dim == d] for d in range(num_dims)]
        for device, at in zip(self.mesh.devices, product(*map(range, sizes)), strict=True):
            piece = tuple(_number([at[a] for a in axes], [sizes[a] for a in axes]) for axes in cutting)
            holders.setdefault(piece, []).append(device)
        return {piece: tuple(devices) for piece, devices in holders.items()}

    def check(self, shape: Sequence[int]) -> None:
        """Raises PlanError where this is not a layout of a tensor of that shape."""
        where = f"layout {self.placement} on mesh {self.mesh.name}"
        states = self.placement.states
        if len(states) != len(self.mesh.axes) or prod(self.mesh.sizes) != len(self.mesh.devices):
            raise PlanError(f"{len(states)} states on {len(self.mesh.axes)} axes of {len(self.mesh.devices)} devices", where=where)
        if any(isinstance(s, Partial) for s in states):
            raise PlanError("a Partial tensor cannot be moved as it is", where=where, allowed="Invariant, Replicated or Sharded on every axis")
        for axis, state in enumerate(states):
            if not isinstance(state, Sharded):
                continue
            units = state.cut.units
            if state.dim >= len(shape) or state.outer * units * state.inner != shape[state.dim]:
                raise PlanError(f"{state} does not cut a tensor of shape {list(shape)}", where=where)
            own = self.lengths.get(state.cut)
            if own is not None and (sum(own) != units or min(own, default=0) < 0):
                raise PlanError(f"lengths {list(own)} of {units} units", where=where)
            nested = any(isinstance(s, Sharded) and s.same_split(state) for a, s in enumerate(states) if a != axis)
            if not nested and state.cut.row.kind != "even" and (own is None or len(own) != self.mesh.sizes[axis]):
                raise PlanError(f"{state} has lengths {own} for {self.mesh.sizes[axis]} devices", where=where)
        if not compatible(states):
            raise PlanError("cuts of one dim do not nest", where=where)


def boxes(shape: Sequence[int], source: Layout, target: Layout) -> dict[tuple[int, ...], list[tuple[tuple[int, ...], Box]]]:
    """Per piece of the target, the pieces of the source that have a part of it, and which; pieces without elements are left out."""
    if not prod(shape):
        return {}
    dims = [_overlaps(n, d, source, target) for d, n in enumerate(shape)]
    found: dict[tuple[int, ...], list[tuple[tuple[int, ...], Box]]] = {}
    for piece in product(*dims):
        here = [of[part] for of, part in zip(dims, piece, strict=True)]
        found[piece] = [
            (tuple(o.part for o in chosen), Box(tuple(o.take for o in chosen), tuple(o.put for o in chosen), tuple(o.size for o in chosen)))
            for chosen in product(*here)
        ]
    return found


@dataclass(frozen=True, slots=True)
class _Overlap:
    """What a part of the target along one dim has in common with part `part` of the source."""

    part: int
    take: Runs
    put: Runs
    size: int


def _overlaps(size: int, dim: int, source: Layout, target: Layout) -> dict[int, list[_Overlap]]:
    """Per part of the target along `dim`: what it gets from each part of the source."""
    grain = gcd(*(s.inner for layout in (source, target) for s in layout.splits(dim))) or size
    (held, at_source), (wanted, at_target) = (_owners(size // grain, dim, layout, grain) for layout in (source, target))
    starts = np.flatnonzero(np.diff(held, prepend=-1) | np.diff(wanted, prepend=-1))
    counts = np.diff(starts, append=len(held))
    keys = np.stack([wanted[starts], held[starts]])
    order = np.lexsort(keys[::-1])
    borders = np.flatnonzero(np.any(np.diff(keys[:, order], axis=1), axis=0)) + 1
    result: dict[int, list[_Overlap]] = {}
    for group in np.split(order, borders):
        at = starts[group]
        take, put = (_runs(where[at], counts[group], grain) for where in (at_source, at_target))
        result.setdefault(int(wanted[at[0]]), []).append(_Overlap(int(held[at[0]]), take, put, int(counts[group].sum()) * grain))
    return result


def _owners(units: int, dim: int, layout: Layout, grain: int) -> tuple[Ints, Ints]:
    """Per unit of `dim`: the part that has it, and where in that part it lies. A unit is `grain` elements."""
    owner, place = np.empty(units, np.int64), np.empty(units, np.int64)
    sizes, states = layout.mesh.sizes, layout.placement.states
    cuts = [isinstance(s, Sharded) and s.dim == dim for s in states]
    scaled = Placement(
        tuple(replace(s, inner=s.inner // grain) if isinstance(s, Sharded) and s.dim == dim else s for s in states), layout.placement.nest
    )
    for part, at in enumerate(product(*(range(n if c else 1) for n, c in zip(sizes, cuts, strict=True)))):
        own = local_indices(units, dim, scaled, sizes, layout.lengths, at)
        owner[own], place[own] = part, np.arange(len(own))
    return owner, place


def _runs(starts: Ints, counts: Ints, grain: int) -> Runs:
    """Ascending runs in elements; those that touch are one."""
    new = np.flatnonzero(np.append(True, starts[1:] != starts[:-1] + counts[:-1]))
    stops = (starts + counts)[np.append(new[1:] - 1, len(starts) - 1)]
    return tuple(zip((starts[new] * grain).tolist(), (stops * grain).tolist(), strict=True))


def _number(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    """Row-major number of coordinates."""
    number = 0
    for c, size in zip(coordinates, sizes, strict=True):
        number = number * size + c
    return number
