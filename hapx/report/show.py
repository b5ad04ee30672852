"""What `hapx show` prints: a plan and why it is as it is, in sections.

In: a plan, and which sections are wanted. Out: text, plain ASCII, at most 120 columns. Every number is the planner's: of its cost model at the plan's
exact lengths, or of its simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hapx.plan import Plan
from hapx.predict import Staged
from hapx.progress import Watcher
from hapx.report.alternatives import Part, why_text
from hapx.report.layers import layers
from hapx.report.memory import memory_table
from hapx.report.messages import traffic, traffic_table
from hapx.report.one_stage import by_stage, heading
from hapx.report.phases import phases, phases_table
from hapx.report.pipelined import pipeline_text
from hapx.report.pricing import Pricing, Step
from hapx.report.render import new_table, render
from hapx.report.search import statistics_text
from hapx.report.split import time_table
from hapx.report.stages import crossings_table, slowest_stage
from hapx.report.table import devices_table, stages_text, times_text, title
from hapx.report.whatif import slowest_line
from hapx.report.words import time_text
from hapx.simulate import simulate
from hapx.verify_graphs import where_of

MOST = 6  # communications that the overview lists


def overview(plan: Plan) -> str:
    """Devices, layers, where time and memory go, and the most expensive communications."""
    if plan.schedules:
        return "\n\n".join([stages_text(plan), by_stage(plan, _stage_overview, "one micro-batch; gradients and update once per iteration")])
    pricing = Pricing.of(plan)
    rows = traffic(pricing)
    return "\n\n".join(
        [
            title(plan), devices_table(plan), layers_table(pricing), times_text(plan), time_table(plan, simulate(plan)),
            headed(f"communication, the most expensive of {sum(t.times for t in rows)}", traffic_table(rows, pricing.words, MOST)),
            headed("memory", memory_table(pricing)),
        ]
    )  # fmt: skip


def _stage_overview(stage: Plan) -> str:
    """Layers, time and memory of a stage alone."""
    pricing = Pricing.of(stage)
    memory = headed("memory; at the peak with all micro-batches in flight", memory_table(pricing))
    return "\n\n".join([layers_table(pricing), time_table(stage, simulate(stage)), memory])


def headed(heading: str, text: str) -> str:
    return f"{heading}\n\n{text}"


def layers_table(pricing: Pricing) -> str:
    """One row per layer: placements, and seconds: of compute on the device that takes longest, of communication that the program waits for, of
    gradient synchronisation (hidden or not). Forward and backward together, of all modules of the row."""
    columns = ("compute", "comm.", "sync")
    table = new_table("layer", "weights", "activations", *columns, right=columns, whole=("layer", *columns))
    by_module: dict[str, list[Step]] = {}
    for step in pricing.steps:
        by_module.setdefault(step.module, []).append(step)
    for row in layers(pricing.plan):
        steps = [s for m in row.modules for s in by_module[m]]
        table.add_row(
            row.module or "(model)", "\n".join(row.weights) or "-", "\n".join(row.activations) or "-", *map(_seconds, _times(pricing, steps))
        )
    return render(table)


def _seconds(seconds: float) -> str:
    return time_text(seconds) if seconds else "-"


def _times(pricing: Pricing, steps: list[Step]) -> tuple[float, float, float]:
    compute = np.zeros(len(pricing.kinds))
    for step in steps:
        for term in (step.cost.forward, step.cost.backward):
            compute = compute + (term.at({}) if term is not None else 0.0)
    messages = [m for s in steps for m in s.messages]
    synchronised = sum(m.seconds for m in messages if m.direction == "synchronise")
    return float(compute.max()), sum(m.seconds for m in messages) - synchronised, synchronised


def communication(plan: Plan) -> str:
    """Every communication, inside of stages and between them."""
    said = "communication; bytes: of the tensor as it is whole along the axis, per device; time: of one"
    between = [headed("between stages, for each micro-batch", crossings_table(Staged(plan)))] if len(plan.stages) > 1 else []
    return headed(said, "\n\n".join([*between, by_stage(plan, _communication)]))


def _communication(plan: Plan) -> str:
    pricing = Pricing.of(plan)
    found = traffic(pricing)
    return traffic_table(found, pricing.words) if found else "no communication"


def phase_section(plan: Plan) -> str:
    """What bounds each phase."""
    said = "phases: what runs between two collectives for which all devices wait, on the slowest device"
    return headed(said, by_stage(plan, _phases))


def _phases(plan: Plan) -> str:
    pricing = Pricing.of(plan)
    return phases_table(pricing, phases(pricing))


def why(plan: Plan, progress: Watcher | None = None) -> str:
    """What the most expensive choices save; of several stages, those of the pipeline and of the slowest stage that has any."""
    if not plan.schedules:
        return why_text(Part(plan), progress)
    staged = Staged(plan)
    found = [pipeline_text(staged)]
    if several := [i for i, s in enumerate(plan.stages) if len(s.devices) > 1]:
        slowest = slowest_stage(staged, several)
        said = f"{heading(plan, slowest)}: the slowest stage of several devices, and no other; seconds per iteration, of the whole pipeline"
        found.append(headed(said, why_text(Part.stage(staged, slowest), progress)))
    return "\n\n".join(found)


def without_slowest(plan: Plan, progress: Watcher | None = None) -> str | None:
    """Whether it is faster without the slowest type of device; of several stages this is not asked, their graph is that of a micro-batch."""
    return slowest_line(plan, progress) if not plan.schedules else None


def programs(plan: Plan) -> str:
    """Every program, instruction by instruction."""
    if not plan.schedules:
        return "\n\n".join(str(p) for p in plan.stages[0].programs.values())
    return "\n\n".join(f"{heading(plan, i)}: {where_of(key)}\n\n{p}" for i, s in enumerate(plan.stages) for key, p in s.programs.items())


SECTIONS: Mapping[str, Callable[[Plan], str]] = {
    "communication": communication,
    "phases": phase_section,
    "statistics": statistics_text,
}
# what plans again, so it takes seconds to minutes: what the most expensive choices save, and whether the slowest devices help
REASONS: tuple[Callable[[Plan, Watcher | None], str | None], ...] = (why, without_slowest)
