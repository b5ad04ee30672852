"""Prices of the relaxed problem: the least over choices, by fewer of them, is the least over all."""

from __future__ import annotations

import numpy as np
import pytest

from hapx.synth.sheet import MANY, Cuts, Weighted

KINDS = 2
WEIGHTS = KINDS**2 + 1  # every pair of kinds, and all alike


def freed(cuts: Cuts, forward: np.ndarray, backward: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """As `Cuts.freed`, written as it is defined: choice, row and weight one by one."""
    total = cuts.after[:, None] + rest
    found = total.copy()
    for c in range(len(total)):
        for r in range(total.shape[1]):
            own = total[c, r]
            if forward[c] and backward[c]:
                found[c, r] = own.max()
            elif cuts.pairs and (forward[c] or backward[c]):
                for i in range(KINDS):
                    for j in range(KINDS):
                        ways = [own[k * KINDS + j] for k in range(KINDS)] if forward[c] else [own[i * KINDS + k] for k in range(KINDS)]
                        found[c, r, i * KINDS + j] = max(ways)
    return found


@pytest.mark.parametrize("cut", ["no phases", "one way", "both ways", "without pairs"])
@pytest.mark.parametrize("alike", [False, True], ids=["then of each choice", "one then"])
def test_the_least_over_choices(cut: str, alike: bool) -> None:
    rng = np.random.default_rng(len(cut))
    choices, rows = 24, 2 * MANY // 24
    base, then = rng.integers(0, 9, (choices, WEIGHTS)) * 1.0, rng.integers(0, 9, (1 if alike else choices, WEIGHTS)) * 1.0
    after, offset = rng.integers(0, 9, (rows, WEIGHTS)) * 1.0, rng.integers(0, 9, WEIGHTS) * 1.0
    forward, backward = rng.random((2, choices)) < 0.4
    if cut == "one way":
        backward &= ~forward
    behind = rng.integers(0, 5, (choices, WEIGHTS)) * 1.0
    for own in (base, behind, forward, backward, *([] if alike else [then])):
        own[5:7] = own[4]
    base[6] += 1  # number 5 is as 4, number 6 is dearer
    phases = None
    if cut != "no phases":
        phases = Cuts.of(forward, backward, behind, 0 if cut == "without pairs" else KINDS)
    weighted = Weighted(base, (), (), phases)
    rest = np.broadcast_to(np.maximum(then[:, None], after), (choices, rows, WEIGHTS))
    total = rest if phases is None else freed(phases, forward, backward, rest + offset) - offset
    assert np.array_equal(weighted.least(then, after, offset), (base[:, None] + total).min(axis=0))
    if phases is not None:
        assert np.array_equal(phases.freed(rest), freed(phases, forward, backward, rest))
    left = weighted._undominated(then)
    assert 4 in left and not {5, 6} & set(left)
