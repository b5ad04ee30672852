"""Geometry of placements that no mesh of two axes can show."""

from __future__ import annotations

from itertools import product

import numpy as np

from hapx.layout import local_indices, local_shape
from hapx.states import Cut, Placement, Row, Sharded


def test_two_axes_in_one_factor_and_a_third_in_another():
    """What two axes leave of a factor is counted once by the axis that cuts the other factor."""
    heads, again, width = (Cut(Row("compute", 0, a), u) for a, u in ((0, 4), (1, 4), (2, 3)))
    placement = Placement((Sharded(0, 1, 3, heads), Sharded(0, 1, 3, again), Sharded(0, 4, 1, width)))
    sizes, lengths = (2, 2, 2), {heads: (3, 1), again: (4, 0), width: (1, 2)}
    found = {at: local_indices(12, 0, placement, sizes, lengths, at) for at in product(*map(range, sizes))}
    assert sorted(np.concatenate(list(found.values()))) == list(range(12))
    assert found[0, 0, 1].tolist() == [1, 2, 4, 5] and found[0, 1, 0].tolist() == [6] and found[1, 0, 1].tolist() == [10, 11]
    assert all(local_shape((12,), placement, sizes, lengths, at) == (len(own),) for at, own in found.items())
    inner_first = Placement(placement.states, (2, 0, 1))
    assert all(np.array_equal(own, local_indices(12, 0, inner_first, sizes, lengths, at)) for at, own in found.items())
