"""What the search did and what it proved, from `plan.statistics`.

In: a plan. Out: text. Plans without statistics (made by hand) have nothing to tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hapx.plan import Plan
from hapx.report.render import new_table, render
from hapx.report.words import time_text

EXACT = 1e-9  # gap up to which a program is the best one: rounding
PROVEN = 1.1e-3  # gap up to which a search is not cut: the distance that it proves on several axes


def proven_lines(plan: Plan) -> list[str]:
    """One line: how far the program may be from the best one at its ratios, or the pipeline from the best one."""
    if plan.schedules:
        apart = plan.statistics.get("inter_op_gap")
        if not isinstance(apart, int | float):
            return []
        return [f"not proven: by the additive cost, a pipeline may exist that takes up to {_percent(apart)} less"]
    gap = plan.statistics.get("gap")
    if not isinstance(gap, int | float):
        return []
    if gap <= EXACT:
        return ["proven: on this mesh, at these ratios, no program costs less"]
    if gap <= PROVEN:
        return [f"proven: on this mesh, at these ratios, no program costs more than {_percent(gap)} less"]
    return [f"CUT: the search ended before its proof; on this mesh, at these ratios, a program may exist that costs up to {_percent(gap)} less"]


def _percent(part: float) -> str:
    return f"{part * 100:.2g} %"


# name in the statistics -> what it says
COUNTS: Mapping[str, str] = {
    "expansions": "partial programs expanded",
    "generated": "partial programs made",
    "kept": "  taken into the frontier",
    "dominated": "  dropped: another one has all it has at no more cost",
    "bounded": "choices dropped: their bound is above the best program known",
    "unfit": "choices dropped: they do not fit into memory",
    "cut": "dropped without proof: by the width of a beam, or with the budget",
    "alternations": "alternations of search and linear program",
    "unproven": "searches that ended with their budget",
    "layers": "layers of pipelines",
    "asks": "runs of layers asked about on kinds of submeshes",
}


def statistics_text(plan: Plan) -> str:
    """Counts of the search, and what came of every mesh view."""
    found = plan.statistics
    table = new_table("search", "number", right=("number",))
    for name, said in COUNTS.items():
        if isinstance(found.get(name), int):
            table.add_row(said, f"{found[name]:,}".replace(",", " "))
    if not table.rows:
        return "search: the plan has no statistics"
    return "\n\n".join([render(table), *_views(plan), *proven_lines(plan)])


def _views(plan: Plan) -> list[str]:
    tried = plan.statistics.get("tried")
    if not isinstance(tried, list | tuple) or not tried:
        return []
    table = new_table("mesh view", "programs", "cost", "simulated", "search", "outcome", right=("programs", "cost", "simulated", "search"))
    for view in tried:
        numbers = [time_text(view[name]) if view.get(name) is not None else "-" for name in ("cost", "time", "search_time")]
        table.add_row(view["view"], str(view.get("programs", 0)), *numbers, _outcome(plan, view))
    return [render(table)]


def _outcome(plan: Plan, view: Mapping[str, Any]) -> str:
    if "error" in view:
        return str(view["error"])
    if view["view"] == plan.stages[0].mesh.name and view.get("time") == plan.iteration_time:
        return "chosen"
    slower = f"{view['time'] / plan.iteration_time:.2f}x the time" if view.get("time") and plan.iteration_time else "slower"
    if view.get("hopeless"):
        if not view.get("programs"):
            return f"dropped: its programs cost {view['hopeless']:.2f}x the best before, at least, so none was looked for"
        return f"dropped: its first program costs {view['hopeless']:.2f}x the best before, so it was not balanced"
    return slower
