"""Which gradients are summed together. The runtime, the cost of memory and the simulator all ask here.

In: gradients in the order in which backward meets them. Out: the number of each one's bucket. Invariant: a bucket holds gradients of one group (what
is summed over the same axes, in the same dtype), and at most the limit unless one gradient alone is larger.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

BUCKET_BYTES = 25 * 2**20


def in_buckets(gradients: Iterable[tuple[Hashable, float]], limit: float = BUCKET_BYTES) -> list[int]:
    """The bucket of every gradient (group, bytes), counted from 0 in the order of first members. A bucket is closed before it would exceed `limit`
    bytes."""
    numbers: list[int] = []
    held: list[float] = []  # bytes of each bucket
    running: dict[Hashable, int] = {}  # the bucket of a group that is still open
    for group, size in gradients:
        number = running.get(group)
        if number is None or held[number] + size > limit:
            number = running[group] = len(held)
            held.append(0.0)
        held[number] += size
        numbers.append(number)
    return numbers
