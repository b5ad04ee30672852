"""Which paths lead from one placement to another, what is free, and what nesting forbids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hapx.ir import Kind, TensorRef
from hapx.plan import Communication, Form
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Placement, State
from hapx.theory.conversion import ALL_FORMS, free, paths, shared_paths, step_is_legal
from hapx.transposes import forward_collective
from support.theories import flat, placed, split, two_level

ONE, TWO = flat(2), two_level(2, 2)
X = TensorRef("x", (8, 6), "float32", Kind.VALUE, True)
CONSTANT = TensorRef("c", (8, 6), "float32", Kind.VALUE, False)
IDS = TensorRef("ids", (8, 6), "int64", Kind.VALUE, False)
ROWS, COLUMNS = split(ONE, 0, 0, 8), split(ONE, 0, 1, 6)
OUTER, INNER = split(TWO, 0, 0, 8), split(TWO, 1, 0, 8)
PADDED = frozenset({"padded"})
STATES: tuple[State, ...] = (REPLICATED, INVARIANT, PARTIAL, ROWS, COLUMNS)


@pytest.mark.parametrize("source", STATES, ids=str)
@pytest.mark.parametrize("target", STATES, ids=str)
def test_every_state_leads_to_every_other(source: State, target: State) -> None:
    found = paths(X, ONE, placed(source), placed(target), PADDED)
    assert len(found) == 1
    assert [(c.source, c.target) for c in found[0]] == ([] if source == target else [(source, target)])


def test_forms_are_a_choice_where_shards_are_gathered_or_scattered() -> None:
    def forms(source: State, target: State, ref: TensorRef = X) -> set[Form]:
        return {p[0].form for p in paths(ref, ONE, placed(source), placed(target), ALL_FORMS)}

    every = {Form.PADDED, Form.GROUPED, Form.POINT_TO_POINT}
    assert forms(ROWS, REPLICATED) == forms(PARTIAL, ROWS) == forms(INVARIANT, ROWS) == every
    assert forms(PARTIAL, INVARIANT) == forms(ROWS, COLUMNS) == forms(REPLICATED, ROWS) == {Form.NONE}
    assert forms(REPLICATED, ROWS, CONSTANT) == {Form.NONE}, "without a gradient nothing is gathered back"


def test_free_conversions() -> None:
    def is_free(source: State, target: State, ref: TensorRef = X) -> bool:
        return free(ref, placed(source), placed(target))

    assert all(is_free(REPLICATED, t) for t in STATES)
    assert all(is_free(s, PARTIAL) for s in STATES)
    assert {(s, t) for s in STATES for t in STATES if is_free(s, t)} == {(s, s) for s in STATES} | {(REPLICATED, t) for t in STATES} | {
        (s, PARTIAL) for s in STATES
    }
    assert is_free(REPLICATED, ROWS, IDS) and not is_free(REPLICATED, PARTIAL, IDS)


def test_integers_are_never_made_partial_but_their_sums_are_gathered() -> None:
    assert paths(IDS, ONE, placed(REPLICATED), placed(PARTIAL), ALL_FORMS) == ()
    assert paths(IDS, ONE, placed(ROWS), placed(PARTIAL), ALL_FORMS) == ()
    assert len(paths(IDS, ONE, placed(PARTIAL), placed(REPLICATED), ALL_FORMS)) == 1
    assert not step_is_legal(IDS, placed(REPLICATED), Communication(0, REPLICATED, PARTIAL, Form.NONE, False))


def orders(source: Placement, target: Placement) -> list[tuple[int, ...]]:
    return sorted(tuple(c.axis for c in p) for p in paths(X, TWO, source, target, PADDED))


def test_independent_axes_change_in_any_order() -> None:
    assert orders(placed(PARTIAL, PARTIAL), placed(INVARIANT, INVARIANT)) == [(0, 1), (1, 0), (1, 0, 1)]


def test_a_sum_over_two_levels_goes_through_shards() -> None:
    (path,) = shared_paths(X, TWO, placed(PARTIAL, PARTIAL), placed(INVARIANT, INVARIANT), PADDED)
    at = placed(PARTIAL, PARTIAL)
    for step in path:
        assert step_is_legal(X, at, step)
        at = at.with_state(step.axis, step.target)
    names = [(c.axis, forward_collective(c.source, c.target)) for c in path]
    assert names == [(1, "reduce_scatter"), (0, "all_reduce"), (1, "all_gather")]
    assert at == placed(INVARIANT, INVARIANT)


def test_what_the_inner_axis_can_share() -> None:
    """Gathers, sums and scattered sums between machines, of values that are whole or Partial inside; not what is free or cut inside already."""

    def count(source: Placement, target: Placement, ref: TensorRef = X) -> int:
        return len(shared_paths(ref, TWO, source, target, ALL_FORMS))

    whole, invariant = placed(REPLICATED, REPLICATED), placed(INVARIANT, INVARIANT)
    assert count(placed(OUTER, REPLICATED), whole) == 3, "three forms between machines"
    assert count(placed(PARTIAL, REPLICATED), placed(OUTER, REPLICATED)) == 3
    assert count(placed(PARTIAL, INVARIANT), invariant) == count(placed(PARTIAL, PARTIAL), whole) == 1
    assert count(whole, placed(OUTER, REPLICATED)) == count(placed(REPLICATED, PARTIAL), invariant) == 0
    assert count(placed(OUTER, split(TWO, 1, 1, 6)), whole) == count(whole, whole) == 0
    assert count(placed(PARTIAL, PARTIAL), invariant, TensorRef("w", (8, 6), "float32", Kind.PARAMETER, True)) == 0
    assert count(placed(PARTIAL, PARTIAL), invariant, TensorRef("s", (1,), "float32", Kind.VALUE, True)) == 0, "nothing to share out"
    even = TensorRef("y", (7, 6), "float32", Kind.VALUE, True)
    (path,) = shared_paths(even, TWO, placed(PARTIAL, PARTIAL), invariant, PADDED)
    assert getattr(path[0].target, "dim", None) == 1, "6 columns can be halved, 7 rows cannot"


def test_the_outer_of_two_nested_axes_moves_only_while_the_inner_one_does_not_cut() -> None:
    whole, nested = placed(REPLICATED, REPLICATED), placed(OUTER, INNER)
    assert orders(whole, nested) == [(0, 1)], "cut by the outer one first"
    assert orders(nested, whole) == [(1, 0)], "gather the inner one first"
    assert orders(nested, placed(REPLICATED, INNER)) == [], "the pieces would come out permuted"


def test_the_other_nest_order() -> None:
    whole, nested = placed(REPLICATED, REPLICATED, nest=(1, 0)), placed(OUTER, INNER, nest=(1, 0))
    assert orders(whole, nested) == [(1, 0)]
    assert orders(nested, whole) == [(0, 1)]
    assert not free(X, whole, placed(OUTER, INNER))


def test_cuts_of_different_dims_do_not_nest() -> None:
    columns = split(TWO, 1, 1, 6)
    assert orders(placed(OUTER, columns), placed(REPLICATED, REPLICATED)) == [(0, 1), (1, 0)]


def test_a_re_cut_takes_the_axes_inside_along() -> None:
    again = replace(OUTER, cut=replace(OUTER.cut, row=TWO.row(0, segment=1)))
    nested, after = placed(OUTER, INNER), placed(again, INNER)
    assert orders(nested, after) == [(0,)]
    assert orders(nested, placed(again, REPLICATED)) == [(0, 1), (1, 0)]
    assert orders(nested, placed(replace(again, outer=2, cut=replace(again.cut, units=4)), INNER)) == [], "cut in other units"
    assert not free(X, nested, after)
    (path,) = paths(X, TWO, nested, after, ALL_FORMS)
    assert path[0].form is Form.NONE and step_is_legal(X, nested, path[0])
    buffer = replace(X, mutated=True)
    assert paths(buffer, TWO, nested, after, ALL_FORMS) == () and not step_is_legal(buffer, nested, path[0])


def test_steps_that_are_not_legal() -> None:
    gather = Communication(0, ROWS, REPLICATED, Form.PADDED, True)
    assert step_is_legal(X, placed(ROWS), gather)
    wrong = {
        "another source": Communication(0, COLUMNS, REPLICATED, Form.PADDED, True),
        "no such axis": Communication(1, ROWS, REPLICATED, Form.PADDED, True),
        "no form": Communication(0, ROWS, REPLICATED, Form.NONE, True),
        "no gradient": Communication(0, ROWS, REPLICATED, Form.PADDED, False),
        "nothing changes": Communication(0, ROWS, ROWS, Form.NONE, True),
        "units that do not fit the dim": Communication(0, ROWS, split(ONE, 0, 1, 5), Form.NONE, True),
        "no such dim": Communication(0, ROWS, split(ONE, 0, 2, 6), Form.NONE, True),
    }
    for what, step in wrong.items():
        assert not step_is_legal(X, placed(ROWS), step), what
    invariant = Communication(0, REPLICATED, INVARIANT, Form.NONE, False)
    assert not step_is_legal(CONSTANT, placed(REPLICATED), invariant), "a value without gradient has no Invariant"
