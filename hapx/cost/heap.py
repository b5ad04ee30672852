"""A heap as a simulation: what is allocated on every kind of devices, and the most that ever was.

In: storages that are made, shared and released, and moments to look at. Out: what was there at each of them. Invariant: a storage is there until its
last holder releases it. Changes are only written down as they happen; sums are made once, over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hapx.cost.terms import Vector


@dataclass(eq=False, slots=True)
class Storage:
    """Memory that `holders` share: variables of the program, autograd, cotangents. freed: a gathered parameter that backward gathers again."""

    size: Vector
    holders: int = 1
    freed: bool = False
    buffers: Vector | None = None


@dataclass(frozen=True)
class Levels:
    """What was allocated, in bytes per kind. after: behind every change, with what was there before the first one; noted: at every moment that was
    noted."""

    after: Vector
    noted: Vector

    def highest(self, moments: int | None = None) -> tuple[Vector, Vector]:
        """The most that was there in the first so many moments (default: all), and the first moment when it was (-1: at rest)."""
        seen = np.concatenate([self.after[:1], self.noted[:moments]])
        at = seen.argmax(axis=0)
        return seen[at, np.arange(seen.shape[1])], at - 1


class Heap:
    """What is allocated. `moments`: what those are called that were noted."""

    def __init__(self, start: Vector):
        self._changes, self._signs, self._none = [start], [1.0], np.zeros_like(start)
        self.moments: list[str] = []
        self._at: list[int] = []
        self._extra: list[Vector] = []

    @property
    def changes(self) -> int:
        """How many there were so far: an index of `Levels.after`."""
        return len(self._changes) - 1

    def note(self, moment: str, extra: Vector | None = None) -> None:
        """A moment to look at. extra: what is there only then."""
        self.moments.append(moment)
        self._at.append(len(self._changes) - 1)
        self._extra.append(self._none if extra is None else extra)

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

    def levels(self) -> Levels:
        """All that happened."""
        kinds = len(self._none)
        after = np.cumsum(np.concatenate(self._changes).reshape(-1, kinds) * np.array(self._signs)[:, None], axis=0)
        extra = np.concatenate([self._none, *self._extra]).reshape(-1, kinds)[1:]
        return Levels(after, after[self._at] + extra)


@dataclass(slots=True)
class Record:
    """What backward of an instruction needs. kept: storages that autograd holds; again: freed ones that it gathers again."""

    kept: list[Storage] = field(default_factory=list)
    again: list[Storage] = field(default_factory=list)
