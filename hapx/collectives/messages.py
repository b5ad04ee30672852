"""Messages from one device to another: one protocol; `ProcessGroupMessenger` carries them over torch.distributed, `ThreadMessenger` between the
threads of one process.

In: tensors of any dtype, device numbers, channels. Out: handles; a sent tensor must not change before its handle was waited for, a received one is
there after it. Invariants: messages of a lane (source, target, channel) arrive in the order of sending; lanes never wait for each other; neither
sending nor asking for a message waits for the other side; of an empty tensor nothing is sent. A message to oneself is a copy, and must have been
sent when it is waited for. A peer that is gone, or does not answer in time, is one `LaunchError`.

On a GPU a message that is under way is a kernel that runs until the other side has come, and CUDA loads a kernel that is launched for the first time
only once nothing runs (lazy loading, CUDA C++ Programming Guide). Two devices that have asked each other for something and then launch what is new
would wait for ever. So what runs for the first time sends its messages `over_hosts`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hapx.collectives.communicator import Handle, own_device
from hapx.collectives.lost import lost_rank
from hapx.collectives.mailbox import Lane, Mailbox
from hapx.collectives.threads import ThreadCommunicator
from hapx.errors import LaunchError
from hapx.warnings import warn

OTHER_STREAMS = 5  # computing, and the collectives of a stage along two axes, both of them, and of all devices
QUEUES_BY_DEFAULT, MOST_QUEUES = 8, 32  # CUDA C++ Programming Guide, environment variables


class Messenger(Protocol):
    """The messages of one device."""

    @property
    def rank(self) -> int: ...

    def isend(self, t: Tensor, device: int, channel: int = 0) -> Handle:
        """Starts to send `t`, which must not change before the handle was waited for. Handles have to be waited for some time."""

    def irecv(self, buffer: Tensor, device: int, channel: int = 0) -> Handle:
        """Asks for the next message of that device; the contiguous `buffer` has it, in the dtype and number of elements sent, after `wait`."""

    def over_hosts(self) -> AbstractContextManager[None]:
        """Messages inside are not kernels that wait on the devices. All devices enter and leave it at the same place, with nothing under way."""


class ThreadMessenger:
    """Between the threads of one `run_threads`; `world`: the communicator of all of them."""

    def __init__(self, world: ThreadCommunicator):
        self.rank, self._mailbox = world.rank, world.mailbox

    def isend(self, t: Tensor, device: int, channel: int = 0) -> Handle:
        if t.numel():
            self._mailbox.put((self.rank, device, channel), _bytes(t))
        return _Done(t)

    def irecv(self, buffer: Tensor, device: int, channel: int = 0) -> Handle:
        return _Asked(self._mailbox, (device, self.rank, channel), buffer) if buffer.numel() else _Done(buffer)

    def over_hosts(self) -> AbstractContextManager[None]:
        return nullcontext()


class ProcessGroupMessenger:
    """Between the processes of the default process group, whose ranks are the devices. See `create_messenger`.

    Args:
        groups: a process group of the two devices for every lane of this device; None: the backend tells channels apart by itself (gloo).
        hosts: with groups, a process group of all that tells channels apart by itself, for messages over the hosts.
    """

    def __init__(self, groups: Mapping[Lane, dist.ProcessGroup] | None = None, hosts: dist.ProcessGroup | None = None):
        self.rank, self._groups, self._own = dist.get_rank(), groups, Mailbox(0.0)
        self._hosts, self._over_hosts = hosts, False

    @contextmanager
    def over_hosts(self) -> Iterator[None]:
        self._over_hosts = self._hosts is not None
        try:
            yield
        finally:
            self._over_hosts = False

    @lost_rank()
    def isend(self, t: Tensor, device: int, channel: int = 0) -> Handle:
        lane = (self.rank, device, channel)
        if not t.numel():
            return _Done(t)
        if device == self.rank:
            self._own.put(lane, _bytes(t))
            return _Done(t)
        data = self._carried(_bytes(t))
        return _Running(dist.isend(data, device, **self._how(lane)), t, data)

    @lost_rank()
    def irecv(self, buffer: Tensor, device: int, channel: int = 0) -> Handle:
        lane = (device, self.rank, channel)
        if not buffer.numel():
            return _Done(buffer)
        if device == self.rank:
            return _Asked(self._own, lane, buffer)
        assert buffer.is_contiguous(), (buffer.shape, buffer.stride())
        place = _bytes(buffer)
        data = self._carried(place, empty=True)
        return _Running(dist.irecv(data, device, **self._how(lane)), buffer, data, None if data is place else place)

    def _carried(self, data: Tensor, empty: bool = False) -> Tensor:
        """What the backend reads or (empty) writes: memory of the host where messages go over it."""
        if not self._over_hosts or data.device.type == "cpu":
            return data
        return torch.empty_like(data, device="cpu") if empty else data.cpu()

    def _how(self, lane: Lane) -> dict[str, Any]:
        if self._over_hosts:
            return {"group": self._hosts, "tag": lane[2]}
        if self._groups is None:
            return {"tag": lane[2]}
        assert lane in self._groups, f"nobody made a process group for {lane}"
        return {"group": self._groups[lane]}


def create_messenger(lanes: Iterable[Lane], timeout: timedelta | None = None, grouped: bool | None = None) -> ProcessGroupMessenger:
    """A messenger for the lanes (source, target, channel) that any process uses. grouped: each has a process group; None: but over gloo.

    Every process must call it with the same lanes: NCCL knows no channels, runs what is asked of one communicator one after the other, and lets a
    message wait for its receiver; so that no lane waits for another, each has a process group, made by all. gloo needs none. NCCL also connects two
    processes at their first message, for which each waits; here all connect in the same order, so that nobody waits for one who waits. Beside them
    there is a group of gloo for `over_hosts`.

    Raises LaunchError where CUDA was started with too few queues for that."""
    if grouped is None:
        grouped = dist.get_backend() != "gloo"
    if not grouped:
        return ProcessGroupMessenger()
    lanes = set(lanes)
    if dist.get_backend() == "nccl":
        check_queues(lanes)
    me, groups = dist.get_rank(), {}
    for lane in sorted(lanes):
        source, target, _ = lane
        if source == target:
            continue
        group = dist.new_group(sorted((source, target)), timeout=timeout)
        if me in (source, target):
            groups[lane] = group
    messenger, place = ProcessGroupMessenger(groups, dist.new_group(backend="gloo", timeout=timeout)), own_device()
    for source, target, channel in sorted(groups):
        byte = torch.zeros(1, dtype=torch.uint8, device=place)
        greeting = messenger.isend(byte, target, channel) if source == me else messenger.irecv(byte, source, channel)
        greeting.wait()
    return messenger


def check_queues(lanes: Iterable[Lane]) -> None:
    """Raises LaunchError where the lanes of a device need more queues than CUDA has; warns where there cannot be enough. Streams share queues where
    there are more of them, and what stands in a queue behind a message that waits for its turn waits too, even if that message waits for it."""
    number = Counter(device for source, target, _ in lanes if source != target for device in (source, target))
    wanted = max(number.values(), default=0) + OTHER_STREAMS
    there = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", QUEUES_BY_DEFAULT))
    if not number or wanted <= there:
        return
    what = f"{wanted} streams of one device send, receive and compute at the same time, and CUDA has {there} queues for them"
    if there < MOST_QUEUES:
        raise LaunchError(
            f"{what}: they might wait for each other for ever",
            where="pipeline over NCCL",
            allowed=f"CUDA_DEVICE_MAX_CONNECTIONS={min(wanted, MOST_QUEUES)} to {MOST_QUEUES}",
            hint=f"import hapx before CUDA starts, or set CUDA_DEVICE_MAX_CONNECTIONS={MOST_QUEUES} in the environment",
        )
    warn(f"{what}: should training hang, plan with fewer stages or on fewer devices")


class _Done:
    """A message that is already on its way, or none."""

    def __init__(self, t: Tensor):
        self.t = t

    def wait(self) -> Tensor:
        return self.t


class _Asked:
    """A message that will be in a mailbox. Asked for now: messages come in the order of asking."""

    def __init__(self, mailbox: Mailbox, lane: Lane, buffer: Tensor):
        assert buffer.is_contiguous(), (buffer.shape, buffer.stride())
        self.mailbox, self.lane, self.buffer, self.number = mailbox, lane, buffer, mailbox.ask(lane)

    def wait(self) -> Tensor:
        message, data = self.mailbox.take(self.lane, self.number), _bytes(self.buffer)
        if message.numel() != data.numel():
            source, target, _ = self.lane
            raise LaunchError(f"device {source} sends {message.numel()} bytes where {data.numel()} were expected", where=f"rank {target}")
        data.copy_(message)
        return self.buffer


class _Running:
    """A message under way; keeps what the backend reads or writes. place: where that goes at the end, if it is elsewhere."""

    def __init__(self, work: Any, t: Tensor, data: Tensor, place: Tensor | None = None):
        self.work, self.t, self.data, self.place = work, t, data, place

    @lost_rank()
    def wait(self) -> Tensor:
        self.work.wait()
        if self.place is not None:
            self.place.copy_(self.data)
            self.place = None
        return self.t


def _bytes(t: Tensor) -> Tensor:
    """The elements in one row, as bytes, which every backend can send; of a contiguous tensor, the same memory."""
    return t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
