"""Pipelines that are put together keep what their stages were planned with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from hapx.cost.remat import chosen_blocks, with_blocks
from hapx.pipelines import assemble, plan_piece
from hapx.planner import key_of
from hapx.predict import Staged
from hapx.put_together import _scheduled, has_room
from hapx.restriction import AUTO
from hapx.setting import Counters, Setting
from support.clusters import TWO_MACHINES
from support.models import GPT
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
