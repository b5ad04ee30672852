"""One iteration of a plan of several stages in time: what every device does when.

In: a plan (the timetable of its groups, and the events of every stage's program). Out: a `Timeline`. Every run of a micro-batch is filled with what
the stage's program does in it on each kind of its devices: what it computes between two collectives is one span, "F3@1" (forward of micro-batch 3 on
stage 1) or "B3@1"; its collectives are on the stream "inside". Between stages, on the stream "communication", "F3 0>1" are activations of micro-batch
3 on their way from stage 0 to stage 1, "B3 1>0" their cotangents. Gradients are synchronised beside the last backward and after it; then "update 1".
Invariant: the total is that of the timetable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hapx.plan import Plan
from hapx.predict import Staged
from hapx.schedules import Span as Run
from hapx.simulate import stage_events
from hapx.timeline import Event, Stream, Timeline


class Piece(NamedTuple):
    """Something in a run, from `start` to `stop` seconds after it began, on some kinds of devices. name: added to that of the run."""

    name: str
    stream: Stream
    kinds: tuple[int, ...]
    start: float
    stop: float


def pipeline_timeline(plan: Plan) -> Timeline:
    """One iteration of a plan's first program."""
    staged = Staged(plan)
    kinds = _Kinds(staged)
    runs = [_StageRuns(staged, stage, kinds) for stage in range(len(plan.stages))]
    last = len(plan.schedules[plan.first].micro_batches) - 1
    events: list[Event] = []
    for group, spans in enumerate(staged.timetable.spans):
        for run in spans:
            pieces = runs[run.action.stage].pieces(run, run.action.micro_batch == last, kinds.of_devices(plan.groups[group]))
            name = f"update {run.action.stage}" if run.stream == "synchronise" else run.name
            events += [kinds.event(f"{name}{p.name}", p, run.start) for p in pieces]
    named = tuple((d, f"device {d}, {_hosted(plan, d)}") for d, _ in kinds.kind_of)
    return Timeline(kinds.kind_of, tuple(sorted(events, key=lambda e: max(e.start))), staged.timetable.total, named)


def _hosted(plan: Plan, device: int) -> str:
    own = plan.stages_of(device)
    return f"stage{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}" if own else "idle"


class _Kinds:
    """Devices that are of one kind in all stages that they have a part in."""

    def __init__(self, staged: Staged):
        views = [staged.exact(stage).view.devices for stage in range(len(staged.plan.stages))]
        profile: dict[int, tuple[tuple[int, int], ...]] = {}
        for device in range(staged.plan.cluster.num_devices):
            profile[device] = tuple((stage, k) for stage, view in enumerate(views) for k, members in enumerate(view) if device in members)
        numbers: dict[tuple[tuple[int, int], ...], int] = {}
        self.kind_of = tuple((device, numbers.setdefault(own, len(numbers))) for device, own in profile.items())
        self._numbers, self._of = numbers, dict(self.kind_of)

    def of_stage(self, stage: int, kind: int) -> tuple[int, ...]:
        """The kinds that are of a kind of a stage's program."""
        return tuple(number for own, number in self._numbers.items() if (stage, kind) in own)

    def of_devices(self, devices: Sequence[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._of[d] for d in devices))

    def event(self, name: str, piece: Piece, begin: float) -> Event:
        """A piece of a run; on other kinds it has no length."""
        start, stop = [begin] * len(self._numbers), [begin] * len(self._numbers)
        for k in piece.kinds:
            start[k], stop[k] = begin + piece.start, begin + piece.stop
        return Event(name, piece.stream, tuple(start), tuple(stop))


class _StageRuns:
    """What a stage's program does in a run."""

    def __init__(self, staged: Staged, stage: int, kinds: _Kinds):
        best = staged.candidates[stage]
        found = stage_events(best.program, best.theory.graph, staged.exact(stage))
        times = staged.times[stage]
        self.forward = list(_pieces(found.forward, stage, kinds, times.forward))
        self.backward = list(_pieces(found.backward, stage, kinds, times.backward))
        self.beside = list(_pieces(found.synchronise, stage, kinds, times.backward + times.iteration))
        self.after = list(_pieces(found.update, stage, kinds, times.iteration))

    def pieces(self, run: Run, last: bool, devices: tuple[int, ...]) -> list[Piece]:
        if run.stream in ("send", "receive"):
            return [Piece("", "communication", devices, 0.0, run.duration)]
        if run.action.kind == "forward":
            return self.forward
        if run.action.kind == "backward":
            return [*self.backward, *self.beside] if last else self.backward
        return self.after


def _pieces(events: Sequence[Event], stage: int, kinds: _Kinds, seconds: float) -> Iterator[Piece]:
    """Events of a run that takes so long, kind by kind; compute without a gap is one piece. A kind that was ahead of the others begins with them."""
    for k in range(len(events[0].start) if events else 0):
        own, together, at = kinds.of_stage(stage, k), None, 0.0
        for e in (e for e in events if e.stop[k] > e.start[k]):
            start = max(e.start[k], at)
            at = min(start + e.stop[k] - e.start[k], seconds)
            if e.stream != "compute":
                yield Piece(f" {e.name}", "inside", own, start, at)
            elif together is not None and together.stop == start:
                together = together._replace(stop=at)
            else:
                if together is not None:
                    yield together
                together = Piece("", "compute", own, start, at)
        if together is not None:
            yield together
