"""Planning where memory binds: how long it takes, and what it costs an iteration.

    python -m benchmarks.tight                       prints the table (ten minutes)
    python -m benchmarks.tight --models GPT --parts 0.7

In: small models of two layers, clusters, parts. Every device gets that part of the memory with which the fullest one would just do if memory were no
matter. Out: CPU seconds of planning, and predicted iterations beside those without a limit.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from benchmarks.small_models import MODELS
from benchmarks.workloads import machines
from hapx.cluster.spec import ClusterSpec
from hapx.cost.memory import RESERVE
from hapx.errors import InsufficientMemoryError
from hapx.ir import Graph
from hapx.plan import Plan
from hapx.planner import plan_graphs

CLUSTERS = {
    "2 A100 + 2 P100": machines((1, "A100-SXM4-40GB", 2), (1, "P100-SXM2-16GB", 2)),
    "4 A100": machines((1, "A100-SXM4-40GB", 4)),
    "2 A100 + V100 + P100": machines((1, "A100-SXM4-40GB", 2), (1, "V100-SXM2-16GB", 1), (1, "P100-SXM2-16GB", 1)),
}
PARTS = (0.5, 0.7, 0.85)
MODELS_SHOWN = ("GPT", "BERT", "VGG-like", "CNN")
ROOM = 64  # times the memory that there is: as if it were no matter


def planned(graph: Graph, cluster: ClusterSpec, memory: int | None = None) -> tuple[Plan | None, float]:
    """The plan with so many bytes per device (None: as if memory were no matter), None where none fits; and CPU seconds."""
    types = {n: replace(kind, memory=kind.memory * ROOM if memory is None else memory) for n, kind in cluster.device_types.items()}
    began = time.process_time()
    try:
        plan: Plan | None = plan_graphs([graph], replace(cluster, device_types=types))
    except InsufficientMemoryError:
        plan = None
    return plan, time.process_time() - began


def main() -> None:
    """Plans everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS_SHOWN)
    parser.add_argument("--parts", nargs="+", type=float, default=PARTS)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table("model", "cluster", "part", "iteration", "times", "mesh", "CPU s")
    for model in asked.models:
        for name, cluster in CLUSTERS.items():
            free, seconds = planned(MODELS[model](), cluster)
            assert free is not None, "with room for everything"
            table.add_row(model, name, "no limit", f"{free.iteration_time * 1e3:.2f} ms", "1.00", free.stages[0].mesh.name, f"{seconds:.1f}")
            for part in asked.parts:
                plan, seconds = planned(MODELS[model](), cluster, int(part * max(free.memory) / (1 - RESERVE)))
                shown = ("does not fit", "", "") if plan is None else (
                    f"{plan.iteration_time * 1e3:.2f} ms", f"{plan.iteration_time / free.iteration_time:.2f}", plan.stages[0].mesh.name
                )  # fmt: skip
                table.add_row(model, name, f"{part:g}", *shown, f"{seconds:.1f}")
    Console(width=110).print(table)
    print("python -m benchmarks.tight")


if __name__ == "__main__":
    main()
