"""A stage of a pipeline as a plan of its own, so that what explains plans of one stage explains it.

In: a `Staged` plan and the number of a stage. Out: a Plan of one stage on the stage's devices, whose iteration is one micro-batch (forward,
backward), then the synchronisation of its gradients and the update. Its memory is the stage's, with all micro-batches that it keeps. Only for
explanations: it has no schedule, and inputs that other stages make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hapx.plan import Copy, Plan, Stage
from hapx.predict import Staged
from hapx.report.stages import devices_line, layers_text
from hapx.simulate import simulate


def stage_plan(staged: Staged, number: int) -> Plan:
    """The stage alone."""
    plan, key = staged.plan, staged.plan.first
    stage, graph = plan.stages[number], plan.part(key, number)
    own = [(s, c) for s in plan.storage for c in s.copies if c.stage == number and s.name in graph.refs]
    alone = Stage(stage.devices, {key: (0, len(graph.nodes))}, stage.mesh, stage.shares, {key: stage.lengths[key]}, {key: stage.programs[key]})
    held = staged.stage_memory(number)
    found = replace(
        plan, graphs={key: graph}, storage=tuple(replace(s, copies=(Copy(0, c.placement),)) for s, c in own), stages=(alone,), schedules={},
        memory=tuple(held.get(d, 0) for d in range(plan.cluster.num_devices)), statistics={},
    )  # fmt: skip
    return replace(found, iteration_time=simulate(found).total)


def with_stage(plan: Plan, number: int, alone: Plan) -> Plan:
    """The plan with another program for a stage, planned as `stage_plan` gives it; not simulated yet."""
    key, (own,) = plan.first, alone.stages
    stage = replace(plan.stages[number], mesh=own.mesh, shares=own.shares, lengths={key: own.lengths[key]}, programs={key: own.programs[key]})
    placed = {s.name: c.placement for s in alone.storage for c in s.copies}
    storage = tuple(
        replace(s, copies=tuple(replace(c, placement=placed[s.name]) if c.stage == number and s.name in placed else c for c in s.copies))
        for s in plan.storage
    )  # fmt: skip
    stages = (*plan.stages[:number], stage, *plan.stages[number + 1 :])
    return replace(plan, stages=stages, storage=storage)


def heading(plan: Plan, number: int) -> str:
    """ "stage 1, devices 2-3: 2 V100, layers blocks.2-3, head"."""
    devices = plan.stages[number].devices
    return f"stage {number}, device{'s' if len(devices) > 1 else ''} {devices_line(plan, devices)}, layers {layers_text(plan, number)}"


def by_stage(plan: Plan, explain: Callable[[Plan], str], said: str = "one micro-batch") -> str:
    """An explanation of a plan; of several stages, of each in turn. said: what it is about there."""
    if not plan.schedules:
        return explain(plan)
    staged = Staged(plan)
    return "\n\n".join(f"{heading(plan, i)}: {said}\n\n{explain(stage_plan(staged, i))}" for i in range(len(plan.stages)))
