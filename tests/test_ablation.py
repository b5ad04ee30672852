"""What the ablation compares hapx with, on small graphs: ZeRO-2 and shardings propagated from the largest dims."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.propagation import largest_dims
from benchmarks.random_graphs import random_graph
from benchmarks.zero2 import zero2
from hapx.cluster.spec import ClusterSpec
from hapx.ir import Graph, Kind
from hapx.lower import Candidate, memory
from hapx.planner import Counters, Setting, key_of, plan_spmd, views
from hapx.restriction import AUTO, BASELINES, Restriction


def machine(devices: int, bandwidth: str = "1 GB/s") -> ClusterSpec:
    card = {"flops": 1e9, "memory": "1 GiB", "memory_bandwidth": "10 GB/s", "kernel_latency": "1 us"}
    network = {"inter": {"bandwidth": "1 GB/s", "latency": "1 us"}, "intra": {"bandwidth": bandwidth, "latency": "1 us"}}
    machines = [{"name": "m", "devices": ["card"] * devices}]
    return ClusterSpec.load({"name": "box", "machines": machines, "device_types": {"card": card}, "network": network})


def setting(graph: Graph, devices: int, bandwidth: str = "1 GB/s") -> Setting:
    return Setting(graph, key_of(graph), machine(devices, bandwidth), AUTO, "fp32", "adamw")


def best(of: Setting, rule: Restriction) -> Candidate:
    return plan_spmd(replace(of, rule=rule), Counters())[0]


GRAPHS = [random_graph(seed, operators=7, batch=32, widths=(16, 32, 64)) for seed in (1, 4)]


@pytest.mark.parametrize("graph", GRAPHS)
def test_never_faster_than_hapx(graph: Graph) -> None:
    given = setting(graph, 4)
    own = best(given, AUTO).time
    flat = views(given.cluster, BASELINES["zero"])[0]
    others = [best(given, BASELINES["dp-even"]).time, best(given, BASELINES["zero"]).time, zero2(given)[0], largest_dims(given, flat)[0]]
    assert own <= min(others) * (1 + 1e-9)


@pytest.mark.parametrize("graph", GRAPHS)
def test_zero2_keeps_a_part_of_gradients_and_states(graph: Graph) -> None:
    """AdamW: 4 bytes of a parameter, and a device's part of 4 of its gradient and 8 of its states, of 16 in data parallelism."""
    given = setting(graph, 4)
    parallel = best(given, BASELINES["dp-even"])
    parameters = sum(r.size for r in graph.of_kind(Kind.PARAMETER))
    expected = max(memory(parallel)) - parameters * 12 * 3 / 4
    assert zero2(given)[1] == pytest.approx(expected)


@pytest.mark.parametrize("graph", GRAPHS)
def test_zero2_moves_as_much_as_data_parallelism(graph: Graph) -> None:
    """Where links decide, a reduce-scatter and an all-gather take as long as the all-reduce that they are the halves of."""
    given = setting(graph, 4, bandwidth="100 kB/s")
    assert zero2(given)[0] == pytest.approx(best(given, BASELINES["dp-even"]).time, rel=0.02)


def test_on_one_device_nothing_differs() -> None:
    given = setting(GRAPHS[0], 1)
    parallel = best(given, BASELINES["dp-even"]).time
    assert zero2(given)[0] == pytest.approx(parallel)
    assert largest_dims(given, views(given.cluster, AUTO)[0])[0] == pytest.approx(parallel)
