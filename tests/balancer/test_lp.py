"""The linear program against grid search, and the objective against the search's cost."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hapx.balancer.lp import balance, objective
from hapx.synth.search import synthesize
from support import toy

KINDS = {2: ((0, 1), (2, 3)), 3: ((0,), (1,), (2, 3))}


def solved(seed: int, kinds):
    theory = toy.random_theory(seed, toy.FLAT, nodes=8, triples=4, states=3)
    costs = toy.ToyCosts(toy.FLAT, seed, kinds)
    shares = toy.shares(theory, len(kinds), seed)
    return theory, costs, shares, synthesize(theory, costs, shares)


@pytest.mark.parametrize("seed", range(8))
def test_objective_is_the_search_cost(seed):
    _, costs, shares, solution = solved(seed, KINDS[2 + seed % 2])
    goal = objective(solution.steps, solution.storage, len(costs.kinds))
    assert goal.time(shares) == pytest.approx(solution.cost, rel=1e-12)
    assert goal.memory(shares) == pytest.approx(np.array(solution.memory), rel=1e-12)


def grid(goal, sizes, rows, steps):
    """Least time over a grid of ratios (all rows vary apart)."""
    points = [p for p in product(range(steps + 1), repeat=len(sizes) - 1) if sum(p) <= steps]
    vectors = [np.array([*p, steps - sum(p)]) / steps / np.array(sizes) for p in points]
    best = (float("inf"), None)
    for chosen in product(vectors, repeat=len(rows)):
        ratios = dict(zip(rows, chosen, strict=True))
        best = min(best, (goal.time({c: ratios[c.row] for c in goal.cuts}), tuple(map(tuple, chosen))))
    return best[0]


@pytest.mark.parametrize("seed", range(8))
def test_equals_grid_search(seed):
    theory, costs, _, solution = solved(seed, KINDS[2 + seed % 2])
    goal = objective(solution.steps, solution.storage, len(costs.kinds))
    rows = tuple(dict.fromkeys(c.row for c in goal.cuts))
    assert rows, "a program that splits nothing tests nothing"
    even = {theory.mesh.row(0, k): np.full(len(costs.sizes), 1 / sum(costs.sizes)) for k in ("compute", "storage")}
    found = balance(goal, costs.sizes, None, even)
    assert found is not None
    time = goal.time({c: found[c.row] for c in goal.cuts})
    steps = {(2, 1): 2000, (2, 2): 60, (3, 1): 60, (3, 2): 10}[len(costs.sizes), len(rows)]
    coarse = grid(goal, costs.sizes, rows, steps)
    assert time <= coarse * (1 + 1e-9)
    if len(rows) == 1 and len(costs.sizes) == 2:
        assert coarse == pytest.approx(time, rel=2e-3)
    for row in rows:
        assert (found[row] * costs.sizes).sum() == pytest.approx(1) and (found[row] >= 0).all()


def test_memory_binds():
    theory, costs, _, solution = solved(1, KINDS[2])
    goal = objective(solution.steps, solution.storage, 2)
    even = {theory.mesh.row(0, k): np.full(2, 0.25) for k in ("compute", "storage")}
    free = balance(goal, costs.sizes, None, even)
    use = goal.memory({c: free[c.row] for c in goal.cuts})
    least = goal.memory({c: np.array([0.0, 0.5]) for c in goal.cuts})[0]
    limit = np.array([(use[0] + least) / 2, 1e9])
    assert use[0] > limit[0], "the limit must bind"
    found = balance(goal, costs.sizes, limit, even)
    shares = {c: found[c.row] for c in goal.cuts}
    assert (goal.memory(shares) <= limit * (1 + 1e-7)).all()
    assert goal.time(shares) >= goal.time({c: free[c.row] for c in goal.cuts}) * (1 - 1e-9)
    assert balance(goal, costs.sizes, limit * 1e-3, even) is None


def test_fixed_cuts_do_not_move():
    theory, costs, shares, solution = solved(3, KINDS[3])
    goal = objective(solution.steps, solution.storage, 3)
    start = {theory.mesh.row(0, k): np.full(3, 0.25) for k in ("compute", "storage")}
    assert balance(goal, costs.sizes, None, start, fixed={c: shares[c] for c in goal.cuts}) == start
