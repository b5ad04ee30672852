"""The catalogue of device types as a table.

In: nothing. Out: text. Peak numbers of datasheets; the planner multiplies them by each type's efficiency.
"""

from __future__ import annotations

from hapx.cluster.catalogue import CATALOGUE
from hapx.cluster.units import show
from hapx.report.render import new_table, render

DTYPES = ("fp32", "tf32", "bf16", "fp16")


def catalogue_table() -> str:
    """One row per device type: TFLOP/s per dtype, memory, memory bandwidth, source."""
    table = new_table("device", *DTYPES, "memory", "bandwidth", "source", right=(*DTYPES, "memory", "bandwidth"))
    for t in CATALOGUE.values():
        rates = [f"{t.flops[d] / 1e12:g}" if d in t.flops else "-" for d in DTYPES]
        table.add_row(t.name, *rates, show(t.memory, "size"), show(t.memory_bandwidth, "bandwidth"), t.source)
    return f"{render(table)}\n\npeak TFLOP/s, dense; a cluster file may override any number"
