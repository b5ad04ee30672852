"""Messages between devices: order, channels, dtypes, empty tensors and failure, between threads and between gloo ranks."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from hapx.collectives import Messenger, ThreadMessenger, create_messenger, run_threads
from hapx.collectives.messages import check_queues
from hapx.errors import LaunchError
from hapx.warnings import HapWarning
from support.pool import Pool, RankError, pool

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def values(source: int, target: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(6) * 7 + 3 * source + 5 * target + number) % 4).reshape(2, 3).to(dtype)


def exercise(messenger: Messenger, size: int) -> int:
    """Everybody sends to everybody, itself included, in every dtype, on two channels that are read in another order than they are written, and asks
    for everything ahead. Returns the number of messages."""
    me, handles, checks = messenger.rank, [], 0
    asked = []
    for channel in (1, 0):
        for peer in range(size):
            for number, dtype in enumerate(DTYPES):
                asked.append((peer, number, channel, messenger.irecv(torch.empty(2, 3, dtype=dtype), peer, channel)))
            asked.append((peer, -1, channel, messenger.irecv(torch.empty(0, 3), peer, channel)))
    for peer in range(size):
        for channel in (0, 1):
            for number, dtype in enumerate(DTYPES):
                handles.append(messenger.isend(values(me, peer, number + channel, dtype), peer, channel))
                handles.append(messenger.isend(torch.empty(0), peer, channel))
    for peer, number, channel, handle in reversed(asked):
        got = handle.wait()
        if number >= 0:
            assert torch.equal(got, values(peer, me, number + channel, DTYPES[number])), (peer, number, channel)
            checks += 1
    for handle in handles:
        handle.wait()
    return checks


def test_messages_between_threads():
    assert run_threads(3, lambda world: exercise(ThreadMessenger(world), 3), timeout=20) == [3 * 2 * len(DTYPES)] * 3


def exercise_processes(grouped: bool) -> int:
    lanes = [(source, target, channel) for source in range(3) for target in range(3) for channel in range(2)] if grouped else []
    return exercise(create_messenger(lanes, grouped=grouped), 3)


@pytest.mark.gloo
@pytest.mark.parametrize("grouped", [False, True], ids=["channels", "a group for every lane"])
def test_messages_between_gloo_ranks(grouped: bool):
    assert pool(3).run(exercise_processes, grouped) == [3 * 2 * len(DTYPES)] * 3


def exercise_over_hosts() -> tuple[int, int]:
    """Over the hosts, then not."""
    messenger = create_messenger([(source, target, channel) for source in range(3) for target in range(3) for channel in range(2)], grouped=True)
    with messenger.over_hosts():
        first = exercise(messenger, 3)
    return first, exercise(messenger, 3)


@pytest.mark.gloo
def test_messages_over_hosts():
    assert pool(3).run(exercise_over_hosts) == [(3 * 2 * len(DTYPES), 3 * 2 * len(DTYPES))] * 3


def test_over_hosts_without_need_changes_nothing():
    def work(world: Any) -> int:
        messenger = ThreadMessenger(world)
        with messenger.over_hosts():
            return exercise(messenger, 3)

    assert run_threads(3, work, timeout=20) == [3 * 2 * len(DTYPES)] * 3


LANES = [(source, target, channel) for source in (0, 1) for target in (2, 3) for channel in range(3)]


@pytest.mark.parametrize("queues", [None, "8", "10"])
def test_too_few_queues_are_refused(queues: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six lanes of a device and five other streams."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    with pytest.raises(LaunchError, match=rf"11 streams of one device .* CUDA has {queues or 8} queues.*CUDA_DEVICE_MAX_CONNECTIONS=11 to 32"):
        check_queues(LANES)


def test_enough_queues_are_not_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "11")
    check_queues(LANES)
    check_queues([])
    check_queues([(0, 0, channel) for channel in range(40)])  # messages to oneself need none
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    with pytest.warns(HapWarning, match="45 streams"):
        check_queues([(0, 1, channel) for channel in range(40)])


def send_what_is_not_contiguous(messenger: Messenger) -> list:
    t = torch.arange(6.0).reshape(2, 3).T
    if messenger.rank == 0:
        handle = messenger.isend(t, 1)
        handle.wait()
        return t.tolist()
    buffer = torch.empty(8)
    messenger.irecv(buffer[1:7], 0).wait()
    return buffer[1:7].reshape(3, 2).tolist()


def test_rows_of_a_larger_buffer_are_filled():
    found = run_threads(2, lambda world: send_what_is_not_contiguous(ThreadMessenger(world)))
    assert found[0] == found[1]


# ---- failure ---------------------------------------------------------------------------------------------------------------------


def test_a_thread_that_fails_releases_who_waits():
    def work(world):
        if world.rank == 1:
            raise KeyError("the reason")
        return ThreadMessenger(world).irecv(torch.empty(1), 1).wait()

    start = time.monotonic()
    with pytest.raises(KeyError, match="the reason"):
        run_threads(2, work)
    assert time.monotonic() - start < 30


def test_a_message_that_does_not_come_is_not_waited_for():
    def work(world):
        return ThreadMessenger(world).irecv(torch.empty(1), 1).wait() if world.rank == 0 else None

    with pytest.raises(LaunchError, match=r"rank 0: a message from device 1 was given up: it did not come within 0\.1 s"):
        run_threads(2, work, timeout=0.1)


def test_a_message_to_oneself_must_have_been_sent():
    with pytest.raises(LaunchError, match="from device 0 was given up: it has not been sent"):
        run_threads(1, lambda world: ThreadMessenger(world).irecv(torch.empty(1), 0).wait())


def test_a_message_of_another_size_is_refused():
    def work(world):
        messenger = ThreadMessenger(world)
        return messenger.isend(torch.ones(3), 1).wait() if world.rank == 0 else messenger.irecv(torch.empty(2), 0).wait()

    with pytest.raises(LaunchError, match="device 0 sends 12 bytes where 8 were expected"):
        run_threads(2, work)


def wait_for_the_dead(receive: bool) -> None:
    messenger = create_messenger([])
    first = messenger.isend(torch.ones(1), 1) if messenger.rank == 0 else messenger.irecv(torch.empty(1), 0)
    first.wait()
    if messenger.rank == 1:
        os._exit(3)
    if receive:
        messenger.irecv(torch.empty(1), 1).wait()
    for _ in range(100):  # the first messages may still fit into the buffers of the dead connection
        messenger.isend(torch.ones(1 << 16), 1).wait()
        time.sleep(0.01)


@pytest.mark.gloo
@pytest.mark.parametrize("receive", [True, False], ids=["receive", "send"])
def test_a_killed_peer_is_one_clear_error(receive):
    own = Pool(2)
    start = time.monotonic()
    try:
        with pytest.raises(RankError) as caught:
            own.run(wait_for_the_dead, receive)
    finally:
        own.stop()
    assert "status 3" in caught.value.failures[1] and "LaunchError: another rank has ended or does not answer" in caught.value.failures[0]
    assert time.monotonic() - start < 30
