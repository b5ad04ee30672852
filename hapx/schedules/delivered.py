"""When what a group has sent may be waited for without holding anything up.

In: a schedule. Out: per group and `free`, the sends that were used by then: in an order of all actions of all groups that knows no time, the run
that waits for them comes before. A group that waits for them there waits only for what is earlier in that order, so nobody waits for ever; and their
memory is given back as the schedule goes on, not at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hapx.plan import Action, Schedule
from hapx.schedules.replay import linear_order
from hapx.schedules.styles import tied_stages


def delivered(schedule: Schedule, stages: int, ties: Iterable[Iterable[int]] = ()) -> tuple[Mapping[Action, tuple[Action, ...]], ...]:
    """By group: `free` -> the sends that have been used by then and by no earlier one. ties: sets of stages that share a parameter."""
    place = {action: i for i, action in enumerate(linear_order(schedule, tied_stages(ties, stages)))}
    return tuple(_of_group(actions, place) for actions in schedule.actions)


def _of_group(actions: Iterable[Action], place: Mapping[Action, int]) -> dict[Action, tuple[Action, ...]]:
    found: dict[Action, tuple[Action, ...]] = {}
    open_sends: list[Action] = []
    for action in actions:
        if action.kind == "send":
            open_sends.append(action)
        elif action.kind == "free":
            used = tuple(send for send in open_sends if place[_user(send)] < place[action])
            open_sends = [send for send in open_sends if send not in used]
            if used:
                found[action] = used
    return found


def _user(send: Action) -> Action:
    """The run that waits for it."""
    return Action(send.direction, send.peer, send.micro_batch)
