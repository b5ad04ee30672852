"""Paths through shards of the inner axis are part of the space, of its bound, and of what is best where machines are far apart."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.random_cases import PADDED, SQUARE, RandomShares, cluster
from benchmarks.random_graphs import random_graph
from hapx.cost.model import CostModel
from hapx.restriction import Restriction
from hapx.synth.exhaustive import Enumeration
from hapx.synth.search import synthesize
from hapx.synth.writer import Solution
from hapx.theory.derive import derive
from hapx.theory.replay import replay
from hapx.theory.triple import Theory


def thinned(theory: Theory, seed: int) -> Theory:
    """The theory with two triples per node, the first (all whole) among them."""
    rng = random.Random(seed)
    drawn = tuple((ts[0], *rng.sample(ts[1:], min(1, len(ts) - 1))) for ts in theory.triples)
    stored = {name: tuple(dict.fromkeys((p[0], p[-1]))) for name, p in theory.stored.items()}
    return replace(theory.with_triples(drawn), stored=stored)


def shared(solution: Solution) -> int:
    """Conversions that go through shards of the inner axis."""
    bodies = (i.triple.body for i in solution.program.instructions)
    return sum(isinstance(b, tuple) and [c.axis for c in b] == [1, 0, 1] for b in bodies)


def test_equals_enumeration_where_machines_are_far_apart() -> None:
    used = 0
    for seed in (24, 26, 28, 31, 33, 35):
        theory = thinned(derive(random_graph(seed, operators=6, linears=2, biases=False), SQUARE), seed)
        costs = CostModel(theory, cluster(("fast", 2), ("slow", 2), bandwidth=1e7, inside=1e9), "fp32", "adamw", "train")
        shares = RandomShares(SQUARE, costs, seed, spread=0.1)
        count = Enumeration(theory, costs, shares, forms=PADDED).run()
        solution = synthesize(theory, costs, shares, restriction=Restriction(forms=PADDED))
        print(f"graph {seed}: {count.programs} legal programs, {shared(solution)} conversions through shards")
        assert solution.cost == pytest.approx(count.cost, rel=1e-9)
        replay(solution.program, theory, solution.storage_of)
        used += shared(solution) > 0
    assert used >= 1
