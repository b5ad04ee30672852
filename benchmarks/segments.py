"""Ratios per segment against one row of ratios: when they pay.

    python -m benchmarks.segments

In: models and pairs of unlike machines. Out: a table: predicted iterations with one compute row and with segments, the segments with the share of
the first device in each, and the seconds that it took to ask whether they pay.
"""

from __future__ import annotations

import warnings
from itertools import product

from rich.console import Console
from rich.table import Table

from benchmarks.workloads import machines, workload
from hapx.cluster.spec import ClusterSpec
from hapx.ir import Graph
from hapx.plan import Plan
from hapx.planner import plan_graphs
from hapx.report.segments import segment_text
from hapx.restriction import Restriction

UNLIKE = ClusterSpec.load(  # one kind multiplies four times as fast, the other moves bytes four times as fast
    {
        "name": "unlike", "machines": [{"name": "m", "devices": ["counter", "counter", "mover", "mover"]}],
        "device_types": {
            "counter": {"flops": 40e12, "memory": "32 GiB", "memory_bandwidth": "400 GB/s"},
            "mover": {"flops": 10e12, "memory": "32 GiB", "memory_bandwidth": "1.6 TB/s"},
        },
        "network": {"inter": {"bandwidth": "100 Gbit/s", "latency": "5 us"}, "intra": {"bandwidth": "300 GB/s", "latency": "5 us"}},
    }
)  # fmt: skip
CLUSTERS = {
    "4 V100 + 4 P100, fp32, 100 Gbit/s": (machines((1, "V100-SXM2-16GB", 4), (1, "P100-SXM2-16GB", 4), inter="100 Gbit/s", latency="5 us"), "fp32"),
    "4 V100 + 4 P100, fp16, 100 Gbit/s": (machines((1, "V100-SXM2-16GB", 4), (1, "P100-SXM2-16GB", 4), inter="100 Gbit/s", latency="5 us"), "fp16"),
    "2 H100 + 2 A100, bf16, 400 Gbit/s": (machines((1, "H100-SXM5-80GB", 2), (1, "A100-SXM4-80GB", 2), inter="400 Gbit/s", latency="5 us"), "bf16"),
    "2 H100 + 2 RTX 3090, bf16, 400 Gbit/s": (machines((1, "H100-SXM5-80GB", 2), (1, "RTX-3090", 2), inter="400 Gbit/s", latency="5 us"), "bf16"),
    "2 counters + 2 movers": (UNLIKE, "fp32"),
}
MODELS = ("VGG19", "BERT", "ViT")


def main() -> None:
    """Plans every pair twice and prints the table."""
    warnings.simplefilter("ignore")
    table = Table("model", "cluster", "one row", "segments", "faster by", "which", "s to ask")
    for model, name in product(MODELS, CLUSTERS):
        cluster, precision = CLUSTERS[name]
        one, free = (_plan(workload(model, cluster.num_devices), cluster, precision, s) for s in ("none", "auto"))
        gain = one.iteration_time / free.iteration_time - 1
        asked = f"{free.statistics['segments_time']:.3f}"
        table.add_row(model, name, f"{one.iteration_time * 1e3:.2f} ms", f"{free.iteration_time * 1e3:.2f} ms", f"{gain:.2%}", _which(free), asked)
    Console(width=170).print(table)
    print("python -m benchmarks.segments")


def _plan(graph: Graph, cluster: ClusterSpec, precision: str, segments: str) -> Plan:
    rule = Restriction(f"segments {segments}", mesh="flat", segments=segments)  # type: ignore[arg-type]
    return plan_graphs([graph], cluster, strategy=rule, precision=precision)


def _which(plan: Plan) -> str:
    graph, stage = plan.graphs[plan.first], plan.stages[0]
    rows = [row for row in stage.shares if row.kind == "compute"]
    if len(rows) == 1:
        return f"one row, {stage.shares[rows[0]][0]:.3f}"
    return "\n".join(f"{segment_text(graph, row)}: {stage.shares[row][0]:.3f}" for row in rows)


if __name__ == "__main__":
    main()
