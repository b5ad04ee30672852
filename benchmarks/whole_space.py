"""The search against the whole space: A* and exhaustive enumeration on random small graphs, with memory left out and where it binds.

In: how many graphs. Out: a row per mesh. A difference is a bug: the benchmark ends with an error.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from benchmarks.random_cases import FLAT, PADDED, SQUARE, Case, random_cases
from hapx.plan import Mesh
from hapx.restriction import Restriction
from hapx.synth.search import synthesize
from hapx.synth.writer import Solution
from hapx.theory.replay import replay

TOLERANCE = 1e-9  # relative; sums are taken in another order
RULE = Restriction(forms=PADDED)


@dataclass(frozen=True)
class Compared:
    """programs: legal ones that fit; difference: of the two costs, relative; proven: whether the search ended with a proof."""

    operators: int
    programs: int
    difference: float
    proven: bool

    @property
    def equal(self) -> bool:
        return self.difference <= TOLERANCE and self.proven


def compare(case: Case, limits: tuple[float, ...] | None = None) -> Compared:
    """The search on a case. Its program is replayed, and must fit."""
    found: Solution = synthesize(case.theory, case.costs, case.shares, limits, restriction=RULE)
    replay(found.program, case.theory, found.storage_of)
    assert limits is None or all(m <= limit for m, limit in zip(found.memory, limits, strict=True))
    least = case.found.within(limits)
    return Compared(len(case.theory.graph.nodes), least.fitting, abs(found.cost / least.cost - 1), found.statistics.unproven == 0)


def binding_limits(case: Case, seed: int) -> tuple[float, ...] | None:
    """Memory limits that the cheapest program exceeds and another one, drawn at random, keeps; None where the cheapest needs least on every kind."""
    programs = case.found.found
    cheapest = min(programs)[1]
    fitting = [m for _, m in programs if any(own < 0.999 * most for own, most in zip(m, cheapest, strict=True))]
    return tuple(m * (1 + 1e-9) for m in random.Random(seed).choice(fitting)) if fitting else None


def comparisons(mesh: Mesh, graphs: int) -> tuple[list[Compared], list[Compared]]:
    """Without limits and with them."""
    free, limited = [], []
    for seed, case in random_cases(mesh, graphs):
        free.append(compare(case))
        if (limits := binding_limits(case, seed)) is not None:
            limited.append(compare(case, limits))
    return free, limited


def whole_space(graphs: int, meshes: Sequence[Mesh] = (FLAT, SQUARE)) -> tuple[Table, bool]:
    """The table, and whether every search found the optimum."""
    table = Table("mesh", "memory", "graphs", "operators min/median", "programs min/median/max", "equal", "worst difference", "time",
                  title="1. The whole space: A* and exhaustive enumeration")  # fmt: skip
    good = True
    for mesh in meshes:
        began = time.perf_counter()
        free, limited = comparisons(mesh, graphs)
        spent = f"{time.perf_counter() - began:.0f} s"
        for name, compared in (("unlimited", free), ("binds", limited)):
            operators, programs = ([getattr(c, field) for c in compared] for field in ("operators", "programs"))
            equal = sum(c.equal for c in compared)
            good &= equal == len(compared)
            table.add_row(mesh.name, name, str(len(compared)), f"{min(operators)} / {median(operators):.0f}",
                          f"{min(programs)} / {median(programs):.0f} / {max(programs)}", f"{equal} of {len(compared)}",
                          f"{max(c.difference for c in compared):.0e}", spent)  # fmt: skip
            spent = ""
    return table, good
