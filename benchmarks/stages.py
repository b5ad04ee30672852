"""Pipelines on slow networks, simulated: hapx against SPMD alone and against pipelines that people and other planners make.

    python -m benchmarks.stages                           every case of the comparison, the ablation, the growth
    python -m benchmarks.stages --quick                   a small GPT on both clusters, and a small ablation
    python -m benchmarks.stages --only "GPT 1.3B"         cases whose name contains this (or, given several times, one of these)
    python -m benchmarks.stages --ablation                equal layers, equal operators (Alpa's ablation, OSDI'22, section 8.3), equal machines
    python -m benchmarks.stages --growth                  CPU seconds of planning over layers and devices
    python -m benchmarks.stages --results FILE.json       keeps what is found, and does not look for it again: large cases take minutes each
    python -m benchmarks.stages --out docs/stages.md      also as a page

Systems: `benchmarks.stage_systems`; models and clusters: `benchmarks.stage_cases`. Everything is timed by the simulator. hapx is the better of SPMD
and its best pipeline; "x hapx" says how many times as long the others take. CPU seconds of a system are those that it adds: what was asked of the
planner for an earlier line of the case is not asked again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.markdown import markdown
from benchmarks.stage_cases import Case, cases, small_gpt, v100, wide_resnet
from benchmarks.stage_systems import ACCUMULATED, DP_PP, EQUAL, ISLANDS, PIPELINE, SPMD, Bench, Costs, Found, cpu
from hapx.plan import Plan
from hapx.predict import Staged
from hapx.schedules import in_flight
from hapx.stages.submeshes import shape_of

TOLERANCE = 1e-3
Write = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What was found of a system, as data. seconds: inf where nothing fits. why: shares, crossings, bubbles in words."""

    case: str
    system: str
    seconds: float
    throughput: str
    stages: str
    micro_batches: int
    schedule: str
    why: str
    costs: Costs

    @staticmethod
    def of(case: Case, found: Found) -> Result:
        plan = found.plan
        if plan is None:
            return Result(case.name, found.system, inf, "", "", 0, "", "", found.costs)
        schedule = plan.schedules.get(plan.first)
        number, name = (len(schedule.micro_batches), schedule.name) if schedule else (1, "SPMD")
        return Result(case.name, found.system, found.time, case.rate(found.time), submeshes(plan), number, name, why(plan), found.costs)


@dataclass
class Book:
    """Results by (case, system), kept in a file if there is one."""

    file: Path | None
    known: dict[tuple[str, str], Result]

    @staticmethod
    def open(file: Path | None) -> Book:
        read = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.exists() else []
        found = [Result(**{**r, "costs": Costs(**r["costs"])}) for r in read]
        return Book(file, {(r.case, r.system): r for r in found})

    def result(self, title: str, case: Case, system: str, find: Callable[[], Found]) -> Result:
        """What is known of a system, or what is found now."""
        if (title, system) not in self.known:
            made = Result.of(case, find())
            self.known[title, system] = Result(**{**vars(made), "case": title})
            if self.file is not None:
                self.file.write_text(json.dumps([asdict(r) for r in self.known.values()], indent=1), encoding="utf-8")
        return self.known[title, system]


# ---- in words ------------------------------------------------------------------------------------------------------------------------------------


def submeshes(plan: Plan) -> str:
    """Devices of the stages from the front, equal neighbours once: "2x(8 V100), 8 P100"."""
    names = [str(shape_of(plan.cluster, s.devices)) for s in plan.stages]
    short = [n.replace("-SXM2-16GB", "").replace("-SXM4-80GB", "").replace("-SXM5-80GB", "") for n in names]
    runs: list[list[str]] = []
    for name in short:
        if runs and runs[-1][0] == name:
            runs[-1].append(name)
        else:
            runs.append([name])
    return " > ".join(f"{len(run)} stages of {run[0]}" if len(run) > 1 else run[0] for run in runs)


