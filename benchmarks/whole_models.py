"""The search against the integer program on whole models of two layers.

In: a time limit per program. Out: a row per model, mesh and memory. Invariant, else the benchmark ends with an error: what the search found is not
below the proven bound, and not above the integer program's solution by more than the gap that the search reports.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import cache

from rich.table import Table

from benchmarks.milp import Found, cheapest
from benchmarks.milp_space import Vector, space
from benchmarks.random_cases import PADDED, RandomShares
from benchmarks.small_models import MODELS
from benchmarks.workloads import machines, paper_cluster
from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.plan import ProgramKey
from hapx.planner import views
from hapx.restriction import AUTO, Restriction
from hapx.synth.exhaustive import ALL_FORMS
from hapx.synth.problem import Problem, build
from hapx.synth.search import least_memory, program_key, solve
from hapx.synth.writer import Solution
from hapx.theory.derive import derive
from hapx.theory.replay import replay
from hapx.theory.triple import Theory

TOLERANCE = 1e-6  # relative: HiGHS keeps rows and integers to 1e-6
CLUSTERS = {"4": paper_cluster(4), "8": paper_cluster(8), "2x2": machines((1, "V100-SXM2-16GB", 2), (1, "P100-SXM2-16GB", 2))}


@dataclass(frozen=True)
class Case:
    """keep: triples per node (None: all of them). tight: memory halfway between what the cheapest program and what the smallest one needs."""

    model: str
    devices: str
    keep: int | None = None
    tight: bool = False

    @property
    def mesh(self) -> str:
        return self.devices if "x" in self.devices else f"flat, {self.devices}"

    @property
    def triples(self) -> str:
        return "all" if self.keep is None else f"{self.keep} per node"


CASES = (
    *(Case(model, devices) for devices in ("4", "8") for model in MODELS),
    *(Case(model, "4", tight=True) for model in ("GPT", "BERT", "VGG-like", "CNN")),
    Case("VGG-like", "2x2"),
    Case("CNN", "2x2"),
    *(Case(model, "2x2", keep=keep) for model, keep in (("GPT", 6), ("BERT", 6), ("BERT-MoE", 4))),
)


@dataclass(frozen=True)
class Compared:
    case: Case
    nodes: int
    solution: Solution
    oracle: Found
    seconds: tuple[float, float]

    @property
    def cost(self) -> float:
        return self.solution.cost

    @property
    def good(self) -> bool:
        """The search lies between the proven bound and the integer program's solution, within the gap that it reports."""
        above = self.cost >= self.oracle.bound * (1 - TOLERANCE)
        return above and self.cost * (1 - self.solution.statistics.gap) <= self.oracle.cost * (1 + TOLERANCE)


@dataclass(frozen=True)
class Prepared:
    """A case as a problem of the search, with what the oracle needs."""

    theory: Theory
    costs: CostModel
    shares: RandomShares
    forms: frozenset[str]
    problem: Problem

    @property
    def key(self) -> ProgramKey:
        return program_key(self.theory)


@cache
def prepared(case: Case) -> Prepared:
    """At shares near to what is proportional to speed."""
    spec: ClusterSpec = CLUSTERS[case.devices]
    mesh = next(m for m in views(spec, AUTO) if m.name == (case.devices if "x" in case.devices else "flat"))
    theory = derive(MODELS[case.model](), mesh)
    if case.keep is not None:
        theory = _thinned(theory, case.keep)
    forms = ALL_FORMS if len(mesh.axes) == 1 else PADDED
    costs = CostModel(theory, spec, "fp32", "adamw", "train")
    return Prepared(theory, costs, RandomShares(mesh, costs, seed=0, spread=0.05), forms, build(theory, costs, Restriction(forms=forms)))


def limits_of(case: Case, p: Prepared) -> Vector | None:
    """Bytes per kind, where memory is to bind."""
    if not case.tight:
        return None
    free = solve(p.problem, p.shares, None, p.key).memory
    least = least_memory(p.problem, p.shares, free, p.key).memory
    return tuple(max(0.5 * a + 0.5 * b, 1.001 * b) for a, b in zip(free, least, strict=True))


@cache
def compare(case: Case, time_limit: float) -> Compared:
    """Both on one case."""
    p = prepared(case)
    limits = limits_of(case, p)
    began = time.perf_counter()
    solution = solve(p.problem, p.shares, limits, p.key)
    searched = time.perf_counter() - began
    replay(solution.program, p.theory, solution.storage_of)
    began = time.perf_counter()
    oracle = cheapest(space(p.theory, p.costs, p.shares, p.forms, memory=case.tight), time_limit, limits)
    return Compared(case, len(p.theory.graph.nodes), solution, oracle, (searched, time.perf_counter() - began))


def _thinned(theory: Theory, keep: int) -> Theory:
    """The whole program and other triples, drawn at random."""
    rng = random.Random(0)
    return theory.with_triples((ts[0], *rng.sample(ts[1:], min(keep - 1, len(ts) - 1))) for ts in theory.triples)


def whole_models(time_limit: float, cases: tuple[Case, ...] = CASES) -> tuple[Table, bool]:
    """The table, and whether all is as it must be."""
    table = Table("model", "mesh", "triples", "memory", "nodes", "variables (binary)", "A* ms", "reported gap", "MILP ms", "MILP bound ms",
                  "A* above bound", "time A*", "time MILP", title="2. Whole models: A* and a mixed integer program")  # fmt: skip
    good = True
    for c in (compare(case, time_limit) for case in cases):
        good &= c.good
        gap, case = c.solution.statistics.gap, c.case
        table.add_row(case.model, case.mesh, case.triples, "binds" if case.tight else "unlimited",
                      str(c.nodes), f"{c.oracle.variables} ({c.oracle.binaries})", f"{1e3 * c.cost:.4f}", f"{gap:.1%}" if gap > 1e-6 else "0",
                      f"{1e3 * c.oracle.cost:.4f}", f"{1e3 * c.oracle.bound:.4f}" + ("" if c.oracle.proven else " (time limit)"),
                      f"{max(c.cost / c.oracle.bound - 1, 0.0):.1e}" + ("" if c.good else " WRONG"),
                      *(f"{s:.1f} s" for s in c.seconds))  # fmt: skip
    return table, good
