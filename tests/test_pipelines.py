"""Pipelines that are put together keep what their stages were planned with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

import hapx
from hapx.cost.remat import chosen_blocks, with_blocks
from hapx.errors import PlanError
from hapx.pipelines import Piece, agree, assemble, plan_piece
from hapx.planner import key_of
from hapx.predict import Staged
from hapx.put_together import _scheduled, has_room, stored_like
from hapx.restriction import AUTO
from hapx.setting import Counters, Setting
from hapx.states import Sharded
from support.clusters import TWO_MACHINES, slow_devices
from support.models import GPT, MLP
from support.staged import assert_staged, block_cuts, micro_graph

MODEL: Callable[[], Any] = partial(GPT, vocab=13, width=8, heads=4, layers=4, context=6)


def inputs(step: int) -> Sequence[Tensor]:
    found: Sequence[Tensor] = MODEL().example(8, step)
    return found


def test_a_stage_that_recomputes_its_blocks() -> None:
    graph, whole = micro_graph(MODEL(), inputs(0), 4)
    setting = Setting(graph, key_of(whole), TWO_MACHINES, replace(AUTO, segments="none"), "fp32", "sgd", repeats=4)
    (cut,) = block_cuts(graph, 2)
    kept, again = (replace(setting, graph=g, in_flight=2) for g in (graph, with_blocks(graph)))
    back = plan_piece(kept, (cut, len(graph.nodes)), (2, 3), Counters())[0]
    front = [plan_piece(s, (0, cut), (0, 1), Counters())[0] for s in (kept, again)]
    plain, plan = (assemble([piece, back], setting, "gpipe", {}) for piece in front)
    assert [chosen_blocks(plan.part(plan.first, i)) > 0 for i in (0, 1)] == [True, False]
    assert plan.memory[0] < plain.memory[0] and plan.memory[2] == plain.memory[2]
    assert plan.iteration_time > plain.iteration_time
    assert_staged(MODEL, inputs, plan, steps=2)


def test_schedules_leave_free_what_is_not_planned_with() -> None:
    """All micro-batches at once would fill the devices; a schedule with fewer of them leaves a tenth of the memory, as plans of one stage do."""
    graph, whole = micro_graph(MODEL(), inputs(0), 4)
    setting = Setting(graph, key_of(whole), TWO_MACHINES, replace(AUTO, segments="none"), "fp32", "sgd", repeats=4)
    (cut,) = block_cuts(graph, 2)
    stages = [(0, cut), (0, 1), 2], [(cut, len(graph.nodes)), (2, 3), 1]
    pieces = [plan_piece(replace(setting, in_flight=kept), nodes, devices, Counters())[0] for nodes, devices, kept in stages]
    full, few = (assemble(pieces, setting, style, {}) for style in ("gpipe", "1f1b"))
    types = {TWO_MACHINES.type_of(d).name: replace(TWO_MACHINES.type_of(d), memory=round(full.memory[d] / 0.95)) for d in (3, 0)}
    cluster = replace(TWO_MACHINES, device_types=types)
    limits = [0.9 * cluster.type_of(d).memory for d in range(4)]
    assert full.memory[0] > limits[0] > few.memory[0]
    assert not has_room(Staged(replace(full, cluster=cluster))) and has_room(Staged(replace(few, cluster=cluster)))
    plan = _scheduled(pieces, replace(setting, cluster=cluster), AUTO, {})
    assert all(held <= limit for held, limit in zip(plan.memory, limits, strict=True))


THREE_STAGES = (0, 1), (2, 3), (0, 1)


def tied(storage: Any) -> tuple[Setting, list[Piece]]:
    """A GPT in three stages, whose first and last one are on the same devices and share the table of tokens. storage: of the last one."""
    graph, whole = micro_graph(MODEL(), inputs(0), 4)
    setting = Setting(graph, key_of(whole), TWO_MACHINES, replace(AUTO, segments="none", storage="as-used"), "fp32", "sgd", repeats=4)
    ends = [0, *block_cuts(graph, 3), len(graph.nodes)]
    settings = setting, setting, replace(setting, rule=replace(setting.rule, storage=storage))
    pieces = [plan_piece(s, nodes, own, Counters())[0] for s, nodes, own in zip(settings, pairwise(ends), THREE_STAGES, strict=True)]
    assert "tok.weight" in pieces[0].candidate.storage_of and "tok.weight" in pieces[2].candidate.storage_of
    return setting, pieces


def test_a_stage_that_stores_otherwise_what_it_shares_is_planned_like_the_one_before() -> None:
    setting, pieces = tied("sharded")
    assert not agree(pieces[0], pieces[2]) and agree(pieces[0], pieces[1])
    with pytest.raises(PlanError, match="stages 0 and 2 are on the same devices, but store it otherwise"):
        assemble(pieces, setting, "gpipe", {}).verify()
    own = replace(setting, cluster=TWO_MACHINES.part([0, 1]), rule=replace(setting.rule, storage="auto"))
    again = stored_like(pieces[2], pieces[:1], own, Counters())
    assert again is not None
    pieces[2] = again
    assert agree(pieces[0], pieces[2])
    plan = assemble(pieces, setting, "gpipe", {})
    plan.verify()
    assert_staged(MODEL, inputs, plan, steps=2)


def test_what_is_stored_along_an_even_axis_has_no_lengths() -> None:
    graph, whole = micro_graph(MODEL(), inputs(0), 4)
    rule = replace(AUTO, segments="none", storage="sharded", mesh="2x2")
    setting = Setting(graph, key_of(whole), TWO_MACHINES, rule, "fp32", "sgd", repeats=4)
    front, back = (plan_piece(setting, nodes, (0, 1, 2, 3), Counters())[0] for nodes in pairwise([0, *block_cuts(graph, 2), len(graph.nodes)]))
    at = front.candidate.storage_of["tok.weight"]
    assert isinstance(at.states[1], Sharded) and at.states[1].cut not in front.candidate.lengths
    assert agree(front, back) is (back.candidate.storage_of["tok.weight"] == at)


def test_stages_that_are_put_together_store_alike_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is called again, in an interleaved pipeline; if its stages would not."""
    model = MLP((64,) * 25)
    model.layers[12] = model.layers[0]
    cluster = slow_devices(["fast", "fast"], ["slow", "slow"], inter="4 Mbit/s", speed=2e6)
    plain = hapx.plan(model, cluster, model.example(4))
    assert [s.devices for s in plain.stages] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    plain.verify()
    asked: list[tuple[int, int]] = []

    def other(one: Piece, piece: Piece) -> bool:
        asked.append(piece.nodes)
        return len(asked) > 1

    monkeypatch.setattr("hapx.put_together.agree", other)
    again = hapx.plan(model, cluster, model.example(4))
    again.verify()
    assert asked and [s.devices for s in again.stages] == [s.devices for s in plain.stages]
    assert again.iteration_time == pytest.approx(plain.iteration_time, rel=1e-2)
