"""How long planning takes: by model, depth and devices, with what it is spent on.

    python -m benchmarks.planner            every row, with the growth ratios
    python -m benchmarks.planner --profile "BERT 12 8 flat"      one row under cProfile

Times are CPU seconds of one core, the best of a few rounds, each from scratch; every row has a process of its own, so that what others leave in
memory does not slow it down ("capture" contains what torch loads late, about 1.3 s). Rows whose ratio is asked for are measured in turns, as machines
do not keep their speed for minutes. "plan" is everything between capture and plan but the theory:
coding the problem, A*, linear programs and rounding, all alternations, simulation of the best candidates, and the rest: ratios per segment, the peak
of memory. Devices have memory enough, so that deep models can be compared with shallow ones; "tight" rows have what the devices really have.

At the end what a user waits for: GPT-2 small on the paper's cluster, seconds on the clock with Python's start and all imports.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.workloads import paper_cluster, workload
from hapx.cluster.spec import ClusterSpec
from hapx.ir import Graph
from hapx.planner import Counters, Setting, key_of, plan_spmd, views
from hapx.restriction import AUTO

GOALS = {
    "VGG19 12 4 flat": 0.051, "VGG19 12 8 flat": 0.045, "VGG19 12 16 flat": 0.057, "VGG19 12 64 flat": 0.262,
    "BERT 12 8 flat": 0.27, "BERT 12 64 flat": 0.30, "BERT 48 8 flat": 0.40, "BERT 48 64 flat": 0.40,
    "BERT-MoE 12 8 flat": 0.5, "BERT-MoE 12 64 flat": 0.5, "BERT 12 64 8x8": 2.0, "BERT 48 64 8x8": 2.0,
}  # fmt: skip
# times of HAP's own implementation (Rust, one core, capture not counted) on a machine of the same class
PUBLISHED = {
    "VGG19 12 4 flat": 0.051, "VGG19 12 8 flat": 0.045, "VGG19 12 16 flat": 0.057, "VGG19 12 64 flat": 0.262,
    "BERT 12 4 flat": 1.44, "BERT 12 8 flat": 1.34, "BERT 12 16 flat": 1.45, "BERT 12 64 flat": 2.30, "BERT 24 8 flat": 9.2, "BERT 48 8 flat": 25.5,
    "BERT-MoE 12 4 flat": 2.78, "BERT-MoE 12 8 flat": 2.88, "BERT-MoE 12 16 flat": 3.03, "BERT-MoE 12 64 flat": 5.06,
}  # fmt: skip
GROWTH = (("BERT 12 8 flat", "BERT 96 8 flat", 1.5), ("BERT 12 8 flat", "BERT 12 1024 flat", 3.0))  # from, to, at most so many times as much
MODEL, CLUSTER = "examples/models/gpt2_small.py:build", "cluster_specs/v100x2_p100x6.yaml"
ONE_PROGRAM = """
import sys; sys.path.insert(0, "examples/models")
import hapx, gpt2_small
model, inputs = gpt2_small.build()
hapx.plan(model, sys.argv[1], inputs, micro_batches=1)
"""
COMMANDS = {
    "one program, all views: hapx.plan(..., micro_batches=1)": ("-c", ONE_PROGRAM, CLUSTER),
    f"and pipelines: hapx plan {MODEL} --cluster {CLUSTER}": ("-m", "hapx", "plan", MODEL, "--cluster", CLUSTER),
}
COMMAND_GOAL = 10.0
ROWS = (
    *(f"VGG19 12 {n} flat" for n in (4, 8, 16, 64)),
    *(f"BERT 12 {n} flat" for n in (4, 8, 16, 64, 256, 1024)),
    *(f"BERT {layers} 8 flat" for layers in (24, 48, 96)), "BERT 48 64 flat",
    *(f"BERT-MoE 12 {n} flat" for n in (4, 8, 16, 64)),
    "VGG19 12 64 8x8", "BERT 12 64 8x8", "BERT 48 64 8x8", "BERT-MoE 12 64 8x8", "BERT 12 8 flat tight", "BERT 24 64 flat tight",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Seconds of one row."""

    name: str
    nodes: int
    capture: float
    theory: float
    problem: float
    search: float
    balance: float
    simulation: float
    rest: float
    generated: int
    gap: float

    @property
    def plan(self) -> float:
        return self.problem + self.search + self.balance + self.simulation + self.rest


