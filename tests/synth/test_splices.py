"""Programs that begin as one does and go on as another: what they take, what they need, and that searches at prices do not find them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from hapx.balancer.lp import objective
from hapx.states import Sharded
from hapx.synth.astar import Statistics, Width, beam
from hapx.synth.domain import State, Synthesis, moves_of
from hapx.synth.search import alternatives, attempt, program_key, solve
from hapx.synth.seeds import seeds
from hapx.synth.splices import Splices
from support.searched import Case, gpt

LAYERS = 6


@pytest.fixture(scope="module", params=["flat", "2x2"])
def any_view(request: pytest.FixtureRequest) -> Case:
    return gpt(request.param, LAYERS if request.param == "flat" else 2)


def by_hand(of: Case) -> Iterator[tuple[State, Synthesis]]:
    """Data parallelism, tensor parallelism, and mixtures of them, without prices and at some."""
    for prices in (None, (1e-9,) * of.problem.terms.kinds, (1e-6,) * of.problem.terms.kinds):
        for only in (None, *seeds(of.problem)):
            domain = of.domain(prices)
            domain.only = only
            last = beam(domain, Width(2), Statistics())
            if last is not None:
                yield last, domain


def test_what_is_put_together_fits_and_takes_what_it_says(any_view: Case) -> None:
    known = list(by_hand(any_view))
    plain = [any_view.domain().follow(last) for last, _ in known]
    assert all(last is not None for last in plain)
    memories = np.array([last.memory for last in plain if last is not None])
    found = own_conversions = 0
    for part in (0.0, 0.2, 0.5, 0.8):
        limits = tuple(((1 - part) * memories.min(axis=0) + part * memories.max(axis=0) * 0.999).tolist())
        splices, before = Splices(any_view.domain(), limits), np.inf
        fitting = [last.estimate for last in plain if last is not None and all(np.array(last.memory) <= limits)]
        for last, domain in known:
            spliced = splices.add(last, domain)
            assert splices.seconds <= before
            if spliced is not None:
                state, seconds = spliced
                assert all(np.array(state.memory) <= limits)
                assert seconds < before
                assert seconds == pytest.approx(splices.seconds)
                any_view.agrees(state, seconds)
                found += 1
                moves = {id(m) for other, _ in known for m in moves_of(other)}
                own_conversions += any(id(m) not in moves for m in moves_of(state))
            before = splices.seconds
        assert before <= min(fitting, default=np.inf) * (1 + 1e-9)
    assert found >= 3
    assert own_conversions >= 1  # one goes on as another though values are elsewhere


def test_between_two_prices_some_layers_do_as_at_one_and_some_as_at_the_other() -> None:
    of = gpt("flat", LAYERS)
    free = beam(of.domain(), Width(16), Statistics())
    assert free is not None

    def in_shards(last: State) -> int:
        own = of.written(last).storage_of
        return sum(any(isinstance(s, Sharded) for s in placement.states) for name, placement in own.items() if "blocks" in name)

    dear = of.domain((1e-4,) * of.problem.terms.kinds)
    thrifty = beam(dear, Width(16), Statistics(), dear.follow(free))
    assert thrifty is not None
    assert in_shards(free) < in_shards(thrifty)
    plain = of.domain().follow(thrifty)
    assert plain is not None
    limits = tuple((0.5 * np.array(free.memory) + 0.5 * np.array(plain.memory)).tolist())
    splices = Splices(of.domain(), limits)
    assert splices.add(free, of.domain()) is None  # alone
    spliced = splices.add(thrifty, dear)
    assert spliced is not None
    state, seconds = spliced
    assert in_shards(free) < in_shards(state) < in_shards(thrifty)
    assert free.estimate < seconds < plain.estimate
    assert splices.add(thrifty, dear) is None  # nothing new


def test_nothing_is_faster_than_what_is_proven() -> None:
    of = gpt("flat", LAYERS)
    known = list(by_hand(of))
    memories = np.array([plain.memory for last, _ in known if (plain := of.domain().follow(last)) is not None])
    limits = tuple((0.7 * memories.min(axis=0) + 0.3 * memories.max(axis=0)).tolist())
    splices = Splices(of.domain(), limits)
    for last, domain in known:
        splices.add(last, domain)
    best = solve(of.problem, of.shares, limits, program_key(of.problem.theory))
    assert best.cost * (1 - best.statistics.gap) * (1 - 1e-9) <= splices.seconds < np.inf
    assert best.cost < 1.01 * splices.seconds


def test_a_program_that_is_known_is_combined_with_the_next_one(any_view: Case) -> None:
    known = list(by_hand(any_view))
    plain = [own for last, _ in known if (own := any_view.domain().follow(last)) is not None]
    memories = np.array([own.memory for own in plain])
    limits = tuple((0.5 * memories.min(axis=0) + 0.5 * memories.max(axis=0)).tolist())
    combined = 0
    for first, second in pairwise(known):
        one, both = Splices(any_view.domain(), limits), Splices(any_view.domain(), limits)
        one.know(*first)
        both.add(*first)
        mine, expected = one.add(*second), both.add(*second)
        assert (mine is None) == (expected is None) and one.seconds == both.seconds
        if mine is not None and expected is not None:
            assert mine[1] == expected[1]
            combined += 1
    assert combined


def test_what_was_found_at_prices_is_known_at_other_shares() -> None:
    of = gpt("flat", 2)
    free = solve(of.problem, of.shares, None, program_key(of.problem.theory))
    attempt(of.problem, of.shares, tuple(0.8 * m for m in free.memory), program_key(of.problem.theory))
    others = {cut: np.roll(own, 1) for cut, own in of.shares.items()}
    found = list(alternatives(of.problem, others, program_key(of.problem.theory)))
    assert len(found) == len(of.problem.at_prices) > 1
    costs = [own.cost for own in found]
    assert costs == sorted(costs)
    best = solve(of.problem, others, None, program_key(of.problem.theory))
    for own in found:
        assert own.cost >= best.cost * (1 - 1e-9)
        assert own.cost * (1 - own.statistics.gap) <= best.cost * (1 + 1e-9)
        total = objective(own.steps, own.storage, of.problem.terms.kinds).time(others)
        assert total == pytest.approx(own.cost)
