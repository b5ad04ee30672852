"""What `hapx show` prints: a plan and why it is as it is, in sections.

In: a plan, and which sections are wanted. Out: text, plain ASCII, at most 120 columns. Every number is the planner's: of its cost model at the plan's
exact lengths, or of its simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hapx.plan import Plan
from hapx.progress import Watcher
from hapx.report.alternatives import why_text
from hapx.report.layers import layers
from hapx.report.memory import memory_table
from hapx.report.messages import traffic, traffic_table
from hapx.report.phases import phases, phases_table
from hapx.report.pricing import Pricing, Step
from hapx.report.render import new_table, render
from hapx.report.search import statistics_text
from hapx.report.split import time_table
from hapx.report.table import devices_table, stages_text, times_text, title
from hapx.report.whatif import slowest_line
from hapx.report.words import time_text
from hapx.simulate import simulate

MOST = 6  # communications that the overview lists


def overview(plan: Plan) -> str:
    """Devices, layers, where time and memory go, and the most expensive communications."""
    if len(plan.stages) != 1:
        return stages_text(plan)
    pricing = Pricing.of(plan)
    rows = traffic(pricing)
    return "\n\n".join(
        [
            title(plan), devices_table(plan), layers_table(pricing), times_text(plan), time_table(plan, simulate(plan)),
            headed(f"communication, the most expensive of {sum(t.times for t in rows)}", traffic_table(rows, pricing.words, MOST)),
            headed("memory", memory_table(pricing)),
        ]
    )  # fmt: skip


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
    """Every communication."""
    pricing = Pricing.of(plan)
    return headed(
        "communication; bytes: of the tensor as it is whole along the axis, per device; time: of one", traffic_table(traffic(pricing), pricing.words)
    )


def phase_section(plan: Plan) -> str:
    """What bounds each phase."""
    pricing = Pricing.of(plan)
    heading = "phases: what runs between two collectives for which all devices wait, on the slowest device"
    return headed(heading, phases_table(pricing, phases(pricing)))


SECTIONS: Mapping[str, Callable[[Plan], str]] = {
    "communication": communication,
    "phases": phase_section,
    "statistics": statistics_text,
}
# what plans again, so it takes seconds to minutes: what the most expensive choices save, and whether the slowest devices help
REASONS: tuple[Callable[[Plan, Watcher | None], str | None], ...] = (why_text, slowest_line)
