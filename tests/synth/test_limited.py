"""Prices of memory, with searches that are written down."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from hapx.synth.domain import State
from hapx.synth.effect import Vector
from hapx.synth.limited import ROUNDS, fitting

LIMITS = (100.0, 100.0)


def program(seconds: float, memory: Vector, prices: Vector = ()) -> State:
    estimate = seconds + sum(p * m for p, m in zip(prices, memory, strict=bool(prices)))
    return State(0, 0, seconds, (0.0, 0.0), (0.0, 0.0), memory, estimate, seconds, None, None)


class Search:
    """The cheapest of some programs (seconds, bytes per kind) at given prices."""

    def __init__(self, *programs: tuple[float, Vector], gap: float = 0.0):
        self.programs, self.gap = programs, gap
        self.asked: list[Vector] = []

    def __call__(self, prices: Vector) -> tuple[State, float, None]:
        self.asked.append(prices)
        return min((program(*p, prices) for p in self.programs), key=lambda s: s.estimate), self.gap, None


def test_the_cheapest_that_fits_is_found_and_proven() -> None:
    search = Search((1.0, (150.0, 50.0)), (1.2, (90.0, 90.0)), (1.5, (50.0, 50.0)))
    found = fitting(search, program(1.0, (150.0, 50.0)), LIMITS, 1e-3)
    assert found.best is not None and found.cost == pytest.approx(1.2)
    assert 1.0 <= found.bound <= 1.2


def test_prices_do_not_rise_where_time_hardly_counts() -> None:
    """Nothing fits, by less than what the search leaves open, so no bound proves it: at some price there is no sense in a higher one."""
    search = Search((1.0, (150.0, 50.0)), (2.0, (101.0, 50.0)), gap=0.02)
    found = fitting(search, program(1.0, (150.0, 50.0)), LIMITS, 1e-3)
    assert found.best is None
    assert len(search.asked) < ROUNDS / 2
    assert search.asked[-1][0] * LIMITS[0] > 10  # of the cheapest program's seconds


def test_what_is_put_together_counts_if_it_is_faster() -> None:
    free = program(1.0, (150.0, 50.0))
    search = Search((1.0, (150.0, 50.0)), (1.5, (60.0, 50.0)))
    for seconds, wanted in ((1.35, 1.35), (1.8, 1.5)):
        spliced = program(seconds, (100.0, 50.0))
        found = fitting(lambda prices, of=spliced: (*search(prices)[:2], (of, of.estimate)), free, LIMITS, 1e-3)  # type: ignore[misc]
        assert found.cost == pytest.approx(wanted)
        assert found.bound <= 1.35


def test_prices_that_are_known_narrow_what_is_left() -> None:
    """With a little less memory: from what was found with more, fewer searches lead to one that is as good."""
    programs = [(1.0 + 0.02 * k + 0.002 * k * k, (150.0 - 5 * k, 60.0 - k)) for k in range(20)]
    free, less = program(*programs[0]), (94.0, 94.0)
    before = Search(*programs)
    fitting(before, free, LIMITS, 1e-4)
    again, anew = Search(*programs), Search(*programs)
    found = fitting(again, free, less, 1e-4, asked=before.asked)
    assert again.asked[: len(before.asked)] == before.asked
    expected = fitting(anew, free, less, 1e-4)
    cheapest = min(seconds for seconds, memory in programs if max(memory) <= 94)
    assert max(found.bound, expected.bound) <= cheapest
    assert cheapest <= found.cost <= 1.05 * cheapest  # between two prices that are close
    assert cheapest <= expected.cost <= 1.05 * cheapest
    assert len(set(again.asked) - set(before.asked)) < len(anew.asked) / 2


def random_programs(rng: np.random.Generator, kinds: int) -> list[tuple[float, Vector]]:
    """What takes longer needs less, more or less; the last ones fit."""
    found = []
    for k in range(30):
        scale = np.exp(rng.normal(0, 0.1, kinds)) * (150 - 2.5 * k)
        found.append((1 + 0.05 * k * float(np.exp(rng.normal(0, 0.3))), tuple(scale.tolist())))
    return found


@pytest.mark.parametrize("kinds", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_no_prices_prove_more(kinds: int, seed: int) -> None:
    """The bound is the best that prices give (a linear program over all programs), in few searches; with one kind, the program that fits is the best
    of those that are cheapest at some prices."""
    rng = np.random.default_rng(seed)
    programs, limits = random_programs(rng, kinds), (100.0,) * kinds
    free = min((program(*p) for p in programs), key=lambda s: s.estimate)
    search = Search(*programs)
    found = fitting(search, free, limits, 0.0)
    lacks = np.array([memory for _, memory in programs]) / limits - 1
    rows = np.hstack([np.ones((len(programs), 1)), -lacks])
    seconds = [s for s, _ in programs]
    dual = linprog([-1.0, *[0.0] * kinds], rows, seconds, bounds=[(None, None), *[(0.0, None)] * kinds], method="highs")
    assert found.bound == pytest.approx(-dual.fun, rel=1e-5)
    assert len(search.asked) <= ROUNDS
    cheapest = min(s for s, memory in programs if all(m <= 100 for m in memory))
    assert found.best is not None and found.cost >= cheapest * (1 - 1e-9)
    if kinds == 1:
        values = seconds + lacks @ dual.x[1:]
        meets = (lacks <= 0).all(axis=1) & (values <= values.min() + 1e-5)
        assert found.cost == pytest.approx(np.array(seconds)[meets].min())


def test_programs_of_other_shares_take_the_place_of_searches() -> None:
    rng = np.random.default_rng(0)
    programs = random_programs(rng, 2)
    free = min((program(*p) for p in programs), key=lambda s: s.estimate)
    alone, helped = Search(*programs), Search(*programs)
    before = fitting(alone, free, LIMITS, 0.0)
    after = fitting(helped, free, LIMITS, 0.0, known=[program(*p) for p in programs])
    assert after.bound == pytest.approx(before.bound, rel=1e-5)
    assert after.cost == pytest.approx(min(s for s, memory in programs if max(memory) <= 100))
    assert len(helped.asked) == 1 < len(alone.asked)


def test_what_takes_no_time_has_prices_too() -> None:
    search = Search((0.0, (150.0, 50.0)), (1e-3, (90.0, 90.0)))
    found = fitting(search, program(0.0, (150.0, 50.0)), LIMITS, 1e-3)
    assert found.best is not None and found.cost == pytest.approx(1e-3)
    assert 0 <= found.bound <= 1e-3
