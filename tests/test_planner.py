"""The planner: views, baselines, alternation, memory, further programs. Small graphs, no torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from hapx.cluster.spec import ClusterSpec
from hapx.errors import HapError, InsufficientMemoryError
from hapx.graph.capture import capture
from hapx.graph.segments import graph_hash
from hapx.ir import Graph
from hapx.planner import SIMPLER, extend, key_of, plan_graphs, plan_spmd, views
from hapx.report.table import batch_sizes
from hapx.restriction import AUTO, BASELINES, Restriction
from hapx.setting import Counters, Setting
from hapx.starts import FEW_STEPS
from hapx.states import Sharded
from hapx.synth.problem import Problem
from hapx.synth.search import attempt
from hapx.theory.discover import discover
from hapx.verify import verify
from support.clusters import slow_devices
from support.models import GPT, MLP
from support.theories import mlp as unhashed


def mlp(batch: int = 8) -> Graph:
    """As capture leaves a graph: batch dims are found later, and it has its hash."""
    graph = unhashed(batch)
    graph = replace(graph, nodes=tuple(replace(n, batch_dims=(None,) * len(n.outputs)) for n in graph.nodes))
    return replace(graph, hash=graph_hash(graph))


def cluster(*machines: list[str], inter: str = "100 Gbit/s", memory: str = "16 GiB") -> ClusterSpec:
    types = {
        "fast": {"flops": 16e12, "memory": memory, "memory_bandwidth": "900 GB/s", "kernel_latency": "1 us"},
        "slow": {"flops": 4e12, "memory": memory, "memory_bandwidth": "400 GB/s", "kernel_latency": "1 us"},
    }
    used = {name for m in machines for name in m}
    return ClusterSpec.load({
        "name": "test",
        "machines": [{"name": f"m{i}", "devices": list(m)} for i, m in enumerate(machines)],
        "device_types": {n: {k: v for k, v in t.items() if k != "kernel_latency"} for n, t in types.items() if n in used},
        "network": {"inter": {"bandwidth": inter, "latency": "5 us"}, "intra": {"bandwidth": "100 GB/s", "latency": "2 us"}},
    })  # fmt: skip


def test_views_of_two_machines():
    names = [m.name for m in views(cluster(["fast"] * 4, ["slow"] * 4), AUTO)]
    assert names == ["flat", "2x4", "4x2"]
    two = views(cluster(["fast"] * 4, ["slow"] * 4), Restriction(mesh="two-level"))
    assert [m.name for m in two] == ["2x4"] and two[0].axes[0].kind == "machines" and two[0].uneven == 0


def test_views_need_equal_groups_inside_a_machine():
    assert [m.name for m in views(cluster(["fast", "slow"], ["fast", "slow"]), AUTO)] == ["flat"]
    assert [m.name for m in views(cluster(["fast"] * 2, ["slow"]), AUTO)] == ["flat"]
    assert [m.name for m in views(cluster(["fast"]), AUTO)] == ["flat"]
    with pytest.raises(HapError, match=r"no mesh view '3x2'.*flat"):
        views(cluster(["fast"] * 4), Restriction(mesh="3x2"))


def test_given_shares_choose_the_views_that_have_as_many_coordinates():
    two = cluster(["fast", "fast"], ["slow", "slow"])
    assert [m.name for m in views(two, Restriction(ratios=(4, 4, 1, 1)))] == ["flat"]
    assert [m.name for m in views(two, Restriction(ratios=(4, 1)))] == ["2x2"]
    plan = plan_graphs([mlp()], two, strategy=Restriction(ratios=(0, 3, 1, 1)))
    verify(plan)
    assert set(plan.stages[0].ratios) == {(0.0, 0.6, 0.2, 0.2)}
    with pytest.raises(HapError, match=r"ratios \(1, 1, 1\).*allowed: 4 numbers >= 0, one per coordinate of the uneven axis"):
        plan_graphs([mlp()], two, strategy=Restriction(ratios=(1, 1, 1)))


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_verify(name):
    plan = plan_graphs([mlp()], cluster(["fast", "fast"], ["slow", "slow"]), strategy=name)
    verify(plan)
    assert sum(plan.shares) == pytest.approx(1) and len(plan.memory) == 4
    assert plan.iteration_time > 0 and plan.statistics["alternations"] >= 1


@pytest.mark.parametrize("view", ["flat", "two-level"])
def test_balanced_is_not_slower_than_its_baselines(view):
    on = cluster(["fast", "fast"], ["slow", "slow"])
    ratios = ("balanced", "even", "speed")
    balanced, *others = (plan_graphs([mlp()], on, strategy=Restriction(mesh=view, ratios=r)) for r in ratios)
    assert balanced.iteration_time <= min(p.iteration_time for p in others) * (1 + 1e-9)


def test_explicit_ratios_are_used():
    plan = plan_graphs([mlp()], cluster(["fast"] * 4), strategy=Restriction(mesh="flat", split="batch", ratios=(0.5, 0.25, 0.25, 0.0)))
    verify(plan)
    assert plan.shares == pytest.approx((0.5, 0.25, 0.25, 0.0))
    with pytest.raises(HapError, match="4 numbers"):
        plan_graphs([mlp()], cluster(["fast"] * 4), strategy=Restriction(mesh="flat", ratios=(0.5, 0.5)))


def test_shares_of_divided_work_are_those_of_what_is_cut():
    by_hand = replace(BASELINES["tensor-parallel"], mesh="flat", ratios=(0.5, 0.25, 0.25, 0.0))
    for on in (cluster(["fast"] * 4), cluster(["fast", "fast"], ["slow", "slow"])):  # whatever the devices are limited by
        plan = plan_graphs([mlp()], on, strategy=by_hand)
        assert batch_sizes(plan) is None
        assert plan.shares == pytest.approx((0.5, 0.25, 0.25, 0.0))


def test_nothing_fits():
    with pytest.raises(InsufficientMemoryError, match="no program fits"):
        plan_graphs([mlp()], cluster(["fast"] * 2, memory="2 KiB"))


def test_extend_keeps_the_storage_and_its_lengths():
    on = cluster(["fast", "fast"], ["slow", "slow"])
    plan = plan_graphs([mlp()], on, strategy=Restriction(mesh="flat", split="batch", storage="sharded", ratios="balanced"))
    short = mlp(batch=6)
    longer = extend(plan, short, key_of(short))
    verify(longer)
    assert longer.storage == plan.storage and len(longer.graphs) == 2
    first, second = longer.stages[0].lengths.values()
    stored = {s.cut for x in plan.storage for s in x.copies[0].placement.states if isinstance(s, Sharded)}
    assert stored and all(first[c] == second[c] for c in stored)


@pytest.mark.parametrize(("widths", "pays"), [((6, 16, 4), True), ((30, 20, 5), False)])
def test_several_axes_inside_of_one_machine_are_searched_to_the_end_only_where_they_pay(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...], pays: bool
) -> None:
    """They are to be faster by so much that this is known from short searches."""
    searches: list[tuple[str, bool]] = []

    def searched(problem: Problem, *rest: Any) -> Any:
        searches.append((problem.theory.mesh.name, problem.brief))
        return attempt(problem, *rest)

    monkeypatch.setattr("hapx.turns.attempt", searched)
    model = MLP(widths)
    graph = capture(model, model.example(6))
    plan = plan_graphs([graph], slow_devices(["fast", "fast", "slow", "slow"], speed=1e5))
    costs = {view["view"]: view["cost"] for view in plan.statistics["tried"]}
    short = [brief for name, brief in searches if name == "2x2"]
    assert short[0]
    assert (costs["2x2"] * (1 + SIMPLER) < costs["flat"]) is pays
    assert (plan.stages[0].mesh.name == "2x2") is pays
    assert (False in short) is pays
    assert not any(brief for name, brief in searches if name == "flat")


@pytest.mark.parametrize("make", [lambda: MLP((16,) * 53), pytest.param(lambda: GPT(13, 16, 2, 5, 8), marks=pytest.mark.slow)], ids=["mlp", "gpt"])
def test_of_a_model_that_needs_far_too_much_memory_one_view_is_looked_at(make: Any) -> None:
    model = make()
    graph = discover(capture(model, model.example(4)))
    assert len(graph.nodes) > FEW_STEPS
    cluster = slow_devices(["fast", "fast"], ["slow", "slow"])
    most = max(plan_graphs([graph], cluster).memory)
    looked: dict[float, tuple[str, ...]] = {}
    for part in (0.01, 1.2):
        own = replace(cluster, device_types={name: replace(kind, memory=part * most / 0.9) for name, kind in cluster.device_types.items()})
        counters = Counters()
        with suppress(InsufficientMemoryError):
            plan_spmd(Setting(graph, key_of(graph), own, AUTO, "fp32", "adamw", tight=True), counters)
        looked[part] = tuple(counters.views)
    assert looked == {0.01: ("flat",), 1.2: ("flat", "2x2")}
