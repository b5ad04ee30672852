"""Ratios of one program where its peak of memory decides: downhill by its cost, as far as the peak fits.

The linear program knows memory as a sum per kind of devices, within limits that the peak of another program or of other ratios has shown; where the
peak leaves more room than that at the ratios in between, it stops short of it. Here the peak itself is asked: first a part of a row is moved from one
kind to another, in parts that are halved as long as nothing is gained, then single units of small cuts are.

In: ratios and lengths of a program, its cost, whether lengths fit. Out: ratios and lengths that cost no more. Invariant: what is returned fits, if
what was given does; only what costs less is asked whether it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from hapx.balancer.rounding import FEW_UNITS, MAX_MOVES, Lengths, neighbours
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
    small = [c for c in movable if c.units <= FEW_UNITS]
    best, at, value = ratios, lengths, cost(lengths)

    def move(trials: Iterable[tuple[Ratios, Lengths]]) -> bool:
        """Takes the cheapest trial that fits, if one is cheaper."""
        nonlocal best, at, value
        priced = [(cost(own), k, shares, own) for k, (shares, own) in enumerate(trials) if own != at]
        for seconds, _, shares, own in sorted(p for p in priced if p[0] < value * (1 - LEAST)):
            if fits(own):
                best, at, value = shares, own, seconds
                return True
        return False

    for part in PARTS:
        for _ in range(MAX_MOVES):
            if not move((shares, deal(shares)) for shares in _shifted(best, rows, kinds, part)):
                break
    for _ in range(MAX_MOVES):
        if not move((best, own) for cut in small for own in neighbours(at, cut, kinds)):
            break
    return best, at


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
