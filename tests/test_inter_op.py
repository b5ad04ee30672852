"""Pipelines as "auto" finds them: plans that hold, and are faster than one program where links are slow."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hapx
from hapx import inter_op, planner, processes
from hapx.cluster.spec import ClusterSpec
from hapx.errors import CaptureError, HapError
from hapx.graph.capture import capture
from hapx.inter_op import at_full_speed, pipelines
from hapx.parts import crossing
from hapx.plan import Plan
from hapx.planner import key_of
from hapx.put_together import look_ahead
from hapx.report.search import COUNTS
from hapx.restriction import AUTO
from hapx.setting import Counters, Setting
from hapx.stage_prices import Planned, _round
from hapx.stages.costs import ONE_F_ONE_B
from hapx.stages.numbers import numbers_of_micro_batches
from hapx.stages.plain import pipeline_by_hand
from hapx.stages.submeshes import ordered, shape_of
from hapx.states import Sharded
from hapx.theory.normalise import MixedSamplesWarning
from hapx.warnings import HapWarning
from support.asking import MODEL, SLOW, asker
from support.clusters import ONE, TWO, slow_devices
from support.models import MLP
from support.staged import micro_graph

QUICK = slow_devices(["fast", "fast"], ["slow", "slow"], inter="100 Gbit/s", speed=1e6)


@cache
def usual() -> Plan:
    model = MODEL()
    return hapx.plan(model, SLOW, model.example(16))


@cache
def single() -> Plan:
    model = MODEL()
    return hapx.plan(model, SLOW, model.example(16), micro_batches=1)


def test_a_slow_link_makes_a_pipeline() -> None:
    plan = usual()
    assert len(plan.stages) == 2
    assert plan.iteration_time < plan.statistics["one_stage"]
    assert sorted(d for s in plan.stages for d in s.devices) == [0, 1, 2, 3]
    plan.verify()
    assert len(single().stages) == 1
    assert single().iteration_time == pytest.approx(plan.statistics["one_stage"])
    for name in ("expansions", "generated", "alternations"):  # what stages took is counted, too
        assert plan.statistics[name] > single().statistics[name] > 0


def test_what_several_answers_take_is_searched_for_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers, by the same number of searches, and programs in the theory that was there before."""
    shapes = [shape_of(SLOW, ordered(SLOW, devices)) for devices in ((0, 1), (2, 3), (0,), (0, 1, 2, 3), (1, 0))]
    alone, together = asker(4), asker(4)
    monkeypatch.setattr(processes, "_cores", lambda: 3)
    monkeypatch.setattr(processes, "_alone", lambda: True)
    together.prepare(shapes)
    searched = together.calls
    assert searched > 1 and len(together.library) == searched
    assert all(own.theory.triples is together.theories[len(own.mesh.axes)].triples for own in together.library.values())
    for shape in shapes:
        assert together.ask(0, 1, shape) == alone.ask(0, 1, shape)
    assert together.calls == alone.calls  # with those of thriftier levels, which are asked about one by one
    together.prepare(shapes)
    assert together.calls == alone.calls


def test_of_stages_that_are_planned_at_the_same_time_the_longest_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    four = asker(4)
    pipeline = pipeline_by_hand((0, 1, len(four.layers)), ((0, 1), (2, 3)), SLOW, four.prices(), ONE_F_ONE_B)
    assert pipeline is not None
    short, long = pipeline.stages
    planned = list[int]()

    def noted(start: int, stop: int, *_: object) -> Planned:
        planned.append(stop - start)
        return Planned(None, 0, Counters())

    monkeypatch.setattr(processes, "_cores", lambda: 1)
    monkeypatch.setattr(four, "_planned", noted)
    look_ahead([(four, pipeline)])
    assert planned == [long.stop - long.start, short.stop - short.start] and planned[0] > planned[1]
    assert all((four.classes[s.start : s.stop], s.shape, s.answer.plan) in four.pieces for s in pipeline.stages)


