"""Downhill with exact peaks: nothing that costs more or does not fit, and no single unit that would still gain."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hapx.balancer.descent import LEAST, descend
from hapx.balancer.rounding import Lengths, neighbours, per_device, round_ratios
from hapx.states import Cut, Row

ROW = Row("compute", 0, 0)
CUT, LARGE = Cut(ROW, 24), Cut(ROW, 4096)
KINDS = ((0,), (1, 2), (3,))
SIZES = [len(k) for k in KINDS]


def deal(ratios: object, cuts: tuple[Cut, ...]) -> Lengths:
    return round_ratios({row: per_device(own.tolist(), KINDS) for row, own in ratios.items()}, cuts)  # type: ignore[attr-defined]


def fullest(own: tuple[int, ...], units: int) -> np.ndarray:
    return np.array([max(own[c] for c in kind) / units for kind in KINDS])


speeds = st.lists(st.floats(0.2, 4), min_size=3, max_size=3).map(np.array)


@settings(deadline=None, max_examples=60)
@given(speeds, st.lists(st.floats(0.26, 1), min_size=3, max_size=3).map(np.array), st.booleans())
def test_what_is_found_fits_and_is_not_dearer(slow, room, large):
    cut = LARGE if large else CUT
    asked = []

    def cost(own):
        return float((slow * fullest(own[cut], cut.units)).max())

    def fits(own):
        asked.append(cost(own))
        return bool((fullest(own[cut], cut.units) <= room).all())

    ratios = {ROW: np.full(3, 0.25)}
    start = deal(ratios, (cut,))
    found, lengths = descend(ratios, start, KINDS, (cut,), lambda r: deal(r, (cut,)), cost, fits)
    assert sum(lengths[cut]) == cut.units and min(lengths[cut]) >= 0
    assert np.isclose((found[ROW] * SIZES).sum(), 1) and (found[ROW] >= 0).all()
    assert fits(lengths) and cost(lengths) <= cost(start)
    assert all(seconds < cost(start) for seconds in asked[:-1])  # what is dearer is not asked about
    near = [own[cut] for own in neighbours(lengths, cut, KINDS)]
    least = min((cost({cut: n}) for n in near if (fullest(n, cut.units) <= room).all()), default=np.inf)
    if not large:
        assert least >= cost(lengths) * (1 - LEAST)
        return
    level = 1 / slow / (SIZES / slow).sum()  # equally slow
    if (level <= room).all():
        assert cost(lengths) <= 1.03 * float((slow * level).max())


def test_where_another_limit_was_too_narrow():
    """Peaks that are not what sums say: the first kind may take more as soon as the last one takes less."""
    room = np.array([0.5, 0.5, 0.5])

    def cost(own):
        return float((np.array([1.0, 2.0, 4.0]) * fullest(own[LARGE], 4096)).max())

    def fits(own):
        held = fullest(own[LARGE], 4096)
        return bool((held + 0.3 * held[2] <= room).all())

    ratios = {ROW: np.full(3, 0.25)}
    found, lengths = descend(ratios, deal(ratios, (LARGE,)), KINDS, (LARGE,), lambda r: deal(r, (LARGE,)), cost, fits)
    # 0.4545 + 2 x 0.2160 + 0.1136 would be level without limits; held[2] = s leaves 0.5 - 0.3 s for the first kind
    assert fits(lengths)
    assert cost(lengths) < 0.48 < 1.0 == cost(deal(ratios, (LARGE,)))
    assert np.allclose(fullest(lengths[LARGE], 4096), found[ROW], atol=2 / 4096)
