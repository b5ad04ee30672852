"""Programs that begin as one program does and go on as another.

In: programs of one problem at the same shares, found at several prices of memory. Out: the cheapest combination of two of them that fits.

At any one price layers that are alike do the same, so programs that prices find lie far apart: a parameter is kept in shards in every layer, or in
none. What fits just so keeps it in shards in some of them, and takes as long at the price that lies in between: the bound of prices says nothing
against it, but no search at prices finds it.

A program goes on as another by its choices: every step's triple, and how parameters are stored, are the other's; conversions are those that what is
available asks for, until everything is where the other one has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from hapx.cost.edges import Array, Numbers
from hapx.synth.domain import State, Synthesis, moves_of
from hapx.synth.effect import Effect, Vector, compose
from hapx.synth.moves import Move

LESS = 1e-9  # relative difference below which programs take as long
TRIES = 12  # steps at which one program is tried to go on as another, those first at which less would be possible


@dataclass(frozen=True, eq=False)
class Known:
    """A program. domain: where it was found; numbers: of its moves, equal where they do the same; places: what is available before every step;
    before, after: effects of all moves before, and from there on; bytes_before, bytes_after: (step, kind)."""

    domain: Synthesis
    moves: list[Move]
    numbers: Numbers
    places: list[int]
    before: list[Effect]
    after: list[Effect]
    bytes_before: Array
    bytes_after: Array


class Splices:
    """See the module. domain: the search at these shares, without prices and limits; limits: bytes per kind."""

    def __init__(self, domain: Synthesis, limits: Vector):
        self.domain = domain
        self.free = np.array(limits) - np.array(domain.fixed_memory)
        self.known: list[Known] = []
        self.seconds = inf  # of the best program so far that fits
        self._numbers: dict[tuple[int, ...], int] = {}
        self._effects: list[Effect] = []  # by the number of a move

    def know(self, last: State, domain: Synthesis) -> None:
        """Adds a program with which others are combined."""
        self._keep(self._unrolled(last, domain))

    def add(self, last: State, domain: Synthesis) -> tuple[State, float] | None:
        """Of a program with those that were added before, the cheapest combination that fits, with its seconds; None where none takes less than
        what was found before, or than the program itself. domain: where it was found."""
        own = self._unrolled(last, domain)
        if any(np.array_equal(own.numbers, other.numbers) for other in self.known):
            return None
        self._keep(own)
        best: State | None = None
        for other in self.known[:-1]:
            for first, second in ((own, other), (other, own)):
                best = self._spliced(first, second) or best
        if best is None:
            return None
        state = self.domain.follow(best)
        assert state is not None, "without limits"
        return state, state.estimate

    def _keep(self, own: Known) -> None:
        if (own.bytes_after[0] <= self.free).all():
            self.seconds = min(self.seconds, own.after[0].seconds)
        self.known.append(own)

    def _spliced(self, first: Known, second: Known) -> State | None:
        """The best program that begins and goes on as these do, if it takes less than what is known."""
        best: State | None = None
        for least, level in self._promising(first, second):
            if least >= self.seconds * (1 - LESS):
                break
            made, total = self._continued(first, level, second)
            if total is not None and total.seconds < self.seconds * (1 - LESS):
                best, self.seconds = _chain([*first.moves[:level], *made], first.places[: level + 1], self.domain), total.seconds
        return best

    def _promising(self, first: Known, second: Known) -> list[tuple[float, int]]:
        """Steps before which a program may begin to go on as another, so that it fits if conversions take no memory, with its seconds, the fewest
        first, if they take no time. Of steps between which the two do the same the first one."""
        same = np.concatenate([[False], first.numbers[:-1] == second.numbers[:-1]])
        fits = (first.bytes_before[:-1] + second.bytes_after[:-1] <= self.free).all(axis=1)
        levels = np.flatnonzero(fits & ~same)[1:].tolist()  # the first one is nearly all of the second program
        return sorted((compose(first.before[level], second.after[level]).seconds, level) for level in levels)[:TRIES]

    def _continued(self, first: Known, level: int, second: Known) -> tuple[list[Move], Effect | None]:
        """What follows a step where a program goes on as another, and the effect of all; None where it cannot, does not fit, or takes too long."""
        problem, there = self.domain.problem, second.domain
        place, total, made = first.places[level], first.before[level], []
        for at in range(level, len(problem.steps)):
            if place == second.places[at]:
                made += second.moves[at:]
                total = compose(total, second.after[at])
                break
            step, wanted = problem.steps[at], second.moves[at]
            stored = [use.kept for use in wanted.uses]
            found = there.following(at, place & step.reads, wanted.choice.index).moves
            move, bits = next(((m, b) for m, b in found if [use.kept for use in m.uses] == stored), (None, 0))
            if move is None:
                return [], None
            total = compose(total, self._effects[self._numbered(at, move)])
            if total.const >= self.seconds:
                return [], None
            made.append(move)
            place = place & step.keep | bits
        return made, total if (np.array(total.memory) <= self.free).all() else None

    def _unrolled(self, last: State, domain: Synthesis) -> Known:
        problem = self.domain.problem
        moves, places, numbers = moves_of(last), [problem.start], []
        for level, move in enumerate(moves):
            numbers.append(self._numbered(level, move))
            places.append(places[-1] & problem.steps[level].keep | self.domain.following.made(level, move))
        effects = [self._effects[n] for n in numbers]
        before, after = [self.domain.moves.nothing], [self.domain.moves.nothing]
        for effect in effects:
            before.append(compose(before[-1], effect))
        for effect in reversed(effects):
            after.append(compose(effect, after[-1]))
        after.reverse()
        sizes = [np.array([effect.memory for effect in of]) for of in (before, after)]
        return Known(domain, moves, np.array(numbers), places, before, after, *sizes)

    def _numbered(self, level: int, move: Move) -> int:
        kind = self.domain.problem.steps[level].kind
        key = id(kind), *move.does
        if key not in self._numbers:
            self._numbers[key] = len(self._effects)
            self._effects.append(self.domain.moves.again(kind, move).effect)
        return self._numbers[key]


def _chain(moves: list[Move], places: list[int], domain: Synthesis) -> State:
    """A program, for `Synthesis.follow`. places: before its first steps, as far as they are known."""
    steps = domain.problem.steps
    for at in range(len(places) - 1, len(moves)):
        places.append(places[-1] & steps[at].keep | domain.following.made(at, moves[at]))
    state: State | None = None
    for at, place in enumerate(places):
        state = State(at, place, 0.0, (), (), (), 0.0, 0.0, state, moves[at - 1] if at else None)
    assert state is not None
    return state