class Odd(nn.Module):
    """With an operator that has no rule, of which is warned."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.w = MODEL(), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(x, y) + torch.block_diag(self.w, self.w).sum()


def whatever_copies(monkeypatch: pytest.MonkeyPatch, cluster: ClusterSpec) -> Plan:
    """The plan of `Odd`, which is the same without copies of the process and with them, as is what is warned of."""
    model, plans = Odd(), []
    for cores in (1, 3):
        monkeypatch.setattr(processes, "_cores", lambda cores=cores: cores)
        monkeypatch.setattr(processes, "_alone", lambda: True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            plans.append((hapx.plan(model, cluster, MODEL().example(16)), [(w.category, str(w.message)) for w in said]))
    (one, said_by_one), (three, said_by_three) = plans
    assert one == three
    assert said_by_one and said_by_one == said_by_three
    assert one.statistics.keys() == three.statistics.keys()
    assert [one.statistics[name] for name in COUNTS] == [three.statistics[name] for name in COUNTS]
    return one


def test_plans_do_not_depend_on_copies_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second core one plan is made in a copy, and so are stages: the same plan, and the same warnings."""
    assert len(whatever_copies(monkeypatch, SLOW).stages) > 1


def test_where_memory_binds_a_plan_of_one_stage_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if memory were no matter it is slower than the pipeline, which is known early; the plan, and what is said of the model, are those of one
    process."""
    memory = max(single().memory)  # of which a tenth is not planned with
    plan = whatever_copies(monkeypatch, replace(SLOW, device_types={n: replace(kind, memory=memory) for n, kind in SLOW.device_types.items()}))
    assert len(plan.stages) == 2
    assert plan.statistics["one_stage_at_least"] > plan.iteration_time and "one_stage" not in plan.statistics
    assert {"capture_time", "coverage", "asks"} <= plan.statistics.keys()
    plan.verify()


@pytest.mark.slow
def test_a_quick_look_at_a_large_model_is_enough_where_one_stage_is_far_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    one_stage = usual().statistics["one_stage"]
    monkeypatch.setattr(planner, "LARGE", 0)
    assert "one_stage" not in whatever_copies(monkeypatch, SLOW).statistics
    plan = hapx.plan(MODEL(), SLOW, MODEL().example(16))
    assert plan == usual()
    assert 0.9 * one_stage < plan.statistics["one_stage_at_least"] <= one_stage


@pytest.mark.parametrize("make", [lambda: MLP((32,) * 6), pytest.param(lambda: MODEL(layers=1), marks=pytest.mark.slow)], ids=["mlp", "gpt"])
def test_a_quick_link_does_not(make: Callable[[], Any]) -> None:
    model = make()
    plan = hapx.plan(model, QUICK, model.example(16))
    assert len(plan.stages) == 1
    graph = capture(model, model.example(16))
    assert plan.iteration_time >= at_full_speed(Setting(graph, key_of(graph), QUICK, AUTO, "fp32", "adamw"))


def test_the_number_of_micro_batches_may_be_given() -> None:
    model = MODEL()
    plan = hapx.plan(model, SLOW, model.example(16), micro_batches=2)
    assert [len(s.micro_batches) for s in plan.schedules.values()] in ([2], [])
    with pytest.raises(HapError, match="micro_batches=3; allowed: a divisor of the batch of 16"):
        hapx.plan(model, SLOW, model.example(16), micro_batches=3)
    assert numbers_of_micro_batches(16, SLOW) == (16, 8)
    with pytest.warns(HapWarning, match="micro_batches=2 has no effect: strategy 'dp-even' means one stage"):
        assert len(hapx.plan(model, SLOW, model.example(16), micro_batches=2, strategy="dp-even").stages) == 1
    with pytest.warns(HapWarning, match="micro_batches=2 has no effect: one device"):
        assert len(hapx.plan(model, ONE, model.example(16), micro_batches=2).stages) == 1
    assert numbers_of_micro_batches(1, SLOW) == ()


def test_one_stage_that_accumulates_is_a_candidate() -> None:
    """On two unlike devices with a quick link uneven shares are faster than stages; micro-batches one after another take less memory."""
    model = MODEL(layers=1)
    whole = capture(model, model.example(16))
    asked = Setting(whole, key_of(whole), TWO, AUTO, "fp32", "adamw")
    plan = pipelines(asked, lambda number: micro_graph(model, model.example(16), number)[0], (4,), more=False)[0]
    assert len(plan.stages) == 1 and plan.stages[0].devices == (0, 1)
    assert len(plan.schedules[plan.first].micro_batches) == 4
    plan.verify()
    at_once = hapx.plan(model, TWO, model.example(16), micro_batches=1)
    assert sum(plan.memory) < sum(at_once.memory)
    assert plan.iteration_time == pytest.approx(at_once.iteration_time, rel=0.1)


def test_interleaving_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few micro-batches of a deep model, of which little crosses: several stages on every machine leave fewer bubbles."""
    model = MLP((64,) * 25)
    cluster = slow_devices(["fast", "fast"], ["slow", "slow"], inter="4 Mbit/s", speed=2e6)
    plan = hapx.plan(model, cluster, model.example(4))
    assert [s.name for s in plan.schedules.values()] == ["interleaved"]
    assert [s.devices for s in plan.stages] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    plan.verify()
    monkeypatch.setattr(inter_op, "interleavings", lambda *_: ())
    without = hapx.plan(model, cluster, model.example(4))
    assert without.groups == plan.groups and len(without.stages) == 2
    assert plan.iteration_time < 0.99 * without.iteration_time


