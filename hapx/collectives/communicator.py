"""Collectives between the devices of some mesh axes: one protocol; `ProcessGroupCommunicator` carries it out over torch.distributed,
`hapx.collectives.threads.ThreadCommunicator` between threads of one process.

In: local tensors, lengths along dim 0 (of every rank, known to all). Out: new tensors; arguments are left as they are (except by
`all_reduce_async`). Nothing here is differentiable. Ranks are coordinates along the axes, row-major.

Invariants: every rank calls the same operations in the same order, also with nothing to contribute; the result does not depend on
the form; what is equal on all ranks is equal bit by bit. The three forms of an uneven gather or reduce-scatter (m ranks, largest
piece b, sum of pieces B): padded moves m*b at once, grouped one broadcast (reduce) of each piece, point-to-point every piece to
every rank. Gloo refuses uneven sizes in all_gather, all_gather_into_tensor and reduce_scatter_tensor, so none is used with them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any, Literal, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from hapx.collectives.lost import lost_rank
from hapx.collectives.threads import ThreadCommunicator, alone
from hapx.plan import Form, Mesh

Reduction = Literal["sum", "max"]


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """The finished tensor."""


class Communicator(Protocol):
    """The devices of some mesh axes that this device belongs to. `lengths`: sizes along dim 0, one per rank, possibly 0."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, t: Tensor, op: Reduction = "sum") -> Tensor:
        """Sum or maximum over all ranks, on every rank."""

    def all_gather(self, t: Tensor, lengths: Sequence[int], form: Form = Form.PADDED) -> Tensor:
        """The ranks' tensors (own: lengths[rank] rows), one behind the other along dim 0, on every rank."""

    def reduce_scatter(self, t: Tensor, lengths: Sequence[int], form: Form = Form.PADDED) -> Tensor:
        """The own piece (lengths[rank] rows) of the sum of the ranks' whole tensors."""

    def all_to_all(self, t: Tensor, send_lengths: Sequence[int], receive_lengths: Sequence[int]) -> Tensor:
        """Piece k of `t` goes to rank k; the pieces received, in the order of the ranks."""

    def broadcast(self, t: Tensor, source: int) -> Tensor:
        """The tensor of rank `source`; the others pass one of the same shape and dtype."""

    def all_reduce_async(self, t: Tensor) -> Handle:
        """Starts to sum the contiguous `t` in place; it may be used again after `wait`."""

    def reduce_scatter_async(self, t: Tensor) -> Handle:
        """Starts to sum the flat `t`, whose size the number of ranks divides; `wait` gives the own one of equal parts. `t` must not change before."""

    def all_gather_async(self, t: Tensor) -> Handle:
        """Starts to put the flat `t` of all ranks, equally long, one behind the other. `t` must not change before `wait`."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""


# The names without `_single` are announced as deprecated; torch 2.11 had only those.
_gather_equal: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_equal: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MOVABLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8})
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def _flat(t: Tensor) -> Tensor:
    """The elements of `t` in one row, as bytes where the backend does not know the dtype."""
    flat = t.detach().resolve_conj().contiguous().reshape(-1)
    return flat if flat.dtype in _MOVABLE else flat.view(torch.uint8)


def _addable(t: Tensor) -> Tensor:
    """`t` in a dtype that backends can add: booleans and short integers are widened."""
    return t.detach() if t.dtype in _MOVABLE else t.detach().to(torch.int32)


def _real(t: Tensor) -> Tensor:
    """Of complex numbers pairs of real ones, which backends can add, along a last dim; the same memory, unless it is conjugated when it is read."""
    return torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t


def _sizes(t: Tensor, flat: Tensor, lengths: Sequence[int]) -> list[int]:
    """Elements of `flat` in each piece of `lengths` rows of `t`."""
    row = math.prod(t.shape[1:]) * (t.element_size() // flat.element_size())
    return [length * row for length in lengths]


def _unflat(flat: Tensor, like: Tensor, rows: int) -> Tensor:
    return flat.view(like.dtype).reshape(rows, *like.shape[1:])


def own_device() -> torch.device:
    """The device of this process, by the backend of the default process group: its GPU under NCCL, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in str(dist.get_backend()) else torch.device("cpu")


