"""What is known of the planner's answers at one number of micro-batches, in arrays.

In: layers (by class), a space, prices. Out: per (shape, start, stop, option) seconds per micro-batch, seconds per iteration and micro-batches that
fit. A pair that was not asked has one option, its bound. Runs of equal layers share an answer: `ask` is called once per (classes, shape).

Bounds are optimistic by about the same factor for all runs on a shape: what the answers have shown of it raises the other bounds to *estimates*,
which lead the search to good pipelines with few asks. Only bounds prove anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hapx.stages.costs import Answer, Prices
from hapx.stages.space import Space

Floats = npt.NDArray[np.float64]
NOISE = 1e-9  # of adding numbers up in another order
Ints = npt.NDArray[np.int64]


class Book:
    """Arrays [shape, start, stop, option]: inf seconds where there is no option. real[shape, start, stop]: asked. version: number of asks."""

    def __init__(self, layers: Sequence[Hashable], space: Space, prices: Prices):
        self.space, self.prices, self.num_layers = space, prices, len(layers)
        runs: dict[tuple[Hashable, ...], list[tuple[int, int]]] = {}
        for stop in range(1, len(layers) + 1):
            for start in range(stop):
                runs.setdefault(tuple(layers[start:stop]), []).append((start, stop))
        self.runs = tuple(runs.values())
        self.alike = {run: runs for runs in self.runs for run in runs}
        size = (len(space.shapes), self.num_layers, self.num_layers + 1)
        self.micro, self.iteration = np.full((*size, 1), np.inf), np.full((*size, 1), np.inf)
        self.fits: Ints = np.zeros((*size, 1), dtype=np.int64)
        self.real = np.zeros(size, dtype=np.bool_)
        self.answers: dict[tuple[int, int, int], tuple[Answer, ...]] = {}
        self.version = 0
        self.others: tuple[Book, ...] = ()
        self.ratio: Floats = np.full((len(space.shapes), 2), np.nan)
        self.num_pairs = len(space.shapes) * len(self.runs)
        for shape, known in enumerate(space.shapes):
            for equal in self.runs:
                self._write(shape, equal, (prices.bound(*equal[0], known),))

    @cached_property
    def least_crossing(self) -> Floats:
        """[shape in front, link, boundary]; nothing crosses after the last layer."""
        least, links, inner = self.prices.least_crossing, self.space.kinds_of_link, range(1, self.num_layers)
        return np.array([[[0.0, *(least(b, shape, link) for b in inner), 0.0] for link in links] for shape in self.space.shapes])

    def ask(self, shape: int, start: int, stop: int) -> bool:
        """Asks the planner, unless it was asked. Returns whether it had to be."""
        if self.real[shape, start, stop]:
            return False
        for equal in self.runs if self.prices.together else (self.alike[start, stop],):
            self._ask(shape, equal)
        self.version += 1
        return True

    def _ask(self, shape: int, equal: Sequence[tuple[int, int]]) -> None:
        """For equal runs of layers."""
        at = (shape, *equal[0], 0)
        bound, fits = (self.micro[at], self.iteration[at]), self.fits[at]
        answers = self.prices.ask(*equal[0], self.space.shapes[shape])
        for a in answers:
            good = a.micro >= bound[0] * (1 - NOISE) and a.iteration >= bound[1] * (1 - NOISE) and a.most_in_flight <= fits
            assert good, f"layers {equal[0]} on {self.space.shapes[shape]}: {a} is better than its bound, {(*bound, fits)}"
        self._write(shape, equal, answers)
        for run in equal:
            self.real[(shape, *run)] = True
            self.answers[(shape, *run)] = answers
        if answers:
            seen = min(a.micro for a in answers), min(a.iteration for a in answers)
            ratio = [s / b if b > 0 else 1.0 for s, b in zip(seen, bound, strict=True)]
            self.ratio[shape] = np.fmin(self.ratio[shape], ratio)

    def arrays(self, estimates: bool) -> tuple[Floats, Floats]:
        """Seconds per micro-batch and per iteration; with estimates in place of the bounds if wanted."""
        if not estimates:
            return self.micro, self.iteration
        ratio = self._factors()[:, None, None, None, :]
        open_ = ~self.real[..., None]
        return np.where(open_, self.micro * ratio[..., 0], self.micro), np.where(open_, self.iteration * ratio[..., 1], self.iteration)

    def asked_only(self) -> tuple[Floats, Floats]:
        """Seconds, inf where nothing was asked."""
        return np.where(self.real[..., None], self.micro, np.inf), self.iteration

    def _factors(self) -> Floats:
        """Per shape, the least of answer / bound, here or else at other numbers of micro-batches; of a shape that was never asked, that of shapes
        with no more devices: more devices have more losses."""
        sizes = np.array([s.num_devices for s in self.space.shapes])
        ratio = self.ratio
        for other in self.others:
            ratio = np.where(np.isnan(self.ratio), np.fmin(ratio, other.ratio), ratio)
        known = ~np.isnan(ratio[:, 0])
        factors = np.where(known[:, None], ratio, 1.0)
        for shape in np.nonzero(~known)[0]:
            smaller = factors[known & (sizes <= sizes[shape])]
            factors[shape] = smaller.min(axis=0) if len(smaller) else 1.0
        return factors

    def _write(self, shape: int, runs: Sequence[tuple[int, int]], answers: Sequence[Answer]) -> None:
        more = len(answers) - self.micro.shape[-1]
        if more > 0:
            pad = [(0, 0)] * 3 + [(0, more)]
            self.micro, self.iteration = (np.pad(a, pad, constant_values=np.inf) for a in (self.micro, self.iteration))
            self.fits = np.pad(self.fits, pad)
        for run in runs:
            at = (shape, *run)
            self.micro[at], self.iteration[at], self.fits[at] = np.inf, np.inf, 0
            for i, a in enumerate(answers):
                self.micro[(*at, i)], self.iteration[(*at, i)], self.fits[(*at, i)] = a.micro, a.iteration, a.most_in_flight
