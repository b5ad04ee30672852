"""Programs that begin as one does and go on as another: what they take, what they need, and that searches at prices do not find them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hapx.balancer.lp import objective
from hapx.balancer.rounding import per_device, round_ratios
from hapx.cost.model import CostModel
from hapx.cost.terms import Shares
from hapx.graph.capture import capture
from hapx.planner import views
from hapx.restriction import AUTO
from hapx.states import Sharded
from hapx.synth.astar import Statistics, Width, beam
from hapx.synth.domain import State, Synthesis, moves_of
from hapx.synth.effect import Vector
from hapx.synth.problem import Problem, build
from hapx.synth.search import program_key, solve
from hapx.synth.seeds import seeds
from hapx.synth.splices import Splices
from hapx.synth.writer import Solution, solution
from hapx.theory.derive import derive
from hapx.theory.discover import discover
from support.clusters import FOUR, TWO_MACHINES
from support.models import GPT

LAYERS = 6


@dataclass
class Case:
    problem: Problem
    shares: Shares

    def domain(self, prices: Vector | None = None) -> Synthesis:
        return Synthesis(self.problem, self.shares, None, prices=prices)

    def written(self, last: State) -> Solution:
        return solution(self.problem, last, last.estimate, program_key(self.problem.theory), Statistics())

    def agrees(self, last: State, seconds: float) -> None:
        """What a search says of a program, the linear program says too."""
        own = self.written(last)
        goal = objective(own.steps, own.storage, self.problem.terms.kinds)
        assert seconds == pytest.approx(goal.time(self.shares))
        assert last.memory == pytest.approx(goal.memory(self.shares).tolist())


def case(view: str) -> Case:
    torch.manual_seed(0)
    model = GPT(50, 16, 2, LAYERS, 8) if view == "flat" else GPT(50, 16, 2, 2, 8)
    cluster = FOUR if view == "flat" else TWO_MACHINES
    graph = discover(capture(model, model.example(8)))
    theory = derive(graph, next(m for m in views(cluster, AUTO) if m.name == view))
    costs = CostModel(theory, cluster, "fp32", "adamw", "train")
    problem = build(theory, costs, AUTO)
    rows = {theory.mesh.row(0, kind, 0): per_device(costs.speeds.tolist(), costs.kinds) for kind in ("compute", "storage")}
    return Case(problem, costs.lengths_to_shares(round_ratios(rows, sorted(problem.cuts, key=str))))


@pytest.fixture(scope="module", params=["flat", "2x2"])
def any_view(request: pytest.FixtureRequest) -> Case:
    return case(request.param)


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
    of = case("flat")
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
    of = case("flat")
    known = list(by_hand(of))
    memories = np.array([plain.memory for last, _ in known if (plain := of.domain().follow(last)) is not None])
    limits = tuple((0.7 * memories.min(axis=0) + 0.3 * memories.max(axis=0)).tolist())
    splices = Splices(of.domain(), limits)
    for last, domain in known:
        splices.add(last, domain)
    best = solve(of.problem, of.shares, limits, program_key(of.problem.theory))
    assert best.cost * (1 - best.statistics.gap) * (1 - 1e-9) <= splices.seconds < np.inf
    assert best.cost < 1.01 * splices.seconds