def contrastive() -> nn.Module:
    """A deep encoder whose samples are compared with each other."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(16)))

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            return F.cross_entropy(y @ y.T, torch.arange(x.shape[0]))

    return Model()


def with_batch_norm() -> nn.Module:
    """The same, each sample for itself but for a batch norm, which refuses a single sample."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(16)))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).square().mean()

    return Model()


@pytest.mark.parametrize("model", [contrastive, with_batch_norm])
def test_what_mixes_samples_becomes_a_pipeline_only_if_asked_for(model: Callable[[], nn.Module]) -> None:
    inputs = (torch.randn(8, 64),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(hapx.plan(model(), SLOW, inputs).stages) == 1
    with pytest.warns(MixedSamplesWarning, match="with 4 micro-batches training equals one device that runs the same micro-batches"):
        assert len(hapx.plan(model(), SLOW, inputs, micro_batches=4).stages) > 1


def test_micro_batches_that_the_model_refuses() -> None:
    with pytest.raises(CaptureError, match=r"^micro_batches=8: the model takes a batch of 8, but not one of 1: .*allowed: fewer, larger"):
        hapx.plan(with_batch_norm(), SLOW, (torch.randn(8, 64),), micro_batches=8)


@pytest.mark.parametrize("cores", [1, 3])
def test_what_pipelines_lack_does_not_matter_where_none_is_needed(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the plan of one stage is there already, or a copy of the process is still making it."""
    monkeypatch.setattr(processes, "_cores", lambda: cores)
    monkeypatch.setattr(processes, "_alone", lambda: True)
    monkeypatch.setattr(inter_op, "NEAR", math.inf)
    plan = hapx.plan(with_batch_norm(), SLOW, (torch.randn(8, 64),), micro_batches=8)
    assert len(plan.stages) == 1 and plan.statistics["pipelines"] == 0


def test_what_is_whole_on_several_machines_crosses_to_each_of_them() -> None:
    """Micro-batches of one sample are computed by both machines, or in shards that are gathered before every layer: so is what they receive."""
    cluster = slow_devices(["fast", "fast"], ["slow", "slow"], ["slow", "slow"], inter="2 Mbit/s", speed=1e8)
    own = asker(16)
    own.asked = replace(own.asked, cluster=cluster)
    both, one = shape_of(cluster, ordered(cluster, (2, 3, 4, 5))), shape_of(cluster, (0, 1))
    there, again = own._crossing[1]
    assert there == again > 0
    wire = [own.crossing(1, one, both, cluster.inter) - 2 * cluster.inter.latency]  # nothing is known of programs yet
    own.ask(0, len(own.layers), both)
    program = own.wholes[both, own.least[both]].best.program
    (received,) = crossing(own.asked.graph, own.layers[1][0])
    placed = next(p.placement for i in program.instructions if i.triple.node is not None for p in i.triple.post if p.tensor == received.name)
    assert not any(isinstance(s, Sharded) for s in placed.states[:1])
    wire += [own.crossing(1, *shapes, cluster.inter) - 2 * cluster.inter.latency for shapes in ((one, both), (both, one), (both, both))]
    assert [w * cluster.inter.bandwidth / there for w in wire] == pytest.approx([2, 3, 3, 2])  # between both and both over two cards


def test_answers_are_near_what_is_planned() -> None:
    """The whole model's program, read for some layers, takes about what their own program does; no less than the bound."""
    asked = asker(4)
    shape = shape_of(SLOW, (0, 1))
    for run in ((0, 1), (1, 2), (0, len(asked.layers))):
        (answer,) = asked.ask(*run, shape)
        piece = asked.piece(*run, shape, 1)
        assert piece is not None
        assert answer.micro == pytest.approx(piece.times.micro, rel=0.2)
        assert answer.micro >= asked.bound(*run, shape).micro
        assert answer.most_in_flight > 4
    assert asked.calls == 1


def test_what_was_planned_corrects_answers() -> None:
    """A planned run takes what it takes; another one on its shape, and on other shapes, is off by as much."""
    asked = asker(4)
    fast, slow = shape_of(SLOW, (0, 1)), shape_of(SLOW, (2, 3))
    before = [asked.ask(0, 1, fast)[0], asked.ask(1, 2, fast)[0], asked.ask(1, 2, slow)[0]]
    prices = asked.corrected()
    assert [prices.ask(0, 1, fast)[0], prices.ask(1, 2, fast)[0], prices.ask(1, 2, slow)[0]] == before
    piece = asked.piece(0, 1, fast, 1)
    assert piece is not None
    prices, off = asked.corrected(), piece.times.micro / before[0].micro
    assert off != 1
    (exact,) = prices.ask(0, 1, fast)
    assert (exact.micro, exact.iteration) == (piece.times.micro, piece.times.iteration)
    for known, run, shape in ((before[1], (1, 2), fast), (before[2], (1, 2), slow)):
        (answer,) = prices.ask(*run, shape)
        assert answer.micro == pytest.approx(off * known.micro) and answer.iteration == known.iteration


def test_a_pipeline_is_priced_anew_for_other_micro_batches() -> None:
    two, four = asker(2), asker(4)
    pipeline = pipeline_by_hand((0, 1, len(two.layers)), ((0, 1), (2, 3)), SLOW, two.prices(), ONE_F_ONE_B)
    assert pipeline is not None and pipeline.micro_batches == 2
    again = inter_op._answered(pipeline, four)
    assert again is not None and again.micro_batches == 4
    for before, after in zip(pipeline.stages, again.stages, strict=True):
        assert (after.start, after.stop, after.devices) == (before.start, before.stop, before.devices)
        assert after.answer.micro < before.answer.micro
        assert after.answer in four.ask(after.start, after.stop, after.shape)


def test_of_equal_machines_a_power_of_two_is_searched() -> None:
    cluster = slow_devices(*[["slow", "slow"]] * 5, ["fast", "fast"])
    five, mixed = shape_of(cluster, range(10)), shape_of(cluster, range(4, 12))
    assert _round(five) == shape_of(cluster, range(8))
    assert _round(_round(five)) == _round(five)
    assert _round(mixed) == mixed
