"""How near the alternation of programs and ratios comes to the best pair: 200 random small cases against a global reference.

    python -m benchmarks.joint                          the tables
    python -m benchmarks.joint --out docs/joint.md      also as a page
    python -m benchmarks.joint --cases 20               only the first cases

The reference of a case is the best pair met from a grid over all shares of device kinds (both rows alike) and from random shares (each row its own),
with A* at every point and the linear program and further alternation after it, and, where memory limits ratios, those at which the peaks of the best
programs just fit; and from what the planner finds for clusters that differ a little (faster devices or links, less memory), whose programs and
lengths are brought to the case. Gaps are of the planner's additive cost at integer lengths, on one mesh view.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.markdown import markdown
from benchmarks.planning_cases import Case, case
from hapx.alternation import Alternation
from hapx.carried import goal_of
from hapx.cluster.spec import ClusterSpec, Link
from hapx.cost.terms import Vector
from hapx.errors import InsufficientMemoryError
from hapx.planner import plan_spmd
from hapx.progress import Teller
from hapx.setting import Counters
from hapx.states import Row
from hapx.synth.search import HOPELESS
from hapx.theory.derive import derive

CASES = 200
GRID = {2: 8, 3: 3, 4: 2}  # parts of a share, by number of kinds; more kinds as 4
RANDOM = 10
LEVELS = (0.001, 0.01, 0.05)
FASTER, LESS = 1.3, 0.9  # in clusters that differ


@dataclass(frozen=True)
class Result:
    """One case. gap: of the planner's best pair to the reference's, relative. seconds: CPU time of the planner, of the reference."""

    seed: int
    mesh: str
    kinds: int
    binds: bool
    gap: float
    searches: int
    ended: tuple[tuple[str, int], ...]
    seconds: tuple[float, float]


def measure(seed: int) -> Result:
    """The planner's pair and the reference's."""
    problem, counters, infinite = case(seed), Counters(), float("inf")
    theory = derive(problem.graph, problem.mesh)
    began = time.process_time()
    planned = plan_spmd(problem.setting, counters, [problem.mesh])
    own = min(c.cost for c in planned if c.fits)
    between = time.process_time()
    searches = Counters()
    reference = Alternation(problem.setting, theory, searches, Teller(None, searches.search, problem.mesh.name, 1, 1, infinite))
    for ratios in restarts(reference, seed):
        with suppress(InsufficientMemoryError):
            reference.alternate(ratios, infinite)
    if reference.found:
        reference.descend(infinite)
    best = min([own, *(c.cost for c in reference.found.values() if c.fits), *_from_others(problem, reference)])
    seconds = (between - began, time.process_time() - between)
    ended = tuple(sorted(counters.ended.items()))
    return Result(seed, problem.mesh.name, len(reference.kinds), problem.binds, own / best - 1, counters.alternations, ended, seconds)


def _from_others(problem: Case, here: Alternation) -> Iterator[float]:
    """Costs of what is found for clusters that differ, where it fits here."""
    for cluster in others(problem.setting.cluster):
        with suppress(InsufficientMemoryError):
            for found in plan_spmd(replace(problem.setting, cluster=cluster), Counters(), [problem.mesh]):
                moved = replace(found, theory=here.theory, costs=here.costs)
                if moved.fits:
                    yield goal_of(moved).time(here.costs.lengths_to_shares(moved.lengths))


def others(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """The cluster with one type of devices faster, with faster links, and with less memory."""
    for name, kind in (*cluster.device_types.items(),)[:: len(cluster.device_types) - 1]:  # the first and the last one
        quick = replace(kind, flops={p: FASTER * f for p, f in kind.flops.items()}, memory_bandwidth=FASTER * kind.memory_bandwidth)
        yield replace(cluster, device_types={**cluster.device_types, name: quick})
    yield replace(cluster, inter=Link(FASTER * cluster.inter.bandwidth, cluster.inter.latency / FASTER))
    yield replace(cluster, device_types={n: replace(kind, memory=int(LESS * kind.memory)) for n, kind in cluster.device_types.items()})


def restarts(alternation: Alternation, seed: int) -> Iterator[dict[Row, Vector]]:
    """The grid, then random shares."""
    rng, sizes, rows = np.random.default_rng(seed), np.array(alternation.sizes), alternation.starts.rows
    kinds = len(sizes)
    steps = GRID.get(kinds, GRID[4])
    for parts in product(range(steps + 1), repeat=kinds - 1):
        if sum(parts) <= steps:
            yield dict.fromkeys(rows, np.array([*parts, steps - sum(parts)]) / steps / sizes)
    for _ in range(RANDOM):
        yield {row: rng.dirichlet(np.full(kinds, rng.choice([0.3, 1, 3]))) / sizes for row in rows}


def tables(results: Sequence[Result]) -> list[Table]:
    """How large the gaps are, and how alternations went."""
    gaps = Table(title="Gap of the alternation to the best pair found by global search")
    for name in ("cases", "number", *(f"under {level:.1%}".replace(".0%", "%") for level in LEVELS), "largest", "searches", "planner", "reference"):
        gaps.add_column(name, justify="left" if name == "cases" else "right")
    groups = {
        "all": results,
        "flat": [r for r in results if r.mesh == "flat" and not r.binds],
        "two axes": [r for r in results if r.mesh != "flat"],
        "memory binds": [r for r in results if r.binds],
        **{f"{k} kinds": [r for r in results if r.kinds == k] for k in sorted({r.kinds for r in results})},
    }
    for name, group in groups.items():
        if group:
            gaps.add_row(name, *_row(group))
    ends = Table(title="How alternations ended")
    ends.add_column("end")
    ends.add_column("alternations", justify="right")
    ends.add_column("meaning")
    counts = Counter(dict.fromkeys(MEANINGS, 0))
    for result in results:
        counts.update(dict(result.ended))
    for why, number in counts.most_common():
        ends.add_row(why, str(number), MEANINGS[why])
    return [gaps, ends]


MEANINGS = {
    "stalled": "the linear program found nothing better than what was known",
    "repeated": "lengths that were searched before",
    "hopeless": f"its program was more than {HOPELESS - 1:.0%} above the best, or the bound says that it would be",
    "limit": "after 8 rounds",
    "too small": "nothing fitted into memory at its ratios",
    "once": "searched once, with a part of the sums of gradients",
}


def _row(group: Sequence[Result]) -> list[str]:
    gaps = np.array([r.gap for r in group])
    shares = [f"{(gaps < level).mean():.1%}" for level in LEVELS]
    seconds = np.array([r.seconds for r in group]).mean(axis=0)
    searches = np.mean([r.searches for r in group])
    return [str(len(group)), *shares, f"{gaps.max():.2%}", f"{searches:.1f}", f"{seconds[0]:.2f} s", f"{seconds[1]:.2f} s"]


def page(results: Sequence[Result], command: str) -> str:
    """The tables as Markdown."""
    parts = [
        "# Joint quality: programs and ratios",
        (__doc__ or "").split("\n\n")[-1].strip(),
        f"Made by `{command}`; times are CPU seconds per case.",
    ]
    return "\n\n".join([*parts, *map(markdown, tables(results))]) + "\n"


def measured(cases: int, processes: int) -> Iterator[Result]:
    """The results of the first so many cases."""
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(measure, range(cases))


def joint_table(cases: int, processes: int = 2) -> tuple[Table, bool]:
    """The table of gaps, and whether 95 % of the cases are within 1 %."""
    results = list(measured(cases, processes))
    return tables(results)[0], sum(r.gap < LEVELS[1] for r in results) >= 0.95 * len(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="also write the tables as Markdown")
    given = parser.parse_args()
    console, results = Console(width=130), []
    for result in measured(given.cases, given.processes):
        results.append(result)
        if result.gap >= LEVELS[1]:
            console.print(f"case {result.seed} on {result.mesh}: {result.gap:.2%}")
        if len(results) % 20 == 0:
            console.print(f"{len(results)} of {given.cases} cases")
    for table in tables(results):
        console.print(table)
    command = "python -m benchmarks.joint" + (f" --cases {given.cases}" if given.cases != CASES else "")
    console.print(command)
    if given.out is not None:
        given.out.write_text(page(results, command), encoding="utf-8")


if __name__ == "__main__":
    main()
