"""Schedules are what their names say, and a machine that carries them out gets one device's results."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapx.errors import PlanError
from hapx.plan import Action, Schedule
from hapx.schedules import Crossing, check, in_flight, make, received_ahead
from hapx.schedules.words import run_text
from support.pipelines import STYLES, Machine, Pipeline, chain, expected, pipelines


def runs(schedule: Schedule, group: int, stages: bool = False) -> str:
    return " ".join(run_text(a, stages) for a in schedule.actions[group] if a.kind in ("forward", "backward"))


@given(pipelines(), st.integers(0, 999), st.booleans())
def test_carried_out(pipeline: Pipeline, seed: int, rendezvous: bool) -> None:
    schedule = pipeline.make()
    machine = Machine(schedule, pipeline, seed, rendezvous)
    machine.run()
    outputs, gradients = expected(pipeline)
    assert machine.outputs == outputs
    if pipeline.style != "forward":
        assert machine.gradients == gradients  # exactly: every schedule sums in the same order
        assert sorted(machine.synchronised) == list(range(len(pipeline.groups)))


@given(pipelines())
def test_passes_its_check(pipeline: Pipeline) -> None:
    schedule = pipeline.make()
    assert schedule.name == pipeline.style
    check(schedule, pipeline.groups, pipeline.crossings, pipeline.ties)


@pytest.mark.parametrize("style", STYLES)
def test_small_pipelines(style: str) -> None:
    """All numbers of groups up to 4 and of micro-batches up to 9, with neighbours only and with every two stages joined."""
    for size, count, each in product(range(1, 5), range(1, 10), (1, 2) if style == "interleaved" else (1,)):
        stages = size * each
        everything = tuple(Crossing(i, j) for i in range(stages) for j in range(i + 1, stages))
        for crossings in {chain(stages), everything}:
            pipeline = Pipeline(style, tuple(range(size)) * each, crossings, (1,) * count, ((0, stages - 1),))
            schedule = pipeline.make()
            check(schedule, pipeline.groups, crossings, pipeline.ties)
            Machine(schedule, pipeline, count, rendezvous=True).run()


@given(pipelines(["1f1b", "1f1b-warm:1", "1f1b-warm:4"]))
def test_keeps_what_it_promises(pipeline: Pipeline) -> None:
    count, size = len(pipeline.micro_batches), len(pipeline.groups)
    extra = int(pipeline.style.partition(":")[2] or 0)
    assert in_flight(pipeline.make()) == tuple(min(count, size - i + (extra if i < size - 1 else 0)) for i in range(size))


@given(pipelines(["gpipe", "forward"]))
def test_keeps_all_or_one(pipeline: Pipeline) -> None:
    kept = len(pipeline.micro_batches) if pipeline.style == "gpipe" else 1
    assert in_flight(pipeline.make()) == (kept,) * len(pipeline.groups)


@given(pipelines(["gpipe", "1f1b", "interleaved", "forward"]))
def test_few_buffers_wait(pipeline: Pipeline) -> None:
    """Two, and one more while the run before that which needs the first is under way; where stages are skipped, or take turns, what runs ahead."""
    neighbours = Pipeline(pipeline.style, tuple(range(len(set(pipeline.groups)))), chain(len(set(pipeline.groups))), pipeline.micro_batches)
    assert max(received_ahead(neighbours.make())) <= 3


def test_1f1b() -> None:
    schedule = make("1f1b", (0, 1, 2), chain(3), (1,) * 4)
    assert runs(schedule, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert runs(schedule, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert runs(schedule, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_warm_1f1b() -> None:
    assert runs(make("1f1b-warm:1", (0, 1, 2), chain(3), (1,) * 6), 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"
    schedule = make("1f1b-warm:2,1,0", (0, 1, 2), chain(3), (1,) * 6)
    assert in_flight(schedule) == (5, 3, 1)


def test_gpipe() -> None:
    assert runs(make("gpipe", (0, 1), chain(2), (1,) * 3), 0) == "F0 F1 F2 B0 B1 B2"


def test_interleaved_as_megatron() -> None:
    """Two stages on each of two groups, four micro-batches: warm-up of (v - 1) G + 2 (G - 1 - p) forwards (SC 2021, figure 4 in kind)."""
    schedule = make("interleaved:2", (0, 1, 0, 1), chain(4), (1,) * 4)
    assert runs(schedule, 0, True) == "F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0"
    assert runs(schedule, 1, True) == "F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1"


def test_a_list_in_full() -> None:
    schedule = make("1f1b", (0, 1), chain(2), (4, 4))
    assert schedule.actions[0] == (
        Action("forward", 0, 0),
        Action("send", 0, 0, 1),
        Action("receive", 0, 0, 1, "backward"),
        Action("receive", 0, 1, 1, "backward"),
        Action("forward", 0, 1),
        Action("send", 0, 1, 1),
        Action("backward", 0, 0),
        Action("free", 0, 0),
        Action("backward", 0, 1),
        Action("free", 0, 1),
        Action("synchronise", 0, 1),
    )


def test_tied_stages_synchronise_together_and_others_at_once() -> None:
    """Stage 3 is done long before stage 0; without the tie it would not wait."""

    def places(ties: list[tuple[int, int]]) -> list[int]:
        actions = make("interleaved", (0, 1, 0, 1), chain(4), (1,) * 4, ties).actions[1]
        return [actions.index(Action(kind, stage, 3)) for kind, stage in (("synchronise", 3), ("backward", 1), ("synchronise", 1))]  # type: ignore[arg-type]

    alone, backward, last = places([])
    assert alone < backward < last
    tied, backward, last = places([(0, 3)])
    assert backward < last < tied


def test_inside_a_group_receive_follows_send() -> None:
    actions = make("gpipe", (0, 1, 0), (*chain(3), Crossing(0, 2)), (1,)).actions[0]
    sent = actions.index(Action("send", 0, 0, 2))
    assert actions[sent + 1] == Action("receive", 2, 0, 0)


@pytest.mark.parametrize(
    "style, groups, crossings, count, message",
    [
        ("1f1b", (0, 1, 0, 1), chain(4), 2, "a group has several stages"),
        ("interleaved:2", (0, 1, 0), chain(3), 2, "group 1 has 1 stages"),
        ("gpipe", (1, 0), chain(2), 2, "not numbered in the order"),
        ("gpipe", (), (), 2, "not numbered in the order"),
        ("gpipe", (0, 1), chain(2), 0, "at least one micro-batch"),
        ("gpipe", (0, 1), [Crossing(1, 0)], 2, "cannot cross from stage 1 to stage 0"),
        ("gpipe", (0, 1), [Crossing(0, 2)], 2, "cannot cross from stage 0 to stage 2"),
        ("gpipe", (0, 1), [Crossing(0, 1), Crossing(0, 1, False)], 2, "join the same stages"),
        ("1f1b-warm:1,0", (0, 1, 2), chain(3), 2, "2 numbers for 3 groups"),
        ("1f1b-warm:0,1,0", (0, 1, 2), chain(3), 2, "more further micro-batches than the one before"),
    ],
)
def test_refused(style: str, groups: tuple[int, ...], crossings: list[Crossing], count: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make(style, groups, crossings, (1,) * count)
