"""Partial programs that random choices lead to, and the search without its bound: oracles of the bound."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from hapx.restriction import Restriction
from hapx.synth.astar import Front
from hapx.synth.domain import State, Synthesis
from hapx.synth.problem import build
from hapx.synth.tables import TensorTable, bits
from support import toy

KINDS = {1: ((0, 1, 2, 3),), 2: ((0, 1), (2, 3)), 3: ((0,), (1, 2), (3,))}


class Unbounded:
    """The same domain from another start, without the bound."""

    def __init__(self, domain: Synthesis, start: State):
        self.domain, self.depth, self._start = domain, domain.depth, start

    def start(self) -> State:
        return self._start

    def successors(
        self, state: State, limit: float, most: int | None = None, front: Front[State] | None = None, hasty: bool = False
    ) -> Iterator[State]:
        for s in self.domain.successors(state, float("inf")):
            s.estimate = s.cost if s.level < self.depth else s.estimate
            if s.estimate < limit:
                yield s

    def leaps(self, state: State, limit: float) -> list[State]:
        return []

    def dominates(self, a: State, b: State) -> bool:
        return self.domain.dominates(a, b)


def in_one(table: TensorTable, mask: int) -> bool:
    """Whether all that is available follows for free from one placement."""
    return any(table.closure(i) == mask for i in bits(mask))


def several(domain: Synthesis, state: State) -> bool:
    """Whether a value is available in placements of which none gives the others for free."""
    live = domain.problem.steps[state.level].live
    return any(not table.stored and not in_one(table, state.place >> shift & table.full) for _, table, shift in live)


def walk(domain: Synthesis, random: Random) -> Iterator[State]:
    """States of one random program, those with values in several placements if there are any."""
    state = domain.start()
    while state is not None and state.level < domain.depth - 1:
        following = list(domain.successors(state, float("inf")))
        rich = [s for s in following if several(domain, s)]
        state = random.choice(rich or following) if following else None
        if state is not None:
            yield state


def random_domain(seed: int, **graph: Any) -> Synthesis:
    """Of a random graph (see `toy.random_theory`) on a flat mesh of one to three kinds, or on a square."""
    mesh, kinds = (toy.FLAT, KINDS[seed % 3 + 1]) if seed % 2 else (toy.SQUARE, ((0,), (1,)))
    theory = toy.random_theory(seed, mesh, nodes=8, triples=3, **graph)
    problem = build(theory, toy.ToyCosts(mesh, seed, kinds), Restriction(forms=frozenset({"padded"})))
    return Synthesis(problem, toy.shares(theory, len(kinds), seed), None)


def used_often(seed: int) -> Synthesis:
    """Of a graph whose first value is used in every step."""
    return random_domain(seed, states=3 if seed % 2 else 2, parameters=1, often=True)


def used_again(seed: int, times: int) -> Synthesis:
    """Of a graph whose parameters are used so many times, at most: as often as a node has room for one."""
    return random_domain(seed, parameters=2, twice=2, times=times)
