"""Where a sequence repeats itself.

In: a number per step, equal for steps that are alike. Out: its runs. Invariant: in a run every step equals the one a period later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """Steps [start, stop) that each equal the one `period` later; they are at least one period."""

    period: int
    start: int
    stop: int


def runs(codes: Sequence[int], longest: int) -> Iterator[Run]:
    """All of them, for each period up to the longest that is asked for."""
    array = np.array(codes)
    for period in range(1, longest + 1):
        equal = array[:-period] == array[period:]
        if np.count_nonzero(equal) < period:
            continue
        framed = np.concatenate([[False], equal, [False]])
        borders = np.flatnonzero(framed[1:] != framed[:-1]).tolist()
        for start, stop in zip(borders[::2], borders[1::2], strict=True):
            if stop - start >= period:
                yield Run(period, start, stop)
