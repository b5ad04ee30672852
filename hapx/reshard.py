"""Moves a tensor from any layout to any other, on the same, other or overlapping devices: who sends what to whom, as data.

In: the tensor's shape and its two layouts. Out: a `ReshardPlan`. Invariants: every element that the target's devices do not have yet crosses once:
of several devices that hold it one sends it; where several devices want it one of them receives it, and the group makes it whole by one all-gather
inside of the target's mesh. What devices send and receive is level: elements are dealt out over the holders of a piece, and over the devices that
want it, cut where a share is full. What is already there is copied. The plan depends on nothing but its arguments: every rank makes the same one.
Gradients take the way back: `ReshardPlan.reversed` is the plan from the target to the source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest
from typing import TypeVar

from hapx.pieces import Box, Layout, Pieces, boxes

Piece = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """`box` of the local tensor of `source` becomes part of that of `target`. `shared`: the whole group of the target gets it from there."""

    source: int
    target: int
    box: Box
    shared: bool

    def __str__(self) -> str:
        take, put = (" x ".join("+".join(f"{a}:{b}" for a, b in runs) for runs in side) for side in (self.box.take, self.box.put))
        return f"{self.source} [{take}] -> {self.target} [{put}]{' for all' if self.shared else ''}"


@dataclass(frozen=True)
class ReshardPlan:
    """`transfers`: in the order of the target's devices, what is shared first, then in the order of the source's devices; those from a device to
    itself are copies. After them the devices of a group of the target (those with equal pieces) gather what each of them has got for all."""

    shape: tuple[int, ...]
    source: Layout
    target: Layout
    transfers: tuple[Transfer, ...]
    machines: tuple[int, ...] = ()

    def __str__(self) -> str:
        gathers = [f"gather {'+'.join(map(str, shares))} on {list(group)}" for group, shares in self.gathers.items()]
        return "\n".join([*map(str, self.transfers), *gathers])

    def reversed(self) -> ReshardPlan:
        """The way back, for cotangents."""
        return reshard_plan(self.shape, self.target, self.source, self.machines)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices of the target that want the same, in the order of their ranks in the communicator of `target.whole_axes`."""
        return tuple(self.target.pieces(len(self.shape)).values())

    @cached_property
    def gathers(self) -> Mapping[tuple[int, ...], tuple[int, ...]]:
        """Per group that gathers, the elements that each of its devices brings."""
        brought: dict[int, int] = defaultdict(int)
        for t in self.transfers:
            brought[t.target] += t.box.size if t.shared else 0
        return {group: shares for group in self.groups if any(shares := tuple(brought[d] for d in group))}


def reshard_plan(shape: Sequence[int], source: Layout, target: Layout, machines: Sequence[int] = ()) -> ReshardPlan:
    """The plan from `source` to `target`. `machines`: machine of every device of the cluster; senders on the receiver's own are preferred.

    Raises PlanError where a layout is not one of a tensor of that shape, or has a Partial state."""
    for layout in (source, target):
        layout.check(shape)
    holders, wanters = source.pieces(len(shape)), target.pieces(len(shape))
    landings: list[_Landing] = []
    for piece, found in boxes(shape, source, target).items():
        landings += _land(wanters[piece], found, holders)
    transfers = _send(landings, holders, machines)
    source_order, target_order = ({d: k for k, d in enumerate(layout.mesh.devices)} for layout in (source, target))
    transfers.sort(key=lambda t: (target_order[t.target], not t.shared, source_order[t.source]))  # stable: boxes stay in order
    return ReshardPlan(tuple(shape), source, target, tuple(transfers), tuple(machines))


def bytes_between(plan: ReshardPlan, itemsize: int) -> dict[tuple[int, int], int]:
    """Bytes that cross from each device to each other one; copies and gathers are not in it."""
    result: dict[tuple[int, int], int] = defaultdict(int)
    for t in plan.transfers:
        if t.source != t.target:
            result[t.source, t.target] += t.box.size * itemsize
    return dict(result)


