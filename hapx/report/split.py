"""Where the time of an iteration goes, from the simulator's timeline.

In: a `Timeline`. Out: a `TimeSplit` per device, or of the device that computes longest. Equation: with compute spans and the collectives it waits for
on one line, what is left of the iteration is either spent on gradient synchronisation that compute does not hide, or on waiting for others:

    total = forward + backward + update + communication (forward and backward) + synchronisation + waiting
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hapx.plan import Plan
from hapx.report.render import new_table, render
from hapx.report.words import ranges_text, time_text
from hapx.simulate import simulate
from hapx.timeline import Span, Timeline

# of pipelines: runs of a stage's backward, and what is between stages, beside runs: a device that has nothing else to do waits
BACKWARD, TRANSFER = re.compile(r"B\d+@"), re.compile(r"[FB]\d+ \d+>\d+")


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Seconds of one iteration on a device. forward, backward, update: compute; forward_communication, backward_communication: collectives that the
    program waits for; `hidden`: gradient synchronisation that runs behind compute (not part of the sum)."""

    total: float
    forward: float
    backward: float
    update: float
    forward_communication: float
    backward_communication: float
    synchronisation: float
    waiting: float
    hidden: float

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.update

    @property
    def communication(self) -> float:
        return self.forward_communication + self.backward_communication

    def __str__(self) -> str:
        times = {"compute": self.compute, "communication": self.communication, "sync": self.synchronisation, "waiting": self.waiting}
        shown = {name: time_text(t) for name, t in times.items() if t > 1e-3 * self.total}
        if self.hidden > 1e-3 * self.total:
            shown["sync"] = f"{shown.get('sync', '0')} (+{time_text(self.hidden)} hidden)"
        return f"{time_text(self.total)} = {' + '.join(f'{name} {t}' for name, t in shown.items()) or '0'}"


def time_split(plan: Plan) -> TimeSplit:
    """Of the plan's first training program, on the device that computes longest."""
    return split_of(simulate(plan))


def split_of(timeline: Timeline, device: int | None = None) -> TimeSplit:
    """`device`: None for the one that computes longest."""
    if device is None:
        compute = timeline.busy("compute")
        device = max(compute, key=lambda d: (compute[d], -d))
    spans = [s for s in timeline.spans[device] if not TRANSFER.fullmatch(s.name)]
    busy = [s for s in spans if not _synchronises(s)]
    behind = _union((s.start, s.stop) for s in spans if _synchronises(s))
    seconds = {(kind, part): sum(s.duration for s in busy if _kind(s) == kind and _part(s) == part) for kind, part in PARTS}
    synchronised = sum(stop - start for start, stop in behind)
    gaps = list(_gaps(((s.start, s.stop) for s in busy), timeline.total))
    exposed = sum(max(min(b, d) - max(a, c), 0.0) for a, b in gaps for c, d in behind)
    waiting = max(timeline.total - sum(seconds.values()) - exposed, 0.0)
    forward, backward, update, forward_communication, backward_communication = seconds.values()
    return TimeSplit(
        timeline.total, forward, backward, update, forward_communication, backward_communication, exposed, waiting, max(synchronised - exposed, 0.0)
    )


PARTS = (("compute", "forward"), ("compute", "backward"), ("compute", "update"), ("communication", "forward"), ("communication", "backward"))


def _kind(span: Span) -> str:
    return "compute" if span.stream == "compute" else "communication"


def _part(span: Span) -> str:
    if span.name.startswith("update"):
        return "update"
    return "backward" if span.name.endswith("backward") or BACKWARD.match(span.name) else "forward"


def _synchronises(span: Span) -> bool:
    return "synchronise bucket" in span.name


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


def time_table(plan: Plan, timeline: Timeline) -> str:
    """One row per group of devices whose times are alike; the columns of a row sum to the iteration."""
    columns = ("forward", "backward", "update", "comm. forward", "comm. backward", "sync", "waiting", "sync hidden")
    table = new_table("device", "type", *columns, right=columns)
    alike: dict[tuple[str, ...], list[int]] = {}
    for device, _ in timeline.kind_of:
        s = split_of(timeline, device)
        parts = (s.forward, s.backward, s.update, s.forward_communication, s.backward_communication, s.synchronisation, s.waiting, s.hidden)
        alike.setdefault((plan.cluster.devices[device].type, *(time_text(t) for t in parts)), []).append(device)
    for (kind, *times), devices in alike.items():
        table.add_row(ranges_text(devices), kind, *times)
    return render(table)
