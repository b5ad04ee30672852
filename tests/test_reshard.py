"""Plans that move a tensor between two layouts: applied to arrays they give the target's pieces, every element crosses once, loads are level."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapx.errors import PlanError
from hapx.pieces import Layout, Runs, head_and_tail, length
from hapx.reshard import ReshardPlan, bytes_between, bytes_between_machines, reshard_plan
from hapx.states import INVARIANT, PARTIAL, Cut, Placement, Row, Sharded
from support.layouts import layouts, local_array, mesh_of, meshes, shapes

# ---- applying a plan to arrays ---------------------------------------------------------------------------------------------------


def at(box_side: tuple[Runs, ...]) -> tuple[np.ndarray, ...]:
    return np.ix_(*(np.concatenate([np.arange(a, b) for a, b in runs]) for runs in box_side))


def apply(plan: ReshardPlan, whole: np.ndarray) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """The target's local arrays, and how often each element has crossed between devices. No element is written twice on a device."""
    numbers = np.arange(whole.size).reshape(whole.shape)
    crossed = np.zeros(whole.size, dtype=int)
    members = {d: group for group in plan.groups for d in group}
    got = {d: np.full(plan.target.local_shape(plan.shape, d), -1, dtype=whole.dtype) for d in plan.target.mesh.devices}
    for t in plan.transfers:
        piece = local_array(whole, plan.source, t.source)[at(t.box.take)]
        assert piece.shape == t.box.shape and piece.size
        assert t.shared <= (len(members[t.target]) > 1)
        if t.source != t.target:
            crossed[local_array(numbers, plan.source, t.source)[at(t.box.take)].ravel()] += 1
        for device in members[t.target] if t.shared else (t.target,):
            assert (got[device][at(t.box.put)] == -1).all()
            got[device][at(t.box.put)] = piece
    return got, crossed.reshape(whole.shape)


def check(plan: ReshardPlan) -> None:
    whole = np.arange(prod(plan.shape)).reshape(plan.shape)
    got, crossed = apply(plan, whole)
    for device, array in got.items():
        assert np.array_equal(array, local_array(whole, plan.target, device))
    there = np.zeros(whole.size, dtype=bool)
    for device in set(plan.source.mesh.devices) & set(plan.target.mesh.devices):
        there[np.intersect1d(local_array(whole, plan.source, device), local_array(whole, plan.target, device))] = True
    assert np.array_equal(crossed.ravel(), np.where(there, 0, 1))


@st.composite
def pairs(draw: st.DrawFn, apart: bool = False) -> tuple[tuple[int, ...], Layout, Layout]:
    shape, source = draw(shapes()), draw(meshes(12 if apart else 8))
    target = draw(meshes(12 if apart else 8, source.devices if apart else ()))
    return shape, draw(layouts(shape, source)), draw(layouts(shape, target))


@settings(max_examples=150)
@given(pairs(), st.sampled_from([(), (0, 0, 0, 0, 1, 1, 1, 1), (0, 1) * 4]))
def test_any_layout_becomes_any_other(pair, machines):
    plan = reshard_plan(*pair, machines)
    check(plan)
    check(plan.reversed())
    assert plan == reshard_plan(*pair, machines) and str(plan) == str(reshard_plan(*pair, machines))


