"""The planner and segments: against a grid of ratios, never worse than one row, memory, what users say, further programs, files, reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.random_graphs import GraphMaker, random_graph, two_characters
from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.errors import HapError, PlanError
from hapx.graph.capture import capture
from hapx.graph.segments import find_blocks
from hapx.ir import Graph
from hapx.plan import Plan
from hapx.planner import extend, key_of, plan_graphs
from hapx.restriction import Restriction
from hapx.states import Sharded
from hapx.synth.problem import build
from hapx.synth.search import program_key, solve
from hapx.theory.derive import derive
from hapx.verify import verify
from support.theories import cluster, device_type
from support.unlike import TwoParts, unlike

PAIR = unlike(["counter", "mover"])


@cache
def two_parts(batch: int = 96, training: bool = True, dropout: float = 0.0) -> Graph:
    model = TwoParts(dropout=dropout)
    return capture(model, model.example(batch), training=training)


@cache
def planned(segments: str | int | tuple[str, ...] = "auto", dropout: float = 0.0) -> Plan:
    return plan_graphs([two_parts(dropout=dropout)], PAIR, strategy=Restriction(segments=segments))


@pytest.fixture
def alternation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No units are moved by the simulator in the end: what that brings without segments hides what they bring."""
    monkeypatch.setattr("hapx.planner.FEW_NODES", 0)


def test_not_worse_than_any_point_of_a_grid(alternation_alone: None) -> None:
    """Shares of the compute rows of two segments and of the storage rows, the cheapest program at each point: the reference for ratios and program
    together. First everywhere, then around the best."""
    tied, plan = (plan_graphs([two_characters()], PAIR, strategy=Restriction(segments=s)) for s in (1, 2))
    graph, mesh = plan.graphs[plan.first], plan.stages[0].mesh
    assert graph.segments == 2
    theory = derive(graph, mesh)
    costs = CostModel(theory, PAIR, "fp32", "adamw", "train")
    problem = build(theory, costs, Restriction())

    def cost(point: tuple[float, ...]) -> float:
        first = {c: point[2] if c.row.kind == "storage" else point[c.row.segment] for c in problem.cuts}
        return solve(problem, {c: np.array([x, 1 - x]) for c, x in first.items()}, None, program_key(theory)).cost

    def least(*axes: Sequence[float]) -> tuple[float, tuple[float, ...]]:
        return min((cost(point), point) for point in product(*axes))

    _, (a, b, c) = least(np.linspace(0.1, 0.9, 9).tolist(), np.linspace(0.1, 0.9, 9).tolist(), (0.2, 0.5))
    best, _ = least(*(np.linspace(x - 0.06, x + 0.06, 7).tolist() for x in (a, b)), (c - 0.05, c, c + 0.05))
    assert plan.statistics["cost"] <= best * 1.005
    assert best < 0.97 * tied.statistics["cost"]


def test_shards_that_pay_only_with_segments_are_found(alternation_alone: None) -> None:
    """The best program of one row keeps a parameter as it is used, so nothing in it says where that should be kept."""
    tied, freed = (plan_graphs([two_characters(64, 48, 256)], PAIR, strategy=Restriction(segments=s)) for s in ("none", "auto"))
    assert "w6" in _in_storage_rows(freed) - _in_storage_rows(tied)
    assert freed.statistics["cost"] < 0.96 * tied.statistics["cost"]


def test_shards_that_pay_at_improved_lengths_are_found(alternation_alone: None) -> None:
    """At shares as they are rounded the best program keeps every parameter as it is used; not so at the lengths into which they are improved."""
    plan = plan_graphs([two_characters(64, 48, 192)], PAIR, strategy=Restriction(segments="none"))
    assert _in_storage_rows(plan) == {"w1", "w4"}
    assert plan.statistics["cost"] < 0.3651  # 0.3806 where every parameter is kept as it is used


def _in_storage_rows(plan: Plan) -> set[str]:
    return {x.name for x in plan.storage if any(isinstance(s, Sharded) and s.cut.row.kind == "storage" for s in x.copies[0].placement.states)}


@pytest.mark.parametrize("seed", range(6))
def test_never_worse_than_one_row(seed: int) -> None:
    graph = random_graph(seed, operators=10, batch=48, widths=(8, 64, 160))
    on = unlike(["counter", "mover"], ["mover"]) if seed % 2 else PAIR
    tied, freed = (plan_graphs([graph], on, strategy=Restriction(segments=s)) for s in ("none", "auto"))
    verify(freed)
    assert freed.iteration_time <= tied.iteration_time * (1 + 1e-9)


def finished(maker: GraphMaker, last: str) -> Graph:
    """As capture leaves a graph."""
    graph = maker.finish(last)
    return replace(graph, block_of=find_blocks(graph.nodes, graph.refs))


