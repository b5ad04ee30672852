"""How many micro-batches must be under way so that links are hidden, and what fewer of them cost.

In: seconds of the stages and of what crosses. Out: styles. A group of one stage runs forward m + w, backward m, forward m + w + 1, ... in turn,
with w of its own (and keeps w + 1 micro-batches). A micro-batch that goes from stage i up to stage j, turns there and comes back takes the trip
R_ij: the runs of both and of those between, and every link between them twice. Meanwhile i begins w_i - w_j + 1 others, so the seconds between two
micro-batches are

    T = max over i <= j of R_ij / (w_i - w_j + 1),   and at least what the busiest link takes for one.

These are all cycles of dependencies that matter: others, which turn several times, are put together from the same runs as some of these. 1F1B has
w_i - w_(i+1) = 1, so two equal stages that take t, with a link that takes x both ways, need t + x / 2. A difference of 2 ("eager" 1F1B: Zhuang et
al., MLSys 2023, section 4) hides all links up to x = t. With few micro-batches the steady state is never reached, and plain 1F1B may be a little
faster: `timetable` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import ceil

from hapx.schedules.styles import Crossing, Style
from hapx.schedules.timetable import Seconds

NOISE = 1e-9


def hidings(seconds: Seconds, crossings: Iterable[Crossing]) -> list[Style]:
    """Styles of a pipeline with one stage per group, from the one with the fewest micro-batches under way that hides all links to 1f1b, each with
    fewer than the one before, for a longer period."""
    given = tuple(crossings)
    trips = round_trips(seconds, given)
    least = shortest_period(seconds, given)
    periods = {least} | {t / k for (i, j), t in trips.items() for k in range(j - i + 1, ceil(t / least) if least else 0) if t / k > least}
    behind = [[(j, t) for (a, j), t in trips.items() if a == i] for i in range(len(seconds.forward))]
    return list(dict.fromkeys(_style(_under_way(behind, period)) for period in sorted(periods)))


def patient(seconds: Seconds) -> Seconds:
    """The same if whatever crosses had to wait for the longest of what else travels on its links, each time: in turns as regular as the formula's it
    never does, but then every delay is passed on. What hides this hides more."""
    wires = {pair: (s, frozenset(seconds.links.get(pair, (pair,)))) for pair, s in seconds.crossing.items()}
    longer = {
        pair: own + max((other for p, (other, shared) in wires.items() if p != pair and links & shared), default=0.0)
        for pair, (own, links) in wires.items()
    }
    return replace(seconds, crossing=longer)


def everywhere(groups: int, slack: int) -> Style:
    """1F1B with so many further micro-batches between every two groups. The formula leaves out that transfers wait for each other; where every link
    has some slack, no such delay is passed on for long."""
    return Style("1f1b-warm", tuple(slack * (groups - 1 - i) for i in range(groups)))


def nearby(style: Style, groups: int) -> Iterator[Style]:
    """Styles of one stage per group with a micro-batch more or fewer under way on one of them, or on it and all before it."""
    own = style.numbers or (0,) * groups
    for i, step in product(range(groups - 1), (1, -1)):
        for first in dict.fromkeys((i, 0)):
            numbers = tuple(n + step * (first <= k <= i) for k, n in enumerate(own))
            if min(numbers) >= 0 and all(a >= b for a, b in pairwise(numbers)):
                yield Style("1f1b-warm", numbers) if any(numbers) else Style("1f1b")


def shortest_period(seconds: Seconds, crossings: Iterable[Crossing]) -> float:
    """Seconds between two micro-batches that no schedule is below: of the slowest stage, or of the busiest link (one per crossing and direction,
    unless `Seconds.links` says what they share)."""
    busy: Counter[object] = Counter()
    for c in crossings:
        for pair in [(c.source, c.target), (c.target, c.source)][: 2 if c.gradient else 1]:
            busy.update(dict.fromkeys(seconds.links.get(pair, (pair,)), seconds.crossing.get(pair, 0.0)))
    return max([*(f + b for f, b in zip(seconds.forward, seconds.backward, strict=True)), *busy.values()])


def round_trips(seconds: Seconds, crossings: Sequence[Crossing]) -> dict[tuple[int, int], float]:
    """R_ij of every two stages i < j of which one needs what the other makes, on the longest ways."""
    back = [c for c in crossings if c.gradient]
    ways = [(crossings, seconds.forward, False), (back, seconds.backward, True)]
    found = [_longest(given, runs, seconds, turned) for given, runs, turned in ways]
    return {pair: there + found[1][pair] for pair, there in found[0].items() if pair in found[1]}


def _longest(crossings: Iterable[Crossing], runs: Sequence[float], seconds: Seconds, turned: bool) -> dict[tuple[int, int], float]:
    """Per stages i < j, seconds of the longest way between them, with the runs at both ends."""
    wires = {(c.source, c.target): seconds.crossing.get((c.target, c.source) if turned else (c.source, c.target), 0.0) for c in crossings}
    found: dict[tuple[int, int], float] = {}
    for i, j in sorted(combinations(range(len(runs)), 2), reverse=True):  # from the end
        ways = [w + (runs[j] if k == j else found[k, j]) for (source, k), w in wires.items() if source == i and (k == j or (k, j) in found)]
        if ways:
            found[i, j] = runs[i] + max(ways)
    return found


def _under_way(behind: Sequence[Sequence[tuple[int, float]]], period: float) -> list[int]:
    """The least w of each stage, of which none is as small as that of the next one. behind: of each stage, those that its round trips turn at, with
    what they take."""
    w = [0] * len(behind)
    for i in reversed(range(len(w) - 1)):
        own = [w[j] + ceil(t / period - NOISE) - 1 for j, t in behind[i]] if period else []
        w[i] = max([w[i + 1] + 1, *own])
    return w


def _style(under_way: Sequence[int]) -> Style:
    extra = tuple(w - (len(under_way) - 1 - i) for i, w in enumerate(under_way))
    return Style("1f1b-warm", extra) if any(extra) else Style("1f1b")
