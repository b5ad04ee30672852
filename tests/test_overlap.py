"""Programs whose synchronisation hides behind backward: what the additive cost cannot see, the plan has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.baselines import EXPERT, Bench, systems
from benchmarks.workloads import bert_moe, example_module, machines
from hapx.cluster.spec import ClusterSpec
from hapx.graph.capture import capture
from hapx.ir import Graph
from hapx.lower import Candidate
from hapx.overlap import Line, beside, exposed, line
from hapx.planner import key_of, plan_graphs, plan_spmd, views
from hapx.restriction import AUTO, Restriction
from hapx.setting import Counters, Setting
from hapx.simulate import simulate_program
from hapx.theory.discover import discover

GRAPH = discover(bert_moe(256, 16, 4))
CLUSTER = machines((8, "P100-SXM2-16GB", 1))


def planned(rule: Restriction = AUTO) -> tuple[list[Candidate], Counters]:
    counters = Counters()
    return plan_spmd(Setting(GRAPH, key_of(GRAPH), CLUSTER, rule, "fp32", "adamw"), counters, views(CLUSTER, AUTO)[:1]), counters


def test_a_program_that_people_write_by_hand_is_found_though_the_additive_cost_prefers_another(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = Bench(GRAPH, CLUSTER).best(systems(GRAPH)[EXPERT])
    assert by_hand is not None
    found, _ = planned()
    assert found[0].time <= by_hand.time * (1 + 1e-6)
    assert min(c.cost for c in found) < found[0].cost, "the additive cost prefers another program"
    monkeypatch.setattr("hapx.planner.overlapped", lambda *_: [])
    assert planned()[0][0].time > 1.01 * by_hand.time


def test_sums_inside_of_machines_hide_where_those_between_them_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted alike, they are avoided where the link between machines is slow, by gathering parameters inside; and a faster link makes it worse."""
    graph = gpt(10, 384, 32)

    def time(bandwidth: str) -> float:
        boxes = [{"name": kind, "device": kind, "devices": 2} for kind in ("V100-SXM2-16GB", "P100-SXM2-16GB")]
        links = {"inter": {"bandwidth": bandwidth, "latency": "50 us"}, "intra": {"bandwidth": "20 GB/s", "latency": "10 us"}}
        return plan_graphs([replace(graph)], ClusterSpec.load({"name": "PCIe", "machines": boxes, "network": links})).iteration_time

    found, slower = time("10 Gbit/s"), time("1 Gbit/s")
    assert found <= slower * (1 + 1e-3)
    monkeypatch.setattr("hapx.overlap.INSIDE", 0)
    assert time("10 Gbit/s") > 1.02 * found


def gpt(layers: int, width: int, batch: int) -> Graph:
    """With a vocabulary of 1000 and 128 tokens, on no device."""
    with torch.device("meta"):
        model, tokens = example_module("gpt").GPT(1000, width, 4, layers, 128), torch.zeros(batch, 128, dtype=torch.int64)
    return capture(model, (tokens, torch.zeros_like(tokens)))


def test_what_is_exposed_is_what_the_simulator_adds() -> None:
    rule = Restriction(split="batch", storage="as-used", sfb="never", forms=frozenset({"padded"}))
    best = planned(rule)[0][0]
    own = line(best)
    timeline = simulate_program(best.program, GRAPH, best.costs, best.lengths)
    assert timeline.total == pytest.approx(best.time)
    assert 0 < exposed(own, best.time) < 1
    assert own.at(1.0) == pytest.approx(best.cost)
    assert own.at(exposed(own, best.time)) == pytest.approx(best.time)
    assert sum(s.stop - s.start for s in timeline.spans[0] if "synchronise bucket" in s.name) == pytest.approx(own.sums)


def test_beside_the_fastest_program_are_those_with_the_next_sums() -> None:
    """Three corners, the second of which is the fastest: the others take as long as it where a fifth and a half of the sums count."""
    best = planned()[0][0]
    candidates = [replace(best, time=time) for time in (7.0, 6.0, 30.0, 40.0)]
    lines = [Line(c, *own) for c, own in zip(candidates, ((7.0, 0.0), (6.0, 2.0), (4.0, 12.0), (3.9, 40.0)), strict=True)]
    assert list(beside(lines, lambda c: c)) == pytest.approx([0.2, 0.5])
    assert list(beside(lines[:1], lambda c: c)) == []
