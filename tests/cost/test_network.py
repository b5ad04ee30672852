"""Collectives: volumes and latencies by hand, and which link an axis has."""

from __future__ import annotations

import numpy as np
import pytest

from hapx.cluster.spec import Link
from hapx.cost.network import AxisLinks, Network
from hapx.cost.terms import Piece
from hapx.cost.view import View
from hapx.plan import Form, Mesh
from hapx.states import Cut
from support.theories import cluster, device_type, flat, two_level

ANY = device_type("any", 1e12)
N = 1e9


def links(machines: list[int], mesh: Mesh, inter: Link = Link(1e9, 1e-3), intra: Link = Link(1e10, 1e-5)) -> tuple[AxisLinks, ...]:  # noqa: B008
    spec = cluster([("any",) * n for n in machines], [ANY], inter=inter, intra=intra)
    return Network(View(mesh, spec)).axes


def test_a_flat_ring_over_machines_has_the_whole_card():
    (axis,) = links([4, 4], flat(8))
    assert axis.ring == (1e9,)
    assert axis.latency == (1e-3,)
    assert axis.cuts
    assert axis.mates == (4,)


def test_the_outer_axis_of_two_shares_the_card_and_the_inner_one_stays_inside():
    outer, inner = links([4, 4], two_level(2, 4))
    assert outer.ring == (0.25e9,)
    assert outer.cuts
    assert inner.ring == (1e10,)
    assert inner.latency == (1e-5,)
    assert not inner.cuts
    assert not inner.crosses


def test_a_ring_is_not_faster_than_the_link_inside():
    (axis,) = links([2, 2], flat(4), inter=Link(1e9, 1e-3), intra=Link(5e8, 1e-5))
    assert axis.ring == (5e8,)


def test_inside_one_machine_every_axis_has_its_link():
    outer, inner = links([8], two_level(2, 4))
    assert outer.ring == inner.ring == (1e10,)
    assert outer.cuts and not inner.cuts


def flat_axis(m: int) -> AxisLinks:
    (axis,) = links([1] * m, flat(m))
    return axis


def at(term, shares) -> float:
    return float(term.at(shares).max())


@pytest.mark.parametrize("m,rounds", [(2, 1), (4, 2), (5, 3), (8, 3)])
def test_all_reduce(m: int, rounds: int):
    assert at(flat_axis(m).all_reduce(Piece((N,))), {}) == pytest.approx(2 * (m - 1) / m * N / 1e9 + 2 * rounds * 1e-3)


def test_sums_of_numbers_have_a_latency_of_their_own_where_it_was_measured():
    (plain,) = links([4], flat(4), intra=Link(1e10, 1e-3))
    (measured,) = links([4], flat(4), intra=Link(1e10, 1e-3, 2e-4))
    few = Piece((8.0,))
    assert at(plain.all_reduce(few, numbers=True), {}) == at(plain.all_reduce(few), {}) == at(measured.all_reduce(few), {})
    assert at(measured.all_reduce(few, numbers=True), {}) == pytest.approx(4 * 2e-4, rel=1e-4)


def test_forms_of_all_gather():
    cut = Cut(flat(4).row(0), 100)
    shard, whole = Piece((0.0,), ((cut, (N,)),)), Piece((N,))

    def cost(form: Form, largest: float) -> float:
        return at(flat_axis(4).all_gather(form, shard, whole), {cut: np.array([largest])})

    assert cost(Form.PADDED, 0.25) == pytest.approx(0.75 + 2e-3)
    assert cost(Form.PADDED, 0.85) == pytest.approx(2.55 + 2e-3)
    assert cost(Form.GROUPED, 0.25) == cost(Form.GROUPED, 0.85) == pytest.approx(1.0 + 4e-3)
    assert cost(Form.POINT_TO_POINT, 0.85) == pytest.approx(2.55 + 3e-3)
    assert cost(Form.POINT_TO_POINT, 0.1) == pytest.approx(0.9 + 3e-3)  # what enters
    # even shares are padded, very uneven ones are broadcast
    assert cost(Form.PADDED, 0.25) < min(cost(Form.GROUPED, 0.25), cost(Form.POINT_TO_POINT, 0.25))
    assert cost(Form.GROUPED, 0.85) < min(cost(Form.PADDED, 0.85), cost(Form.POINT_TO_POINT, 0.85))


def test_point_to_point_stays_inside_a_machine_where_it_can():
    """Two machines of two: only what the other machine needs passes the cards."""
    (axis,) = links([2, 2], flat(4), intra=Link(1e12, 1e-5))
    cut = Cut(flat(4).row(0), 100)
    term = axis.all_gather(Form.POINT_TO_POINT, Piece((0.0,), ((cut, (N,)),)), Piece((N,)))
    assert at(term, {cut: np.array([0.4])}) == pytest.approx(2 * 0.4 * 2 + 3e-3)


def test_all_to_all_is_bounded_by_each_share():
    cut = Cut(flat(4).row(0), 100)
    term = flat_axis(4).all_to_all(Piece((0.0,), ((cut, (N,)),)), Piece((N / 4,)))
    assert at(term, {cut: np.array([0.5])}) == pytest.approx(0.5 + 3e-3)
    assert at(term, {cut: np.array([0.0])}) == pytest.approx(0.25 + 3e-3)


def test_latency_always_counts():
    nothing = Piece((0.0,))
    axis = flat_axis(4)
    for term in (axis.all_reduce(nothing), *(axis.all_gather(f, nothing, nothing) for f in (Form.PADDED, Form.GROUPED, Form.POINT_TO_POINT))):
        assert at(term, {}) >= 2e-3


def test_one_device_communicates_nothing():
    (axis,) = links([1], flat(1))
    assert axis.all_reduce(Piece((N,))) is None
    assert axis.all_gather(Form.PADDED, Piece((N,)), Piece((N,))) is None
    assert axis.all_to_all(Piece((N,)), Piece((N,))) is None
