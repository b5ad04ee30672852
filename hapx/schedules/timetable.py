"""When everything in a schedule happens: an event-driven simulation from plain numbers.

In: a schedule and `Seconds`: of a stage's forward and backward of one micro-batch, of its synchronisation and update, of what crosses between stages,
and which crossings share a link. Out: a `Timetable`: spans per group, the total, the share of the time in which a group has nothing to do.

The model, which is that of `hapx.schedules.make`: a group runs forwards and backwards one after another, in the order of its list; a run begins when
the run before it has ended and all it receives is there. A transfer begins when both ends have started it and all links that it travels on are free;
a link serves transfers in the order in which they could begin, one at a time, beside the runs of both ends. Synchronisation and update of
a stage begin when the stages tied to it are ready too; they run beside forwards and backwards of the group's other stages, one after another.

Closed forms that follow (S equal stages, n micro-batches, crossings for nothing): GPipe and 1F1B (n + S - 1)(f + b); interleaved, v stages of
(f + b) / v on each of G groups, n a multiple of G: (n + (G - 1) / v)(f + b) (Narayanan et al., SC 2021, section 2.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import Literal

from hapx.plan import Action, Schedule
from hapx.schedules.replay import receive_of, receives_by_run, send_of
from hapx.schedules.styles import tied_stages
from hapx.schedules.words import span_text

Lane = Literal["compute", "send", "receive", "synchronise"]


@dataclass(frozen=True, slots=True)
class Seconds:
    """forward, backward: of one micro-batch on each stage. update: synchronisation and update of each stage, once (empty: nothing). crossing: of one
    micro-batch's tensors from stage to stage in the direction in which they flow: (i, j) activations, (j, i) cotangents; 0 where nothing is said.
    links: by the same pairs, all that they travel on (network cards, in one direction); those without an entry have a link per pair of groups and
    direction."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...] = ()
    crossing: Mapping[tuple[int, int], float] = field(default_factory=dict)
    links: Mapping[tuple[int, int], tuple[Hashable, ...]] = field(default_factory=dict)

    def run(self, action: Action) -> float:
        return (self.forward if action.kind == "forward" else self.backward)[action.stage]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a group does on one of its streams, from `start` to `stop`. Transfers appear on both ends."""

    name: str
    stream: Lane
    start: float
    stop: float
    action: Action

    @property
    def duration(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True)
class Timetable:
    """One iteration: per group its spans in the order in which they begin (none of no length), and seconds from its start to its end."""

    spans: tuple[tuple[Span, ...], ...]
    total: float

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """Per group, the share of the total in which it neither runs nor synchronises nor updates."""
        return tuple(
            1 - _covered(s for s in spans if s.stream in ("compute", "synchronise")) / self.total if self.total else 0.0 for spans in self.spans
        )


def timetable(schedule: Schedule, seconds: Seconds, ties: Iterable[Iterable[int]] = ()) -> Timetable:
    """The schedule in time. ties: sets of stages that share a parameter. The schedule must have passed `check`."""
    clock = _Clock(_Known.of(schedule), seconds, tied_stages(ties, len(seconds.forward)))
    clock.run()
    spans = tuple(tuple(sorted(s, key=lambda span: span.start)) for s in clock.spans)
    return Timetable(spans, clock.total)


def duration_of(schedule: Schedule) -> Callable[[Seconds], float]:
    """`Timetable.total` by the seconds of the parts, without ties: what does not depend on these is found once, and no spans are kept."""
    known = _Known.of(schedule)

    def total(seconds: Seconds) -> float:
        clock = _Clock(known, seconds, tied_stages((), len(seconds.forward)), keeps=False)
        clock.run()
        return clock.total

    return total


def _covered(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans is under way."""
    total = end = 0.0
    for s in sorted(spans, key=lambda s: s.start):
        total += max(0.0, s.stop - max(s.start, end))
        end = max(end, s.stop)
    return total


@dataclass(frozen=True)
class _Known:
    """What a schedule says whatever its parts take. group_of: of each stage. receives: per group, what each run needs."""

    actions: tuple[tuple[Action, ...], ...]
    group_of: dict[int, int]
    receives: list[dict[tuple[str, int, int], list[Action]]]

    @staticmethod
    def of(schedule: Schedule) -> _Known:
        group_of = {a.stage: g for g, actions in enumerate(schedule.actions) for a in actions}
        return _Known(schedule.actions, group_of, [receives_by_run(actions) for actions in schedule.actions])


