"""The bound of what a re-cut moves, against every single device's units."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from hapx.balancer.rounding import deal
from hapx.cost.recut import MANY, moved
from hapx.cost.view import View
from hapx.plan import Mesh
from hapx.states import Cut
from support.theories import cluster, device_type, flat, placed, split, two_level

FAST, SLOW = device_type("fast", 2e12), device_type("slow", 1e12)
UNITS = 960
LAYOUTS = {
    "two kinds": (("fast",) * 2, ("slow",) * 3),
    "one of each": (("fast",), ("slow",)),
    "mixed": (("fast", "slow"), ("fast", "slow")),
    "many": (("fast",) * (MANY + 1), ("slow",)),
}


def busiest(held: tuple[int, ...], wanted: tuple[int, ...]) -> list[int]:
    """Units that each device sends or receives, unit by unit."""
    before, after = ([j for j, n in enumerate(own) for _ in range(n)] for own in (held, wanted))
    moves = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    return [max(sum(a == j for a, _ in moves), sum(b == j for _, b in moves)) for j in range(len(held))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bound_holds_and_is_exact_at_lengths(name: str) -> None:
    devices = sum(map(len, LAYOUTS[name]))
    mesh, spec = flat(devices), cluster(LAYOUTS[name], (FAST, SLOW))
    source = split(mesh, 0, 0, UNITS)
    target = type(source)(0, 1, 1, Cut(mesh.row(0, segment=1), UNITS))
    view, rng = View(mesh, spec), Random(name)
    for _ in range(20):
        lengths: dict[Cut, tuple[int, ...]] = {}
        for cut in (source.cut, target.cut):
            weights = [rng.random() for _ in view.kinds]
            lengths[cut] = deal(UNITS, [next(w for w, k in zip(weights, view.kinds, strict=True) if c in k) for c in range(devices)])
        true = busiest(lengths[source.cut], lengths[target.cut])
        shares = {cut: np.array(own) for cut, own in view.shares(lengths).items()}
        bound = np.max([p.at(shares) for p in moved(view, placed(source), placed(target), 0)], axis=0) * UNITS
        for kind, most in zip(view.kinds, bound, strict=True):
            assert max(true[c] for c in kind) <= most + len(kind) + 1e-9  # rounding: a unit per device
        exact = View(mesh, spec, lengths)
        (piece,) = moved(exact, placed(source), placed(target), 0)
        for kind, part in zip(exact.kinds, piece.const, strict=True):
            assert part * UNITS == pytest.approx(max(true[c] for c in kind))


def test_equal_rows_move_nothing_and_small_changes_little() -> None:
    mesh, spec = flat(2), cluster((("fast",), ("slow",)), (FAST, SLOW))
    source = split(mesh, 0, 0, UNITS)
    target = type(source)(0, 1, 1, Cut(mesh.row(0, segment=1), UNITS))

    def at(s: float, t: float) -> float:
        shares = {source.cut: np.array([s, 1 - s]), target.cut: np.array([t, 1 - t])}
        return float(np.max([p.at(shares) for p in moved(View(mesh, spec), placed(source), placed(target), 0)]))

    assert at(0.6, 0.6) == pytest.approx(0) and at(0.6, 0.55) == pytest.approx(0.05) and at(0.5, 0.6) == pytest.approx(0.1)


def test_the_axes_inside_move_their_part() -> None:
    mesh: Mesh = two_level(2, 4)
    spec = cluster((("fast",) * 4, ("slow",) * 4), (FAST, SLOW))
    outer, inner = split(mesh, 0, 0, UNITS), split(mesh, 1, 0, UNITS)
    again = type(outer)(0, 1, 1, Cut(mesh.row(0, segment=1), UNITS))
    pieces = moved(View(mesh, spec), placed(outer, inner), placed(again, inner), 0)
    shares = {outer.cut: np.array([0.6, 0.4]), again.cut: np.array([0.5, 0.5])}
    assert np.max([p.at(shares) for p in pieces]) == pytest.approx(0.1 / 4)
