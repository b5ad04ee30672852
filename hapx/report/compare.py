"""Several plans side by side.

In: plans by name, usually of one model on one cluster. Out: a table of predicted times, the speedup over the slowest, memory and shares.
"""

from __future__ import annotations

from collections.abc import Mapping

from hapx.ir import Kind
from hapx.plan import Plan
from hapx.report.render import new_table, render
from hapx.report.split import time_split
from hapx.report.words import shares_text, size_text, time_text


def compare_table(plans: Mapping[str, Plan]) -> str:
    """One row per plan. `plans`: by the name that the table shows."""
    slowest = max(p.iteration_time for p in plans.values())
    table = new_table(
        "plan", "strategy", "mesh", "iteration", "compute", "comm.", "sync", "speedup", "memory", "shares",
        right=("iteration", "compute", "comm.", "sync", "speedup", "memory"),
    )  # fmt: skip
    for name, plan in plans.items():
        split = time_split(plan)
        speedup = f"{slowest / plan.iteration_time:.2f}x" if plan.iteration_time else "-"
        table.add_row(
            name, plan.restriction.name, _mesh(plan), time_text(plan.iteration_time), time_text(split.compute),
            time_text(split.communication), time_text(split.synchronisation), speedup, size_text(max(plan.memory)), shares_text(plan.shares),
        )  # fmt: skip
    lines = [render(table)]
    clusters = dict.fromkeys(p.cluster.name for p in plans.values())
    if len(clusters) > 1 or len({_model(p) for p in plans.values()}) > 1:
        lines.append(f"note: these plans are not of one model on one cluster ({', '.join(clusters)})")
    return "\n\n".join(lines)


def _mesh(plan: Plan) -> str:
    """The view, and how many segments have ratios of their own; of several stages, how many, and their schedule."""
    if plan.schedules:
        schedule = plan.schedules[plan.first]
        return f"{len(plan.stages)} stages, {len(schedule.micro_batches)}x {schedule.name}"
    name, segments = plan.stages[0].mesh.name, plan.graphs[plan.first].segments
    return f"{name}, {segments} segments" if segments > 1 else name


def _model(plan: Plan) -> object:
    """What tells models apart, also where a plan has the graph of one micro-batch: parameters and buffers, and the shapes of a whole batch."""
    graph = plan.graphs[plan.first]
    kept = frozenset((r.name, r.shape, r.dtype) for kind in (Kind.PARAMETER, Kind.BUFFER) for r in graph.of_kind(kind))
    return plan.first, kept