def roomy(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with memory that never binds."""
    data = cluster.to_dict()
    for kind in data["device_types"].values():
        kind["memory"] = "1024 GiB"
    return ClusterSpec.load(data)


@cache
def case(name: str) -> tuple[Graph, ClusterSpec, str, float]:
    """Graph, cluster and view of a row, and CPU seconds of its capture."""
    began = time.process_time()
    model, layers, devices, view, *tight = name.split()
    cluster = paper_cluster(int(devices))
    graph = workload(model, int(devices), int(layers))
    return graph, cluster if tight else roomy(cluster), view, time.process_time() - began


def planned(graph: Graph, cluster: ClusterSpec, view: str) -> Counters:
    """Plans once, on one view."""
    counters = Counters()
    meshes = [m for m in views(cluster, AUTO) if m.name == view]
    graph = replace(graph)  # without what planning has found out about it before
    plan_spmd(Setting(graph, key_of(graph), cluster, AUTO, "fp32", "adamw"), counters, meshes)
    return counters


def measured(name: str) -> Row:
    """A row by its name: model, layers, devices, view; planned once."""
    graph, cluster, view, capture = case(name)
    began, clock = time.process_time(), time.perf_counter()
    c = planned(graph, cluster, view)
    total, clock = time.process_time() - began, time.perf_counter() - clock
    search = c.search_time - c.problem_time - c.balance_time
    parts = [p * total / clock for p in (c.theory_time, c.problem_time, search, c.balance_time, c.simulation_time)]  # seconds of CPU
    return Row(name, len(graph.nodes), capture, *parts, total - sum(parts), c.search.generated, c.search.gap)


def in_turns(names: Sequence[str], rounds: int) -> dict[str, Row]:
    """The quickest of each row by its name, a round of each after the other."""
    found: dict[str, Row] = {}
    with ExitStack() as stack:
        alone = {name: stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"))) for name in names}
        for _ in range(rounds):
            for name, process in alone.items():
                row = process.submit(measured, name).result()
                found[name] = min(found.get(name, row), row, key=lambda row: row.plan + row.theory)
    return found


def table(rows: Sequence[Row]) -> Table:
    """The rows for people."""
    made = Table(title="planning time, CPU seconds")
    for column in (
        "model, layers, devices, view",
        "nodes",
        "capture",
        "theory",
        "problem",
        "A*",
        "LP",
        "simulate",
        "rest",
        "plan",
        "goal",
        "HAP",
        "generated",
        "gap",
    ):
        made.add_column(column, justify="left" if column.startswith("model") else "right")
    for r in rows:
        goal, known = GOALS.get(r.name), PUBLISHED.get(r.name)
        made.add_row(
            r.name, str(r.nodes), *(f"{t:.3f}" for t in (r.capture, r.theory, r.problem, r.search, r.balance, r.simulation, r.rest, r.plan)),
            f"{goal:.3f}" if goal else "", f"{known:.3f}" if known else "", str(r.generated), f"{r.gap:.1%}" if r.gap > 1e-9 else "0",
        )  # fmt: skip
    return made


def growth(of: Mapping[str, Row]) -> Table | None:
    """How the time grows with depth and devices. of: rows by their names."""
    made = Table(title="growth")
    for column in ("from", "to", "ratio", "goal"):
        made.add_column(column)
    for low, high, goal in GROWTH:
        if low in of and high in of:
            made.add_row(low, high, f"{of[high].plan / of[low].plan:.2f}", f"{goal}")
    return made if made.row_count else None


def waiting() -> Table:
    """How long commands take on the clock."""
    made = Table(title="GPT-2 small on the paper's cluster, seconds on the clock")
    for column in ("", "s", "goal"):
        made.add_column(column, justify="left" if not column else "right")
    for name, arguments in COMMANDS.items():
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL)
        made.add_row(name, f"{time.perf_counter() - began:.1f}", f"{COMMAND_GOAL:g}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=ROWS, help='rows by name, such as "BERT 12 8 flat" (model, layers, devices, view)')
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="the functions that take the time of each row")
    options = parser.parse_args()
    console = Console(width=170)
    if options.profile:
        for name in options.rows:
            graph, cluster, view, _ = case(name)
            profile = cProfile.Profile()
            profile.runcall(planned, graph, cluster, view)
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    compared = [pair for pair in GROWTH if pair[0] in options.rows and pair[1] in options.rows]
    rows = in_turns(list(dict.fromkeys(name for pair in compared for name in pair[:2])), options.rounds + 2)
    for name in options.rows:
        rows |= in_turns([name], options.rounds) if name not in rows else {}
        console.print(f"{name}: {rows[name].plan:.3f} s", style="dim")
    console.print(table([rows[name] for name in options.rows]))
    grown = growth(rows)
    if grown is not None:
        console.print(grown)
    if options.rows is ROWS:
        console.print(waiting())
    console.print("python -m benchmarks.planner")


if __name__ == "__main__":
    main()