def quick_and_roomy(memory: str) -> ClusterSpec:
    """A device of four times the speed and little memory, and one with much."""
    speeds = {"quick": (8e9, memory), "roomy": (2e9, "1 GiB")}
    types = {name: {"flops": flops, "memory": m, "memory_bandwidth": "100 GB/s"} for name, (flops, m) in speeds.items()}
    link = {"bandwidth": "10 GB/s", "latency": "1 us"}
    spec = {"name": "memory", "machines": [{"name": "m", "devices": ["quick", "roomy"]}], "device_types": types}
    return ClusterSpec.load({**spec, "network": {"inter": link, "intra": link}})


def test_the_big_slow_card_stores_more_and_computes_less() -> None:
    maker = GraphMaker(256)
    h = maker.input(256, 128)
    for _ in range(4):
        h = maker.unary(maker.linear(h, 128, False), "relu")
    plan = plan_graphs([finished(maker, h)], quick_and_roomy("1 MiB"))
    verify(plan)
    rows = {row.kind: shares for row, shares in plan.stages[0].shares.items()}
    assert rows["compute"][0] > 0.55 and rows["storage"][1] > 0.7
    assert plan.memory[0] < 2**20 < plan.memory[1]


@pytest.mark.slow
def test_segments_pay_where_memory_binds_in_one_part() -> None:
    """Many numbers in the middle of the first part: with one row they bound the share of the quick device everywhere."""
    maker = GraphMaker(512)
    h = maker.unary(maker.linear(maker.input(512, 32), 512, False), "gelu")
    h = maker.linear(maker.unary(maker.unary(h, "relu"), "gelu"), 32, False)
    for _ in range(4):
        h = maker.linear(maker.unary(maker.linear(maker.unary(h, "relu"), 256, False), "relu"), 32, False)
    graph = finished(maker, h)
    tied, freed = (plan_graphs([graph], quick_and_roomy("3 MiB"), strategy=Restriction(segments=s)) for s in ("none", "auto"))
    verify(freed)
    assert freed.iteration_time < 0.9 * tied.iteration_time
    first, last = (own for row, own in freed.stages[0].shares.items() if row.kind == "compute")
    assert first[0] < last[0] - 0.2  # the quick device has less of the part that is large
    assert freed.memory[0] < 3 * 2**20


def test_devices_that_differ_only_in_speed_share_one_row() -> None:
    types = [device_type("fast", 2e9, bandwidth=2e9), device_type("slow", 1e9, bandwidth=1e9)]
    plan = plan_graphs([two_parts()], cluster((("fast", "slow"),), types))
    assert plan.graphs[plan.first].segments == 1


def test_what_the_user_says() -> None:
    one, two, named = planned("none"), planned(2), planned(("waves",))
    assert one.graphs[one.first].segments == 1 and planned(1).graphs[one.first].segments == 1
    assert two.graphs[two.first].segments == 2 and two.iteration_time < one.iteration_time
    graph = named.graphs[named.first]
    assert graph.segment_of == tuple(int(i >= [n.module.startswith("waves") for n in graph.nodes].index(True)) for i in range(len(graph.nodes)))
    with pytest.raises(HapError, match=r"no operator is in a module 'wave'.*products, waves"):
        planned(("wave",))
    even = plan_graphs([two_parts()], PAIR, strategy=Restriction(ratios="even", segments=4))
    assert even.graphs[even.first].segments == 1


def test_further_programs_have_the_same_segments() -> None:
    plan = planned(dropout=0.1)
    first = plan.graphs[plan.first]
    assert first.segments > 1
    short, evaluation = two_parts(40, dropout=0.1), two_parts(96, False, 0.1)
    assert len(evaluation.nodes) < len(first.nodes)
    for graph in (short, evaluation):
        plan = extend(plan, graph, key_of(graph))
    verify(plan)
    assert [g.segments for g in plan.graphs.values()] == [first.segments] * 3
    by_name = {n.outputs[0].name: s for n, s in zip(first.nodes, first.segment_of, strict=True)}
    again = plan.graphs[key_of(evaluation)]
    assert all(by_name.get(n.outputs[0].name, s) == s for n, s in zip(again.nodes, again.segment_of, strict=True))
    stored = {s.cut for x in plan.storage for s in x.copies[0].placement.states if isinstance(s, Sharded)}
    assert all(len({lengths[c] for lengths in plan.stages[0].lengths.values() if c in lengths}) == 1 for c in stored)


def test_saved_and_loaded(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.digest == plan.digest
    loaded.verify()


def test_changed_segments_are_refused() -> None:
    plan = planned()
    graph = plan.graphs[plan.first]
    for changed in ((0,) * len(graph.nodes), (*graph.segment_of[:-1], 0), tuple(s + 1 for s in graph.segment_of), graph.segment_of[1:]):
        with pytest.raises(PlanError):
            verify(replace(plan, graphs={plan.first: replace(graph, segment_of=changed)}))
    with pytest.raises(PlanError, match="not made of parts"):
        verify(replace(plan, restriction=Restriction(segments="none")))