def why(plan: Plan) -> str:
    """What a plan does: shares of the work per device type, and of a pipeline what crosses, bubbles, micro-batches in flight."""
    kinds = [d.type.split("-")[0] for d in plan.cluster.devices]
    share: Counter[str] = Counter()
    for kind, s in zip(kinds, plan.shares, strict=True):
        share[kind] += s
    work = ", ".join(f"{kind} {s / sum(share.values()):.0%}" for kind, s in share.items())
    if len(plan.stages) == 1 and not plan.schedules:
        return f"work: {work}"
    staged = Staged(plan)
    most = max(t.micro for t in staged.times)
    balance = "/".join(f"{t.micro / most:.2f}" for t in staged.times)
    crossing = max(staged.crossing.values(), default=0.0)
    bubbles = staged.timetable.bubbles
    kept = in_flight(plan.schedules[plan.first])
    return (
        f"work: {work}; seconds of stages, slowest = 1: {balance}; crossing at most {crossing * 1e3:.3g} ms of {most * 1e3:.3g} ms per micro-batch; "
        f"bubbles {min(bubbles):.0%} to {max(bubbles):.0%}; in flight {'/'.join(map(str, kept))}; "
        f"synchronisation and update {max(t.iteration for t in staged.times) * 1e3:.3g} ms"
    )


def cells(result: Result, hapx: float) -> list[str]:
    spent = f"{result.costs.total:.0f}"
    if result.seconds == inf:
        return [result.system, "does not fit", "", "", "", "", "", spent]
    ratio = f"{result.seconds / hapx:.2f}"
    number = str(result.micro_batches)
    return [result.system, f"{result.seconds:.4g}", result.throughput, ratio, result.stages, number, result.schedule, spent]


def table(title: str, results: Sequence[Result]) -> Table:
    made = Table(title=title)
    for column in ("system", "s", "throughput", "x hapx", "stages", "micro-batches", "schedule", "CPU s"):
        made.add_column(column, justify="right" if column in ("s", "throughput", "x hapx", "micro-batches", "CPU s") else "left")
    own = hapx(results)
    for result in results:
        made.add_row(*cells(result, own))
    return made


def hapx(results: Sequence[Result]) -> float:
    """Seconds of hapx: the better of SPMD and its pipelines."""
    return min((r.seconds for r in results if r.system in (SPMD, PIPELINE)), default=inf)


def faster(results: Sequence[Result]) -> list[str]:
    """What is faster than hapx."""
    own = hapx(results)
    return [
        f"FASTER than hapx: {r.system}, by {own / r.seconds - 1:.1%}"
        for r in results
        if r.system in (ACCUMULATED, ISLANDS, EQUAL, DP_PP) and r.seconds < own * (1 - TOLERANCE)
    ]


def lines(results: Sequence[Result]) -> Iterator[str]:
    """Why each system is as fast as it is, what is faster than hapx, what planning took."""
    yield from (f"{r.system}: {r.why}" for r in results if r.why)
    yield from faster(results)
    for r in results:
        if r.system == PIPELINE:
            c = r.costs
            planning = f"capture {c.capture:.1f} s, {c.asks} asks {c.asking:.1f} s, program {c.program:.1f} s"
            yield f"planning the pipeline: {planning}, putting together and polishing {c.rest:.1f} s"


# ---- growth --------------------------------------------------------------------------------------------------------------------------------------


def growth(quick: bool, watch: Write) -> Table:
    """CPU seconds of hapx's pipelines over layers and machines."""
    made = Table(title="planning a pipeline, CPU seconds")
    for column in ("model", "devices", "capture", "asks", "asking", "program", "rest", "total"):
        made.add_column(column, justify="left" if column in ("model", "devices") else "right")
    layers, machines = ((4, 8), (2,)) if quick else ((4, 8, 16, 32), (2, 4, 8))
    shapes = [(n, 2) for n in layers] + [(8, m) for m in machines if m > 2]
    for depth, number in shapes:
        case = Case(small_gpt(depth), f"{number} x 8 V100", v100(number))
        costs = Bench(case, watch=watch).pipelines(PIPELINE).costs
        seconds = (costs.capture, costs.asking, costs.program, costs.rest, costs.total)
        texts = [f"{s:.1f}" for s in seconds]
        made.add_row(case.model.name, case.cluster_name, texts[0], str(costs.asks), *texts[1:])
    return made


