"""Sums over two axes: which collectives they are, in which order, and that they are sums."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hapx.collectives.communicator import create_groups
from hapx.collectives.threads import ThreadCommunicator, run_threads
from hapx.plan import Axis, Mesh
from hapx.runtime.sums import STEPS, buffer_size, start
from support.pool import pool

BOTH = (0, 1)


def mesh(outer: int, inner: int) -> Mesh:
    return Mesh("m", (Axis("machines", outer, "machines"), Axis("devices", inner, "devices")), tuple(range(outer * inner)), 0)


def summed(shape: tuple[int, int], sizes: tuple[int, ...], threads: ThreadCommunicator | None = None) -> list[Tensor]:
    """Of every bucket, the sum over all devices of the device's number times 1, 2, ... Sums overlap as in backward."""
    groups = create_groups(mesh(*shape), threads)
    mine = groups[BOTH].rank + 1
    running = []
    for size in sizes:
        for other in running:
            other.advance()
        flat = torch.zeros(buffer_size(groups, BOTH, size), dtype=torch.float64)
        flat[:size] = mine * torch.arange(1, size + 1)
        running.append(start(groups, BOTH, flat))
    return [s.wait()[:size] for s, size in zip(running, sizes, strict=True)]


SIZES = (5, 1, 0, 12, 7)


def check(found: list[list[Tensor]], devices: int) -> None:
    for tensors in found:
        for size, t in zip(SIZES, tensors, strict=True):
            assert torch.equal(t, torch.arange(1, size + 1, dtype=torch.float64) * (devices * (devices + 1) // 2))


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 1), (1, 2)])
def test_every_device_has_the_sum(shape: tuple[int, int]) -> None:
    devices = shape[0] * shape[1]
    check(run_threads(devices, lambda comm: summed(shape, SIZES, comm), timeout=20), devices)


@pytest.mark.gloo
def test_every_process_has_the_sum() -> None:
    check(pool(4).run(partial(summed, (2, 2), SIZES)), 4)


class Recorded:
    """A communicator of which the calls are kept."""

    def __init__(self, size: int, name: str, calls: list[str]):
        self.size, self.rank, self.name, self.calls = size, 0, name, calls

    def __getattr__(self, what: str) -> Any:
        def call(t: Tensor) -> Any:
            self.calls.append(f"{what} {self.name} {t.numel()}")
            length = {"reduce_scatter_async": t.numel() // self.size, "all_gather_async": t.numel() * self.size}.get(what, t.numel())
            return type("Handle", (), {"wait": lambda _: torch.zeros(length)})()

        return call


def test_links_between_machines_carry_a_part() -> None:
    """Two buckets on 3 machines of 4 devices: what is sent where, in the order in which it starts."""
    calls: list[str] = []
    groups: Mapping[tuple[int, ...], Any] = {(0,): Recorded(3, "outer", calls), (1,): Recorded(4, "inner", calls), BOTH: Recorded(12, "all", calls)}
    assert [buffer_size(groups, BOTH, n) for n in (8, 9, 0)] == [8, 12, 0]
    assert buffer_size(groups, (0,), 9) == 9
    first = start(groups, BOTH, torch.zeros(8))
    first.advance()
    second = start(groups, BOTH, torch.zeros(12))
    for _ in range(STEPS):
        first.advance()
        second.advance()
    assert [s.wait().numel() for s in (first, second)] == [8, 12]
    assert calls == [
        "reduce_scatter_async inner 8",
        "all_reduce_async outer 2",
        "reduce_scatter_async inner 12",
        "all_gather_async inner 2",
        "all_reduce_async outer 3",
        "all_gather_async inner 3",
    ]
    calls.clear()
    start(groups, (0,), torch.zeros(9)).wait()
    assert calls == ["all_reduce_async outer 9"]
