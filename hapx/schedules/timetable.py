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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from hapx.plan import Action, Schedule
from hapx.schedules.replay import receive_of, send_of
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
    found: list[list[Span]] = [[] for _ in schedule.actions]

    def kept(group: int, lane: Lane, action: Action, start: float, duration: float) -> None:
        if duration > 0:
            found[group].append(Span(span_text(action), lane, start, start + duration, action))

    total = _happen(_Coded.of(schedule), seconds, tied_stages(ties, len(seconds.forward)), kept)
    return Timetable(tuple(tuple(sorted(spans, key=lambda span: span.start)) for spans in found), total)


def duration_of(schedule: Schedule) -> Callable[[Seconds], float]:
    """`Timetable.total` by the seconds of the parts, without ties: what does not depend on these is found once, and no spans are kept."""
    coded = _Coded.of(schedule)
    return lambda seconds: _happen(coded, seconds, tied_stages((), len(seconds.forward)))


def _covered(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans is under way."""
    total = end = 0.0
    for s in sorted(spans, key=lambda s: s.start):
        total += max(0.0, s.stop - max(s.start, end))
        end = max(end, s.stop)
    return total


class _Step(NamedTuple):
    """What a group does next. number: of a run, of a transfer (one of its ends), of the stage to be synchronised. length: of a run, its place among
    forward and backward of stage after stage."""

    what: int
    number: int
    length: int
    action: Action


_RUN, _MEET, _SYNCHRONISE = range(3)


@dataclass(frozen=True)
class _Coded:
    """What a schedule says whatever its parts take, in integers. steps: per group. waits: per run, transfers that it waits for. transfers: the
    receives; for each, the run that waits for it, and its number among the `pairs` of stages that tensors cross between. group_of: of each stage."""

    steps: list[list[_Step]]
    waits: list[int]
    transfers: list[Action]
    awaited_by: list[int]
    pair_of: list[int]
    pairs: list[tuple[int, int]]
    group_of: dict[int, int]

    @staticmethod
    def of(schedule: Schedule) -> _Coded:
        runs: dict[tuple[str, int, int], int] = {}
        transfers: dict[Action, int] = {}
        steps: list[list[_Step]] = []
        for actions in schedule.actions:
            own: list[_Step] = []
            for a in actions:
                if a.kind in ("forward", "backward"):
                    number = runs.setdefault((a.kind, a.stage, a.micro_batch), len(runs))
                    own.append(_Step(_RUN, number, 2 * a.stage + (a.kind == "backward"), a))
                elif a.kind in ("send", "receive"):
                    own.append(_Step(_MEET, transfers.setdefault(receive_of(a) if a.kind == "send" else a, len(transfers)), 0, a))
                elif a.kind == "synchronise":
                    own.append(_Step(_SYNCHRONISE, a.stage, 0, a))
            steps.append(own)
        awaited_by = [runs[r.direction, r.stage, r.micro_batch] for r in transfers]
        waits = [0] * len(runs)
        for run in awaited_by:
            waits[run] += 1
        pairs: dict[tuple[int, int], int] = {}
        pair_of = [pairs.setdefault((r.peer, r.stage), len(pairs)) for r in transfers]
        group_of = {a.stage: g for g, actions in enumerate(schedule.actions) for a in actions}
        return _Coded(steps, waits, list(transfers), awaited_by, pair_of, list(pairs), group_of)


Kept = Callable[[int, Lane, Action, float, float], None]


def _happen(coded: _Coded, seconds: Seconds, tied: Sequence[frozenset[int]], kept: Kept | None = None) -> float:
    """Lets everything happen; the seconds from the first start to the last end. kept: is told the group, lane, action, start and duration of each
    span. One function, as schedules are simulated by the hundred."""
    steps, missing, awaited_by, pair_of, group_of = coded.steps, coded.waits.copy(), coded.awaited_by, coded.pair_of, coded.group_of
    lengths = [t for both in zip(seconds.forward, seconds.backward, strict=True) for t in both]
    crossing = [seconds.crossing.get(pair, 0.0) for pair in coded.pairs]
    numbers: dict[Hashable, int] = {}
    links = [
        tuple(numbers.setdefault(link, len(numbers)) for link in seconds.links.get((i, j), (("between groups", group_of[i], group_of[j]),)))
        for i, j in coded.pairs
    ]
    queues: list[deque[int]] = [deque() for _ in numbers]  # of each link: what is first on all its links is on its way
    place, running = [0] * len(steps), [False] * len(steps)
    started = [False] * len(awaited_by)  # transfers whose one end is ready
    ready: set[int] = set()  # stages at their synchronisation
    synchronised = [0.0] * len(steps)
    events: list[tuple[float, int, int]] = []  # when, in which order, and what ends: the run of a group, or ~transfer
    now, count = 0.0, 0

    def advance(group: int) -> None:
        """Goes on until a run begins or must wait."""
        nonlocal count
        own, at = steps[group], place[group]
        while at < len(own):
            what, number, length, action = own[at]
            if what == _RUN:
                if missing[number]:
                    break
                running[group] = True
                count += 1
                heappush(events, (now + lengths[length], count, group))
                if kept is not None:
                    kept(group, "compute", action, now, lengths[length])
                at += 1
                break
            at += 1
            if what == _SYNCHRONISE:
                synchronise(number, action)
            elif started[number]:
                for link in links[pair_of[number]]:
                    queues[link].append(number)
                transfer(number)
            else:
                started[number] = True
        place[group] = at

    def transfer(number: int) -> None:
        """Begins if it is the first on all its links."""
        nonlocal count
        pair = pair_of[number]
        for link in links[pair]:
            if queues[link][0] != number:
                return
        count += 1
        heappush(events, (now + crossing[pair], count, ~number))
        if kept is not None:
            receive = coded.transfers[number]
            kept(group_of[receive.peer], "send", send_of(receive), now, crossing[pair])
            kept(group_of[receive.stage], "receive", receive, now, crossing[pair])

    def synchronise(stage: int, action: Action) -> None:
        ready.add(stage)
        if tied[stage] <= ready:
            for each in sorted(tied[stage]):
                group = group_of[each]
                start, duration = max(now, synchronised[group]), seconds.update[each] if seconds.update else 0.0
                synchronised[group] = start + duration
                if kept is not None:
                    kept(group, "synchronise", Action("synchronise", each, action.micro_batch), start, duration)

    for group in range(len(steps)):
        advance(group)
    while events:
        now, _, ended = heappop(events)
        if ended >= 0:
            running[ended] = False
            advance(ended)
            continue
        number = ~ended
        missing[awaited_by[number]] -= 1
        pair = pair_of[number]
        for link in links[pair]:
            queues[link].popleft()
        for following in dict.fromkeys([queues[link][0] for link in links[pair] if queues[link]]):
            transfer(following)
        group = group_of[coded.pairs[pair][1]]
        if not running[group]:
            advance(group)
    assert all(at == len(own) for at, own in zip(place, steps, strict=True)), "the schedule is stuck: check it first"
    return max(now, *synchronised)
