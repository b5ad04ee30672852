"""Slows one process down to a share of a core, without privileges: a cluster of unequal devices on one machine.

In: a speed in (0, 1]. Out: the same computation, in a time as if the core were that slow. Equation (an in-process deadline): between two
checkpoints, sleep until

    wall time  >=  CPU time of this thread / speed,

and start afresh after a communication, whose time is not ours. Checkpoints are the beginnings of communications, because nobody sees the
time of a device except through them. CPU time does not count while other processes hold the core, so the ratio of speeds is right as long as
the speeds of all processes on a machine sum to well below its cores. On the CPU, autograd runs backward in the thread that called it; the
process must compute in one thread (`torch.set_num_threads(1)`).

Invariant: a throttled model computes exactly what the model computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from hapx.cluster.spec import ClusterSpec, DeviceType
from hapx.collectives.communicator import Communicator, Handle
from hapx.collectives.messages import Messenger
from hapx.errors import HapError
from hapx.plan import Form
from hapx.runtime.executor import Executor
from hapx.runtime.pipeline import Pipeline

if TYPE_CHECKING:
    from hapx.api import HAP

Clock = Callable[[], float]


class Throttle:
    """The debt of one thread. `speed`: share of a core, 1 means not slowed (there is never a debt then).

    `cpu`, `wall` and `sleep` are there for tests."""

    def __init__(self, speed: float, *, cpu: Clock = time.thread_time, wall: Clock = time.perf_counter, sleep: Callable[[float], None] = time.sleep):
        if not 0 < speed <= 1:
            raise HapError(f"throttle speed {speed}", allowed="a share of a core, above 0 and at most 1")
        self.speed, self._cpu, self._wall, self._sleep = speed, cpu, wall, sleep
        self._slowed = 0.0
        self.restart()

    def restart(self) -> None:
        """Start afresh: what happened until now is paid or was not ours."""
        self._cpu_mark, self._wall_mark = self._cpu(), self._wall()

    def pay(self) -> None:
        """Checkpoint: sleep off the debt since the last one."""
        debt = (self._cpu() - self._cpu_mark) / self.speed - (self._wall() - self._wall_mark)
        if self.speed < 1 and debt > 0:
            self._sleep(debt)
        self.restart()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Around waiting for others: the debt is paid before, and time inside is not counted."""
        self.pay()
        try:
            yield
        finally:
            self.restart()


def slowed(cluster: ClusterSpec, speeds: Sequence[float]) -> ClusterSpec:
    """The cluster as the planner must see it when every device runs at its speed (one per device): `cluster` holds what a core does per
    second of CPU time (`calibrate` with `clock=time.thread_time`), and a throttle makes 1 / speed seconds of it, whatever is computed."""
    if len(speeds) != cluster.num_devices:
        raise HapError(f"{len(speeds)} speeds", where="throttle", allowed=f"{cluster.num_devices}, one per device")
    names = [device.type if speed == 1 else f"{device.type}-at-{speed:g}" for device, speed in zip(cluster.devices, speeds, strict=True)]
    types = {name: _at_speed(cluster.type_of(d), name, speeds[d]) for d, name in enumerate(names)}
    place = iter(names)
    machines = tuple(replace(m, devices=tuple(next(place) for _ in m.devices)) for m in cluster.machines)
    return replace(cluster, machines=machines, device_types=types, profile=None)


def _at_speed(kind: DeviceType, name: str, speed: float) -> DeviceType:
    flops = {dtype: value * speed for dtype, value in kind.flops.items()}
    return replace(kind, name=name, flops=flops, memory_bandwidth=kind.memory_bandwidth * speed, kernel_latency=kind.kernel_latency / speed)


def attach(throttle: Throttle, model: HAP) -> None:
    """Slows a planned model that has not run yet: from now on its computation on this rank takes as long as the slow core would need.

    Checkpoints: all its communications (of the local programs, between stages, of the gradients and the norm), and the beginning of a call, where
    the ranks agree on what they are about to run. What the caller computes between (an optimizer's step) is paid at the next checkpoint."""
    slow(throttle, model._running())
    model.register_forward_pre_hook(lambda *_: throttle.pay())


def slow(throttle: Throttle, executor: Executor | Pipeline) -> None:
    """Slows what runs a plan on this device, before it has run. In a pipeline, messages between stages are checkpoints too."""
    if executor.started:
        raise HapError("the model has already run", where="throttle", hint="attach the throttle before the first call")
    if isinstance(executor, Pipeline):
        executor.wrap(lambda communicator: ThrottledCommunicator(communicator, throttle), lambda inner: ThrottledMessenger(inner, throttle))
    else:
        executor.wrap(lambda communicator: ThrottledCommunicator(communicator, throttle))
    executor.begins = throttle.restart


class ThrottledCommunicator:
    """A communicator that pays before each communication and starts afresh after it. What else it has is the wrapped one's."""

    def __init__(self, communicator: Communicator, throttle: Throttle):
        self.inner, self.throttle = communicator, throttle

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def __repr__(self) -> str:
        return f"ThrottledCommunicator({self.inner!r} at speed {self.throttle.speed:g})"

    def all_reduce(self, t: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        with self.throttle.outside():
            return self.inner.all_reduce(t, op)

    def all_gather(self, t: Tensor, lengths: Sequence[int], form: Form = Form.PADDED) -> Tensor:
        with self.throttle.outside():
            return self.inner.all_gather(t, lengths, form)

    def reduce_scatter(self, t: Tensor, lengths: Sequence[int], form: Form = Form.PADDED) -> Tensor:
        with self.throttle.outside():
            return self.inner.reduce_scatter(t, lengths, form)

    def all_to_all(self, t: Tensor, send_lengths: Sequence[int], receive_lengths: Sequence[int]) -> Tensor:
        with self.throttle.outside():
            return self.inner.all_to_all(t, send_lengths, receive_lengths)

    def broadcast(self, t: Tensor, source: int) -> Tensor:
        with self.throttle.outside():
            return self.inner.broadcast(t, source)

    def all_reduce_async(self, t: Tensor) -> Handle:
        self.throttle.pay()
        return _ThrottledHandle(self.inner.all_reduce_async(t), self.throttle)

    def reduce_scatter_async(self, t: Tensor) -> Handle:
        self.throttle.pay()
        return _ThrottledHandle(self.inner.reduce_scatter_async(t), self.throttle)

    def all_gather_async(self, t: Tensor) -> Handle:
        self.throttle.pay()
        return _ThrottledHandle(self.inner.all_gather_async(t), self.throttle)

    def barrier(self) -> None:
        with self.throttle.outside():
            self.inner.barrier()


class ThrottledMessenger:
    """A messenger that pays before a message leaves and before one is waited for, and starts afresh after waiting."""

    def __init__(self, messenger: Messenger, throttle: Throttle):
        self.inner, self.throttle = messenger, throttle

    @property
    def rank(self) -> int:
        return self.inner.rank

    def isend(self, t: Tensor, device: int, channel: int = 0) -> Handle:
        self.throttle.pay()
        return _ThrottledHandle(self.inner.isend(t, device, channel), self.throttle)

    def irecv(self, buffer: Tensor, device: int, channel: int = 0) -> Handle:
        return _ThrottledHandle(self.inner.irecv(buffer, device, channel), self.throttle)

    def over_hosts(self) -> AbstractContextManager[None]:
        return self.inner.over_hosts()


class _ThrottledHandle:
    def __init__(self, handle: Handle, throttle: Throttle):
        self.handle, self.throttle = handle, throttle

    def wait(self) -> Tensor:
        with self.throttle.outside():
            return self.handle.wait()
