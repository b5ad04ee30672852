"""Where the time of an iteration goes, from the simulator's timeline.

In: a `Timeline`. Out: a `TimeSplit` of the device that computes longest. Equation: with compute spans and the collectives it waits for on
one line, what is left of the iteration is either spent on gradient synchronisation that compute does not hide, or on waiting for others:

    total = compute + communication + synchronisation + waiting
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hapx.plan import Plan
from hapx.report.words import time_text
from hapx.simulate import Span, Timeline, simulate


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Seconds of one iteration on the busiest device. `hidden`: gradient synchronisation that runs behind compute (not part of the sum)."""

    total: float
    compute: float
    communication: float
    synchronisation: float
    waiting: float
    hidden: float

    def __str__(self) -> str:
        times = {"compute": self.compute, "communication": self.communication, "sync": self.synchronisation, "waiting": self.waiting}
        shown = {name: time_text(t) for name, t in times.items() if t > 1e-3 * self.total}
        if self.hidden > 1e-3 * self.total:
            shown["sync"] = f"{shown.get('sync', '0')} (+{time_text(self.hidden)} hidden)"
        return f"{time_text(self.total)} = {' + '.join(f'{name} {t}' for name, t in shown.items()) or '0'}"


def time_split(plan: Plan) -> TimeSplit:
    """Of the plan's first training program."""
    return split_of(simulate(plan))


def split_of(timeline: Timeline) -> TimeSplit:
    compute = timeline.busy("compute")
    device = max(compute, key=lambda d: (compute[d], -d))
    spans = timeline.spans[device]
    busy = [s for s in spans if not _synchronises(s)]
    behind = _union((s.start, s.stop) for s in spans if _synchronises(s))
    communication = sum(s.duration for s in busy if s.stream != "compute")
    synchronised = sum(stop - start for start, stop in behind)
    gaps = list(_gaps(((s.start, s.stop) for s in busy), timeline.total))
    exposed = sum(max(min(b, d) - max(a, c), 0.0) for a, b in gaps for c, d in behind)
    waiting = max(timeline.total - compute[device] - communication - exposed, 0.0)
    return TimeSplit(timeline.total, compute[device], communication, exposed, waiting, max(synchronised - exposed, 0.0))


def _synchronises(span: Span) -> bool:
    return span.name.startswith("synchronise")


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The intervals without their overlaps: buckets may be on their way between machines and inside them at once."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _gaps(busy: Iterable[tuple[float, float]], total: float) -> Iterable[tuple[float, float]]:
    """What the intervals leave free of [0, total]."""
    at = 0.0
    for start, stop in sorted(busy):
        if start > at:
            yield at, start
        at = max(at, stop)
    if total > at:
        yield at, total
