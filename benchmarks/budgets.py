"""What the search's limits cost: its budget of partial programs and its tolerance, on cases whose optimum the integer program proves.

In: a time limit for the oracle. Out: a row per case and limit. Invariant, else the benchmark ends with an error: the true gap is at most the
reported one.
"""

from __future__ import annotations

import time

from rich.table import Table

from benchmarks.whole_models import TOLERANCE, Case, compare, prepared
from hapx.synth.astar import Statistics
from hapx.synth.domain import Synthesis
from hapx.synth.search import BUDGET, WIDE, _search, _tolerance, _widened

CASES = (Case("GPT", "8"), Case("BERT-MoE", "4"), Case("BERT-MoE", "8"), Case("GPT", "2x2", keep=6), Case("BERT-MoE", "2x2", keep=4))
BUDGETS = (BUDGET, BUDGET // 10, BUDGET // 100, 0)


def cut_table(time_limit: float, cases: tuple[Case, ...] = CASES) -> tuple[Table, bool]:
    """The table, and whether no search was further from the optimum than it said."""
    table = Table("model", "mesh", "triples", "budget", "expansions", "ended by", "reported gap", "true gap", "after a wider beam", "time",
                  title="4. The search's limits: what they cost where the optimum is known")  # fmt: skip
    good = True
    for case in cases:
        oracle, p = compare(case, time_limit).oracle, prepared(case)
        for budget in BUDGETS:
            began, statistics, domain = time.perf_counter(), Statistics(), Synthesis(p.problem, p.shares, None)
            p.problem.programs.clear()
            first = _search(domain, statistics, budget=budget, wide=False)
            reported = statistics.gap
            best = _widened(domain, statistics, first, WIDE[len(p.problem.theory.mesh.axes) > 1], _tolerance(p.problem))
            assert first is not None and best is not None
            # against the program that the oracle found; where its proof is not complete, this is the gap to a program, not to the optimum
            gaps = [max(x.estimate / oracle.cost - 1, 0.0) for x in (first, best)]
            good &= all(x.estimate * (1 - gap) <= oracle.cost * (1 + TOLERANCE) for x, gap in ((first, reported), (best, statistics.gap)))
            table.add_row(case.model, case.mesh, case.triples, str(budget),
                          str(statistics.expansions), "budget" if statistics.unproven else "proof", f"{reported:.2%}",
                          *(f"{gap:.2%}" for gap in gaps),
                          f"{time.perf_counter() - began:.1f} s")  # fmt: skip
    return table, good
