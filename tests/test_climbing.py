"""The best pipelines made better: by their neighbours, and in parts of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from hapx import climbing, inter_op
from hapx.graph.capture import capture
from hapx.inter_op import pipelines
from hapx.planner import key_of
from hapx.put_together import put_together
from hapx.restriction import AUTO
from hapx.setting import Setting
from hapx.stage_prices import LEVELS
from hapx.stages.clustering import finer
from hapx.stages.costs import ONE_F_ONE_B
from hapx.stages.dp import Solution
from hapx.stages.plain import pipeline_by_hand
from hapx.stages.submeshes import shape_of
from support.asking import MODEL, SLOW, asker
from support.clusters import slow_devices
from support.staged import micro_graph


def whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are not made of parts of layers."""
    for name in ("PARTS", "MORE_PARTS"):
        monkeypatch.setattr(climbing, name, 1)


def test_a_pipeline_that_saves_memory_is_short_of_it() -> None:
    """Then smaller micro-batches are looked at, even where its devices have room."""
    four = asker(4)
    pipeline = pipeline_by_hand((0, 1, len(four.layers)), ((0, 1), (2, 3)), SLOW, four.prices(), ONE_F_ONE_B)
    assert pipeline is not None
    made = put_together(four, pipeline, AUTO, {})
    assert made is not None and not climbing.is_short(made)
    again = [replace(s, answer=replace(s.answer, plan=len(LEVELS) - 1)) if s.start else s for s in pipeline.stages]
    assert climbing.is_short(replace(made, pipeline=replace(pipeline, stages=tuple(again))))


def test_neighbours_of_a_pipeline_are_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a pipeline with far too many layers on the slow machine to the one that the program finds."""
    model = MODEL(layers=5)
    whole = capture(model, model.example(16))
    asked = Setting(whole, key_of(whole), SLOW, AUTO, "fp32", "adamw")

    def parts(number: int) -> Any:
        return micro_graph(model, model.example(16), number)[0]

    def poor(_layers: Any, _space: Any, prices: Any, *_: Any, **__: Any) -> Solution:
        made = pipeline_by_hand((0, 2, len(_layers)), ((0, 1), (2, 3)), SLOW, prices[0], ONE_F_ONE_B)
        assert made is not None
        return Solution((made,), 0.0, 1, 1, 1, 1)

    found = pipelines(asked, parts, (4,), more=False, one_stage=False)[0]
    whole_layers(monkeypatch)  # parts of them would make up for most of it
    monkeypatch.setattr(inter_op, "solve", poor)
    monkeypatch.setattr(inter_op, "plain_pipelines", lambda *_: ())
    climbed = pipelines(asked, parts, (4,), more=False, one_stage=False)[0]
    climbed.verify()
    monkeypatch.setattr(climbing, "neighbours", lambda *_: ())
    without = pipelines(asked, parts, (4,), more=False, one_stage=False)[0]
    assert climbed.iteration_time < 0.9 * without.iteration_time
    assert climbed.iteration_time <= 1.02 * found.iteration_time


def test_where_memory_binds_neighbours_may_look_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    four, limits = asker(4), list[float]()
    pipeline = pipeline_by_hand((0, 1, len(four.layers)), ((0, 1), (2, 3)), SLOW, four.prices(), ONE_F_ONE_B)
    assert pipeline is not None
    made = put_together(four, pipeline, AUTO, {})
    assert made is not None
    monkeypatch.setattr(climbing, "_nearest", lambda made, asked, limit, tried, near: limits.append(limit))
    for short in (False, True):
        monkeypatch.setattr(climbing, "is_short", lambda _, short=short: short)
        assert climbing.climbed([made], four.asked, lambda _: None, set()) is made
    assert limits[0] < made.plan.iteration_time < limits[1]


def best_in_parts(layers: int, *machines: Sequence[str]) -> Callable[[], Any]:
    """Plans blocks on machines of such devices, as pipelines of eight micro-batches, with the constants of then."""
    model = MODEL(layers=layers)
    whole = capture(model, model.example(16))
    asked = Setting(whole, key_of(whole), slow_devices(*machines, inter="20 Mbit/s", speed=1e7), AUTO, "fp32", "adamw")

    def best() -> Any:
        return pipelines(asked, lambda number: micro_graph(model, model.example(16), number)[0], (8,), more=False, one_stage=False)[0]

    return best


def test_parts_of_layers_share_out_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks on devices of speeds 3 and 1: whole blocks are shared one and one, or all on one; a half of one is less for the slow device."""
    best = best_in_parts(2, ["medium"], ["slow"])
    found = best()
    found.verify()
    assert len(found.stages) == 2
    whole_layers(monkeypatch)
    assert found.iteration_time < 0.97 * best().iteration_time


def test_parts_of_layers_go_to_other_arrangements_where_these_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block on three machines: whole layers leave one arrangement of two stages; in parts, another one is a seventh faster."""
    best = best_in_parts(1, ["medium"], ["slow"], ["medium", "medium"])
    found = best()
    found.verify()
    monkeypatch.setattr(climbing, "CHEAP", 0)
    few = best()
    assert found.iteration_time < 0.9 * few.iteration_time
    assert [s.devices for s in found.stages] != [s.devices for s in few.stages]


def test_who_asks_about_parts_knows_what_was_planned() -> None:
    """A stage of whole layers takes as many parts, is not planned again, and has the same answers."""
    four = asker(4)
    pipeline = pipeline_by_hand((0, 1, len(four.layers)), ((0, 1), (2, 3)), SLOW, four.prices(), ONE_F_ONE_B)
    assert pipeline is not None and put_together(four, pipeline, AUTO, {}) is not None
    layers = finer(four.asked.graph, tuple(four.layers), 4)
    among, (same,) = four.finer(layers, [pipeline])
    assert len(layers) > len(four.layers) and len(same.stages) == len(pipeline.stages)
    calls = four.calls
    for coarse, fine in zip(pipeline.stages, same.stages, strict=True):
        assert [layers[fine.start][0], layers[fine.stop - 1][1]] == [four.layers[coarse.start][0], four.layers[coarse.stop - 1][1]]
        before, after = (a.ask(s.start, s.stop, s.shape)[0] for a, s in ((four, coarse), (among, fine)))
        assert (after.micro, after.most_in_flight) == pytest.approx((before.micro, before.most_in_flight), rel=1e-3)
        assert among.piece(fine.start, fine.stop, fine.shape, 1) is four.piece(coarse.start, coarse.stop, coarse.shape, 1)
    shape = shape_of(SLOW, (0, 1))
    ends = [0, len(layers) // 2, len(layers)]
    halves = [among.ask(a, b, shape)[0].micro for a, b in pairwise(ends)]
    assert sum(halves) == pytest.approx(among.ask(0, len(layers), shape)[0].micro, rel=1e-9)
    assert among.calls == calls
