"""Planted faults are found, each by its sentence; and what passes can be carried out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapx.errors import PlanError
from hapx.plan import Action, Schedule
from hapx.schedules import Crossing, check, make
from support.pipelines import Machine, Pipeline, chain, expected, pipelines

GROUPS, CROSSINGS = (0, 1, 2), (*chain(3), Crossing(0, 2, False))
Lists = list[list[Action]]


def schedule(style: str = "1f1b") -> Schedule:
    return make(style, GROUPS, CROSSINGS, (2, 2, 2, 2))


def change(whole: Schedule, group: int, edit: Callable[[list[Action]], object]) -> Schedule:
    lists = [list(actions) for actions in whole.actions]
    edit(lists[group])
    return replace(whole, actions=tuple(map(tuple, lists)))


def move(action: Action, before: Action) -> Callable[[list[Action]], object]:
    def edit(actions: list[Action]) -> None:
        actions.remove(action)
        actions.insert(actions.index(before), action)

    return edit


def swap(a: Action, b: Action) -> Callable[[list[Action]], object]:
    def edit(actions: list[Action]) -> None:
        i, j = actions.index(a), actions.index(b)
        actions[i], actions[j] = b, a

    return edit


F = {(s, m): Action("forward", s, m) for s in range(3) for m in range(4)}
B = {(s, m): Action("backward", s, m) for s in range(3) for m in range(4)}
FREE = Action("free", 1, 0)
DONE = Action("synchronise", 1, 3)
FROM_0 = [Action("receive", 1, m, 0) for m in range(4)]
TO_2 = [Action("send", 1, m, 2) for m in range(4)]
TO_0 = [Action("send", 1, m, 0, "backward") for m in range(4)]
SURPLUS = Action("send", 2, 0, 0, "backward")  # the skip connection has no gradient

FAULTS: list[tuple[Callable[[list[Action]], object], str]] = [
    (lambda a: a.remove(F[1, 2]), "forward of micro-batch 2 on stage 1 is missing"),
    (lambda a: a.remove(B[1, 0]), "backward of micro-batch 0 on stage 1 is missing"),
    (lambda a: a.append(B[1, 0]), "backward of micro-batch 0 on stage 1 appears twice"),
    (lambda a: a.append(Action("forward", 1, 4)), "forward of micro-batch 4 on stage 1 has no purpose"),
    (lambda a: a.append(Action("forward", 3, 0)), "forward of micro-batch 0 on stage 3 has no purpose"),
    (lambda a: a.append(F[0, 0]), "is in the list of group 1, not of group 0"),
    (swap(F[1, 0], B[1, 0]), "comes before"),
    (move(B[1, 2], before=F[1, 2]), "backward of micro-batch 2 on stage 1 comes before forward of micro-batch 2 on stage 1"),
    (
        move(F[1, 0], before=FROM_0[0]),
        "forward of micro-batch 0 on stage 1 comes before receive of micro-batch 0's activations on stage 1",
    ),
    (move(TO_2[1], before=F[1, 1]), "send of micro-batch 1's activations from stage 1 to stage 2 comes before forward"),
    (lambda a: a.remove(TO_0[3]), "send of micro-batch 3's cotangents from stage 1 to stage 0 is missing"),
    (lambda a: a.remove(FROM_0[3]), "receive of micro-batch 3's activations on stage 1 from stage 0 is missing"),
    (lambda a: a.append(Action("send", 1, 0, 1)), "has no purpose"),
    (swap(FROM_0[1], FROM_0[2]), "where group 0 sends for"),
    (lambda a: a.remove(FREE), "free of micro-batch 0 on stage 1 is missing"),
    (move(FREE, before=B[1, 0]), "free of micro-batch 0 on stage 1 comes before backward"),
    (move(FREE, before=TO_0[0]), "free of micro-batch 0 on stage 1 comes before send of micro-batch 0's cotangents"),
    (lambda a: a.remove(DONE), "synchronise of stage 1 is missing"),
    (move(DONE, before=B[1, 3]), "synchronise of stage 1 comes before backward of micro-batch 3"),
    (lambda a: a.append(Action("synchronise", 1, 0)), "synchronise of stage 1 has no purpose"),
]


@pytest.mark.parametrize("edit, message", FAULTS, ids=[m for _, m in FAULTS])
def test_planted(edit: Callable[[list[Action]], object], message: str) -> None:
    check(schedule(), GROUPS, CROSSINGS)
    with pytest.raises(PlanError, match=message) as error:
        check(change(schedule(), 1, edit), GROUPS, CROSSINGS)
    assert str(error.value).startswith("schedule 1f1b: ")


def test_surplus_cotangents() -> None:
    both = change(change(schedule(), 2, lambda a: a.append(SURPLUS)), 0, lambda a: a.insert(0, Action("receive", 0, 0, 2, "backward")))
    with pytest.raises(PlanError, match=r"cotangents .* has no purpose"):
        check(both, GROUPS, CROSSINGS)


def test_evaluation_runs_no_backward() -> None:
    whole = schedule("forward")
    check(whole, GROUPS, CROSSINGS)
    for action in (B[1, 0], DONE):
        with pytest.raises(PlanError, match="has no purpose"):
            check(change(whole, 1, lambda a, action=action: a.append(action)), GROUPS, CROSSINGS)  # type: ignore[misc]
    with pytest.raises(PlanError, match="backward of micro-batch 0 on stage 0 is missing"):
        check(replace(whole, name="gpipe"), GROUPS, CROSSINGS)


def test_wrong_shapes() -> None:
    with pytest.raises(PlanError, match="lists of 2 groups"):
        check(replace(schedule(), actions=schedule().actions[:2]), GROUPS, CROSSINGS)
    with pytest.raises(PlanError, match="samples"):
        check(replace(schedule(), micro_batches=(2, 2, 0, 2)), GROUPS, CROSSINGS)
    with pytest.raises(PlanError, match="cannot cross"):
        check(schedule(), GROUPS, (*CROSSINGS, Crossing(1, 3)))


def test_more_in_flight_than_promised() -> None:
    gpipe = schedule("gpipe")
    check(gpipe, GROUPS, CROSSINGS)
    with pytest.raises(PlanError, match=r"schedule 1f1b: stage 0 keeps 4 micro-batches at once; allowed: 3"):
        check(replace(gpipe, name="1f1b"), GROUPS, CROSSINGS)
    with pytest.raises(PlanError, match=r"stage 2 keeps 4 micro-batches at once; allowed: 2"):
        check(gpipe, GROUPS, CROSSINGS, limits=(4, 4, 2))
    check(replace(schedule(), name="by hand"), GROUPS, CROSSINGS)  # promises nothing


def test_deadlock() -> None:
    """Group 0 wants cotangents of micro-batch 0 before it makes micro-batch 1; group 1 wants micro-batch 1 first."""
    pair = chain(2)
    whole = make("gpipe", (0, 1), pair, (1, 1))
    stuck = change(whole, 0, move(F[0, 1], before=B[0, 1]))
    stuck = change(stuck, 0, move(Action("send", 0, 1, 1), before=B[0, 1]))
    message = "wait for each other for ever: group 0 at 'backward of micro-batch 0 on stage 0' for 'send of micro-batch 0's cotangents"
    with pytest.raises(PlanError, match=message):
        check(stuck, (0, 1), pair)


def test_deadlock_only_with_rendezvous() -> None:
    """The well-known one of 1F1B: both groups send at once, and post receives just before they need them."""
    pair = chain(2)
    lists = [[a for a in actions if a.kind != "receive"] for actions in make("1f1b", (0, 1), pair, (1, 1)).actions]
    for m in (0, 1):
        lists[0].insert(lists[0].index(B[0, m]), Action("receive", 0, m, 1, "backward"))
        lists[1].insert(lists[1].index(F[1, m]), Action("receive", 1, m, 0))
    late = replace(make("1f1b", (0, 1), pair, (1, 1)), actions=tuple(map(tuple, lists)))
    pipeline = Pipeline("1f1b", (0, 1), pair, (1, 1))
    Machine(late, pipeline, 0, rendezvous=False).run()
    with pytest.raises(PlanError, match="for ever where a send waits until its receive is posted: group 0 at 'send of micro-batch 1's activations"):
        check(late, (0, 1), pair)


def test_deadlock_of_ties() -> None:
    """Stage 3 synchronises as soon as it is done, before its group goes on with stage 1, which stage 0 needs."""
    groups, crossings = (0, 1, 0, 1), chain(4)
    whole = make("interleaved", groups, crossings, (1,) * 4)
    check(whole, groups, crossings)
    with pytest.raises(PlanError, match=r"for ever: .*group 1 at 'synchronise of stage 3' for 'synchronise of stage 0'"):
        check(whole, groups, crossings, [(0, 3)])
    check(make("interleaved", groups, crossings, (1,) * 4, [(0, 3)]), groups, crossings, [(0, 3)])


@given(pipelines(), st.data())
def test_nothing_can_be_left_out(pipeline: Pipeline, data: st.DataObject) -> None:
    whole = pipeline.make()
    group = data.draw(st.integers(0, len(whole.actions) - 1))
    place = data.draw(st.integers(0, len(whole.actions[group]) - 1))
    with pytest.raises(PlanError):
        check(change(whole, group, lambda a: a.pop(place)), pipeline.groups, pipeline.crossings, pipeline.ties)


@given(pipelines(), st.data(), st.integers(0, 999), st.booleans())
def test_what_passes_can_be_carried_out(pipeline: Pipeline, data: st.DataObject, seed: int, rendezvous: bool) -> None:
    """Actions moved anywhere: either the check finds a fault, or the machine gets the right result."""
    whole = replace(pipeline.make(), name="forward" if pipeline.style == "forward" else "by hand")
    for _ in range(data.draw(st.integers(1, 3))):
        group = data.draw(st.integers(0, len(whole.actions) - 1))
        place, other = (data.draw(st.integers(0, len(whole.actions[group]) - 1)) for _ in range(2))
        whole = change(whole, group, lambda a, i=place, j=other: a.insert(j, a.pop(i)))  # type: ignore[misc]
    try:
        check(whole, pipeline.groups, pipeline.crossings, pipeline.ties)
    except PlanError:
        return
    machine = Machine(whole, pipeline, seed, rendezvous)
    machine.run()
    assert machine.outputs == expected(pipeline)[0]
    assert machine.gradients == pytest.approx(expected(pipeline)[1]) or pipeline.style == "forward"