class ProcessGroupCommunicator:
    """Over a torch.distributed process group (None: all processes) whose ranks are the coordinates, in order. gloo and NCCL."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = dist.group.WORLD if group is None else group
        _communicators.add(self)
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    def __repr__(self) -> str:
        return f"ProcessGroupCommunicator(rank {self.rank} of {self.size})"

    @lost_rank()
    def all_reduce(self, t: Tensor, op: Reduction = "sum") -> Tensor:
        if t.is_complex():
            return torch.view_as_complex(self.all_reduce(_real(t), op))
        result = _addable(t).clone(memory_format=torch.contiguous_format)
        if result.numel():
            dist.all_reduce(result, _OPERATIONS[op], group=self.group)
        return result.to(t.dtype)

    @lost_rank()
    def all_gather(self, t: Tensor, lengths: Sequence[int], form: Form = Form.PADDED) -> Tensor:
        assert t.shape[0] == lengths[self.rank], (tuple(t.shape), lengths, self.rank)
        flat = _flat(t)
        sizes = _sizes(t, flat, lengths)
        gather = {Form.PADDED: self._gather_padded, Form.GROUPED: self._gather_grouped, Form.POINT_TO_POINT: self._gather_directly}[form]
        whole = gather(flat, sizes) if sum(sizes) else flat.new_empty(0)
        return _unflat(whole, t, sum(lengths))

    def _gather_padded(self, flat: Tensor, sizes: list[int]) -> Tensor:
        width = max(sizes)
        padded = flat if flat.numel() == width else torch.cat([flat, flat.new_zeros(width - flat.numel())])
        result = flat.new_empty(width * self.size)
        _gather_equal(result, padded, group=self.group)
        if min(sizes) == width:
            return result
        return torch.cat([piece[:size] for piece, size in zip(result.split(width), sizes, strict=True)])

    def _gather_grouped(self, flat: Tensor, sizes: list[int]) -> Tensor:
        result = flat.new_empty(sum(sizes))
        pieces = result.split(sizes)
        pieces[self.rank].copy_(flat)
        works = [dist.broadcast(p, group_src=source, group=self.group, async_op=True) for source, p in enumerate(pieces) if p.numel()]
        for work in works:
            work.wait()
        return result

    def _gather_directly(self, flat: Tensor, sizes: list[int]) -> Tensor:
        result = flat.new_empty(sum(sizes))
        pieces = result.split(sizes)
        pieces[self.rank].copy_(flat)
        self._exchange([flat] * self.size, pieces)
        return result

    def _exchange(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> None:
        """send[k] goes to rank k; receive[k] comes from rank k. Empty ones are left out on both sides."""
        operations = []
        for shift in range(1, self.size):  # every rank starts with another peer
            target, source = (self.rank + shift) % self.size, (self.rank - shift) % self.size
            if send[target].numel():
                operations.append(dist.P2POp(dist.isend, send[target], group=self.group, group_peer=target))
            if receive[source].numel():
                operations.append(dist.P2POp(dist.irecv, receive[source], group=self.group, group_peer=source))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    @lost_rank()
    def reduce_scatter(self, t: Tensor, lengths: Sequence[int], form: Form = Form.PADDED) -> Tensor:
        assert t.shape[0] == sum(lengths), (tuple(t.shape), lengths)
        if t.is_complex():
            return torch.view_as_complex(self.reduce_scatter(_real(t), lengths, form))
        flat = _addable(t).contiguous().reshape(-1)
        sizes = [length * math.prod(t.shape[1:]) for length in lengths]
        reduce = {Form.PADDED: self._reduce_padded, Form.GROUPED: self._reduce_grouped, Form.POINT_TO_POINT: self._reduce_directly}[form]
        own = reduce(flat, sizes) if sum(sizes) else flat.new_empty(0)
        return own.to(t.dtype).reshape(lengths[self.rank], *t.shape[1:])

    def _reduce_padded(self, flat: Tensor, sizes: list[int]) -> Tensor:
        width = max(sizes)
        padded = flat
        if min(sizes) < width:
            padded = torch.cat([torch.nn.functional.pad(p, (0, width - p.numel())) for p in flat.split(sizes)])
        own = flat.new_empty(width)
        _reduce_scatter_equal(own, padded, group=self.group)
        return own[: sizes[self.rank]].clone()

    def _reduce_grouped(self, flat: Tensor, sizes: list[int]) -> Tensor:
        pieces = [p.clone() for p in flat.split(sizes)]
        works = [dist.reduce(p, group_dst=owner, group=self.group, async_op=True) for owner, p in enumerate(pieces) if p.numel()]
        for work in works:
            work.wait()
        return pieces[self.rank]

    def _reduce_directly(self, flat: Tensor, sizes: list[int]) -> Tensor:
        pieces = list(flat.split(sizes))
        received = [pieces[self.rank] if k == self.rank else flat.new_empty(sizes[self.rank]) for k in range(self.size)]
        self._exchange(pieces, received)
        total = torch.zeros_like(received[0])
        for piece in received:  # in the order of the ranks, so that the sum is reproducible
            total += piece
        return total

    @lost_rank()
    def all_to_all(self, t: Tensor, send_lengths: Sequence[int], receive_lengths: Sequence[int]) -> Tensor:
        assert t.shape[0] == sum(send_lengths), (tuple(t.shape), send_lengths)
        flat = _flat(t)
        send, receive = _sizes(t, flat, send_lengths), _sizes(t, flat, receive_lengths)
        result = flat.new_empty(sum(receive))
        dist.all_to_all_single(result, flat, receive, send, group=self.group)
        return _unflat(result, t, sum(receive_lengths))

    @lost_rank()
    def broadcast(self, t: Tensor, source: int) -> Tensor:
        flat = _flat(t).clone()
        if flat.numel():
            dist.broadcast(flat, group_src=source, group=self.group)
        return flat.view(t.dtype).reshape(t.shape)

    @lost_rank()
    def all_reduce_async(self, t: Tensor) -> Handle:
        assert t.is_contiguous() and _real(t).dtype in _MOVABLE, (t.shape, t.stride(), t.dtype)
        return _Running(dist.all_reduce(_real(t), group=self.group, async_op=True), t)

    @lost_rank()
    def reduce_scatter_async(self, t: Tensor) -> Handle:
        assert t.dim() == 1 and t.is_contiguous() and _real(t).dtype in _MOVABLE and t.numel() % self.size == 0, (t.shape, t.dtype, self.size)
        own = t.new_empty(t.numel() // self.size)
        return _Running(_reduce_scatter_equal(_real(own), _real(t), group=self.group, async_op=True), own)

    @lost_rank()
    def all_gather_async(self, t: Tensor) -> Handle:
        assert t.dim() == 1 and t.is_contiguous() and _real(t).dtype in _MOVABLE, (t.shape, t.dtype)
        whole = t.new_empty(t.numel() * self.size)
        return _Running(_gather_equal(_real(whole), _real(t), group=self.group, async_op=True), whole)

    @lost_rank()
    def barrier(self) -> None:
        dist.barrier(self.group, device_ids=[torch.cuda.current_device()] if dist.get_backend(self.group) == "nccl" else None)


class _Running:
    def __init__(self, work: Any, t: Tensor):
        self.work, self.t = work, t

    @lost_rank()
    def wait(self) -> Tensor:
        self.work.wait()
        return self.t


_communicators: WeakSet[ProcessGroupCommunicator] = WeakSet()


def release_groups() -> None:
    """At the end of the process: no communicator holds its process group any more, so that those which are destroyed end their threads while Python
    still runs. A thread of gloo that lets go of a tensor later than that ends the process with SIGABRT."""
    for communicator in _communicators:
        del communicator.group
    _communicators.clear()
    # imported once there is a process group, as capture does, these functions have it as the default of an argument
    for function in vars(sys.modules.get("torch.distributed.nn.functional", object)).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(value, dist.ProcessGroup) for value in defaults):
            function.__defaults__ = tuple([None if isinstance(value, dist.ProcessGroup) else value for value in defaults])


def create_groups(mesh: Mesh, world: ThreadCommunicator | None = None, timeout: timedelta | None = None) -> dict[tuple[int, ...], Communicator]:
    """A communicator for every non-empty set of device axes of `mesh` (ascending), as seen by this process or, with `world`, by this
    thread; empty for a device outside of the mesh. Rank = number of the device in the cluster.

    Every process (thread) must call it, in the same order: groups are made by all, also by those that are not in them."""
    me = dist.get_rank() if world is None else world.rank
    axes = [i for i, axis in enumerate(mesh.axes) if axis.kind != "micro_batches"]
    made: dict[tuple[int, ...], Communicator | None] = {}
    result: dict[tuple[int, ...], Communicator] = {}
    for chosen in (c for n in range(1, len(axes) + 1) for c in combinations(axes, n)):
        for members in dict.fromkeys(mesh.group(device, chosen) for device in mesh.devices):
            if members not in made:
                made[members] = _process_group(members, me, timeout) if world is None else world.subgroup(members) if me in members else None
            communicator = made[members]
            if communicator is not None:
                result[chosen] = communicator
    return result


def _process_group(members: tuple[int, ...], me: int, timeout: timedelta | None) -> Communicator | None:
    if len(members) == 1:
        return alone() if me in members else None
    if members == tuple(range(dist.get_world_size())):
        return ProcessGroupCommunicator()
    order = {} if list(members) == sorted(members) else {"sort_ranks": False}
    group = dist.new_group(list(members), timeout=timeout, **order)
    return ProcessGroupCommunicator(group) if me in members else None
