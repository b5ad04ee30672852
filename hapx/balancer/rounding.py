"""Ratios to integer lengths, one vector per cut.

In: ratios per device along the uneven axis, the cuts in use, what lengths cost. Out: per cut, lengths in units (grains) that sum to its units.

Largest remainder first: every device gets the floor of its share, the units left go to the largest remainders, so no length is a whole unit away
from its share. A cut of few units is then improved by moving single units between kinds of devices as long as that makes the program cheaper: with
12 heads on 8 devices, what the linear program hides in fractions is a good part of the time.

Invariant: lengths are whole, not negative, and sum to the units; equal cuts have equal lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heapreplace

import numpy as np

from hapx.cost.terms import Vector
from hapx.states import Cut, Row

Lengths = dict[Cut, tuple[int, ...]]
FEW_UNITS = 256
MAX_MOVES = 64


def per_device(shares: Sequence[float], kinds: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Shares per kind as shares per coordinate."""
    result = [0.0] * sum(map(len, kinds))
    for share, coordinates in zip(shares, kinds, strict=True):
        for c in coordinates:
            result[c] = float(share)
    return tuple(result)


def deal(units: int, shares: Sequence[float]) -> tuple[int, ...]:
    """`units` dealt out in proportion to shares, by largest remainder (the first of equal ones)."""
    exact, lengths = _floors(units, shares)
    left = units - sum(lengths)
    if left:
        more = [n - x for n, x in zip(lengths, exact, strict=True)]
        for i in sorted(range(len(more)), key=more.__getitem__)[:left]:
            lengths[i] += 1
    return tuple(lengths)


def level(units: int, shares: Sequence[float]) -> tuple[int, ...]:
    """`units` dealt out such that the fullest device, measured by its share, is as little full as can be: by floors, then one by one to whom one more
    fills least. With few units that is not in proportion: of 16 units for shares of 4, 4, 1, 1 and 1 it is 7, 6, 1, 1, 1 instead of 6, 6, 2, 1, 1."""
    exact, lengths = _floors(units, shares)
    takers = [((lengths[i] + 1) / x, i) for i, x in enumerate(exact) if x > 0]
    heapify(takers)
    for _ in range(units - sum(lengths)):
        _, i = takers[0]
        lengths[i] += 1
        heapreplace(takers, ((lengths[i] + 1) / exact[i], i))
    return tuple(lengths)


def _floors(units: int, shares: Sequence[float]) -> tuple[list[float], list[int]]:
    """`units` in proportion to shares, exactly and rounded down."""
    total = float(sum(shares))
    assert total > 0 and min(shares) >= 0, f"shares {shares} cannot deal out anything"
    exact = [units * s / total for s in shares]
    return exact, [int(x + 1e-9) for x in exact]


def fullest(lengths: Sequence[int], shares: Sequence[float]) -> float:
    """The largest length, measured by its share; inf where what has no share has a length."""
    return max((n / s if s > 0 else np.inf for n, s in zip(lengths, shares, strict=True) if n), default=0.0)


def round_ratios(ratios: Mapping[Row, Sequence[float]], cuts: Iterable[Cut]) -> Lengths:
    """Lengths of every cut by largest remainder; `ratios` are per coordinate."""
    return _each(deal, ratios, cuts)


def level_ratios(ratios: Mapping[Row, Sequence[float]], cuts: Iterable[Cut]) -> Lengths:
    """The same, with every device as little full as can be."""
    return _each(level, ratios, cuts)


def _each(way: Callable[[int, Sequence[float]], tuple[int, ...]], ratios: Mapping[Row, Sequence[float]], cuts: Iterable[Cut]) -> Lengths:
    """Lengths of every cut; cuts of equal rows and units have the same."""
    known: dict[tuple[Row, int], tuple[int, ...]] = {}
    found: Lengths = {}
    for cut in cuts:
        key = cut.row, cut.units
        if key not in known:
            known[key] = way(cut.units, ratios[cut.row])
        found[cut] = known[key]
    return found


def cheapest(trials: Sequence[Lengths], costs: Sequence[float], below: float, fits: Callable[[Lengths], bool]) -> int | None:
    """Which of the trials that cost less than that is the cheapest that fits; what is dearer is not asked whether it fits."""
    cheaper = sorted((seconds, k) for k, seconds in enumerate(costs) if seconds < below)
    return next((k for _, k in cheaper if fits(trials[k])), None)


def improve(
    lengths: Mapping[Cut, tuple[int, ...]], kinds: Sequence[Sequence[int]], cost: Callable[[Lengths], float], movable: Iterable[Cut],
    fits: Callable[[Lengths], bool] = lambda _: True, least: float = 1e-9,
) -> Lengths:  # fmt: skip
    """Moves single units of small cuts from one kind to another while that lowers `cost` (inf: does not fit) by this part of it at least, and fits.

    Within a kind only the largest length counts, so a unit leaves a device with the most and goes to one with the fewest."""
    best = dict(lengths)
    value = cost(best)
    small = [c for c in movable if c.units <= FEW_UNITS]
    for _ in range(MAX_MOVES):
        trials = [trial for cut in small for trial in neighbours(best, cut, kinds)]
        costs = [cost(t) for t in trials]
        found = cheapest(trials, costs, value * (1 - least), fits)
        if found is None:
            break
        best, value = trials[found], costs[found]
    return best


def neighbours(lengths: Lengths, cut: Cut, kinds: Sequence[Sequence[int]], givers: Sequence[Sequence[int]] | None = None) -> Iterable[Lengths]:
    """The lengths with the maximum of one kind one lower and the units that this frees given to one other kind. givers: the kinds that may give."""
    own = lengths[cut]
    for giver in kinds if givers is None else givers:
        top = max(own[c] for c in giver)
        full = [c for c in giver if own[c] == top]
        # a kind is as slow as its fullest device: all of the fullest give a unit, or nothing is gained
        if top == 0:
            continue
        for taker in kinds:
            if taker is giver and len(full) == len(giver):
                continue
            changed = list(own)
            for c in full:
                changed[c] -= 1
            for _ in full:
                fewest = min((c for c in taker if taker is not giver or c not in full), key=lambda c: changed[c])
                changed[fewest] += 1
            if tuple(changed) != own:
                yield {**lengths, cut: tuple(changed)}


def fit(lengths: Mapping[Cut, tuple[int, ...]], kinds: Sequence[Sequence[int]], used: Callable[[Lengths], Vector], movable: Iterable[Cut]) -> Lengths:
    """Moves units until memory fits: `used` is what part of its limit every kind uses (<= 1: fits). Units of the fullest kind first, and of others,
    whose largest lengths may be what buffers of all are made for, only where that leads nowhere. Returns the best found."""
    best, cuts = dict(lengths), list(movable)
    parts = used(best)
    while parts.max() > 1:
        for givers in ([kinds[int(parts.argmax())]], None):
            trials = [t for cut in cuts for t in neighbours(best, cut, kinds, givers)]
            found = [used(t) for t in trials]
            highest = [float(own.max()) for own in found]
            if highest and min(highest) < parts.max() - 1e-15:
                break
        else:
            break
        at = highest.index(min(highest))
        best, parts = trials[at], found[at]
    return best
