"""The search against exhaustive enumeration on real theories: random graphs over registered operators, real costs, unequal devices; with memory left
out and where it binds. `python -m benchmarks.optimality` does the same on hundreds of graphs.
"""

from __future__ import annotations

import pytest

from benchmarks.random_cases import FLAT, LEAST, PADDED, SQUARE, random_case
from benchmarks.whole_space import RULE, binding_limits, compare
from hapx.cost.exposed import ALL, BETWEEN, NONE, Exposed
from hapx.plan import Mesh
from hapx.synth import astar, search
from hapx.synth.domain import State, Synthesis
from hapx.synth.exhaustive import Enumeration
from hapx.synth.problem import build
from hapx.synth.search import program_key, solve

SEEDS = (0, 1, 2, 5, 7, 8, 9, 10, 12, 13, 14, 17, 18, 19, 42)  # of those that have a case on both meshes


@pytest.mark.parametrize("mesh", (FLAT, SQUARE), ids=lambda m: m.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_enumeration(mesh: Mesh, seed: int) -> None:
    case = random_case(mesh, seed)
    assert case is not None
    free, limits = compare(case), binding_limits(case, seed)
    assert free.operators >= 6
    assert free.programs >= LEAST
    assert free.equal, free
    if limits is not None:
        limited = compare(case, limits)
        assert 0 < limited.programs < free.programs
        assert limited.equal, limited


@pytest.mark.parametrize("mesh", (FLAT, SQUARE), ids=lambda m: m.name)
@pytest.mark.parametrize("seed", (1, 9, 14, 19, 42))  # the cheapest programs of these sum gradients
def test_equals_enumeration_where_sums_of_gradients_count_in_part(mesh: Mesh, seed: int) -> None:
    case = random_case(mesh, seed)
    assert case is not None
    problem = build(case.theory, case.costs, RULE)
    costs = []
    for exposed in (NONE, Exposed.alike(0.3), ALL, BETWEEN, Exposed(0.3, 0.7)):
        problem.exposed = exposed
        costs.append(solve(problem, case.shares, None, program_key(case.theory)).cost)
        least = Enumeration(case.theory, case.costs, case.shares, forms=PADDED, exposed=exposed).run().cost
        assert costs[-1] == pytest.approx(least, rel=1e-9)
    assert costs[0] < costs[1] < costs[2], "gradients are summed in the cheapest program"


@pytest.fixture
def unaided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search begins with no program: what beams find would hide that it misses one."""
    monkeypatch.setattr(search, "_incumbent", lambda domain, statistics, within, best: best)


@pytest.mark.parametrize("mesh", (FLAT, SQUARE), ids=lambda m: m.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_enumeration_unaided(mesh: Mesh, seed: int, unaided: None) -> None:
    case = random_case(mesh, seed)
    assert case is not None
    assert compare(case).equal


def test_a_wrong_dominance_is_found(monkeypatch: pytest.MonkeyPatch, unaided: None) -> None:
    """Without the pending compute, dominance drops optimal programs, and the comparison says so. (That what dominates has not spent more alone would
    hide it.)"""

    def careless(domain: Synthesis, a: State, b: State) -> bool:
        return a.cost <= b.cost

    monkeypatch.setattr(Synthesis, "dominates", careless)
    monkeypatch.setattr(astar, "ROUNDING", 1.0)
    for seed in (2, 8, 12, 18):
        case = random_case(FLAT, seed)
        assert case is not None
        assert not compare(case).equal
