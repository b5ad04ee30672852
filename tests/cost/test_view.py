"""Kinds of devices and fractions of tensors; fractions at concrete lengths agree with the geometry of `hapx.layout`."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from random import Random

import numpy as np
import pytest

from hapx.cost.network import Network
from hapx.cost.view import View
from hapx.layout import local_shape
from hapx.plan import Axis, Mesh
from hapx.planner import views
from hapx.restriction import AUTO
from hapx.states import REPLICATED, Cut, Placement
from support.theories import cluster, device_type, flat, placed, split, two_level

FAST, SLOW = device_type("fast", 4e12), device_type("slow", 1e12)
MIXED = cluster([("fast", "fast"), ("slow", "slow"), ("slow", "slow")], [FAST, SLOW])


def test_kinds_are_alike_devices_in_order_of_appearance():
    assert View(flat(6), MIXED).kinds == ((0, 1), (2, 3, 4, 5))
    assert View(two_level(3, 2), MIXED).kinds == ((0,), (1, 2))
    assert View(two_level(3, 2), MIXED).devices == ((0, 1), (2, 3, 4, 5))


def test_machines_of_different_size_are_different_kinds():
    uneven = cluster([("fast", "fast"), ("fast",)], [FAST])
    assert View(flat(3), uneven).kinds == ((0, 1), (2,))


def test_types_with_equal_numbers_are_one_kind():
    assert View(flat(2), cluster([("fast",), ("twin",)], [FAST, device_type("twin", 4e12)])).kinds == ((0, 1),)


def test_a_processor_is_another_kind_than_an_accelerator_with_its_numbers():
    assert View(flat(2), cluster([("fast",), ("cpu",)], [FAST, device_type("cpu", 4e12)])).kinds == ((0,), (1,))


def test_without_an_uneven_axis_there_is_one_kind_as_slow_as_the_slowest():
    even = Mesh("even", (Axis("devices", 6, "devices"),), tuple(range(6)), None)
    view = View(even, MIXED)
    assert view.kinds == ((0,),)
    assert view.worst(lambda d: MIXED.type_of(d).speed("fp32"), min) == (1e12,)


def test_even_axes_are_folded_in_with_whole_units():
    mesh = two_level(3, 2)
    piece = View(mesh, MIXED).fraction(placed(split(mesh, 0, 0, 12), split(mesh, 1, 1, 5)))
    assert piece.const == (0.0, 0.0)
    assert piece.slopes == ((Cut(mesh.row(0), 12), (3 / 5, 3 / 5)),)  # the larger part of 5 units on 2 devices is 3


def test_a_nested_even_axis_is_allowed_a_part_of_a_unit():
    mesh = two_level(3, 2)
    both = placed(split(mesh, 0, 0, 12), split(mesh, 1, 0, 12))
    view, cut = View(mesh, MIXED), Cut(mesh.row(0), 12)
    assert view.fraction(both).slopes == ((cut, (0.5, 0.5)),)
    assert view.fraction(both).const == pytest.approx((0.25 / 12,) * 2)
    assert view.fraction(both, bound=True).const == pytest.approx((0.5 / 12,) * 2)


@pytest.mark.parametrize("nest", [(), (1, 0)])
@pytest.mark.parametrize("lengths", [(7, 3, 2), (12, 0, 0), (5, 5, 2)])
def test_exact_fractions_are_those_of_the_largest_local_tensor(nest: tuple[int, ...], lengths: tuple[int, ...]):
    mesh, cut = two_level(3, 2), Cut(two_level(3, 2).row(0), 12)
    shape = (12, 10)
    for second in (split(mesh, 1, 0, 12), split(mesh, 1, 1, 5, inner=2), REPLICATED):
        placement = placed(split(mesh, 0, 0, 12), second, nest=nest)
        view = View(mesh, MIXED, {cut: lengths})
        exact = {c: view.fraction(placement).const[k] for k, members in enumerate(view.kinds) for c in members}
        for c in range(3):
            local = max(prod(local_shape(shape, placement, mesh.sizes, {cut: lengths}, (c, i))) for i in range(2))
            if nest and second == split(mesh, 1, 0, 12):
                # the inner axis deals out first: the largest part of any coordinate
                assert exact[c] >= local / prod(shape)
            else:
                assert exact[c] == pytest.approx(local / prod(shape))


@pytest.mark.parametrize("lengths", [(7, 3, 2), (12, 0, 0), (4, 4, 4)])
def test_bounds_are_never_below_the_exact_fractions(lengths: tuple[int, ...]):
    mesh, cut = two_level(3, 2), Cut(two_level(3, 2).row(0), 12)
    placement = placed(split(mesh, 0, 0, 12), split(mesh, 1, 0, 12))
    view = View(mesh, MIXED)
    shares = {c: np.array(v) for c, v in view.shares({cut: lengths}).items()}
    bound = view.fraction(placement, bound=True).at(shares)
    at_lengths = View(mesh, MIXED, {cut: lengths})
    exact = {c: at_lengths.fraction(placement).const[k] for k, members in enumerate(at_lengths.kinds) for c in members}
    for kind, members in enumerate(view.kinds):
        assert all(bound[kind] >= exact[c] - 1e-12 for c in members)


def test_shares_are_the_largest_of_a_kind():
    mesh = flat(6)
    assert View(mesh, MIXED).shares({Cut(mesh.row(0), 10): (3, 4, 1, 1, 1, 0)}) == {Cut(mesh.row(0), 10): (0.4, 0.1)}


def test_work_nests_as_the_tensors_do():
    mesh = two_level(3, 2)
    cuts = (Cut(mesh.row(0), 12), Cut(mesh.row(1), 12))
    view = View(mesh, MIXED)
    nested = placed(split(mesh, 0, 0, 12), split(mesh, 1, 0, 12))
    apart = placed(split(mesh, 0, 0, 12), split(mesh, 1, 1, 12))
    assert view.work(cuts, [nested]) == view.fraction(nested)
    assert view.work(cuts, [apart]).const == (0.0, 0.0)
    assert view.work((None, None), [nested]) == view.fraction(Placement((REPLICATED, REPLICATED)))


@pytest.mark.parametrize("seed", range(40))
def test_devices_of_a_kind_have_the_same_links(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are looked up for the first coordinate of a kind only."""
    random = Random(seed)
    sizes = random.choices((1, 2, 2, 3, 4), k=random.randint(1, 4))
    machines = [[random.choice(("fast", "slow"))] * n if random.random() < 0.7 else random.choices(("fast", "slow"), k=n) for n in sizes]
    plain = cluster([tuple(m) for m in machines], [FAST, SLOW])
    quick = [replace(m, intra=replace(m.intra, bandwidth=random.choice((1, 4)) * m.intra.bandwidth)) for m in plain.machines]
    of = replace(plain, machines=tuple(quick))
    for mesh in views(of, AUTO):
        found = Network(View(mesh, of)).axes
        with monkeypatch.context() as patch:
            patch.setattr(View, "worst", lambda view, number, worst=max: tuple(float(worst(map(number, own))) for own in view.devices))
            assert found == Network(View(mesh, of)).axes
