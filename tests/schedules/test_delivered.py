"""What a group has sent is waited for when it has been used, by an order that knows no time."""

from __future__ import annotations

import pytest

from hapx.plan import Action
from hapx.schedules import Crossing, delivered, make
from hapx.schedules.replay import linear_order, receives_by_run, send_of
from hapx.schedules.styles import tied_stages

CHAIN = [Crossing(0, 1), Crossing(1, 2), Crossing(0, 2), Crossing(2, 3)]
CASES = {
    "gpipe": ("gpipe", (0, 1, 2, 3), 6),
    "1f1b": ("1f1b", (0, 1, 2, 3), 8),
    "1f1b-warm": ("1f1b-warm:2", (0, 1, 2, 3), 8),
    "interleaved": ("interleaved", (0, 1, 0, 1), 8),
    "one micro-batch": ("1f1b", (0, 1, 2, 3), 1),
    "evaluation": ("forward", (0, 1, 2, 3), 5),
}


@pytest.mark.parametrize("name", CASES)
def test_sends_are_given_back_after_their_use(name: str) -> None:
    style, groups, number = CASES[name]
    schedule = make(style, groups, CHAIN, (4,) * number, [(0, 3)])
    order = linear_order(schedule, tied_stages([(0, 3)], 4))
    place = {action: i for i, action in enumerate(order)}
    assert sorted(map(len, schedule.actions)) and len(place) == sum(map(len, schedule.actions))
    for own, actions in zip(delivered(schedule, 4, [(0, 3)]), schedule.actions, strict=True):
        assert [place[a] for a in actions] == sorted(place[a] for a in actions), "every group keeps its own order"
        for (kind, stage, micro_batch), receives in receives_by_run(actions).items():
            assert all(place[send_of(r)] < place[Action(kind, stage, micro_batch)] for r in receives), "nothing is used before it was sent"  # type: ignore[arg-type]
        given_back = [send for sends in own.values() for send in sends]
        sent = [a for a in actions if a.kind == "send"]
        assert len(set(given_back)) == len(given_back) and set(given_back) <= set(sent)
        for free, sends in own.items():
            assert all(actions.index(send) < actions.index(free) for send in sends)
            assert all(place[Action(s.direction, s.peer, s.micro_batch)] < place[free] for s in sends)


def test_few_tensors_wait_in_one_forward_one_backward() -> None:
    """However many micro-batches there are."""
    most = []
    for number in (8, 32):
        schedule = make("1f1b", (0, 1, 2, 3), CHAIN, (1,) * number)
        highest = 0
        for own, actions in zip(delivered(schedule, 4), schedule.actions, strict=True):
            waiting = 0
            for action in actions:
                waiting += (action.kind == "send") - len(own.get(action, ()))
                highest = max(highest, waiting)
        most.append(highest)
    assert most[0] == most[1] <= 12
