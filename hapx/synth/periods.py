"""Where a sequence of steps repeats itself, so that what was found for one repetition is not computed again for the others.

In: a number per step, equal for steps that are alike. Out: per step its *period*: the distance to the later step that it repeats, 0 where it
repeats none. Invariant: a step with period p is in a run of steps each of which equals the step p after it, at least p steps long.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def periods(kinds: Sequence[int]) -> list[int]:
    """The period of every step, from the longest run that it is part of."""
    codes = np.array(kinds)
    runs = []
    for period in range(1, len(codes) // 2 + 1):
        same = np.concatenate([[False], codes[:-period] == codes[period:], [False]])
        borders = np.flatnonzero(same[1:] != same[:-1])
        runs += [(stop - start, -period, start) for start, stop in zip(borders[::2], borders[1::2], strict=True) if stop - start >= period]
    found = [0] * len(codes)
    for length, period, start in sorted(runs):  # longer runs are written last
        found[start : start + length] = [-period] * length
    return found
