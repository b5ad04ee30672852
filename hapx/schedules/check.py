"""Checks a schedule against the stages that it is for, whoever made it.

In: a schedule, the group of each stage, what crosses, which stages parameters tie together. Out: nothing, or a PlanError with the first thing that
is wrong, in one sentence. What holds afterwards:

1. every micro-batch runs once on each stage, forward, then backward (evaluation, the style "forward": forward only);
2. all that crosses is sent once and received once, and nothing else; a run follows the receives of what it needs, sends follow the run that
   makes what they send, `free` follows all of them, once;
3. each stage synchronises once, after its last backward (evaluation: never);
4. the transfers from one group to another start in the same order on both ends;
5. no stage keeps more micro-batches than it may: what `limits` says, else what the style promises (`promised`);
6. groups cannot wait for each other for ever, with asynchronous sends and also where a send waits until its receive is posted
   (`hapx.schedules.replay`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hapx.errors import PlanError
from hapx.plan import Action, Schedule
from hapx.schedules.make import sends_after
from hapx.schedules.orders import promised, stages_by_group
from hapx.schedules.replay import expect_no_deadlock, receive_of
from hapx.schedules.styles import Crossing, expected_crossings, tied_stages
from hapx.schedules.words import action_text


def check(
    schedule: Schedule,
    groups: Sequence[int],
    crossings: Iterable[Crossing],
    ties: Iterable[Iterable[int]] = (),
    limits: Sequence[int] | None = None,
) -> None:
    """Raises PlanError for the first fault. groups, crossings, ties: as for `make`. limits: per stage, the most micro-batches that it may keep."""
    where = f"schedule {schedule.name}"
    places = _places(schedule, groups, where)
    _expect_actions(places, dict(_earlier(schedule, len(groups), expected_crossings(crossings, len(groups)))), where)
    _expect_channels(schedule, groups, where)
    for stage, (kept, most) in enumerate(zip(in_flight(schedule), limits or promised(schedule, groups), strict=True)):
        if kept > most:
            raise PlanError(f"stage {stage} keeps {kept} micro-batches at once", where=where, allowed=str(most))
    tied = tied_stages(ties, len(groups))
    expect_no_deadlock(schedule, tied, rendezvous=False)
    expect_no_deadlock(schedule, tied, rendezvous=True)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most micro-batches for which it keeps something at once: between their forward and their `free`."""
    return _most(schedule, "forward", "free")


def received_ahead(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose activations it has posted receives for and not used yet: buffers, beside what is in flight."""
    return _most(schedule, "receive", "forward")


def _most(schedule: Schedule, start: str, stop: str) -> tuple[int, ...]:
    held: dict[int, set[int]] = {}
    most: dict[int, int] = {}
    for a in (a for actions in schedule.actions for a in actions if a.kind in (start, stop) and a.direction == "forward"):
        now = held.setdefault(a.stage, set())
        (now.add if a.kind == start else now.discard)(a.micro_batch)
        most[a.stage] = max(most.get(a.stage, 0), len(now))
    return tuple(most[s] for s in sorted(most))


def _places(schedule: Schedule, groups: Sequence[int], where: str) -> dict[Action, int]:
    """The place of each action in its group's list. Lists are those of the right groups, and hold nothing twice."""
    size = len(stages_by_group(groups))
    if len(schedule.actions) != size:
        raise PlanError(f"it has lists of {len(schedule.actions)} groups", where=where, allowed=f"one per group, of {size}")
    if min(schedule.micro_batches, default=0) < 1:
        raise PlanError(f"its micro-batches have {schedule.micro_batches} samples", where=where, allowed="micro-batches of at least one sample")
    places: dict[Action, int] = {}
    for group, actions in enumerate(schedule.actions):
        for place, a in enumerate(actions):
            if 0 <= a.stage < len(groups) and groups[a.stage] != group:
                raise PlanError(f"{action_text(a)} is in the list of group {group}, not of group {groups[a.stage]}", where=where)
            if a in places:
                raise PlanError(f"{action_text(a)} appears twice", where=where)
            places[a] = place
    return places


def _earlier(schedule: Schedule, size: int, crossings: Sequence[Crossing]) -> Iterator[tuple[Action, list[Action]]]:
    """All actions that there must be, and what comes earlier than each in its group's list."""
    count = len(schedule.micro_batches)
    kinds = ("forward",) if schedule.name == "forward" else ("forward", "backward")
    received: dict[Action, list[Action]] = {}
    for stage in range(size):
        for m in range(count):
            earlier: list[Action] = []
            for kind in kinds:
                run = Action("forward" if kind == "forward" else "backward", stage, m)
                received.setdefault(run, []).extend(earlier)
                sends = sends_after(run, crossings)
                for send in sends:
                    receive = receive_of(send)
                    received.setdefault(Action(run.kind, send.peer, m), []).append(receive)
                    yield receive, []
                    yield send, [run]
                earlier = [*earlier, run, *sends]
            yield Action("free", stage, m), earlier
        if len(kinds) > 1:
            yield Action("synchronise", stage, count - 1), [Action("backward", stage, m) for m in range(count)]
    yield from received.items()


def _expect_actions(places: dict[Action, int], earlier: dict[Action, list[Action]], where: str) -> None:
    for a, before in earlier.items():
        for needed in (*before, a):
            if needed not in places:
                raise PlanError(f"{action_text(needed)} is missing", where=where)
        for b in before:
            if places[b] > places[a]:
                raise PlanError(f"{action_text(a)} comes before {action_text(b)}", where=where)
    for a in places:
        if a not in earlier:
            raise PlanError(f"{action_text(a)} has no purpose", where=where, hint="no such stage, micro-batch or crossing asks for it")


def _expect_channels(schedule: Schedule, groups: Sequence[int], where: str) -> None:
    """From group to group, transfers in the same order on both ends."""
    sends: dict[tuple[int, int], list[Action]] = {}
    receives: dict[tuple[int, int], list[Action]] = {}
    for group, actions in enumerate(schedule.actions):
        for a in actions:
            if a.kind == "send":
                sends.setdefault((group, groups[a.peer]), []).append(receive_of(a))
            elif a.kind == "receive":
                receives.setdefault((groups[a.peer], group), []).append(a)
    for (source, target), started in sends.items():
        for sent, received in zip(started, receives[source, target], strict=True):
            if sent != received:
                raise PlanError(
                    f"group {target} posts '{action_text(received)}' where group {source} sends for '{action_text(sent)}'",
                    where=where,
                    allowed="transfers from one group to another in the same order on both ends",
                )
