"""What people see of plans of several stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hapx.plan import Plan
from hapx.predict import Staged
from hapx.report.compare import compare_table
from hapx.report.memory import memory_parts
from hapx.report.one_stage import by_stage, heading, stage_plan
from hapx.report.pricing import Pricing
from hapx.report.show import REASONS, SECTIONS, overview, programs
from hapx.report.split import time_split
from hapx.report.stages import crossings_table, layers_text, schedule_text, stages_table
from hapx.report.words import share_text, size_text, time_text
from support.small_stages import accumulating, deep_gpt, gpt, idle, interleaved, mlp

PLANS = [gpt, deep_gpt, mlp, idle, interleaved, accumulating]


@pytest.mark.parametrize("make", PLANS)
def test_everything_is_ascii_and_not_too_wide(make: Callable[[], Plan]) -> None:
    plan = make()
    for text in (str(plan), overview(plan), programs(plan)[:0], *(section(plan) for section in SECTIONS.values())):
        assert text.isascii()
        assert max(map(len, text.splitlines()), default=0) <= 120


def test_one_stage_that_accumulates() -> None:
    plan = accumulating()
    text = str(plan)
    assert text.startswith("plan for slow-devices: 2 devices in one stage that accumulates, strategy auto, fp32, sgd\n")
    assert "1f1b: 1 group, 1 stage, 4 micro-batches" in text
    assert "crossing" not in text and "between stages" not in SECTIONS["communication"](plan)


def test_a_plan_of_stages() -> None:
    plan, staged = deep_gpt(), Staged(deep_gpt())
    title, table, schedule, *rest = str(plan).split("\n\n")
    assert title == "plan for slow-devices: 4 devices in 2 stages, strategy auto, fp32, sgd"
    rows = table.splitlines()
    assert rows[0].split() == ["stage", "devices", "layers", "mesh", "work", "forward", "backward", "in", "flight", "memory"]
    for number, row in enumerate(rows[2:]):
        times, device = staged.times[number], plan.stages[number].devices[0]
        for text in (share_text(staged.work[number]), time_text(times.forward), time_text(times.backward), size_text(plan.memory[device])):
            assert text in row
    assert "0-1: 2 medium  tok, pos, blocks.0-1 " in rows[2]
    assert "2-3: 2 slow    blocks.2-3, norm, head " in rows[3]
    assert schedule.splitlines()[:2] == [
        "micro-batches: 4 of 2 samples; group 0: devices 0-1; group 1: devices 2-3", "1f1b: 2 groups, 2 stages, 4 micro-batches",
    ]  # fmt: skip
    assert schedule.splitlines()[2].startswith("group 0  F0 F1 ..")
    assert "bubbles by group  0: " in str(plan)
    last = rest[-1].splitlines()
    assert last[0] == f"predicted iteration: {time_split(plan)}"
    assert last[-1] == f"{8 / plan.iteration_time:.1f} samples per second; the slowest stage is 1: {time_text(staged.times[1].micro)} per micro-batch"


def test_what_crosses() -> None:
    rows = crossings_table(Staged(deep_gpt())).splitlines()
    size = size_text(2 * 4 * 8 * 8)  # two samples of four positions, eight features in float64
    assert rows[2].split()[:3] == ["0", ">", "1"]
    assert rows[2].count(size) == 2


def test_several_stages_of_a_device_and_idle_devices() -> None:
    assert [line.split()[0] for line in stages_table(Staged(interleaved())).splitlines()[2:]] == ["0", "1", "2", "3"]
    assert "\ngroup 0  F0@0-" in schedule_text(Staged(interleaved()))
    assert "\nidle: 1: 1 medium\n" in str(idle())


def test_a_layer_of_two_stages_is_said_to_be_part() -> None:
    plan = deep_gpt()
    first, second = (s.nodes[plan.first] for s in plan.stages)
    stages = [replace(s, nodes={plan.first: n}) for s, n in zip(plan.stages, ((0, first[1] - 3), (first[1] - 3, second[1])), strict=True)]
    changed = replace(plan, stages=tuple(stages))
    assert layers_text(changed, 0).endswith("blocks.0, part of blocks.1")
    assert layers_text(changed, 1).startswith("part of blocks.1, blocks.2-3")


@pytest.mark.parametrize("make", PLANS)
def test_stages_alone_add_up(make: Callable[[], Plan]) -> None:
    """Memory of a device is that of its stages; an iteration of a stage alone is a micro-batch, synchronisation and update."""
    plan, staged = make(), Staged(make())
    alone = [stage_plan(staged, i) for i in range(len(plan.stages))]
    assert tuple(map(sum, zip(*(p.memory for p in alone), strict=True))) == plan.memory
    for times, own in zip(staged.times, alone, strict=True):
        assert own.iteration_time == pytest.approx(times.micro + times.iteration)
        pricing = Pricing.of(own)
        parts, _ = memory_parts(pricing)
        assert sum(float(p[0]) for p in parts.values()) == pytest.approx(own.memory[pricing.kinds[0][0]])


def test_explanations_come_stage_by_stage() -> None:
    plan = mlp()
    names = [heading(plan, i) for i in (0, 1)]
    assert names == ["stage 0, devices 0-1: 1 fast + 1 medium, layers layers.0-1", "stage 1, device 2: 1 slow, layers layers.2-3"]
    for text in (overview(plan), SECTIONS["communication"](plan), SECTIONS["phases"](plan), programs(plan)):
        assert all(name in text for name in names)
    assert by_stage(plan, lambda p: str(p.stages[0].devices)) == f"{names[0]}: one micro-batch\n\n(0, 1)\n\n{names[1]}: one micro-batch\n\n(2,)"


def test_why_is_told_of_the_pipeline_and_of_the_slowest_stage_of_several_devices() -> None:
    plan = mlp()
    (several,) = [i for i, s in enumerate(plan.stages) if len(s.devices) > 1]
    why, without = (reason(plan, None) for reason in REASONS)
    assert why is not None and why.startswith("why this pipeline: ")
    assert f"\n\n{heading(plan, several)}: the slowest stage of several devices, and no other; " in why
    assert without is None
    alone = REASONS[0](gpt(), None)
    assert alone is not None and "the slowest stage" not in alone  # one device each


def test_plans_with_other_stages_are_compared() -> None:
    lines = compare_table({"a": gpt(), "b": replace(gpt(), iteration_time=2 * gpt().iteration_time)}).splitlines()
    assert "2 stages, 4x 1f1b" in lines[2]
    assert "2.00x" in lines[2]


@pytest.mark.parametrize("make", PLANS)
def test_plans_of_stages_are_files(make: Callable[[], Plan], tmp_path: Path) -> None:
    plan, path = make(), tmp_path / "plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    assert again.digest == plan.digest
    assert list(again.schedules) == list(plan.schedules)
    assert str(again) == str(plan)
    again.verify()
