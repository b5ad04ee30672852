"""Replays a schedule without time: can every group reach the end of its list?

In: a schedule, the stages tied to each stage. Out: nothing, or a PlanError that says who waits for what. Two models of sending. Asynchronous: a send
never waits. Rendezvous: a send waits until its receive is posted (transfers inside one group never wait: both ends are the same program). In both, a
receive never waits, a run waits until all it receives was sent, and the last `synchronise` that a group has of tied stages waits until all
groups of these stages have come to theirs. What ends under rendezvous also ends asynchronously, as it only waits more.
"""

from __future__ import annotations

from collections.abc import Sequence

from hapx.errors import PlanError
from hapx.plan import Action, Schedule
from hapx.schedules.words import action_text

MOST = 3  # groups that a message names


def expect_no_deadlock(schedule: Schedule, tied: Sequence[frozenset[int]], rendezvous: bool) -> None:
    """Raises PlanError where groups wait for each other for ever. Transfers must match (`hapx.schedules.check`)."""
    replay = _Replay(schedule, tied, rendezvous)
    size = len(schedule.actions)
    while sum(replay.advance(group) for group in range(size)):
        pass
    stuck = [(g, replay.blocked(g)) for g in range(size) if replay.place[g] < len(schedule.actions[g])]
    if stuck:
        waits = [f"group {g} at '{action_text(schedule.actions[g][replay.place[g]])}' for {why}" for g, why in stuck[:MOST]]
        how = " where a send waits until its receive is posted" if rendezvous else ""
        raise PlanError(f"groups wait for each other for ever{how}: {'; '.join(waits)}", where=f"schedule {schedule.name}")


def linear_order(schedule: Schedule, tied: Sequence[frozenset[int]]) -> list[Action]:
    """All actions of all groups, one after another, each after what it waits for. Raises PlanError as `expect_no_deadlock` does."""
    expect_no_deadlock(schedule, tied, rendezvous=True)
    replay, size = _Replay(schedule, tied, rendezvous=False), len(schedule.actions)
    found: list[Action] = []
    while len(found) < sum(map(len, schedule.actions)):
        for group in range(size):
            start = replay.place[group]
            replay.advance(group)
            found += schedule.actions[group][start : replay.place[group]]
    return found


def receives_by_run(actions: Sequence[Action]) -> dict[tuple[str, int, int], list[Action]]:
    """The receives that a group's runs wait for, by kind, stage and micro-batch of the run."""
    found: dict[tuple[str, int, int], list[Action]] = {}
    for a in actions:
        if a.kind == "receive":
            found.setdefault((a.direction, a.stage, a.micro_batch), []).append(a)
    return found


def send_of(receive: Action) -> Action:
    return Action("send", receive.peer, receive.micro_batch, receive.stage, receive.direction)


def receive_of(send: Action) -> Action:
    return Action("receive", send.peer, send.micro_batch, send.stage, send.direction)


class _Replay:
    def __init__(self, schedule: Schedule, tied: Sequence[frozenset[int]], rendezvous: bool):
        self.actions, self.tied, self.rendezvous = schedule.actions, tied, rendezvous
        self.place = [0] * len(schedule.actions)
        self.reached: set[Action] = set()
        self.arrived: set[int] = set()  # stages at their synchronisation
        self.receives = [receives_by_run(actions) for actions in schedule.actions]
        self.group_of = {a.stage: g for g, actions in enumerate(schedule.actions) for a in actions}

    def advance(self, group: int) -> bool:
        """Goes on until the group must wait; whether it went on at all."""
        start = self.place[group]
        while self.place[group] < len(self.actions[group]):
            action = self.actions[group][self.place[group]]
            if action.kind == "synchronise":
                self.arrived.add(action.stage)
            if self.blocked(group):
                break
            self.reached.add(action)
            self.place[group] += 1
        return self.place[group] > start

    def blocked(self, group: int) -> str | None:
        """What the group's next action waits for."""
        action = self.actions[group][self.place[group]]
        needed: list[Action] = []
        if action.kind in ("forward", "backward"):
            needed = [send_of(r) for r in self.receives[group].get((action.kind, action.stage, action.micro_batch), ())]
        elif action.kind == "send" and self.rendezvous and self.group_of[action.peer] != group:
            needed = [receive_of(action)]
        elif action.kind == "synchronise":
            return self._blocked_tie(action.stage, group)
        return next((f"'{action_text(n)}'" for n in needed if n not in self.reached), None)

    def _blocked_tie(self, stage: int, group: int) -> str | None:
        joined = self.tied[stage]
        if any(self.group_of[s] == group and s not in self.arrived for s in joined):
            return None  # the group has a later one, which waits
        missing = sorted(joined - self.arrived)
        return f"'synchronise of stage {missing[0]}'" if missing else None
