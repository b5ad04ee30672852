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

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from math import inf
from operator import attrgetter, le
from typing import cast

import numpy as np

from hapx.cost.edges import Array, Numbers
from hapx.cost.model import CostModel
from hapx.cost.terms import Vector as Bytes
from hapx.layout import Lengths
from hapx.plan import ProgramKey
from hapx.synth.astar import Statistics, undominated
from hapx.synth.bound import Bound
from hapx.synth.domain import State, no_dearer
from hapx.synth.effect import Vector
from hapx.synth.lean import Lean
from hapx.synth.levels import Level, Rows
from hapx.synth.moments import PARTS
from hapx.synth.moves import Move, Moves
from hapx.synth.problem import Problem
from hapx.synth.seeds import Mask
from hapx.synth.timed import Timed
from hapx.synth.writer import Solution, solution

WIDTHS = 32, 8  # of the beam, on meshes of one axis and of several


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
        self._rows = [Rows() for _ in range(self.depth)]

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
        self.most, self.below = tuple([part * own for own in self.capacity]), below
        self.complete = self._followed(WIDTHS[len(self.problem.theory.mesh.axes) > 1], statistics)
        for last in sorted(self.complete, key=attrgetter("estimate")):
            gap = 1 - bound / last.estimate if last.estimate > 0 else 0.0
            yield solution(self.problem, last, last.estimate, key, Statistics(gap=gap))

    def start(self) -> State:
        begun = super().start()
        estimate = self.bound.estimate(0.0, self.zero, self.zero, self.bound.rest(0, begun.place))
        return State(0, begun.place, 0.0, self.zero, self.zero, begun.memory, estimate, 0.0, None, None)

    def dominates(self, a: State, b: State) -> bool:
        return all(map(le, a.memory, b.memory)) and no_dearer(a, b)

    # -- the beam ----------------------------------------------------------------------------------------------------------------------------------

    def _followed(self, width: int, statistics: Statistics) -> list[State]:
        """Complete programs. Level by level the best by their estimates and by what they are likely to cost, in turns, as `hapx.synth.astar.beam`
        has them, of all that follow the best before: these are made as arrays."""
        states = [self.start()]
        while states and states[0].level < self.depth:
            level, found = states[0].level + 1, self.level_after(states)
            statistics.expansions += len(states)
            statistics.generated += len(found)
            if level == self.depth:
                return [found.state(i) for i in range(len(found))]
            states = undominated(self, map(found.state, self._ranked(found, width)), len(found), width, statistics)
        return states

    def level_after(self, states: Sequence[State]) -> Level:
        """What follows partial programs of one level, is as fast as asked for and fits."""
        level, step = states[0].level, self.problem.steps[states[0].level]
        moves, before, chosen = self._rows[level], list[int](), [np.zeros(0, dtype=np.int64)]
        for number, state in enumerate(states):
            estimates = self.bound.choices(level, state.place, state.cost, state.forward, state.backward)
            for choice in np.flatnonzero(estimates < self.below).tolist():
                chosen.append(self._moves(level, state.place & step.reads, choice))
                before += [number] * len(chosen[-1])
        parents, rows, old = np.array(before, dtype=np.int64), np.concatenate(chosen), Level.of(states, len(PARTS))
        if not before:
            return old[np.zeros(len(old), dtype=bool)]
        effects, memory = moves.arrays
        cost, forward, backward = effects.after(old.cost[parents], old.forward[parents], old.backward[parents], rows)
        spent = cost + forward.max(axis=1) + backward.max(axis=1)
        found = Level(level + 1, states, moves.moves, parents, rows, [], cost, forward, backward, np.zeros(0), spent, spent)[spent < self.below]
        stays = [state.place & step.keep for state in states]
        found.place = [stays[p] | moves.bits[r] for p, r in zip(found.parents.tolist(), found.rows.tolist(), strict=True)]
        if level + 1 < self.depth:
            rest = found.by_place(lambda place: self.bound.rest(level + 1, place))
            estimates = self.bound.estimates(found.cost, found.forward, found.backward, rest)
            found.estimate = np.maximum(found.spent, estimates)
            found = found[found.estimate < self.below]
        found.memory = self._after(old, found, memory[found.rows])
        return found[self._fits(level + 1, found.memory)]

    def _ranked(self, found: Level, width: int) -> Iterator[int]:
        by_estimate = np.argsort(found.estimate, kind="stable").tolist()
        if len(found) <= width:
            yield from by_estimate
            return
        seen = set[int]()
        for number in chain.from_iterable(zip(np.argsort(self._likely(found), kind="stable").tolist(), by_estimate, strict=True)):
            if number not in seen:
                seen.add(number)
                yield number

    def _likely(self, found: Level) -> Array:
        cost = found.cost
        if self.priced is not self.bound:
            stays = found.memory[:, :3].sum(axis=1)
            cost = cost + sum([p * stays[:, own].max(axis=1) for p, own in zip(self.prices, self.exactly, strict=True)])
        rest = found.by_place(lambda place: self.priced.likely(found.level, place))
        return self.priced.estimates(cost, found.forward, found.backward, rest)

    def _moves(self, level: int, reads: int, choice: int) -> Numbers:
        """Where the moves of a choice are, among the rows of its step."""
        rows, inside = self._rows[level], self.region[level] >= 0
        if (reads, choice) not in rows.of:
            found = self.following[inside](level, reads, choice).moves
            rows.add(
                (reads, choice),
                found,
                [np.reshape(move.effect.memory, (len(PARTS), -1)) if inside else self._moment(level, reads, move) for move, _ in found],
            )
        return rows.of[reads, choice]

    # -- memory ------------------------------------------------------------------------------------------------------------------------------------

    def _moment(self, level: int, reads: int, move: Move) -> Array:
        """(part, kind): what a move takes where that is available of what a step reads, outside of checkpoint regions."""
        step = self.problem.steps[level]
        masks = [s.fixed if s.fixed is not None else reads >> at & s.table.full for s, at in zip(step.kind.slots, step.slot_shifts, strict=True)]
        live = frozenset(name for name, _, _ in self.problem.steps[level + 1].live) if level + 1 < self.depth else frozenset()

        def gone(slot: int, mask: int) -> Bytes:
            return self._size(step.tensors[slot], step.kind.slots[slot].table, mask)[0]

        own = self.timed.moment(level, masks, move, live, self.reaching, gone)
        return np.array([own.parameters, own.gradients, own.saved, (0.0,) * self.kinds, own.forward, own.backward])

    def _after(self, old: Level, found: Level, own: Array) -> Array:
        """(program, part, kind): the memory of what follows partial programs by moves that take so much of their own. See `hapx.synth.lean`."""
        before, region = old.memory[found.parents], self.region[old.level]
        live = old.by_place(lambda place: self._there(old.level, place)[0])[found.parents]
        cotangents = found.by_place(lambda place: self._there(found.level, place)[1])
        parameters, gradients, saved, inside, ahead, back = before.swapaxes(0, 1)
        k, g, s, r, f, b = own.swapaxes(0, 1)
        if region < 0:
            kept = parameters + k + saved
        else:
            kept, b = parameters + k + (saved + s), np.maximum(b, f)
            r = r + inside if old.level > 0 and self.region[old.level - 1] == region else r
        forward = np.maximum(ahead + k, kept + live + f)
        backward = np.maximum(back + k + g, kept + r + cotangents + b) if self.training else np.zeros_like(b)
        return np.stack([parameters + k, gradients + g, saved + s, r, forward, backward], axis=1)

    def _fits(self, level: int, memory: Array) -> Mask:
        k, g, s = np.array(self.left[level]).reshape(3, -1)
        parameters, gradients, saved = memory[:, 0] + k, memory[:, 1] + g, memory[:, 2] + s
        ahead, back, update = memory[:, 4] + k, memory[:, 5] + k + g, parameters + (1.0 + np.array(self.update)) * gradients
        found: Mask = (np.maximum.reduce([ahead, back, parameters + saved, update]) <= self.most).all(axis=1)
        return found

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