# ---- the command ---------------------------------------------------------------------------------------------------------------------------------


def ablations(quick: bool) -> list[Case]:
    if quick:
        return [Case(wide_resnet("250M", 256), "2 x 8 V100", v100(2))]
    return [Case(wide_resnet(size), f"{n} x 8 V100", v100(n)) for size, n in (("1B", 2), ("2B", 4), ("4B", 8))]


def run(chosen: Sequence[tuple[Case, bool]], book: Book, console: Console, watch: Write) -> list[tuple[str, list[Result]]]:
    """Every case (True: the ablation), printed as soon as it is done."""
    made = []
    for case, is_ablation in chosen:
        title = f"{case.name}, ablation" if is_ablation else case.name
        bench = Bench(case, watch=watch)
        ways = bench.ablations() if is_ablation else bench.systems()
        results = [book.result(title, case, name, find) for name, find in ways.items()]
        made.append((title, results))
        console.print(table(title, results))
        for line in lines(results):
            console.print(f"  {line}", highlight=False, markup=False)
    return made


def page(command: str, made: Sequence[tuple[str, list[Result]]], grown: Table | None) -> str:
    text = [
        "# Pipelines, simulated", "",
        f"Made by `{command}`. Systems: `benchmarks/stage_systems.py`; models and clusters: `benchmarks/stage_cases.py`.",
        "Every number is of the event-driven simulator; none was measured on GPUs. `x hapx`: how many times as long as hapx, which is the better of",
        "SPMD and pipeline.",
        "",
    ]  # fmt: skip
    for title, results in made:
        text += [markdown(table(title, results)), "", *(f"- {line}" for line in lines(results)), ""]
    text += [markdown(grown), ""] if grown is not None else []
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--only", action="append", default=[], help="cases whose name contains this; may be given several times")
    parser.add_argument("--ablation", action="store_true", help="only the ablation")
    parser.add_argument("--growth", action="store_true", help="only the growth of planning time")
    parser.add_argument("--results", type=Path, help="a JSON file that keeps results")
    parser.add_argument("--out", type=Path, help="a markdown page to write")
    parser.add_argument("--verbose", action="store_true", help="say what is being planned")
    options = parser.parse_args(arguments)
    console, began = Console(width=250 if not sys.stdout.isatty() else None), cpu()

    def watch(message: str) -> None:
        if options.verbose:
            console.print(f"[dim]{cpu() - began:7.1f} s  {message}[/dim]", highlight=False)

    every = not options.ablation and not options.growth
    chosen = [(c, False) for c in cases(options.quick)] if every else []
    chosen += [(c, True) for c in ablations(options.quick)] if every or options.ablation else []
    wanted = [word.lower() for word in options.only or [""]]
    made = run([(c, a) for c, a in chosen if any(word in c.name.lower() for word in wanted)], Book.open(options.results), console, watch)
    grown = growth(options.quick, watch) if options.growth or (every and not options.quick and not options.only) else None
    if grown is not None:
        console.print(grown)
    command = f"python -m benchmarks.stages {shlex.join(sys.argv[1:] if arguments is None else arguments)}".strip()
    console.print(f"{cpu() - began:.0f} CPU s: {command}", highlight=False, markup=False)
    if options.out is not None:
        options.out.write_text(page(command, made, grown), encoding="utf-8")
    return 1 if any(faster(results) for _, results in made) else 0


if __name__ == "__main__":
    sys.exit(main())
