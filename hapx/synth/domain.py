"""The domain of the A* search: partial programs of a problem at given shares.

A partial program: for each live value the placements it is available in (one int, closed under free conversions), the pending compute per kind,
forward and backward, and the memory per kind. a dominates b when its placements include b's, memory_a <= memory_b on every kind, and
cost_a + max_j(pf_a - pf_b)_j + max_j(pb_a - pb_b)_j <= cost_b. Memory counts only where limits are given.

Memory may have *prices* instead (seconds per byte and kind, see `hapx.synth.limited`): then they are part of every cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from math import inf
from operator import add, le, mul, sub
from typing import NamedTuple

import numpy as np

from hapx.cost.terms import Shares
from hapx.synth.astar import ROUNDING, Front
from hapx.synth.bound import Bound
from hapx.synth.effect import Effect, Effects, Vector, after, at_most, compose, plus, repeated
from hapx.synth.moves import Move, Moves
from hapx.synth.periods import Repetition
from hapx.synth.problem import Choice, Problem, Step
from hapx.synth.seeds import Mask

SETTLED = 4  # rounds after which beams follow what repeats itself only
NEARER = 0.02  # relative difference of programs that are known, for which the bound is not made sharper again
MANY = 32  # moves of a choice, from which on those that are hopeless are looked for in arrays


class State:
    """A partial program; see the module."""

    __slots__ = ("backward", "cost", "dead", "estimate", "forward", "level", "memory", "move", "parent", "place", "rounds", "spent")

    def __init__(self, level: int, place: int, cost: float, forward: Vector, backward: Vector, memory: Vector, estimate: float,
                 spent: float, parent: State | None, move: Move | None, rounds: tuple[int, int] = (0, 0)):  # fmt: skip
        self.level, self.place, self.cost, self.forward, self.backward, self.memory = level, place, cost, forward, backward, memory
        self.estimate, self.parent, self.move, self.dead = estimate, parent, move, False
        self.spent = spent  # with all that is pending: what dominates a state has not spent more
        self.rounds = rounds  # (period, times): instead of by a move, by repeating the last moves before it

    def spent_at_most(self, most: Iterable[float]) -> bool:
        """Whether for every kind forward and every kind backward no more is spent, with what is pending there, than `most` says of the pair."""
        return at_most(self.cost, self.forward, self.backward, most)


def moves_of(last: State) -> list[Move]:
    """The moves that lead to a state, in order."""
    states: list[State] = []
    state: State | None = last
    while state is not None:
        states.append(state)
        state = state.parent
    moves: list[Move] = []
    for state in reversed(states):
        period, times = state.rounds
        moves += [state.move] if state.move is not None else moves[len(moves) - period :] * times
    return moves


def no_dearer(a: State, b: State) -> bool:
    """Whether a costs no more than b, whatever follows."""
    more = max(map(sub, a.forward, b.forward)) + max(map(sub, a.backward, b.backward))
    return bool(a.cost + more <= b.cost + 1e-13 * b.estimate)


class Reached(NamedTuple):
    """The moves of a choice with the bits of a partial program that they set. effects: theirs, where there are many moves."""

    moves: list[tuple[Move, int]]
    effects: Effects | None


class Following:
    """What follows a partial program, by its level, by what of the step's slots is available, and by a choice. arrays: effects of many moves are
    wanted."""

    def __init__(self, problem: Problem, moves: Moves, *, arrays: bool):
        self.problem, self.moves, self.arrays = problem, moves, arrays
        self._known: list[dict[tuple[int, int], Reached]] = [{} for _ in problem.steps]  # by what is available,
        self._alike: list[dict[tuple[tuple[int, ...], int], Reached]] = [{} for _ in problem.steps]  # and by what is used of it
        self._parts: dict[int, list[tuple[int, int, int]]] = {}
        self._places: dict[int, list[int | None]] = {}

    def __call__(self, level: int, mask: int, choice: int) -> Reached:
        """The moves of a choice of a step where `mask` is available."""
        known = self._known[level]
        if (mask, choice) not in known:
            step, kind = self.problem.steps[level], self.problem.steps[level].kind
            masks = tuple(s.fixed if s.fixed is not None else mask >> at & s.table.full for s, at in zip(kind.slots, step.slot_shifts, strict=True))
            used = self.moves.used(kind, masks, choice)
            alike = self._alike[level]
            if (used, choice) not in alike:
                found = self.moves.at(kind, used, choice)
                effects = Effects([m.effect for m in found]) if self.arrays and len(found) > MANY else None
                alike[used, choice] = Reached([(m, self.made(level, m)) for m in found], effects)
            known[mask, choice] = alike[used, choice]
        return known[mask, choice]

    def made(self, level: int, move: Move) -> int:
        """The bits of a partial program that a move sets."""
        if level not in self._parts:
            step, kind = self.problem.steps[level], self.problem.steps[level].kind
            parts = [(o, s.table.full, at) for s, o, at in zip(kind.slots, kind.slot_offsets, step.slot_shifts, strict=True) if s.live]
            parts += [(o, r.table.full, at) for r, o, at in zip(kind.results, kind.result_offsets, step.result_shifts, strict=True) if r.live]
            self._parts[level] = parts
        return sum((move.place >> o & full) << at for o, full, at in self._parts[level])

    def places(self, level: int) -> list[int | None]:
        """Per choice of a step the bits that all of its moves set, beside those that are set already; None where a parameter is used for the first
        time that is used again: then it depends on the move."""
        if level not in self._places:
            step, kind = self.problem.steps[level], self.problem.steps[level].kind
            if any(slot.live and first for slot, first in zip(kind.slots, self.problem.outline.first[level], strict=True)):
                self._places[level] = [None] * len(kind.choices)
            else:
                self._places[level] = [_made(step, choice) for choice in kind.choices]
        return self._places[level]


def _made(step: Step, choice: Choice) -> int:
    """The bits of what a choice reads, as it needs it, and of what it makes."""
    kind, made = step.kind, 0
    for slot, target in choice.needs:
        if kind.slots[slot].live:
            made |= kind.slots[slot].table.closure(target) << step.slot_shifts[slot]
    for result, at, given in zip(kind.results, step.result_shifts, choice.gives, strict=True):
        if result.live:
            made |= result.table.closure(given) << at
    return made


def round_before(repetition: Repetition, state: State) -> list[State] | None:
    """The partial programs of the last period, each one move after the one before it, if every value was available before them as its counterpart is
    here."""
    period = repetition.before(state.level)
    pairs = repetition.pairs(state.level, period) if period else None
    if pairs is None:
        return None
    then, made = state, []
    for _ in range(period):
        if then.move is None or then.parent is None:
            return None
        made.append(then)
        then = then.parent
    same = all(state.place >> now & full == then.place >> before & full for now, before, full in pairs)
    return made[::-1] if same else None


class Synthesis:
    """The domain of the A* search: partial programs of a problem at given shares. limits: bytes per kind, or None if they cannot bind; capacity:
    see `Moves`. prices: without limits, part of every cost; with limits, they only sharpen the bound, as Lagrangian multipliers: what fits costs at
    least its priced cost less the price of all the memory that there is."""

    def __init__(self, problem: Problem, shares: Shares, limits: Vector | None, *, capacity: Vector | None = None, prices: Vector | None = None):
        self.problem, self.limits, self.prices = problem, limits, prices
        self.moves = Moves(problem, shares, limits is not None, capacity, prices if limits is None else None)
        self._multipliers = prices if limits is not None else None
        self.bound = Bound(problem, self.moves if self._multipliers is None else Moves(problem, shares, False, None, prices))
        if len(problem.theory.mesh.axes) > 1 and limits is None and capacity is None and self.bound.knows_pairs:
            self.moves.least = self.bound.relaxation.priced
        self.depth = len(problem.steps)
        self.zero: Vector = (0.0,) * problem.terms.kinds
        self.fixed_memory = self.zero
        for name, placement in problem.unused.items():
            kept = next(k for k in problem.tables[name].stored if problem.tables[name].placements[k.placement] == placement)
            self.fixed_memory = plus(self.fixed_memory, self.moves.values[kept.step.memory])
        self.repetition: Repetition = self.bound.relaxation.repetition
        self.only: Mapping[int, Mask] | None = None  # by id of a step class, the choices that are looked at
        self.bounded = self.unfit = self.dominated = 0  # what was not followed: for the bound, for the limits, for what is there already
        self.sharp, self.eager = False, True
        self._sharpened = inf  # below which programs were wanted when that was last done
        self.following = Following(problem, self.moves, arrays=limits is None)
        self._left = self._least_memory() if limits is not None else []

    def start(self) -> State | None:
        if self.limits is not None and not all(map(le, map(add, self.fixed_memory, self._left[0]), self.limits)):
            return None
        rest = self.bound.rest(0, self.problem.start)
        fixed = sum(map(mul, self.prices, self.fixed_memory)) if self.limits is None and self.prices is not None else 0.0
        estimate = self.bound.estimate(fixed + self._priced(self.fixed_memory), self.zero, self.zero, rest)
        return State(0, self.problem.start, fixed, self.zero, self.zero, self.fixed_memory, estimate, fixed, None, None)

    def sharpen(self, limit: float) -> Callable[[State], float] | None:
        """See `hapx.synth.astar.Sharpen`; None where the bound is sharp already, by what was known of programs then."""
        if self.bound.potentials is not None and limit >= self._sharpened * (1 - NEARER):
            return None
        self._sharpened = limit
        self.bound.sharpen(limit)
        return self.estimated

    @property
    def quickly_sharp(self) -> bool:
        """Whether `sharpen` takes less, as an earlier search of the problem has asked for it."""
        return (self.moves.capacity is None) in self.problem.forward

    def estimated(self, state: State) -> float:
        if state.level == self.depth:
            return state.estimate
        rest = self.bound.rest(state.level, state.place)
        return max(state.estimate, self.bound.estimate(state.cost + self._priced(state.memory), state.forward, state.backward, rest))

    def successors(
        self, state: State, limit: float, most: int | None = None, front: Front[State] | None = None, hasty: bool = False
    ) -> Iterator[State]:
        """By the choices whose bound is below the limit, and which the front does not cover whatever they convert: conversions are priced for no
        others. most: by so many of the best, unless the step places the only parameter that is used again: what its places cost later the bounds of
        choices do not know. hasty: nor do estimates, where that is not known yet."""
        estimates = self.bound.choices(state.level, state.place, state.cost + self._priced(state.memory), state.forward, state.backward)
        allowed = self.only.get(id(self.problem.steps[state.level].kind)) if self.only is not None else None
        chosen = np.flatnonzero(estimates < limit if allowed is None else (estimates < limit) & allowed)
        if allowed is None:
            self.bounded += len(estimates) - len(chosen)
        if most is not None and len(chosen) > most and not self.bound.relaxation.placed(state.level):
            chosen = chosen[np.argsort(estimates[chosen], kind="stable")[:most]]
        reads = state.place & self.problem.steps[state.level].reads
        covered = self._covered(state, front) if front is not None and self.limits is None else None
        for choice in chosen.tolist():
            if covered is None or not covered(choice):
                yield from self._follow(state, self._promising(state, self.following(state.level, reads, choice), limit), limit, hasty)

    def _covered(self, state: State, front: Front[State]) -> Callable[[int], bool] | None:
        """Says of a choice whether every state after it is dominated by one of the front, by the bound of what it has spent."""
        level, places = state.level, self.following.places(state.level)
        paid = self.bound.paid(level, state.place, state.cost, state.forward, state.backward)
        if paid is None:
            return None
        kept, rounding = state.place & self.problem.steps[level].keep, ROUNDING * state.estimate
        least = (paid + 0.1 * rounding).tolist()

        def covered(choice: int) -> bool:
            made, own = places[choice], least[choice]
            found = made is not None and front.covers(kept | made, max(own) + rounding, lambda other: other.spent_at_most(own))
            self.dominated += found
            return found

        return covered

    def follow(self, last: State) -> State | None:
        """A program that was found at other shares or prices, at these; None where it does not fit."""
        chain: list[State] = []
        old: State | None = last
        while old is not None:
            chain.append(old)
            old = old.parent
        state = self.start()
        made: list[Effect] = []
        for old in reversed(chain[:-1]):
            if state is None:
                break
            if old.move is not None:
                move: Move | None = self.moves.again(self.problem.steps[state.level].kind, old.move)
                assert move is not None
                effect = move.effect
                made.append(effect)
            else:
                period, times = old.rounds
                move, effect = None, repeated(reduce(compose, made[-period:]), times)
                made.append(self.moves.nothing)  # no round reaches back over this
            state = self._reached(state, old.level, old.place, effect, move, old.rounds, inf, bounded=False)
        return state

    def again(self, state: State, limit: float) -> list[State] | None:
        """One period after a state in which every value was available as its counterpart is here: the move that was made there, or all rounds that
        are left if the last one ended as it had begun."""
        made = round_before(self.repetition, state)
        if made is None:
            return None
        if self.repetition.jump(state.level) is not None:
            return self._leap(state, made, limit)
        first = made[0].move
        assert first is not None, "a round of moves"
        moves = self.following(state.level, state.place & self.problem.steps[state.level].reads, first.choice.index).moves
        return self._follow(state, [m for m in moves if m[0] is first], limit)

    def leaps(self, state: State, limit: float) -> list[State]:
        """After all rounds that are left, where the last one ended as it had begun."""
        made = round_before(self.repetition, state) if self.repetition.jump(state.level) is not None else None
        return self._leap(state, made, limit) if made is not None else []

    def settled(self, level: int) -> bool:
        """Whether so many rounds are before a level, and some after it, that what is good repeats itself by then."""
        return self.repetition.done(level) >= SETTLED and self.repetition.rounds(level) > 1

    def _leap(self, state: State, made: list[State], limit: float) -> list[State]:
        jump = self.repetition.jump(state.level)
        assert jump is not None, "checked by the caller"
        effect = repeated(reduce(compose, (own.move.effect for own in made if own.move is not None)), jump.times)
        place = sum((state.place >> before & full) << now for now, before, full in jump.pairs)
        found = self._reached(state, state.level + jump.times * len(made), place, effect, None, (len(made), jump.times), limit)
        return [found] if found is not None else []

    def _follow(self, state: State, moves: list[tuple[Move, int]], limit: float, hasty: bool = False) -> list[State]:
        kept, level = state.place & self.problem.steps[state.level].keep, state.level + 1
        found = [self._reached(state, level, kept | made, move.effect, move, (0, 0), limit, hasty=hasty) for move, made in moves]
        return [after for after in found if after is not None]

    def _reached(
        self, state: State, level: int, place: int, effect: Effect, move: Move | None, rounds: tuple[int, int], limit: float, bounded: bool = True,
        hasty: bool = False,
    ) -> State | None:  # fmt: skip
        """The state at `level` with `place` after an effect, if it may lead to a program below the limit. bounded: its estimate is wanted; hasty: if
        that takes long, a lower one will do."""
        memory, limits = tuple(map(add, state.memory, effect.memory)), self.limits
        if limits is not None and not all(map(le, map(add, memory, self._left[level]), limits)):
            self.unfit += 1
            return None
        cost, forward, backward = after(state.cost, state.forward, state.backward, effect)
        if cost >= limit:
            self.bounded += 1
            return None
        spent = estimate = cost + max(forward) + max(backward)
        if bounded and level < self.depth:
            bound = self.bound
            paid, pending, quick = cost + self._priced(memory), bound.pending(forward, backward), bound.quick(level, place)
            if quick is not None and paid + max(map(add, pending, quick)) >= limit:
                self.bounded += 1
                return None
            rest = quick if hasty and quick is not None else bound.rest(level, place)
            estimate = max(estimate, paid + max(map(add, pending, rest)))
        if estimate >= limit:
            self.bounded += 1
            return None
        return State(level, place, cost, forward, backward, memory, estimate, spent, state, move, rounds)

    def dominates(self, a: State, b: State) -> bool:
        return (self.limits is None or all(map(le, a.memory, b.memory))) and no_dearer(a, b)

    def kin(self, state: State) -> int:
        """Where its large values are: what else there is can be elsewhere for little."""
        return state.place & self.bound.outline.large[state.level] if state.level < self.depth else 0

    def likely(self, state: State) -> float:
        """As its estimate, with what all live values add to the bound instead of the most that one of them adds: nearer to the truth where several
        are in the wrong place. (The bound is to this as h_max is to h_add: Bonet and Geffner 2001, *Planning as heuristic search*.)"""
        if state.level == self.depth:
            return state.estimate
        rest = self.bound.likely(state.level, state.place)
        return self.bound.estimate(state.cost + self._priced(state.memory), state.forward, state.backward, rest)

    def _priced(self, memory: Vector) -> float:
        """What multipliers add to a lower bound: the price of what is allocated, less that of all there is."""
        if self._multipliers is None or self.limits is None:
            return 0.0
        return float(sum(map(mul, self._multipliers, map(sub, memory, self.limits))))

    def _promising(self, state: State, following: Reached, limit: float) -> list[tuple[Move, int]]:
        """The moves that may lead to a program below the limit; only of many are those that do not looked for."""
        level, (moves, effects) = state.level + 1, following
        if effects is None or level == self.depth:
            return moves
        estimates = self.bound.several(level, *effects.after(state.cost, state.forward, state.backward))
        chosen = np.flatnonzero(estimates < limit * (1 + ROUNDING))
        self.bounded += len(moves) - len(chosen)
        return [moves[i] for i in chosen.tolist()]

    def _least_memory(self) -> list[Vector]:
        """Per level, bytes per kind that the steps from there on need at least."""
        left = [self.zero]
        for step in reversed(self.problem.steps):
            new = {n for n, _, _ in step.live}
            masks = []
            for name, slot in zip(step.tensors, step.kind.slots, strict=True):
                first = bool(slot.table.stored) and name not in new
                masks.append(slot.fixed if slot.fixed is not None else 0 if first else slot.table.full)
            needed = [m.effect.memory for c in range(len(step.kind.choices)) for m in self.moves.at(step.kind, tuple(masks), c)]
            left.append(plus(left[-1], tuple(map(min, zip(*needed, strict=True))) if needed else self.zero))
        return left[::-1]
