"""The fastest programs whose peak of memory fits, by a beam that knows peaks of partial programs.

The search by seconds (`hapx.synth.domain`) knows memory as a sum per kind of devices; where temporaries are large, the peak of a program has little
to do with that. Here a partial program has the seconds of the one and the memory of the other (`hapx.synth.lean`), and is left out unless

    max(F + k,  B + k + g,  K + k + S + s,  K + k + (1 + u) (G + g))  <=  what may be used        on every kind of devices,

where k, g, s are the least bytes of parameters, gradients and activations that the steps to come keep, and u is what the optimizer's update takes per
byte of gradients. One partial program dominates another if it does by seconds and has no more of any of these numbers.

In: a problem, a cost model at exact lengths. Out: programs. As in `hapx.synth.lean`, storages that several tensors share count for each of them:
whether a program fits, `hapx.cost.liveness` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import inf
from operator import add, attrgetter, le
from typing import cast

import numpy as np

from hapx.cost.model import CostModel
from hapx.cost.terms import Vector as Bytes
from hapx.layout import Lengths
from hapx.plan import ProgramKey
from hapx.synth.astar import Front, Statistics, Width, beam
from hapx.synth.bound import Bound
from hapx.synth.domain import State, no_dearer
from hapx.synth.effect import Vector, after
from hapx.synth.lean import Lean
from hapx.synth.moves import Move, Moves
from hapx.synth.problem import Problem
from hapx.synth.timed import Moment, Timed
from hapx.synth.writer import Solution, solution

WIDTHS = Width(32), Width(8)  # of the beam, on meshes of one axis and of several


class Momentary(Lean):
    """The domain of the beam, at exact lengths."""

    moments = Timed

    def __init__(self, problem: Problem, exact: CostModel, lengths: Lengths):
        super().__init__(problem, exact, lengths)
        self.timed = cast(Timed, self.moves[0])
        self.shares = problem.costs.lengths_to_shares(lengths)
        self.bound = Bound(problem, Moves(problem, self.shares, False))
        self.zero: Vector = (0.0,) * problem.terms.kinds
        self.most, self.below = self.capacity, inf
        self.prices, self.priced = self.zero, self.bound  # of bytes, where a beam asks what is likely, per kind of the problem: at the exact lengths
        self.exactly = [[i for i, alike in enumerate(exact.kinds) if set(alike) <= set(own)] for own in problem.costs.kinds]  # these may be several
        self._bounds: dict[float, Bound] = {0.0: self.bound}  # by price
        self.complete: list[State] = []
        self._moments: dict[tuple[int, int, int], Moment] = {}

    def fastest(
        self, key: ProgramKey, statistics: Statistics, part: float = 1.0, below: float = inf, price: float = 0.0
    ) -> Iterator[Solution]:  # fmt: skip
        """Programs, the fastest first, whose peaks, by what is known here, are at most this part of what may be used, and that take less than `below`
        seconds. Their `memory` is not that of sums. price: of all that may be used, in times of what the fastest program takes at least, where the
        beam chooses. statistics: of the beam. Raises Crowded where a step has too many moves."""
        bound = self.start().estimate
        if bound >= below:
            return
        self.prices = tuple([price * bound / own for own in self.problem.costs.capacity.tolist()])
        if price not in self._bounds:
            self._bounds[price] = Bound(self.problem, Moves(self.problem, self.shares, False, None, self.prices))
        self.priced = self._bounds[price]
        self.most, self.below, self.complete = tuple([part * own for own in self.capacity]), below, []
        beam(self, WIDTHS[len(self.problem.theory.mesh.axes) > 1], statistics)
        for last in sorted(self.complete, key=attrgetter("estimate")):
            gap = 1 - bound / last.estimate if last.estimate > 0 else 0.0
            yield solution(self.problem, last, last.estimate, key, Statistics(gap=gap))

    # -- what the beam asks for --------------------------------------------------------------------------------------------------------------------

    def start(self) -> State:
        begun = super().start()
        estimate = self.bound.estimate(0.0, self.zero, self.zero, self.bound.rest(0, begun.place))
        return State(0, begun.place, 0.0, self.zero, self.zero, begun.memory, estimate, 0.0, None, None)

    def successors(
        self, state: State, limit: float, most: int | None = None, front: Front[State] | None = None, hasty: bool = False
    ) -> Iterator[State]:
        step, following = self.problem.steps[state.level], self.following[self.region[state.level] >= 0]
        estimates = self.bound.choices(state.level, state.place, state.cost, state.forward, state.backward)
        for choice in np.flatnonzero(estimates < min(limit, self.below)).tolist():
            yield from self._follow(state, following(state.level, state.place & step.reads, choice).moves, limit)

    def again(self, state: State, limit: float) -> list[State] | None:
        return None  # layers that are alike may fit in different ways

    def dominates(self, a: State, b: State) -> bool:
        return all(map(le, a.memory, b.memory)) and no_dearer(a, b)

    def likely(self, state: State) -> float:
        paid = 0.0
        if self.priced is not self.bound:
            stays = self._staying(state.memory)
            paid = sum([p * max([stays[i] for i in own]) for p, own in zip(self.prices, self.exactly, strict=True)])
        if state.level == self.depth:
            return state.estimate + paid
        return self.priced.estimate(state.cost + paid, state.forward, state.backward, self.priced.likely(state.level, state.place))

    def _follow(self, state: State, moves: list[tuple[Move, int]], limit: float) -> Iterator[State]:
        level, limit = state.level + 1, min(limit, self.below)
        stays = state.place & self.problem.steps[state.level].keep
        for move, bits in moves:
            place = stays | bits
            cost, forward, backward = after(state.cost, state.forward, state.backward, move.effect)
            spent = estimate = cost + max(forward) + max(backward)
            if level < self.depth and spent < limit:
                estimate = max(spent, self.bound.estimate(cost, forward, backward, self.bound.rest(level, place)))
            if estimate < limit:
                memory = self._after(state, move, place)
                if self._fits(level, memory):
                    found = State(level, place, cost, forward, backward, memory, estimate, spent, state, move)
                    if level == self.depth:
                        self.complete.append(found)
                    yield found

    # -- memory ------------------------------------------------------------------------------------------------------------------------------------

    def _moment(self, state: State, move: Move) -> Moment:
        """Of a move after a partial program, outside of checkpoint regions."""
        level, step = state.level, self.problem.steps[state.level]
        key = level, state.place & step.reads, id(move)
        if key not in self._moments:
            parts = zip(step.kind.slots, step.slot_shifts, strict=True)
            masks = [s.fixed if s.fixed is not None else state.place >> at & s.table.full for s, at in parts]
            live = frozenset(name for name, _, _ in self.problem.steps[level + 1].live) if level + 1 < self.depth else frozenset()

            def gone(slot: int, mask: int) -> Bytes:
                return self._size(step.tensors[slot], step.kind.slots[slot].table, mask)[0]

            self._moments[key] = self.timed.moment(level, masks, move, live, self.reaching, gone)
        return self._moments[key]

    def _after(self, state: State, move: Move, place: int) -> Vector:
        """The memory of what follows a state by a move."""
        level, n, old = state.level, self.kinds, state.memory
        if self.region[level] >= 0:
            return self._grown(state, move.effect.memory, place)
        own = self._moment(state, move)
        live, cotangents = self._there(level, state.place)[0], self._there(level + 1, place)[1]
        stays = map(add, old[: 3 * n], (*own.parameters, *own.gradients, *own.saved))
        forward, backward = [], []
        for i in range(n):
            k, g, kept = own.parameters[i], own.gradients[i], old[i] + own.parameters[i] + old[2 * n + i]
            forward.append(max(old[4 * n + i] + k, kept + live[i] + own.forward[i]))
            backward.append(max(old[5 * n + i] + k + g, kept + cotangents[i] + own.backward[i]) if self.training else 0.0)
        return (*stays, *[0.0] * n, *forward, *backward)

    def _fits(self, level: int, memory: Vector) -> bool:
        n, left = self.kinds, self.left[level]
        for i in range(n):
            k, g = left[i], left[n + i]
            parameters, gradients, saved = memory[i] + k, memory[n + i] + g, memory[2 * n + i] + left[2 * n + i]
            ahead, back, update = memory[4 * n + i] + k, memory[5 * n + i] + k + g, parameters + (1.0 + self.update[i]) * gradients
            if max(ahead, back, parameters + saved, update) > self.most[i]:
                return False
        return True

    @cached_property
    def left(self) -> list[Vector]:
        """Per level, bytes of parameters, gradients and activations per kind that the steps from there on keep at least."""
        left = [np.zeros(3 * self.kinds)]
        for level in reversed(range(self.depth)):
            left.append(left[-1] + self._least(level))
        return [tuple(own.tolist()) for own in reversed(left)]

    def _least(self, level: int) -> Bytes:
        """Of a step: what its leanest call keeps, and the leanest way to store what is read for the first time."""
        step, moves, n = self.problem.steps[level], self.moves[self.region[level] >= 0], 3 * self.kinds
        live = {name for name, _, _ in step.live}
        least: Bytes = np.min([moves.effect(step.kind, c.index).memory[:n] for c in step.kind.choices], axis=0)
        for name, slot in zip(step.tensors, step.kind.slots, strict=True):
            if slot.table.stored and name not in live and slot.fixed in (0, None):
                least = least + np.min([moves.of_kept(slot.table, kept).memory[:n] for kept in slot.table.stored], axis=0)
        return least
