"""A heap as a simulation: what is allocated on every kind of devices, and the most that ever was.

In: storages that are made, shared and released, and moments to look at; stretches that happen again and again. Out: what was there at each of them.
Invariant: a storage is there until its last holder releases it. Changes are only written down as they happen; sums are made once, over all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hapx.cost.terms import Vector


@dataclass(eq=False, slots=True)
class Storage:
    """Memory that `holders` share: variables of the program, autograd, cotangents. freed: a gathered parameter that backward gathers again."""

    size: Vector
    holders: int = 1
    freed: bool = False
    buffers: Vector | None = None


class Place(NamedTuple):
    """How many changes and notes were before."""

    changes: int
    notes: int


class Stretch(NamedTuple):
    """What happens between two places."""

    start: Place
    stop: Place


class Repeat(NamedTuple):
    """A stretch that happens once in each of these rounds, in this order."""

    stretch: Stretch
    rounds: Sequence[int]


class _Piece(NamedTuple):
    """A stretch in a round; later: by how many changes, for all the stretches that happened again before."""

    stretch: Stretch
    round: int
    later: int


@dataclass(frozen=True)
class Levels:
    """What was allocated, in bytes per kind. after: behind every change, with what was there before the first one; noted: at every moment that was
    noted; notes, rounds: the number of its note, and the round in which it was."""

    after: Vector
    noted: Vector
    notes: NDArray[np.int64]
    rounds: NDArray[np.int64]

    def highest(self, moments: int | None = None) -> tuple[Vector, Vector]:
        """The most that was there in the first so many moments (default: all), and the first moment when it was (-1: at rest)."""
        seen = np.concatenate([self.after[:1], self.noted[:moments]])
        at = seen.argmax(axis=0)
        return seen[at, np.arange(seen.shape[1])], at - 1


class Heap:
    """What is allocated. `moments`: those that were noted."""

    def __init__(self, start: Vector):
        self._changes, self._signs, self._none = [start], [1.0], np.zeros_like(start)
        self._unknown: dict[int, Any] = {}
        self.moments: list[Any] = []
        self._at: list[int] = []
        self._extra: list[Vector] = []

    @property
    def place(self) -> Place:
        return Place(len(self._changes), len(self.moments))

    def note(self, moment: Any, extra: Vector | None = None) -> None:
        """A moment to look at. extra: what is there only then."""
        self.moments.append(moment)
        self._at.append(len(self._changes) - 1)
        self._extra.append(self._none if extra is None else extra)

    def note_unknown(self, moment: Any, what: Any) -> None:
        """A moment to look at, with as much there only then as `levels` will be told."""
        self._unknown[len(self.moments)] = what
        self.note(moment)

    def add(self, size: Vector) -> None:
        """Memory that stays."""
        self._changes.append(size)
        self._signs.append(1.0)

    def new(self, size: Vector) -> Storage:
        self.add(size)
        return Storage(size)

    def release(self, storage: Storage | None) -> None:
        if storage is None:
            return
        storage.holders -= 1
        assert storage.holders >= 0, "freed twice"
        if not storage.holders:
            self._changes.append(storage.size)
            self._signs.append(-1.0)

    def levels(self, repeats: Sequence[Repeat] = (), size: Callable[[Any, int], Vector] | None = None) -> Levels:
        """All that happened. repeats: one behind the other; size: what else is there in an unknown moment of a round, asked for in their order."""
        pieces = list(self._pieces(repeats))
        changes, notes = (np.concatenate([np.arange(start[i], stop[i]) for (start, stop), _, _ in pieces]) for i in range(2))
        counts = [stop.notes - start.notes for (start, stop), _, _ in pieces]
        after = np.cumsum(self._signed(0, len(self._changes))[changes], axis=0)
        extra, unknown, before = self._extras(0, len(self._extra))[notes], sorted(self._unknown), 0
        for (start, stop), number, _ in pieces:
            for k in unknown[bisect_left(unknown, start.notes) : bisect_left(unknown, stop.notes)]:
                assert size is not None
                extra[before + k - start.notes] = size(self._unknown[k], number)
            before += stop.notes - start.notes
        at = np.array(self._at, dtype=int)[notes] + np.repeat([later for _, _, later in pieces], counts)
        return Levels(after, after[at] + extra, notes, np.repeat([number for _, number, _ in pieces], counts))

    def _pieces(self, repeats: Sequence[Repeat]) -> Iterator[_Piece]:
        done, later = Place(0, 0), 0
        for stretch, rounds in repeats:
            yield _Piece(Stretch(done, stretch.start), 0, later)
            length = stretch.stop.changes - stretch.start.changes
            for i, number in enumerate(rounds):
                yield _Piece(stretch, number, later + i * length)
            done, later = stretch.stop, later + (len(rounds) - 1) * length
        yield _Piece(Stretch(done, self.place), 0, later)

    def _signed(self, start: int, stop: int) -> Vector:
        signed: Vector = np.array(self._changes[start:stop]).reshape(-1, len(self._none)) * np.array(self._signs[start:stop])[:, None]
        return signed

    def _extras(self, start: int, stop: int) -> Vector:
        return np.array(self._extra[start:stop]).reshape(-1, len(self._none))

    def alike(self, one: Stretch, other: Stretch) -> bool:
        """Whether the same happened."""
        (a, b), (c, d) = one, other
        asked = [[k - start for k in self._unknown if start <= k < stop] for start, stop in ((a.notes, b.notes), (c.notes, d.notes))]
        noted = [[at - start.changes for at in self._at[start.notes : stop.notes]] for start, stop in (one, other)]
        return bool(
            asked[0] == asked[1] and noted[0] == noted[1]
            and np.array_equal(self._signed(a.changes, b.changes), self._signed(c.changes, d.changes))
            and np.array_equal(self._extras(a.notes, b.notes), self._extras(c.notes, d.notes))
        )  # fmt: skip


def moved(place: Place, repeats: Sequence[Repeat]) -> Place:
    """A place behind some of the repeats, with all that happens again before it."""
    before = [(stretch, len(rounds) - 1) for stretch, rounds in repeats if stretch.stop.changes <= place.changes]
    return Place(*(place[i] + sum(more * (stretch.stop[i] - stretch.start[i]) for stretch, more in before) for i in range(2)))


@dataclass(slots=True)
class Record:
    """What backward of an instruction needs. kept: storages that autograd holds; again: freed ones that it gathers again."""

    kept: list[Storage] = field(default_factory=list)
    again: list[Storage] = field(default_factory=list)
