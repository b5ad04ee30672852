"""The ratio rows of a plan, one line each.

In: a plan of one stage. Out: a table with lines such as "features.0 .. features.36  computing  24.5 % x4 : 0.5 % x4". Nothing where the whole
model has one compute row and stores nothing in shards of other sizes: the table of devices shows that row.
"""

from __future__ import annotations

from itertools import groupby

from hapx.ir import Graph
from hapx.plan import Plan
from hapx.report.render import new_table, render
from hapx.report.words import share_text
from hapx.states import Row

WHAT = {"compute": "computing", "storage": "keeping parameters"}


def rows_table(plan: Plan) -> str:
    """A table of segments and shares, or nothing."""
    stage, graph = plan.stages[0], plan.graphs[plan.first]
    used = {cut.row for cut in stage.lengths[plan.first]}
    shown = [row for row in stage.shares if row in used]
    if len(shown) < 2:
        return ""
    table = new_table("segment", "ratios for", "shares, device by device")
    for row in sorted(shown, key=lambda r: (r.segment, r.kind)):
        table.add_row(segment_text(graph, row), WHAT[row.kind], _shares(stage.shares[row]))
    return render(table)


def segment_text(graph: Graph, row: Row) -> str:
    """For which modules a row is: the first and the last of them."""
    if graph.segments == 1:
        return "all"
    modules = list(dict.fromkeys(n.module for n, s in zip(graph.nodes, graph.segment_of, strict=True) if s == row.segment and n.module))
    if not modules:
        return "(model)"
    return modules[0] if len(modules) == 1 else f"{modules[0]} .. {modules[-1]}"


def _shares(shares: tuple[float, ...]) -> str:
    runs = [(text, len(list(run))) for text, run in groupby(map(share_text, shares))]
    return " : ".join(f"{text} x{count}" if count > 1 else text for text, count in runs)
