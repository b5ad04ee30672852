"""Collectives between threads of one process: a local program of every device, run without processes.

In: `run_threads(m, fn)` calls `fn(communicator)` in m threads. Out: their results, in the order of the ranks, or the first error.
Invariants: sums are taken in the order of the ranks, so results are reproducible and equal bit by bit on all ranks; when one thread
fails, the others are released from whatever they wait for; ranks that call different operations are told so.

On the CPU, autograd runs backward in the thread that calls it, so collectives inside of backward meet here as well.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from hapx.collectives.mailbox import Mailbox
from hapx.errors import LaunchError
from hapx.plan import Form

T = TypeVar("T")


class _World:
    """The threads of one `run_threads`. `group`: the shared memory of the threads `members`, made by the first that asks."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.mailbox = Mailbox(timeout)
        self.lock = threading.Lock()
        self.groups: dict[tuple[int, ...], _Group] = {}
        self.broken = False

    def group(self, members: tuple[int, ...]) -> _Group:
        with self.lock:
            group = self.groups.setdefault(members, _Group(len(members)))
            if self.broken:
                group.barrier.abort()
            return group

    def abort(self) -> None:
        with self.lock:
            self.broken = True
            for group in self.groups.values():
                group.barrier.abort()
        self.mailbox.abort()


class _Group:
    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size


class _Done:
    """A collective that finished at once."""

    def __init__(self, t: Tensor):
        self.t = t

    def wait(self) -> Tensor:
        return self.t


class ThreadCommunicator:
    """The threads `members` of one `run_threads`, seen by one of them. See `hapx.collectives.communicator.Communicator`."""

    def __init__(self, world: _World, members: tuple[int, ...], rank: int):
        self._world, self._members, self._group = world, members, world.group(members)
        self.rank, self.size = rank, len(members)

    @property
    def mailbox(self) -> Mailbox:
        """The messages of all threads, by ranks of the whole world."""
        return self._world.mailbox

    def __repr__(self) -> str:
        return f"ThreadCommunicator(rank {self.rank} of {self.size})"

    def subgroup(self, members: Sequence[int]) -> ThreadCommunicator:
        """Communicator of those ranks of this one, in the given order; this thread must be one of them."""
        return ThreadCommunicator(self._world, tuple(self._members[k] for k in members), list(members).index(self.rank))

    def _exchange(self, what: str, value: Any, read: Callable[[list[Any]], T]) -> T:
        """`read` of what every rank has brought. Nobody goes on (and may change what it brought) before all have read."""
        self._group.slots[self.rank] = (what, value)
        self._wait(what)
        asked = [slot[0] for slot in self._group.slots]
        if len(set(asked)) > 1:
            self._world.abort()
            raise LaunchError(f"the ranks of a group call different collectives: {', '.join(asked)}", where=f"rank {self.rank}")
        result = read([slot[1] for slot in self._group.slots])
        self._wait(what)
        self._group.slots[self.rank] = None
        return result

    def _wait(self, what: str) -> None:
        try:
            self._group.barrier.wait(self._world.timeout)
        except threading.BrokenBarrierError:
            reason = "another rank failed" if self._world.broken else f"another rank did not come within {self._world.timeout:g} s"
            raise LaunchError(f"{what} was given up: {reason}", where=f"rank {self.rank} of {self.size}") from None

    def all_reduce(self, t: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        return self._exchange(f"all_reduce {op} {_shape(t)}", t.detach(), _sum if op == "sum" else _max)

    def all_gather(self, t: Tensor, lengths: Sequence[int], form: Form = Form.PADDED) -> Tensor:
        assert t.shape[0] == lengths[self.rank] and form is not Form.NONE, (tuple(t.shape), lengths, form)
        return self._exchange(f"all_gather {form.value} {list(lengths)} x {list(t.shape[1:])}", t.detach(), torch.cat)

    def reduce_scatter(self, t: Tensor, lengths: Sequence[int], form: Form = Form.PADDED) -> Tensor:
        assert t.shape[0] == sum(lengths) and form is not Form.NONE, (tuple(t.shape), lengths, form)
        start = sum(lengths[: self.rank])
        stop = start + lengths[self.rank]
        return self._exchange(
            f"reduce_scatter {form.value} {list(lengths)} {_shape(t)}", t.detach(), lambda all_t: _sum([x[start:stop] for x in all_t])
        )

    def all_to_all(self, t: Tensor, send_lengths: Sequence[int], receive_lengths: Sequence[int]) -> Tensor:
        assert t.shape[0] == sum(send_lengths), (tuple(t.shape), send_lengths)
        result = self._exchange("all_to_all", t.detach().split(list(send_lengths)), lambda pieces: torch.cat([p[self.rank] for p in pieces]))
        assert result.shape[0] == sum(receive_lengths), (tuple(result.shape), receive_lengths)
        return result

    def broadcast(self, t: Tensor, source: int) -> Tensor:
        return self._exchange(f"broadcast {source} {_shape(t)}", t.detach(), lambda all_t: all_t[source].clone(memory_format=torch.contiguous_format))

    def all_reduce_async(self, t: Tensor) -> _Done:
        assert t.is_contiguous(), (t.shape, t.stride())
        with torch.no_grad():
            t.copy_(self.all_reduce(t))
        return _Done(t)

    def reduce_scatter_async(self, t: Tensor) -> _Done:
        assert t.dim() == 1 and t.numel() % self.size == 0, (t.shape, self.size)
        return _Done(self.reduce_scatter(t, [t.numel() // self.size] * self.size))

    def all_gather_async(self, t: Tensor) -> _Done:
        return _Done(self.all_gather(t, [t.numel()] * self.size))

    def barrier(self) -> None:
        self._exchange("barrier", None, lambda _: None)


def _shape(t: Tensor) -> str:
    return f"{t.dtype}{list(t.shape)}"


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for t in tensors[1:]:
        total += t
    return total


def _max(tensors: Sequence[Tensor]) -> Tensor:
    result = tensors[0].clone(memory_format=torch.contiguous_format)
    for t in tensors[1:]:
        result = torch.maximum(result, t)
    return result


def alone() -> ThreadCommunicator:
    """The communicator of one device by itself."""
    return ThreadCommunicator(_World(math.inf), (0,), 0)


def run_threads(m: int, fn: Callable[[ThreadCommunicator], T], timeout: float = 60.0) -> list[T]:
    """Calls `fn(communicator)` in `m` threads; their results by rank. Raises the first error of any; waits at most `timeout`
    seconds in one collective."""
    world = _World(timeout)
    results: list[Any] = [None] * m
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = fn(ThreadCommunicator(world, tuple(range(m)), rank))
        except BaseException as error:  # kept for the caller, and everybody must be released
            errors.append(error)
            world.abort()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(m)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
