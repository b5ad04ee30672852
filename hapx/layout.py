"""Geometry of placements: which elements of a tensor a device holds. Pure integer arithmetic, used by everything that
touches local tensors (collectives, parameters, checkpoints), so that there is one answer.

Invariant: for every placement, the pieces of the coordinates of one axis, put together block by block, are the tensor as it is
without that axis. `lengths` are in units of the cut and sum to `cut.units`; two axes that split the same factor of a dim nest:
the outer one has the lengths of its cut, the inner one divides what the outer coordinate has evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from hapx.errors import PlanError
from hapx.states import Cut, Placement, Sharded

Lengths = Mapping[Cut, tuple[int, ...]]


def divide(total: int, parts: int) -> tuple[int, ...]:
    """`total` units dealt out evenly; the first `total % parts` get one more."""
    base, rest = divmod(total, parts)
    return tuple(base + (i < rest) for i in range(parts))


@dataclass(frozen=True, slots=True)
class Block:
    """How one axis cuts a *local* tensor's dim: size = outer x sum(lengths) x inner; coordinate j has outer x lengths[j] x inner."""

    dim: int
    outer: int
    lengths: tuple[int, ...]
    inner: int

    @property
    def size(self) -> int:
        return self.outer * sum(self.lengths) * self.inner

    def size_of(self, coordinate: int) -> int:
        return self.outer * self.lengths[coordinate] * self.inner


def axis_lengths(placement: Placement, axis: int, sizes: Sequence[int], lengths: Lengths, coordinates: Sequence[int]) -> tuple[int, ...]:
    """Units that each coordinate along `axis` has of the factor that `axis` splits, for the devices that share the other
    `coordinates`. `sizes`: sizes of the mesh axes."""
    mine = placement.states[axis]
    assert isinstance(mine, Sharded)
    outer_axes = [
        b for b in placement.order()[: placement.order().index(axis)] if isinstance(s := placement.states[b], Sharded) and s.same_split(mine)
    ]
    if not outer_axes:
        if mine.cut.row.kind == "even":
            return divide(mine.cut.units, sizes[axis])
        return lengths[mine.cut]
    last = outer_axes[-1]
    total = axis_lengths(placement, last, sizes, lengths, coordinates)[coordinates[last]]
    return divide(total, sizes[axis])


def block(placement: Placement, axis: int, sizes: Sequence[int], lengths: Lengths, coordinates: Sequence[int]) -> Block:
    """The cut of `axis` on the tensor as it is local to the device's coordinates on all *other* axes.

    Raises PlanError where two axes split one dim in a way that does not nest."""
    mine = placement.states[axis]
    assert isinstance(mine, Sharded)
    outer, inner = mine.outer, mine.inner
    for other, state in enumerate(placement.states):
        if other == axis or not isinstance(state, Sharded) or state.dim != mine.dim or state.same_split(mine):
            continue
        if followers(placement, other):  # what several axes leave of a factor is what the innermost leaves
            continue
        units = state.cut.units
        have = axis_lengths(placement, other, sizes, lengths, coordinates)[coordinates[other]]
        if mine.outer % (state.outer * units) == 0:
            outer = outer // units * have
        elif mine.inner % (units * state.inner) == 0:
            inner = inner // units * have
        else:
            raise PlanError(f"{state} and {mine} do not nest in one dim", where=f"placement {placement}")
    return Block(mine.dim, outer, axis_lengths(placement, axis, sizes, lengths, coordinates), inner)


def followers(placement: Placement, axis: int) -> tuple[int, ...]:
    """The axes inside of `axis` that split the same factor: what it cuts anew they divide anew."""
    mine, order = placement.states[axis], placement.order()
    inner = order[order.index(axis) + 1 :]
    return tuple(a for a in inner if isinstance(mine, Sharded) and isinstance(s := placement.states[a], Sharded) and s.same_split(mine))


def joint_block(placement: Placement, axes: Sequence[int], sizes: Sequence[int], lengths: Lengths, coordinates: Sequence[int]) -> Block:
    """The cut of `axes` together (the first one and its followers, ascending): lengths of their coordinates in row-major order."""
    first = block(placement, axes[0], sizes, lengths, coordinates)
    own = []
    for chosen in product(*(range(sizes[a]) for a in axes)):
        at = list(coordinates)
        for a, c in zip(axes, chosen, strict=True):
            at[a] = c
        own.append(axis_lengths(placement, axes[-1], sizes, lengths, at)[chosen[-1]])
    return Block(first.dim, first.outer, tuple(own), first.inner)


def compatible(states: Sequence[object]) -> bool:
    """Whether the splits of one dim by several axes nest (equal splits, or splits of different factors)."""
    shards = [s for s in states if isinstance(s, Sharded)]
    for i, a in enumerate(shards):
        for b in shards[i + 1 :]:
            if a.dim != b.dim or a.same_split(b):
                continue
            if a.outer % (b.outer * b.cut.units) and b.outer % (a.outer * a.cut.units):
                return False
    return True


def local_indices(
    size: int, dim: int, placement: Placement, sizes: Sequence[int], lengths: Lengths, coordinates: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Global indices along `dim` (of `size` elements) that the device at `coordinates` holds, in local order."""
    indices = np.arange(size)
    done: list[int] = []
    for axis in placement.order():
        state = placement.states[axis]
        if not isinstance(state, Sharded) or state.dim != dim:
            continue
        # the local block as seen after the axes already applied: hide the axes not yet applied
        seen = Placement(tuple(s if a in done or a == axis else _WHOLE for a, s in enumerate(placement.states)), placement.nest)
        b = block(seen, axis, sizes, lengths, coordinates)
        start = sum(b.lengths[: coordinates[axis]])
        cube = indices.reshape(b.outer, sum(b.lengths), b.inner)
        indices = cube[:, start : start + b.lengths[coordinates[axis]], :].reshape(-1)
        done.append(axis)
    return indices


def local_shape(shape: Sequence[int], placement: Placement, sizes: Sequence[int], lengths: Lengths, coordinates: Sequence[int]) -> tuple[int, ...]:
    """Shape of the local tensor on the device at `coordinates`."""
    result = list(shape)
    for axis in placement.order():
        state = placement.states[axis]
        if not isinstance(state, Sharded):
            continue
        own = axis_lengths(placement, axis, sizes, lengths, coordinates)
        assert result[state.dim] % max(sum(own), 1) == 0
        result[state.dim] = result[state.dim] // sum(own) * own[coordinates[axis]] if sum(own) else 0
    return tuple(result)


def local_offset(dim: int, placement: Placement, sizes: Sequence[int], lengths: Lengths, coordinates: Sequence[int]) -> int:
    """Global index of the first local element along `dim`; the splits of `dim` must be contiguous (outer 1).

    An empty piece starts where it would if it had elements."""
    offset = 0
    for axis in placement.order():
        state = placement.states[axis]
        if isinstance(state, Sharded) and state.dim == dim:
            assert state.outer == 1, "an offset needs a contiguous split"
            own = axis_lengths(placement, axis, sizes, lengths, coordinates)
            offset += sum(own[: coordinates[axis]]) * state.inner
    return offset


class _Whole:
    """Stands for an axis that has not cut yet."""


_WHOLE: Any = _Whole()
