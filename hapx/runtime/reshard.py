"""Moves the tensors that cross between two stages: what `hapx.reshard` plans, carried out by one device.

In: per tensor a plan and a dtype; on the source's devices the local tensors in the source's layout. Out: on the target's devices the local tensors in
the target's layout: contiguous, constants to autograd. Invariants: sending never waits; receiving can be asked for long before; per pair of devices
there is one message for all tensors of a dtype that are gathered over the same axes; those tensors are gathered at once. Cotangents take the way
back: a `Resharder` of the `reversed` crossings. Every device walks the same plans, so both sides cut messages alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from hapx.collectives.communicator import Communicator, Handle
from hapx.collectives.messages import Messenger
from hapx.errors import LaunchError
from hapx.pieces import Box, Runs
from hapx.plan import Form
from hapx.reshard import ReshardPlan, Transfer

Communicators = Mapping[tuple[int, ...], Communicator]
Move = tuple[int, Transfer]  # of the tensor of that number


@dataclass(frozen=True)
class Crossing:
    """A tensor that crosses. `name`: for people."""

    name: str
    plan: ReshardPlan
    dtype: torch.dtype

    def reversed(self) -> Crossing:
        """Its cotangent."""
        return replace(self, plan=self.plan.reversed())


def lanes(crossings: Iterable[Crossing], channel: int) -> set[tuple[int, int, int]]:
    """The lanes for which `hapx.collectives.create_messenger` has to be asked."""
    return {(t.source, t.target, channel) for c in crossings for t in c.plan.transfers if t.source != t.target}


class Pending:
    """What was asked for: per bundle the buffers of what comes for the group and for this device alone, and the messages that fill them."""

    def __init__(self, buffers: list[tuple[Tensor, Tensor]], handles: list[Handle]):
        self.buffers, self.handles = buffers, handles


class Resharder:
    """Moves `crossings`, all of them between the same two stages and in the same direction.

    Args:
        rank: this device, of the source, the target, or both.
        communicators: of the target's mesh, as `create_groups` makes them; needed on its devices.
        channel: of the messages; resharders that may have messages between the same devices at the same time need different ones.
        device: where tensors are. form: of the gathers.
    """

    def __init__(
        self, crossings: Sequence[Crossing], rank: int, messenger: Messenger, communicators: Communicators, channel: int = 0,
        device: torch.device | str = "cpu", form: Form = Form.PADDED,
    ):  # fmt: skip
        self.crossings, self.rank, self.messenger, self.channel, self.device = tuple(crossings), rank, messenger, channel, torch.device(device)
        by_kind: dict[tuple[torch.dtype, tuple[int, ...]], dict[int, Crossing]] = {}
        for k, c in enumerate(self.crossings):
            by_kind.setdefault((c.dtype, c.plan.target.whole_axes), {})[k] = c
        self._bundles = [_Bundle(members, rank, communicators, self.device, form) for members in by_kind.values()]

    def send(self, tensors: Sequence[Tensor]) -> list[Handle]:
        """Starts to send the local tensors, one per crossing; they must not change before all handles were waited for, which has to happen some time.

        Raises LaunchError for a tensor of another shape or dtype than planned."""
        assert len(tensors) == len(self.crossings), (len(tensors), len(self.crossings))
        for crossing, t in zip(self.crossings, tensors, strict=True):
            planned = crossing.plan.source.local_shape(crossing.plan.shape, self.rank)
            if tuple(t.shape) != planned or t.dtype != crossing.dtype:
                found = f"{t.dtype} of shape {list(t.shape)}"
                raise LaunchError(
                    f"{crossing.name} is {found} where it leaves its stage",
                    where=f"rank {self.rank}",
                    allowed=f"{crossing.dtype} of shape {list(planned)}",
                )
        with torch.no_grad():
            return [self.messenger.isend(message, to, self.channel) for b in self._bundles for to, message in b.messages(tensors)]

    def post(self) -> Pending:
        """Asks for what will be sent next; never waits."""
        buffers, handles = [], []
        for bundle in self._bundles:
            pair = tuple(torch.empty(sum(size for _, size in sizes), dtype=bundle.dtype, device=self.device) for sizes in bundle.arrivals)
            for buffer, sizes in zip(pair, bundle.arrivals, strict=True):
                slices = _parts(buffer, [size for _, size in sizes])
                handles += [self.messenger.irecv(t, source, self.channel) for t, (source, _) in zip(slices, sizes, strict=True)]
            buffers.append(pair)
        return Pending(buffers, handles)

    def finish(self, pending: Pending) -> list[Tensor]:
        """Waits for what was asked for; the local tensors, one per crossing. The devices of the target's groups call it in the same order."""
        for handle in pending.handles:
            handle.wait()
        results: dict[int, Tensor] = {}
        with torch.no_grad():
            for bundle, (shared, own) in zip(self._bundles, pending.buffers, strict=True):
                results |= bundle.assemble(shared, own)
        return [results[k] for k in range(len(self.crossings))]


