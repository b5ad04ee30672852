"""Ratios of one program where its peak of memory decides: downhill by its cost, as far as the peak fits.

The linear program knows memory as a sum per kind of devices, within limits that the peak of another program or of other ratios has shown; where the
peak leaves more room than that at the ratios in between, it stops short of it. Here the peak itself is asked: first a part of a row is moved from one
kind to another, in parts that are halved as long as nothing is gained, then single units of small cuts are.

In: ratios and lengths of a program, its cost, whether lengths fit. Out: ratios and lengths that cost no more. Invariant: what is returned fits, if
what was given does; only what costs less is asked whether it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

from hapx.balancer.rounding import MAX_MOVES, Lengths, cheapest, improve
from hapx.cost.terms import Vector
from hapx.states import Cut, Row

PARTS = tuple(2.0**-n for n in range(3, 11))  # of a row, that are moved from one kind of devices to another
LEAST = 1e-4  # of the cost that a move must gain
FEW_KINDS = 5  # of devices, of which also two give to a third one together
TINY = 1e-12  # a share that is left over when all of it was moved

Ratios = Mapping[Row, Vector]


def descend(
    ratios: Ratios, lengths: Lengths, kinds: Sequence[Sequence[int]], movable: Sequence[Cut], deal: Callable[[Ratios], Lengths],
    cost: Callable[[Lengths], float], fits: Callable[[Lengths], bool],
) -> tuple[Ratios, Lengths]:  # fmt: skip
    """Ratios are per device of each kind. movable: the cuts that may change; deal: gives lengths for ratios, where those of other cuts stay."""
    rows = tuple(dict.fromkeys(c.row for c in movable))
    best, at, value = ratios, lengths, cost(lengths)
    for part in PARTS:
        for _ in range(MAX_MOVES):
            shifted = list(_shifted(best, rows, kinds, part))
            dealt = list(map(deal, shifted))
            costs = list(map(cost, dealt))
            found = cheapest(dealt, costs, value * (1 - LEAST), fits)
            if found is None:
                break
            best, at, value = shifted[found], dealt[found], costs[found]
    return best, improve(at, kinds, cost, movable, fits, LEAST)


def _shifted(ratios: Ratios, rows: Sequence[Row], kinds: Sequence[Sequence[int]], part: float) -> Iterator[Ratios]:
    """A part of a row given to one kind by another one, if kinds are few by two (that may be equally slow), or by all others; or all they have."""
    sizes, everyone = [len(k) for k in kinds], range(len(kinds))
    for row in rows:
        has = [float(share) * size for share, size in zip(ratios[row], sizes, strict=True)]
        for taker in everyone:
            others = [k for k in everyone if k != taker and has[k] > 0]
            two = combinations(others, 2) if len(kinds) <= FEW_KINDS else ()
            for givers in dict.fromkeys((*combinations(others, 1), *two, tuple(others))):
                whole = sum(has[k] for k in givers)
                if whole > 0:
                    given = min(part, whole)
                    own = ratios[row].copy()
                    for k in givers:
                        own[k] *= 1 - given / whole
                    own[taker] += given / sizes[taker]
                    own[own < TINY] = 0.0
                    yield {**ratios, row: own}
