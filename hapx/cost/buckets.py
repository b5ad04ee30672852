"""The memory of buckets of gradients (`hapx.buckets`), for every kind of devices at once.

In: the parameters that enter the gradient synchroniser, in order of first use. Out: bytes that are there for a moment when a gradient arrives.
Invariant: gradients stay until all of their bucket are there; then the bucket is allocated, they are copied into it, and it stays in their place: the
summed gradients are views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hapx.buckets import in_buckets
from hapx.cost.terms import Vector
from hapx.ir import TensorRef
from hapx.states import Placement

Key = tuple[int, tuple[int, ...]]  # the number of a parameter, and the axes over which its gradient is summed


@dataclass(frozen=True, slots=True)
class Use:
    """A parameter that enters the synchroniser, stored in `placement`."""

    key: Key
    placement: Placement
    ref: TensorRef


class Buckets:
    """part: bytes per kind of a tensor of some bytes in a placement."""

    def __init__(self, uses: Sequence[Use], part: Callable[[Placement, float], Vector]):
        self._bucket: dict[Key, list[int]] = {u.key: [] for u in uses}
        self._sizes: list[list[float]] = []
        self._awaited: list[list[int]] = []
        local = {u.key: part(u.placement, float(u.ref.bytes)) for u in uses}
        for k in range(len(next(iter(local.values()))) if local else 0):
            self._lay_out(uses, {key: float(v[k]) for key, v in local.items()})

    def _lay_out(self, uses: Sequence[Use], local: dict[Key, float]) -> None:
        """The buckets of one kind."""
        backward = uses[::-1]
        numbers = in_buckets(((use.key[1], use.ref.dtype), local[use.key]) for use in backward)
        sizes, members = [0.0] * (1 + max(numbers)), [0] * (1 + max(numbers))
        for use, number in zip(backward, numbers, strict=True):
            sizes[number] += local[use.key]
            members[number] += 1
            self._bucket[use.key].append(number)
        self._sizes.append(sizes)
        self._awaited.append(members)

    def fill(self, key: Key) -> Vector:
        """Bytes per kind of the bucket that the arrival of a gradient makes complete, beside the gradients."""
        made = []
        for index, sizes, awaited in zip(self._bucket[key], self._sizes, self._awaited, strict=True):
            awaited[index] -= 1
            made.append(0.0 if awaited[index] else sizes[index])
        return np.array(made)
