"""What planning makes is freed when it is no longer needed: nothing waits for a collection of cycles, which does not run while a plan is made."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hapx.cluster.spec import ClusterSpec
from hapx.cost.memory import RESERVE
from hapx.errors import InsufficientMemoryError
from hapx.graph.capture import capture
from hapx.ir import Graph
from hapx.planner import plan_graphs
from support.clusters import slow_devices
from support.models import MLP

CLUSTER = slow_devices(["fast", "fast"], ["slow", "slow"])
BUDGET = 200_000  # beams that know peaks, as everything else, but few of them


@pytest.fixture(scope="module")
def graph() -> Graph:
    model = MLP((8, 16, 12, 4))
    return capture(model, model.example(8))


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """What only a collection frees, once it is asked for."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def with_memory(part: float, of: Graph) -> ClusterSpec:
    most = max(plan_graphs([of], CLUSTER).memory)
    return replace(CLUSTER, device_types={n: replace(k, memory=int(part * most / (1 - RESERVE))) for n, k in CLUSTER.device_types.items()})


@pytest.mark.parametrize("part", [2.0, *(pytest.param(part, marks=pytest.mark.slow) for part in (0.8, 0.05))])
def test_nothing_is_left_to_a_collection(part: float, graph: Graph, garbage: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapx.by_peaks.BUDGET", BUDGET)
    cluster = with_memory(part, graph)
    try:
        plan = plan_graphs([graph], cluster, advise=False)
    except InsufficientMemoryError:
        assert part < 0.5
    else:
        assert part > 0.5 and plan.iteration_time > 0
        del plan
    gc.collect()
    assert not Counter(type(one).__qualname__ for one in garbage if type(one).__module__.startswith("hapx"))
