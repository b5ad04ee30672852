"""How many further micro-batches hide the links of a pipeline.

In: seconds of the stages and of what crosses. Out: a style. A group of one stage keeps a micro-batch from its forward to the end of its backward;
in between the micro-batch passes all later stages and every link twice. By Little's law k_i = ceil(R_i / T) micro-batches keep the slowest part
busy, with R_i that round trip and T the seconds between two micro-batches: of the slowest stage, or of the busiest link (one per crossing
and direction, unless `Seconds.links` says what they share). For equal stages and crossings for nothing k_i = S - i, which is 1F1B. With fewer
than about two micro-batches per stage the steady state is never reached, and plain 1F1B may be a little faster: `timetable` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil

from hapx.schedules.styles import Crossing, Style
from hapx.schedules.timetable import Seconds


def hiding(seconds: Seconds, crossings: Iterable[Crossing]) -> Style:
    """The style that keeps as many micro-batches as it takes to hide all links, of a pipeline with one stage per group; 1f1b where it takes none."""
    size = len(seconds.forward)
    both = [f + b for f, b in zip(seconds.forward, seconds.backward, strict=True)]
    wire = {(c.source, c.target): (_wire(seconds, c.source, c.target), _wire(seconds, c.target, c.source) if c.gradient else 0.0) for c in crossings}
    busy: Counter[object] = Counter()
    for (source, target), (there, back) in wire.items():
        for pair, taken in (((source, target), there), ((target, source), back)):
            busy.update(dict.fromkeys(seconds.links.get(pair, (pair,)), taken))
    period = max([*both, *busy.values()])
    trips = [0.0] * size
    for i in reversed(range(size)):
        trips[i] = both[i] + max((sum(s) + trips[j] for (source, j), s in wire.items() if source == i), default=0.0)
    kept = [ceil(trip / period - 1e-9) if period else 1 for trip in trips]
    extra = [max(0, k - (size - i)) for i, k in enumerate(kept)]
    for i in reversed(range(size - 1)):
        extra[i] = max(extra[i], extra[i + 1])
    return Style("1f1b-warm", tuple(extra)) if any(extra) else Style("1f1b")


def _wire(seconds: Seconds, source: int, target: int) -> float:
    return seconds.crossing.get((source, target), 0.0)
