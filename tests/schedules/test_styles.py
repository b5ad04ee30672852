"""Names of schedules, and what is read off plans."""

from __future__ import annotations

import pytest

from hapx.errors import PlanError
from hapx.plan import Boundary
from hapx.schedules import Crossing, Style, crossings_between, groups_of, tied_stages
from hapx.states import INVARIANT, Placement, Property
from support.plans import mlp_batch_split


@pytest.mark.parametrize("text", ["gpipe", "1f1b", "1f1b-warm:2", "1f1b-warm:3,1,0", "interleaved", "interleaved:2", "forward"])
def test_prints_what_it_was_read_from(text: str) -> None:
    assert str(Style.parse(text)) == text


@pytest.mark.parametrize(
    "text, message",
    [
        ("1fb1", "did you mean 1f1b"),
        ("zero", "no schedule is named 'zero'"),
        ("1f1b-warm", "needs a number"),
        ("1f1b-warm:x", "'x' are not numbers"),
        ("1f1b-warm:1,", "'1,' are not numbers"),
        ("1f1b-warm:-1", "'-1' are not numbers"),
        ("gpipe:2", "gpipe takes no numbers"),
        ("interleaved:0", "one positive number"),
        ("interleaved:1,2", "one positive number"),
    ],
)
def test_refuses_other_text(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Style.parse(text)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(PlanError, match="not negative"):
        Style("1f1b-warm", (-1,))


def test_crossings_of_boundaries() -> None:
    plan = mlp_batch_split((4, 6, 3), (1, 1))
    tensors = plan.graphs[plan.first].refs
    whole = Placement((INVARIANT,))

    def boundary(tensor: str, source: int, target: int) -> Boundary:
        return Boundary(tensor, (source, Property(tensor, whole)), (target, Property(tensor, whole)))

    found = [boundary("linear", 0, 2), boundary("x", 0, 1), boundary("targets", 0, 2)]
    assert crossings_between(found, tensors) == (Crossing(0, 1, False), Crossing(0, 2, True))
    assert crossings_between(found, tensors, backward=False) == (Crossing(0, 1, False), Crossing(0, 2, False))
    assert groups_of(plan) == (0,)


def test_ties_join() -> None:
    assert tied_stages([(0, 3), (3, 4)], 5) == (frozenset({0, 3, 4}), frozenset({1}), frozenset({2}), frozenset({0, 3, 4}), frozenset({0, 3, 4}))
    with pytest.raises(PlanError, match="cannot be tied"):
        tied_stages([(0, 5)], 5)
