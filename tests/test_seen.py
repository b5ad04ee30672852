"""What a plan tells of other pipelines."""

from __future__ import annotations

from dataclasses import replace

import hapx
from hapx.plan import Plan
from hapx.seen import TOLD, Seen, beside, remembered
from support.asking import MODEL, SLOW

BEST = Seen(4, ((0, 1), (2, 3)), ((0, 5), (5, 9)), 1.0, False)


def test_the_fastest_of_each_sort_are_kept_and_none_that_is_cut_like_the_best() -> None:
    moved = [replace(BEST, nodes=((0, 4 - i), (4 - i, 9)), seconds=1.5 - i / 10) for i in range(4)]
    elsewhere = replace(BEST, devices=((0,), (1, 2, 3)), seconds=3.0)
    finer = replace(BEST, micro_batches=8, devices=((0,), (1, 2, 3)), seconds=1.1)
    twin = replace(BEST, seconds=0.5, estimated=True)
    found = beside(remembered(BEST, [*moved, elsewhere, finer, twin]))
    assert found == (finer, moved[3], moved[2], elsewhere)
    assert [s.sort(BEST) for s in found] == ["micro_batches", "nodes", "nodes", "devices"] and TOLD == 2


def test_what_was_planned_counts_more_than_what_was_estimated() -> None:
    guess = replace(BEST, nodes=((0, 3), (3, 9)), seconds=0.9, estimated=True)
    planned = replace(guess, seconds=1.2, estimated=False)
    assert beside(remembered(BEST, [guess, planned])) == (planned,)


def test_plans_keep_it_and_their_files_too(tmp_path) -> None:
    model = MODEL()
    plan = hapx.plan(model, SLOW, model.example(16))
    own, others = Seen.of(plan), beside(plan.statistics)
    assert others and {s.sort(own) for s in others} >= {"micro_batches"}
    assert own.cut not in {s.cut for s in others}
    for other in others:
        assert len(other.devices) == len(other.nodes) and other.seconds > 0
        assert [stop for _, stop in other.nodes[:-1]] == [start for start, _ in other.nodes[1:]]
        assert other.estimated or other.seconds >= plan.iteration_time
    plan.save(tmp_path / "plan.json")
    assert beside(Plan.load(tmp_path / "plan.json").statistics) == others
