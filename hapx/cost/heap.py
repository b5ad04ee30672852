"""A heap as a simulation: what is allocated on every kind of devices, and the most that ever was.

In: storages that are made, shared and released. Out: `Heap.highest` and when that was. Invariant: a storage is there until its last holder
releases it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hapx.cost.terms import Vector


@dataclass(eq=False)
class Storage:
    """Memory that `holders` share: variables of the program, autograd, cotangents. freed: a gathered parameter that backward gathers again."""

    size: Vector
    holders: int = 1
    freed: bool = False
    buffers: Vector | float = 0.0


class Heap:
    """What is allocated, and the most that ever was."""

    def __init__(self, start: Vector):
        self.alive, self.highest, self.moments = start.copy(), start.copy(), ["at rest"] * len(start)

    def note(self, moment: str, extra: Vector | float = 0.0) -> None:
        now = self.alive + extra
        more = now > self.highest
        if np.logical_or.reduce(more):
            for k in np.flatnonzero(more):
                self.moments[k] = moment
            self.highest = np.maximum(now, self.highest)

    def new(self, size: Vector) -> Storage:
        self.alive = self.alive + size
        return Storage(size)

    def release(self, storage: Storage | None) -> None:
        if storage is None:
            return
        storage.holders -= 1
        assert storage.holders >= 0, "freed twice"
        if not storage.holders:
            self.alive = self.alive - storage.size


@dataclass
class Record:
    """What backward of an instruction needs. kept: storages that autograd holds; again: freed ones that it gathers again."""

    kept: list[Storage] = field(default_factory=list)
    again: list[Storage] = field(default_factory=list)