@settings(max_examples=100)
@given(pairs(apart=True))
def test_each_device_sends_and_receives_its_share(pair):
    plan = reshard_plan(*pair)
    check(plan)
    received, sent = Counter(), Counter()
    for t in plan.transfers:
        received[t.target] += t.box.size
        sent[t.source] += t.box.size
    row = rows(plan)
    for group in plan.groups:
        assert max(received[d] for d in group) <= -(-sum(received[d] for d in group) // len(group)) + row
    for holders in plan.source.pieces(len(plan.shape)).values():
        fair = -(-sum(sent[d] for d in holders) // len(holders))
        assert max(sent[d] for d in holders) <= max(fair, *received.values(), 0) + row
    pieces = [len(layout.pieces(len(plan.shape))) for layout in (plan.source, plan.target)]
    assert len(plan.transfers) <= prod(pieces) + len(plan.source.mesh.devices) + len(plan.target.mesh.devices)
    assert all(sum(shares) == sum(received[d] for d in group) and len(group) > 1 for group, shares in plan.gathers.items())


def rows(plan: ReshardPlan) -> int:
    """Elements of one row across the longest dim: a cut is no finer."""
    return prod(plan.shape) // max(plan.shape, default=1) if prod(plan.shape) else 0


@given(pairs())
def test_what_does_not_change_does_not_move(pair):
    shape, layout, _ = pair
    plan = reshard_plan(shape, layout, layout)
    assert not plan.gathers and not bytes_between(plan, 4) and all(t.box.take == t.box.put for t in plan.transfers)


# ---- named cases -----------------------------------------------------------------------------------------------------------------


def flat(lengths: tuple[int, ...] | None, first: int, size: int = 0, dim: int = 0, outer: int = 1, inner: int = 1) -> Layout:
    """One axis, cut with these lengths, or whole on `size` devices; devices from `first` on."""
    if lengths is None:
        return Layout(mesh_of((size,), tuple(range(first, first + size))), Placement((INVARIANT,)), {})
    cut = Cut(Row("compute", 0, 0), sum(lengths))
    mesh = mesh_of((len(lengths),), tuple(range(first, first + len(lengths))))
    return Layout(mesh, Placement((Sharded(dim, outer, inner, cut),)), {cut: lengths})


def test_shares_follow_the_sources_pieces():
    plan = reshard_plan((8, 4), flat((2, 2, 2, 2), 0), flat(None, 4, 4))
    assert str(plan).splitlines() == [
        "0 [0:2 x 0:4] -> 4 [0:2 x 0:4] for all",
        "1 [0:2 x 0:4] -> 5 [2:4 x 0:4] for all",
        "2 [0:2 x 0:4] -> 6 [4:6 x 0:4] for all",
        "3 [0:2 x 0:4] -> 7 [6:8 x 0:4] for all",
        "gather 8+8+8+8 on [4, 5, 6, 7]",
    ]


def test_blocks_are_runs():
    plan = reshard_plan((12,), flat((1, 0, 1), 0, outer=2, inner=3), flat((4,), 3, inner=3))
    assert str(plan).splitlines() == ["0 [0:6] -> 3 [0:3+6:9]", "2 [0:6] -> 3 [3:6+9:12]"]


def test_copies_share_the_sending():
    assert bytes_between(reshard_plan((6, 4), flat(None, 0, 2), flat((2, 2, 2), 2)), 2) == {(0, 2): 16, (1, 3): 16, (0, 4): 8, (1, 4): 8}
    assert bytes_between(reshard_plan((6, 4), flat(None, 0, 4), flat((6,), 4)), 2) == {(0, 4): 48}


def test_shares_are_cut_along_the_longest_dim_where_none_is_exact():
    plan = reshard_plan((2, 7), flat((2,), 0), flat(None, 1, 3))
    assert plan.gathers == {(1, 2, 3): (6, 6, 2)} and len(plan.transfers) == 3


def test_a_sender_on_the_same_machine_is_preferred():
    machines = (0, 1, 0, 0, 1)
    plan = reshard_plan((9,), flat(None, 0, 2), flat((3, 3, 3), 2), machines)
    assert bytes_between(plan, 1) == {(0, 2): 3, (0, 3): 3, (1, 4): 3}
    assert bytes_between_machines(plan, 1, machines) == {(0, 0): 6, (1, 1): 3} and plan.reversed().machines == machines


def test_what_one_of_a_group_has_is_gathered_from_it():
    plan = reshard_plan((8,), flat((5, 3), 0), flat(None, 1, 2))  # device 1 has the last three
    assert str(plan).splitlines() == [
        "0 [0:1] -> 1 [0:1] for all",
        "1 [0:3] -> 1 [5:8] for all",
        "0 [1:5] -> 2 [1:5] for all",
        "gather 4+4 on [1, 2]",
    ]


def test_sixty_four_devices_need_few_messages():
    """8x8 to 8x8, all cuts different: as many transfers as there are overlaps, and the same again for 64 flat devices."""
    rows_, columns, heads = (Cut(Row("compute", 0, a), u) for a, u in ((0, 1024), (1, 64), (1, 1024)))
    source = Layout(
        mesh_of((8, 8), tuple(range(64))), Placement((Sharded(0, 1, 1, rows_), Sharded(1, 3, 64, columns))), {rows_: (128,) * 8, columns: (8,) * 8}
    )
    by_tokens = Layout(mesh_of((8, 8), tuple(range(64, 128))), Placement((INVARIANT, Sharded(0, 1, 1, heads))), {heads: (100,) * 7 + (324,)})
    plan = reshard_plan((1024, 3 * 64 * 64), source, by_tokens)
    assert sum(bytes_between(plan, 2).values()) == 2 * 1024 * 3 * 64 * 64
    assert len(plan.transfers) < 64 * 8 and max(len(r) for t in plan.transfers for r in (*t.box.take, *t.box.put)) == 3
    tokens = reshard_plan((1024, 64), flat((16,) * 64, 0), flat((1,) * 64, 64, dim=1))
    assert len(tokens.transfers) == 64 * 64


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=4), st.integers(0, 20))
def test_runs_are_cut_anywhere(gaps, count):
    runs, position = [], 0
    for gap, size in gaps:
        runs.append((position + gap, position + gap + size))
        position += gap + size
    head, tail = head_and_tail(tuple(runs), min(count, length(tuple(runs))))
    elements = [i for a, b in runs for i in range(a, b)]
    assert [i for a, b in head for i in range(a, b)] == elements[: min(count, len(elements))]
    assert [i for a, b in tail for i in range(a, b)] == elements[count:] and all(a < b for a, b in (*head, *tail))


@pytest.mark.parametrize(
    "shape, layout, message",
    [
        ((4,), Layout(mesh_of((2,), (0, 1)), Placement((PARTIAL,)), {}), "a Partial tensor cannot be moved"),
        ((4,), Layout(mesh_of((2,), (0, 1)), Placement((INVARIANT, INVARIANT)), {}), "2 states on 1 axes of 2 devices"),
        ((5,), flat((2, 2), 0), r"does not cut a tensor of shape \[5\]"),
        ((4,), flat((2, 2), 0, dim=1), r"does not cut a tensor of shape \[4\]"),
        ((4,), Layout(mesh_of((3,), (0, 1, 2)), flat((2, 2), 0).placement, flat((2, 2), 0).lengths), "for 3 devices"),
        ((4,), Layout(mesh_of((2,), (0, 1)), flat((2, 2), 0).placement, {Cut(Row("compute", 0, 0), 4): (3, 2)}), "lengths .* of 4 units"),
    ],
)
def test_what_is_no_layout_is_refused(shape, layout, message):
    with pytest.raises(PlanError, match=message):
        reshard_plan(shape, layout, flat(None, 0, 1))