class _Clock:
    def __init__(self, known: _Known, seconds: Seconds, tied: tuple[frozenset[int], ...], keeps: bool = True):
        """keeps: spans; else only the total."""
        self.actions, self.seconds, self.tied, self.keeps = known.actions, seconds, tied, keeps
        self.group_of, self.receives = known.group_of, known.receives
        size = len(known.actions)
        self.spans: list[list[Span]] = [[] for _ in range(size)]
        self.place, self.running = [0] * size, [False] * size
        self.started: set[Action] = set()  # receives that one end has started
        self.arrived: set[Action] = set()
        self.queues: dict[Hashable, deque[Action]] = {}  # by link; what is first on all its links is on its way
        self.ready: set[int] = set()  # stages at their synchronisation
        self.synchronised = [0.0] * size
        self.now = self.total = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0

    def run(self) -> None:
        for group in range(len(self.actions)):
            self.advance(group)
        while self.events:
            self.now, _, happen = heappop(self.events)
            happen()
        assert all(p == len(a) for p, a in zip(self.place, self.actions, strict=True)), "the schedule is stuck: check it first"

    def advance(self, group: int) -> None:
        """Goes on until a run begins or must wait."""
        while not self.running[group] and self.place[group] < len(self.actions[group]):
            action = self.actions[group][self.place[group]]
            if action.kind in ("forward", "backward"):
                receives = self.receives[group].get((action.kind, action.stage, action.micro_batch), ())
                if any(r not in self.arrived for r in receives):
                    return
                self.running[group] = True
                self.span(group, "compute", action, self.seconds.run(action))
                self.after(self.seconds.run(action), lambda: self.ended(group))
            elif action.kind == "send":
                self.meet(receive_of(action))
            elif action.kind == "receive":
                self.meet(action)
            elif action.kind == "synchronise":
                self.synchronise(action)
            self.place[group] += 1

    def ended(self, group: int) -> None:
        self.running[group] = False
        self.advance(group)

    def meet(self, receive: Action) -> None:
        """One end of a transfer is ready; the second one lets it begin."""
        if receive not in self.started:
            self.started.add(receive)
            return
        for link in self.links(receive):
            self.queues.setdefault(link, deque()).append(receive)
        self.transfer(receive)

    def links(self, receive: Action) -> tuple[Hashable, ...]:
        pair = receive.peer, receive.stage
        return self.seconds.links.get(pair, (("between groups", self.group_of[receive.peer], self.group_of[receive.stage]),))

    def transfer(self, receive: Action) -> None:
        """Begins if it is the first on all its links."""
        if any(self.queues[link][0] is not receive for link in self.links(receive)):
            return
        duration = self.seconds.crossing.get((receive.peer, receive.stage), 0.0)
        self.span(self.group_of[receive.peer], "send", send_of(receive), duration)
        self.span(self.group_of[receive.stage], "receive", receive, duration)
        self.after(duration, lambda: self.delivered(receive))

    def delivered(self, receive: Action) -> None:
        self.arrived.add(receive)
        links = self.links(receive)
        for link in links:
            self.queues[link].popleft()
        for following in dict.fromkeys(queue[0] for link in links if (queue := self.queues[link])):
            self.transfer(following)
        self.advance(self.group_of[receive.stage])

    def synchronise(self, action: Action) -> None:
        self.ready.add(action.stage)
        joined = self.tied[action.stage]
        if joined <= self.ready:
            for stage in sorted(joined):
                group = self.group_of[stage]
                start = max(self.now, self.synchronised[group])
                duration = self.seconds.update[stage] if self.seconds.update else 0.0
                self.synchronised[group] = start + duration
                self.span(group, "synchronise", Action("synchronise", stage, action.micro_batch), duration, start)

    def span(self, group: int, stream: Lane, action: Action, duration: float, start: float | None = None) -> None:
        if duration > 0:
            start = self.now if start is None else start
            self.total = max(self.total, start + duration)
            if self.keeps:
                self.spans[group].append(Span(span_text(action), stream, start, start + duration, action))

    def after(self, duration: float, happen: Callable[[], None]) -> None:
        self.count += 1
        heappush(self.events, (self.now + duration, self.count, happen))
