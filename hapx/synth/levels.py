"""Partial programs of one level as arrays, and the moves that lead there: for a beam that makes all that follows its programs at once.

In: partial programs (`hapx.synth.domain.State`) and what moves do to seconds and bytes. Out: arrays, and single partial programs of them where one is
asked for. Numbers are those that one partial program after another would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hapx.cost.edges import Array, Numbers
from hapx.synth.domain import State
from hapx.synth.effect import Effects, Vector
from hapx.synth.moves import Move
from hapx.synth.seeds import Mask


class Rows:
    """The moves of a step, as arrays: those that were asked for, which are added by what is available of what the step reads and by choice."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.bits: list[int] = []  # that they set
        self.of: dict[tuple[int, int], Numbers] = {}  # where they are
        self._taken: list[Array] = []
        self._arrays: tuple[Effects, Array] | None = None

    def add(self, key: tuple[int, int], moves: Sequence[tuple[Move, int]], taken: Sequence[Array]) -> None:
        """taken: of each, (part, kind) bytes."""
        self.of[key] = np.arange(len(self.moves), len(self.moves) + len(moves))
        self.moves += [move for move, _ in moves]
        self.bits += [bits for _, bits in moves]
        self._taken += taken
        self._arrays = None

    @property
    def arrays(self) -> tuple[Effects, Array]:
        """Of all moves so far: what they do to seconds, and (move, part, kind) bytes."""
        if self._arrays is None:
            self._arrays = Effects([move.effect for move in self.moves]), np.array(self._taken)
        return self._arrays


@dataclass(slots=True)
class Level:
    """Partial programs after as many steps. before: those that they follow, `parents` by number; rows: by which of the moves. Arrays are (program,),
    (program, kind) and, of memory, (program, part, kind), where kinds may be other ones."""

    level: int
    before: Sequence[State]
    moves: Sequence[Move]
    parents: Numbers
    rows: Numbers
    place: list[int]
    cost: Array
    forward: Array
    backward: Array
    memory: Array
    estimate: Array
    spent: Array

    @classmethod
    def of(cls, states: Sequence[State], parts: int) -> Level:
        """As arrays. parts: of the memory of a partial program."""
        none = np.zeros(len(states), dtype=np.int64)
        cost, estimate, spent = (np.array(own) for own in zip(*[(s.cost, s.estimate, s.spent) for s in states], strict=True))
        forward, backward = np.array([s.forward for s in states]), np.array([s.backward for s in states])
        memory = np.array([s.memory for s in states]).reshape(len(states), parts, -1)
        return cls(states[0].level, (), (), none, none, [s.place for s in states], cost, forward, backward, memory, estimate, spent)

    def __len__(self) -> int:
        return len(self.cost)

    def __getitem__(self, chosen: Mask) -> Level:
        if chosen.all():
            return self
        arrays = (self.cost, self.forward, self.backward, self.memory, self.estimate, self.spent)
        place = [own for own, keep in zip(self.place, chosen.tolist(), strict=False) if keep]
        cut = [own[chosen] if len(own) else own for own in arrays]  # some are not known yet
        return Level(self.level, self.before, self.moves, self.parents[chosen], self.rows[chosen], place, *cut)

    def by_place(self, function: Callable[[int], Vector]) -> Array:
        """(program, number): of what is available, asked once for all that are alike."""
        index: dict[int, int] = {}
        places = [index.setdefault(place, len(index)) for place in self.place]
        return np.array([function(place) for place in index])[places] if index else np.zeros((0, 1))

    def state(self, number: int) -> State:
        """One of them."""
        memory = tuple(self.memory[number].ravel().tolist())
        forward, backward = tuple(self.forward[number].tolist()), tuple(self.backward[number].tolist())
        cost, estimate, spent = float(self.cost[number]), float(self.estimate[number]), float(self.spent[number])
        before, move = self.before[self.parents[number]], self.moves[self.rows[number]]
        return State(self.level, self.place[number], cost, forward, backward, memory, estimate, spent, before, move)
