"""Why a pipeline is as it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from hapx.cost.memory import usable
from hapx.pipelines import drafted, predicted
from hapx.plan import Plan
from hapx.predict import Staged
from hapx.report.alternatives import Part, alternatives
from hapx.report.one_stage import stage_plan, with_stage
from hapx.report.pipelined import pipeline_choices, pipeline_text
from hapx.report.words import time_text
from hapx.seen import Seen, remembered
from support.small_stages import accumulating, deep_gpt, gpt, idle, interleaved, mlp


def telling() -> Plan:
    """A plan that knows other pipelines."""
    plan = deep_gpt()
    own = Seen.of(plan)
    (start, middle), (_, stop) = own.nodes
    others = [
        replace(own, nodes=((start, middle - 14), (middle - 14, stop)), seconds=2 * own.seconds),
        replace(own, devices=((0,), (1, 2, 3)), seconds=3 * own.seconds, estimated=True),
        replace(own, micro_batches=8, seconds=1.5 * own.seconds),
    ]
    return replace(plan, statistics={"one_stage": 4 * own.seconds, **remembered(own, others)})


def test_rows_are_the_fastest_without_each_choice() -> None:
    plan = telling()
    rows = list(pipeline_choices(Staged(plan)))
    times = [row.seconds / plan.iteration_time for row in rows]
    assert [row.choice for row in rows] == ["2 stages", "cut of the layers", "devices 0-1 | 2-3", "4 micro-batches", "schedule 1f1b"]
    assert times[:4] == pytest.approx([4, 2, 3, 1.5])
    assert [row.how for row in rows] == ["", "", "about ", "", ""]
    assert rows[1].instead.startswith("stage 0: tok, pos, ") and "; stage 1: " in rows[1].instead
    assert rows[2].instead.startswith("0: tok, pos, blocks.0-1; 1-3: blocks.2-3, norm, head")
    assert rows[3].instead == "8, devices 0-1 | 2-3"
    assert rows[4].instead == "gpipe"


def test_other_schedules_are_simulated() -> None:
    plan = deep_gpt()
    (row,) = pipeline_choices(Staged(replace(plan, statistics={})))
    gpipe = Staged(replace(plan, schedules={plan.first: drafted(plan, plan.first, "gpipe")}))
    assert (row.choice, row.instead) == ("schedule 1f1b", "gpipe")
    assert row.seconds == gpipe.timetable.total
    assert row.unfit == any(held > usable(plan.cluster.type_of(d)) for d, held in enumerate(gpipe.memory))


def test_the_table() -> None:
    plan = telling()
    text = pipeline_text(Staged(plan))
    assert text.startswith("why this pipeline: ") and text.isascii()
    assert max(map(len, text.splitlines())) <= 120
    for row in pipeline_choices(Staged(plan)):
        shown = row.how + time_text(row.seconds), f"{row.seconds / plan.iteration_time - 1:+.1%}"
        assert re.search(re.escape(shown[0]) + " +" + re.escape(shown[1]), text), text
    assert pipeline_text(Staged(replace(interleaved(), statistics={}))) == "why this pipeline: the plan tells of no others"


@pytest.mark.parametrize("make", [gpt, deep_gpt, mlp, idle, interleaved, accumulating])
def test_a_stage_put_back_is_the_plan(make: Callable[[], Plan]) -> None:
    plan = make()
    for number in range(len(plan.stages)):
        same = with_stage(plan, number, stage_plan(Staged(plan), number))
        assert (same.stages, same.storage) == (plan.stages, plan.storage)


@pytest.mark.parametrize(("make", "number"), [(deep_gpt, 1), (mlp, 0), (accumulating, 0)])
def test_a_stage_is_priced_by_the_whole_pipeline(make: Callable[[], Plan], number: int) -> None:
    """Alternatives are legal stages of the pipeline, and none is much better than what was planned for the same micro-batches."""
    plan = make()
    part = Part.stage(Staged(plan), number)
    assert part.repeats == len(plan.schedules[plan.first].micro_batches)
    assert part.seconds(part.alone) == pytest.approx(part.now) == pytest.approx(plan.iteration_time)
    found = [a for a in alternatives(part) if a.plan is not None]
    assert found
    for other in found:
        assert other.plan is not None
        whole = predicted(Staged(with_stage(plan, number, other.plan)))
        whole.verify()
        assert whole.iteration_time == pytest.approx(part.seconds(other.plan))
        assert whole.iteration_time > 0.97 * plan.iteration_time
