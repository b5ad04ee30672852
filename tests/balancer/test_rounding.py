"""Rounding keeps sums, bounds and memory."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hapx.balancer.rounding import deal, fit, fullest, improve, level, per_device, round_ratios
from hapx.states import Cut, Row

ROW = Row("compute", 0, 0)
shares = st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(lambda s: sum(s) > 1e-6)


@given(st.integers(0, 5000), shares)
def test_deal_sums_and_stays_near(units, share):
    lengths = deal(units, share)
    exact = [units * s / sum(share) for s in share]
    assert sum(lengths) == units and all(x >= 0 for x in lengths)
    assert all(abs(x - e) < 1 + 1e-6 for x, e in zip(lengths, exact, strict=True))


@settings(deadline=None)
@given(st.integers(1, 9), st.lists(st.one_of(st.just(0.0), st.floats(0.01, 1)), min_size=2, max_size=4).filter(any))
def test_level_is_as_little_full_as_can_be(units, share):
    ways = [way for way in product(range(units + 1), repeat=len(share)) if sum(way) == units]
    found = level(units, share)
    assert found in ways
    assert fullest(found, share) <= min(fullest(way, share) for way in ways) * (1 + 1e-9) <= fullest(deal(units, share), share) * (1 + 1e-9)


def test_largest_remainders_make_the_slowest_the_fullest():
    assert deal(16, (4, 4, 1, 1, 1)) == (6, 6, 2, 1, 1)
    assert level(16, (4, 4, 1, 1, 1)) == (7, 6, 1, 1, 1)
    assert fullest((6, 6, 2, 1, 1), (4, 4, 1, 1, 1)) == 2 > 1.75 == fullest((7, 6, 1, 1, 1), (4, 4, 1, 1, 1))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any))
def test_whole_shares_are_kept(lengths):
    assert deal(sum(lengths), [x / sum(lengths) for x in lengths]) == tuple(lengths)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.lists(st.floats(0.01, 1), min_size=2, max_size=3), st.lists(st.floats(0.1, 9), min_size=3, max_size=3))
def test_improve_never_worsens_and_keeps_sums(units, share, speeds):
    kinds = ((0, 2), (1,), (3,))[: len(share)]
    n = sum(map(len, kinds))
    cut = Cut(ROW, units)

    def cost(lengths):
        return max(lengths[cut][c] * speeds[k] for k, kind in enumerate(kinds) for c in kind)

    kinds = tuple(tuple(i for i in range(n) if i % len(kinds) == k) for k in range(len(kinds)))
    before = round_ratios({ROW: per_device(share, kinds)}, [cut])
    after = improve(before, kinds, cost, [cut])
    assert sum(after[cut]) == units and min(after[cut]) >= 0
    assert cost(after) <= cost(before)


def test_improve_finds_the_best_of_few_units():
    kinds, cut = ((0,), (1, 2)), Cut(ROW, 12)
    # the first device is twice as fast: 6, 3, 3
    after = improve({cut: (4, 4, 4)}, kinds, lambda n: max(n[cut][0] / 2, n[cut][1], n[cut][2]), [cut])
    assert after[cut] == (6, 3, 3)


@given(st.integers(3, 60), st.integers(0, 60))
def test_fit_respects_memory(units, limit):
    kinds, cut = ((0,), (1,)), Cut(ROW, units)
    after = fit({cut: (units, 0)}, kinds, lambda n: np.array([n[cut][0] / max(limit, 1), 0.0]), [cut])
    assert sum(after[cut]) == units
    assert after[cut][0] <= max(limit, 1)
