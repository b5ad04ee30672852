"""When everything in an iteration happens, on every device.

In: what a simulation has recorded. Out: spans per device, a trace for Perfetto, text. Invariant: no span ends after the total.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

# "inside": communication of the inner axis of two levels, or inside of a stage of several
Stream = Literal["compute", "communication", "inside"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs on a stream of a device, from `start` to `stop` (seconds since the iteration began)."""

    name: str
    stream: Stream
    start: float
    stop: float

    @property
    def duration(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Event:
    """A span on every device: start and stop per kind."""

    name: str
    stream: Stream
    start: tuple[float, ...]
    stop: tuple[float, ...]


@dataclass(frozen=True)
class Timeline:
    """One iteration. `kind_of`: (device, by its number in the cluster; its kind). `total`: seconds. `named`: what a trace calls the devices."""

    kind_of: tuple[tuple[int, int], ...]
    events: tuple[Event, ...]
    total: float
    named: tuple[tuple[int, str], ...] = ()

    @cached_property
    def spans(self) -> dict[int, tuple[Span, ...]]:
        """Per device, its spans in the order in which they were started. Spans of no length are left out."""
        of = {
            k: tuple(Span(e.name, e.stream, e.start[k], e.stop[k]) for e in self.events if e.stop[k] > e.start[k])
            for k in {k for _, k in self.kind_of}
        }
        return {device: of[k] for device, k in self.kind_of}

    def busy(self, stream: Stream = "compute") -> dict[int, float]:
        """Seconds per device in which a stream works (a collective's waiting for the last device is not work)."""
        return {device: sum(s.duration for s in spans if s.stream == stream) for device, spans in self.spans.items()}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the Chrome trace format, which Perfetto reads: a process per device, a thread per stream (further ones where its spans overlap),
        microseconds."""
        events: list[dict[str, object]] = []
        names = dict(self.named)
        for device, spans in self.spans.items():
            events.append({"ph": "M", "name": "process_name", "pid": device, "args": {"name": names.get(device, f"device {device}")}})
            lanes = _lanes(spans)
            threads = {at: k for k, at in enumerate(dict.fromkeys([*((stream, 0) for stream in get_args(Stream)), *sorted(lanes)]))}
            for (stream, lane), thread in threads.items():
                name = f"{stream} {lane + 1}" if lane else stream
                events.append({"ph": "M", "name": "thread_name", "pid": device, "tid": thread, "args": {"name": name}})
            for s, at in zip(spans, lanes, strict=True):
                where = {"pid": device, "tid": threads[at]}
                events.append({"ph": "X", "name": s.name, "cat": s.stream, "ts": s.start * 1e6, "dur": s.duration * 1e6, **where})
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def __str__(self) -> str:
        busy, outside, inside = self.busy(), self.busy("communication"), self.busy("inside")
        moving = {device: seconds + inside[device] for device, seconds in outside.items()}
        lines = [f"one iteration: {self.total * 1e3:.3f} ms"]
        share = 1.0 / self.total if self.total else 0.0
        return "\n".join(lines + [f"  device {d}: computes {b * share:4.0%}, communicates {moving[d] * share:4.0%}" for d, b in busy.items()])


def _lanes(spans: Sequence[Span]) -> list[tuple[Stream, int]]:
    """Per span, its stream and a number, so that spans of equal ones do not overlap."""
    ends: dict[tuple[Stream, int], float] = {}
    found: dict[int, tuple[Stream, int]] = {}
    for i in sorted(range(len(spans)), key=lambda i: spans[i].start):
        s, lane = spans[i], 0
        while ends.get((s.stream, lane), 0.0) > s.start + 1e-12:
            lane += 1
        found[i] = s.stream, lane
        ends[s.stream, lane] = s.stop
    return [found[i] for i in range(len(spans))]