def bytes_between_machines(plan: ReshardPlan, itemsize: int, machines: Sequence[int]) -> dict[tuple[int, int], int]:
    """Bytes that cross from each machine to each (also within one). `machines`: by device."""
    result: dict[tuple[int, int], int] = defaultdict(int)
    for (source, target), moved in bytes_between(plan, itemsize).items():
        result[machines[source], machines[target]] += moved
    return dict(result)


# ---- who receives, who sends ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Landing:
    """Part of a piece of the source that `target` gets."""

    piece: Piece
    box: Box
    target: int
    shared: bool


def _land(group: tuple[int, ...], found: Sequence[tuple[Piece, Box]], holders: Pieces) -> list[_Landing]:
    """Who of a group of the target receives what: everybody copies what everybody has; one that has it brings what others lack; the rest is dealt
    out, in order, so that neighbours in the tensor land on one device."""
    result, local, remote = [], [], []
    for piece, box in found:
        having = tuple(d for d in group if d in holders[piece])
        if having == group:
            result += [_Landing(piece, box, d, False) for d in group]
        elif having:
            local.append((having, (piece, box)))
        else:
            remote.append((group, (piece, box)))
    load = dict.fromkeys(group, 0)
    for candidates, same in groupby(sorted(local, key=lambda x: (len(x[0]), x[0])) + remote, key=lambda x: x[0]):
        dealt = _deal([(piece, box) for _, (piece, box) in same], candidates, load, in_order=True)
        result += [_Landing(piece, box, d, len(group) > 1) for d, piece, box in dealt]
    return result


def _send(landings: Sequence[_Landing], holders: Pieces, machines: Sequence[int]) -> list[Transfer]:
    """Who of the holders of a piece sends what: the receiver itself if it can, else one of its machine, else any. A device sends little more than
    its part, or one landing where that is more: cutting it further would not make the receiver faster."""
    result = [Transfer(x.target, x.target, x.box, x.shared) for x in landings if x.target in holders[x.piece]]
    by_piece: dict[Piece, dict[tuple[int, ...], list[_Landing]]] = defaultdict(lambda: defaultdict(list))
    for x in landings:
        if x.target not in holders[x.piece]:
            near = tuple(d for d in holders[x.piece] if machines and machines[d] == machines[x.target])
            by_piece[x.piece][near or holders[x.piece]].append(x)
    for piece, classes in by_piece.items():
        load = dict.fromkeys(holders[piece], 0)
        for candidates in sorted(classes, key=lambda c: (len(c), c)):
            wanted = classes[candidates]
            dealt = _deal([(x, x.box) for x in wanted], candidates, load, in_order=False)
            result += [Transfer(d, x.target, box, x.shared) for d, x, box in dealt]
    return result


K = TypeVar("K")


def _deal(boxes: Sequence[tuple[K, Box]], devices: Sequence[int], load: dict[int, int], in_order: bool) -> list[tuple[int, K, Box]]:
    """Every box to one of `devices`, cut where that device's share is full; `load` is what each has, and is kept. In order: the first device gets the
    first boxes. Otherwise the device with the least load comes first, and shares are no smaller than the largest box."""
    full = _level([load[d] for d in devices], sum(box.size for _, box in boxes))
    if not in_order:
        full = max(full, max(box.size for _, box in boxes))
    result = []
    for key, whole in boxes:
        rest: Box | None = whole
        for device in devices if in_order else sorted(devices, key=lambda d: load[d]):
            if rest is None:
                break
            if load[device] < full:
                part, rest = rest.split(min(full - load[device], rest.size))
                load[device] += part.size
                result.append((device, key, part))
        assert rest is None, "a level that holds everything"
    return result


def _level(loads: Sequence[int], more: int) -> int:
    """The height to which the lowest loads rise when `more` is poured over them, rounded up."""
    ordered, below = sorted(loads), 0
    for count, (load, above) in enumerate(zip_longest(ordered, ordered[1:]), 1):
        below += load
        level = -(-(below + more) // count)
        if above is None or level <= above:
            return level
    raise AssertionError("no device")