class _Bundle:
    """Tensors (by number) of one dtype that are gathered over the same axes, as one device sends and receives them.

    arrivals: sizes of the messages that arrive, by source, in the order in which they lie in the buffers: those for the group, then those for this
    device alone."""

    def __init__(self, crossings: Mapping[int, Crossing], rank: int, communicators: Communicators, device: torch.device, form: Form):
        first = next(iter(crossings.values()))
        self.crossings, self.dtype, self.form, self.device = crossings, first.dtype, form, device
        self.departures = [
            (target, [(k, _Where(t.box.take, device), t.box) for k, t in moves])
            for shared in (True, False)
            for target, moves in _by(lambda t: t.target, [(k, t) for k, t in self._moves() if t.source == rank and t.shared == shared])
        ]
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.arrivals: tuple[list[tuple[int, int]], ...] = ([], [])
        if rank not in first.plan.target.mesh.devices:
            return
        self.shapes = {k: c.plan.target.local_shape(c.plan.shape, rank) for k, c in crossings.items()}
        group = first.plan.target.mesh.group(rank, first.plan.target.whole_axes)
        landed, own = [self._arranged(d, True) for d in group], self._arranged(rank, False)
        self.arrivals = (_sizes(landed[group.index(rank)]), _sizes(own))
        self.lengths = [sum(size for _, size in _sizes(moves)) for moves in landed]
        self.comm = communicators[first.plan.target.whole_axes] if any(self.lengths) else None
        self.shared_places = self._places([move for moves in landed for move in moves])
        self.own_places = self._places(own)

    def _moves(self) -> list[Move]:
        return [(k, t) for k, c in self.crossings.items() for t in c.plan.transfers]

    def _arranged(self, target: int, shared: bool) -> list[Move]:
        """What arrives on a device, message by message."""
        moves = [(k, t) for k, t in self._moves() if t.target == target and t.shared == shared]
        return [move for _, message in _by(lambda t: t.source, moves) for move in message]

    def _places(self, moves: Sequence[Move]) -> list[tuple[int, _Where, Box]] | None:
        """Where the parts of a buffer belong; None: the buffer as it is is the one tensor there is."""
        if len(self.shapes) == 1 and moves:
            ((_, shape),) = self.shapes.items()
            starts = [_start(t.box.put, shape) for _, t in moves]
            ends = [0]
            for _, t in moves:
                ends.append(ends[-1] + t.box.size)
            if starts == ends[:-1] and ends[-1] == prod(shape):
                return None
        return [(k, _Where(t.box.put, self.device), t.box) for k, t in moves]

    def messages(self, tensors: Sequence[Tensor]) -> Iterable[tuple[int, Tensor]]:
        """Target and content of what this device sends."""
        for target, items in self.departures:
            parts = [where.read(tensors[k].detach()).reshape(-1) for k, where, _ in items]
            yield target, parts[0] if len(parts) == 1 else torch.cat(parts)

    def assemble(self, shared: Tensor, own: Tensor) -> dict[int, Tensor]:
        """The local tensors."""
        if self.comm is not None:
            shared = self.comm.all_gather(shared, self.lengths, self.form)
        for buffer, places in ((shared, self.shared_places), (own, self.own_places)):
            if places is None:
                return {k: buffer.view(shape) for k, shape in self.shapes.items()}
        results = {k: torch.empty(shape, dtype=self.dtype, device=self.device) for k, shape in self.shapes.items()}
        for buffer, places in ((shared, self.shared_places), (own, self.own_places)):
            assert places is not None
            for (k, where, box), part in zip(places, _parts(buffer, [box.size for _, _, box in places]), strict=True):
                where.write(results[k], part.view(box.shape))
        return results


def _by(device: Callable[[Transfer], int], moves: Iterable[Move]) -> list[tuple[int, list[Move]]]:
    """Moves by device, those of one device in order."""
    found: dict[int, list[Move]] = {}
    for move in moves:
        found.setdefault(device(move[1]), []).append(move)
    return list(found.items())


def _sizes(moves: Iterable[Move]) -> list[tuple[int, int]]:
    """Source and elements of each message."""
    return [(source, sum(t.box.size for _, t in message)) for source, message in _by(lambda t: t.source, moves)]


def _parts(buffer: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return buffer.split(list(sizes)) if sizes else ()


def _start(runs: tuple[Runs, ...], shape: Sequence[int]) -> int | None:
    """Where a box begins in a contiguous tensor in which it is one run of elements; None if it is not."""
    start, partial = 0, False
    for own, size in zip(runs, shape, strict=True):
        (first, stop), *more = own
        if more or (partial and (first, stop) != (0, size)):
            return None
        partial = partial or stop - first > 1
        start = start * size + first
    return start


class _Where:
    """A box of a tensor: a view where every dim is one run, else with lists of indices."""

    def __init__(self, runs: tuple[Runs, ...], device: torch.device):
        self.slices = tuple(slice(*own[0]) if len(own) == 1 else slice(None) for own in runs)
        self.indices = {d: torch.cat([torch.arange(a, b) for a, b in own]).to(device) for d, own in enumerate(runs) if len(own) > 1}

    def read(self, t: Tensor) -> Tensor:
        t = t[self.slices]
        for dim, index in self.indices.items():
            t = t.index_select(dim, index)
        return t

    def write(self, t: Tensor, values: Tensor) -> None:
        t = t[self.slices]
        if not self.indices:
            t.copy_(values)
        elif len(self.indices) == 1:
            ((dim, index),) = self.indices.items()
            t.index_copy_(dim, index, values)
        else:
            every = [self.indices.get(d, torch.arange(n, device=t.device)) for d, n in enumerate(t.shape)]
            t[tuple(index.reshape(-1, *[1] * (t.dim() - 1 - d)) for d, index in enumerate(every))] = values
