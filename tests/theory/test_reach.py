"""Which placements follow from which is that of the tensor itself, although tensors of other shapes share what is known."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapx.ir import Kind, TensorRef
from hapx.layout import compatible
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Cut, Placement, Row, Sharded, State
from hapx.theory import reach as known
from hapx.theory.conversion import free, may_change
from hapx.theory.reach import Reach, reach

ROWS = {axis: (Row("compute", 0, axis), Row("storage", 0, axis)) for axis in (0, 1)}
SIZES = 8, 12, 24


def shards(axis: int, shape: tuple[int, ...]) -> list[Sharded]:
    """All ways to cut a tensor along an axis in a row's units: outer x units x inner is a dim."""
    ways = ((dim, outer, units, n // outer // units) for dim, n in enumerate(shape) for outer in (1, 2, 4) for units in (2, 3, 4, 8, 12, 24))
    return [Sharded(d, o, i, Cut(row, u)) for d, o, u, i in ways if o * u * i == shape[d] for row in ROWS[axis]]


@st.composite
def tensors(draw: st.DrawFn, axes: int) -> tuple[TensorRef, list[Placement]]:
    """A tensor and some of its placements, in any order."""
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=2)))
    ref = TensorRef("x", shape, draw(st.sampled_from(["float32", "int64"])), Kind.VALUE, draw(st.booleans()), draw(st.booleans()))
    own: list[list[State]] = []
    for axis in range(axes):
        cut = draw(st.lists(st.sampled_from(shards(axis, shape)), min_size=1, max_size=3, unique=True))
        own.append([REPLICATED, INVARIANT, PARTIAL, *cut])
    found = [Placement(states) for states in product(*own) if compatible(states)]
    turned = [Placement(p.states, (1, 0)) for p in found if axes == 2 and _same_factor(p)]
    return ref, draw(st.lists(st.sampled_from([*found, *turned]), min_size=1, max_size=12, unique=True))


def _same_factor(placement: Placement) -> bool:
    one, other = placement.states
    return isinstance(one, Sharded) and isinstance(other, Sharded) and one.same_split(other)


def check(ref: TensorRef, placements: list[Placement]) -> Reach:
    found = reach(ref, placements)
    assert found.placements == tuple(placements)
    for p, q in product(range(len(placements)), repeat=2):
        assert bool(found.closure(p) >> q & 1) == free(ref, placements[p], placements[q])
    axes = range(len(placements[0].states))
    if len(axes) > 1:
        between = {Placement(states) for states in product(*found.states) if compatible(states)}
        assert set(found.all_placements) == between | set(placements)
    assert len(found.all_placements) == len(set(found.all_placements))
    for axis in axes:
        pairs = set(zip(*(own.tolist() for own in found.pattern.along[axis]), strict=True))
        for p, q in permutations(range(len(found.all_placements)), 2):
            one, other = found.all_placements[p], found.all_placements[q]
            alone = all(s == t for a, (s, t) in enumerate(zip(one.states, other.states, strict=True)) if a != axis)
            assert ((p, q) in pairs) == (alone and may_change(ref, one, other, axis))
    return found


@pytest.mark.parametrize("axes", [1, 2])
def test_what_tensors_share_is_true_of_each(axes: int) -> None:
    shared = 0

    @settings(max_examples=60)
    @given(tensors(axes), st.data())
    def every(one: tuple[TensorRef, list[Placement]], data: st.DataObject) -> None:
        nonlocal shared
        (ref, placements), factor = one, data.draw(st.sampled_from([2, 3]))
        own = check(ref, placements)
        larger = TensorRef("y", tuple(factor * n for n in ref.shape), ref.dtype, ref.kind, ref.requires_grad, ref.mutated)
        of_units = data.draw(st.booleans())  # whether units are more, or larger
        stretched = [Placement(tuple(_stretched(s, factor, of_units) for s in p.states), p.nest) for p in placements]
        if all(compatible(p.states) for p in stretched):
            shared += check(larger, stretched).pattern is own.pattern

    known._known.clear()
    known._patterns.clear()
    every()
    assert shared > 20


def _stretched(state: State, factor: int, of_units: bool) -> State:
    if not isinstance(state, Sharded):
        return state
    if of_units:
        return Sharded(state.dim, state.outer, state.inner, Cut(state.cut.row, factor * state.cut.units))
    return Sharded(state.dim, state.outer, factor * state.inner, state.cut)


def test_what_does_not_nest_in_one_shape_is_not_taken_from_another() -> None:
    def both(shape: int, outer: int, inner: int) -> tuple[TensorRef, list[Placement]]:
        """A dim in halves of it on one axis, in blocks on the other."""
        ref = TensorRef("x", (shape,), "float32", Kind.VALUE, True)
        one, other = Sharded(0, 1, shape // outer, Cut(ROWS[0][0], outer)), Sharded(0, shape // inner, 1, Cut(ROWS[1][0], inner))
        return ref, [Placement(states) for states in ((REPLICATED, REPLICATED), (one, REPLICATED), (REPLICATED, other))]

    nests, does_not = reach(*both(24, 2, 4)), reach(*both(24, 8, 12))
    assert nests.pattern is not does_not.pattern
    assert len(nests.all_placements) == 4 and len(does_not.all_placements) == 3
    assert nests.pattern is reach(*both(48, 2, 4)).pattern


def test_what_splits_another_factor_is_not_taken_from_what_splits_the_same() -> None:
    def both(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[TensorRef, list[Placement]]:
        """A dim cut on both axes, in blocks x units x grains."""
        ref = TensorRef("x", (24,), "float32", Kind.VALUE, True)
        cuts = [Sharded(0, outer, inner, Cut(ROWS[axis][0], units)) for axis, (outer, units, inner) in enumerate((one, other))]
        return ref, [Placement((cuts[0], cuts[1])), Placement((REPLICATED, cuts[1]))]

    same, another = check(*both((1, 24, 1), (1, 24, 1))), check(*both((1, 4, 6), (4, 6, 1)))
    assert [len(sources) for sources, _ in same.pattern.along] == [0, 0]  # the outer axis may not change while the inner one splits the same
    assert [len(sources) for sources, _ in another.pattern.along] == [2, 0]
