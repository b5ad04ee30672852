"""The search against exhaustive enumeration, on random small theories."""

from __future__ import annotations

import numpy as np
import pytest

from hapx.errors import InsufficientMemoryError
from hapx.synth.exhaustive import Enumeration
from hapx.synth.search import synthesize
from support import toy
from hapx.theory.replay import replay

KINDS = {1: ((0, 1, 2, 3),), 2: ((0, 1), (2, 3)), 3: ((0,), (1, 2), (3,))}


def case(seed: int):
    mesh, kinds = (toy.FLAT, KINDS[seed % 3 + 1]) if seed % 2 else (toy.SQUARE, ((0,), (1,)))
    size = dict(nodes=6, triples=3, states=3) if seed % 2 else dict(nodes=6, triples=3, states=2)
    theory = toy.random_theory(seed, mesh, **size)
    costs = toy.ToyCosts(mesh, seed, kinds)
    return theory, costs, toy.shares(theory, len(kinds), seed)


@pytest.mark.parametrize("seed", range(40))
def test_equals_enumeration(seed, record_property):
    theory, costs, shares = case(seed)
    count = Enumeration(theory, costs, shares, forms=frozenset({"padded"})).run()
    from hapx.restriction import Restriction
    solution = synthesize(theory, costs, shares, restriction=Restriction(forms=frozenset({"padded"})))
    print(seed, count, solution.statistics)
    assert solution.cost == pytest.approx(count.cost, rel=1e-9)
    replay(solution.program, theory, solution.storage_of)
