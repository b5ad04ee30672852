"""Throttling: the debt, with clocks of our own, and communicators that pay before they wait."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hapx.cluster import ClusterSpec
from hapx.collectives.threads import run_threads
from hapx.errors import HapError
from hapx.plan import Form
from hapx.profile.throttle import Throttle, ThrottledCommunicator, ThrottledMessenger, slow, slowed
from support.equivalence import run_ranks
from support.models import MLP
from support.random_stages import Job, random_stages
from support.staged import pipeline_on

SPECS = Path(__file__).parents[2] / "cluster_specs"


class Clocks:
    """Time that passes when told. Sleeping passes wall time only."""

    def __init__(self) -> None:
        self.cpu, self.wall, self.slept = 0.0, 0.0, 0.0

    def work(self, seconds: float, waiting: float = 0.0) -> None:
        self.cpu += seconds
        self.wall += seconds + waiting

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.wall += seconds
        self.slept += seconds

    def throttle(self, speed: float) -> Throttle:
        return Throttle(speed, cpu=lambda: self.cpu, wall=lambda: self.wall, sleep=self.sleep)


def test_work_takes_as_long_as_on_the_slow_core() -> None:
    clocks = Clocks()
    throttle = clocks.throttle(0.25)
    for burst in (1.0, 0.001, 3.0):
        before = clocks.wall
        clocks.work(burst)
        throttle.pay()
        assert clocks.wall - before == pytest.approx(4 * burst)


def test_time_without_a_core_counts_towards_the_debt_but_is_never_given_back() -> None:
    clocks = Clocks()
    throttle = clocks.throttle(0.5)
    clocks.work(1.0, waiting=0.5)  # another process had the core for half a second
    throttle.pay()
    assert clocks.wall == pytest.approx(2.0)
    clocks.work(1.0, waiting=5.0)
    throttle.pay()
    assert clocks.wall == pytest.approx(8.0)
    clocks.work(1.0)
    throttle.pay()
    assert clocks.wall == pytest.approx(10.0)


def test_communication_is_not_slowed() -> None:
    clocks = Clocks()
    throttle = clocks.throttle(0.5)
    clocks.work(1.0)
    with throttle.outside():
        assert clocks.wall == pytest.approx(2.0)  # paid before
        clocks.work(0.25, waiting=3.0)
    throttle.pay()
    assert clocks.slept == pytest.approx(1.0)


def test_full_speed_never_sleeps() -> None:
    clocks = Clocks()
    throttle = clocks.throttle(1.0)
    clocks.cpu += 5.0
    throttle.pay()
    assert clocks.slept == 0.0


def test_the_planner_sees_slowed_devices() -> None:
    cluster = ClusterSpec.load(SPECS / "laptop-4.yaml")
    core = cluster.device_types["my-core"]
    result = slowed(cluster, (1.0, 0.5, 0.5, 0.1))
    assert [d.type for d in result.devices] == ["my-core", "my-core-at-0.5", "my-core-at-0.5", "my-core-at-0.1"]
    assert result.type_of(0) == core
    slow = result.type_of(3)
    assert slow.speed("float32") == pytest.approx(0.1 * core.speed("float32"))
    assert slow.memory_bandwidth == pytest.approx(0.1 * core.memory_bandwidth)
    assert slow.kernel_latency == pytest.approx(10 * core.kernel_latency)
    assert slow.memory == core.memory
    assert ClusterSpec.load(result.to_dict()) == result
    with pytest.raises(HapError, match="3 speeds"):
        slowed(cluster, (1.0, 0.5, 0.5))


@pytest.mark.parametrize("speed", [0.0, -1.0, 1.5])
def test_impossible_speeds(speed: float) -> None:
    with pytest.raises(HapError, match="above 0 and at most 1"):
        Throttle(speed)


def test_a_throttled_communicator_computes_the_same_and_pays_before_every_call() -> None:
    def every_call(comm: object) -> tuple[list[torch.Tensor], int]:
        t = torch.arange(4.0)
        own = torch.arange(4.0).reshape(2, 2)
        return [
            comm.all_reduce(t), comm.all_reduce(t, "max"), comm.all_gather(own, [2, 2], Form.GROUPED), comm.reduce_scatter(t, [1, 3]),
            comm.all_to_all(t, [2, 2], [2, 2]), comm.broadcast(t, 1), comm.all_reduce_async(t.clone()).wait(),
        ]  # fmt: skip

    def slowed(comm: object) -> tuple[list[torch.Tensor], int]:
        clocks = Clocks()
        throttle = clocks.throttle(0.5)
        wrapped = ThrottledCommunicator(comm, throttle)
        paid = 0
        pay = throttle.pay

        def counted() -> None:
            nonlocal paid
            paid += 1
            pay()

        throttle.pay = counted  # type: ignore[method-assign]
        assert (wrapped.rank, wrapped.size) == (comm.rank, comm.size)
        results = every_call(wrapped)
        wrapped.barrier()
        return results, paid

    plain, throttled = run_threads(2, every_call), run_threads(2, slowed)
    for expected, (got, paid) in zip(plain, throttled, strict=True):
        assert paid == 9  # 8 calls, and the wait of the asynchronous one
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


# ---- pipelines ---------------------------------------------------------------------------------------------------------------


class Sent:
    """A messenger on which nothing ever takes time."""

    rank = 0

    def isend(self, t: torch.Tensor, device: int, channel: int = 0) -> Any:
        return Waited(t)

    def irecv(self, buffer: torch.Tensor, device: int, channel: int = 0) -> Any:
        return Waited(buffer)


class Waited:
    def __init__(self, t: torch.Tensor):
        self.t = t

    def wait(self) -> torch.Tensor:
        return self.t


def test_a_throttled_messenger_pays_before_it_sends_and_before_it_waits() -> None:
    clocks, t = Clocks(), torch.ones(2)
    messenger = ThrottledMessenger(Sent(), clocks.throttle(0.25))
    clocks.work(1.0)
    sent = messenger.isend(t, 1)
    assert clocks.wall == pytest.approx(4.0), "what was computed before a message leaves took as long as on the slow core"
    arriving = messenger.irecv(t, 1)
    assert clocks.wall == pytest.approx(4.0), "asking costs nothing"
    clocks.work(1.0)
    assert arriving.wait() is t and clocks.wall == pytest.approx(8.0)
    clocks.work(0.5)
    assert sent.wait() is t and clocks.wall == pytest.approx(10.0)


WORK = Job(partial(MLP, (6, 8, 8, 3)), lambda step: MLP((6, 8, 8, 3)).example(8, step), 4)


def test_a_slowed_stage_of_a_pipeline_computes_the_same_and_takes_its_time() -> None:
    """Device 0 computes for a second per micro-batch, forward; it is alone in its stage."""
    plan = random_stages(WORK, ((0,), (1, 2)), cuts=[3])
    graph = plan.graphs[plan.first]

    def step(speed: float, threads: Any = None) -> tuple[float, dict[str, torch.Tensor], float]:
        clocks = Clocks()
        pipeline = pipeline_on(plan, WORK.model(), threads)
        slow(clocks.throttle(speed if pipeline.rank == 0 else 1.0), pipeline)
        for program in pipeline.programs(plan.first):
            program.module.register_forward_pre_hook(lambda *_: clocks.work(1.0))
        clocks.work(5.0)  # before the run: not its time
        loss = pipeline.run(plan.first, dict(zip(graph.given, WORK.inputs(0), strict=True)))[graph.loss]
        loss.backward()
        with pytest.raises(HapError, match="has already run"):
            slow(clocks.throttle(0.5), pipeline)
        return float(loss.detach()), pipeline.store.full_gradients(), clocks.slept

    fast, slowly = (run_ranks(plan, partial(step, speed)) for speed in (1.0, 0.25))
    for (loss, gradients, slept), (same, alike, _) in zip(fast, slowly, strict=True):
        assert loss == same and all(torch.equal(gradients[n], g) for n, g in alike.items())
        assert slept == 0.0
    assert [late for _, _, late in slowly] == [pytest.approx(3.0 * 4), 0.0, 0.0]


def test_a_real_burst_takes_its_time() -> None:
    throttle = Throttle(0.5)
    began, cpu = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu < 0.05:
        pass
    throttle.pay()
    assert time.perf_counter() - began >= 0.0999
