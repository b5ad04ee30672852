"""Layers cut into stages for given submeshes, such that the stage that is busy for longest is so for the shortest time.

In: shapes of the stages from the front, how many micro-batches each keeps, prices. Out: layers and answer of each stage.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import inf
from typing import Any

from hapx.stages.costs import Answer, Prices
from hapx.stages.submeshes import Shape

Runs = tuple[tuple[int, int, Answer], ...]


def busy(answer: Answer, micro_batches: int) -> float:
    """Seconds of an iteration that a stage computes and updates."""
    return micro_batches * answer.micro + answer.iteration


class Cutter:
    """Cuts of some layers at some prices. Answers are kept from cut to cut."""

    def __init__(self, layers: int, prices: Prices):
        self.layers, self.prices = layers, prices
        self._numbers: dict[Shape, int] = {}
        self._known: dict[tuple[int, int, int], tuple[Answer, ...]] = {}
        self._least: dict[tuple[int, int, int], float] = {}

    def cut(self, shapes: Sequence[Shape], kept: Sequence[int], limit: float = inf, plans: Sequence[Container[Any]] | None = None) -> Runs | None:
        """Layers [start, stop) and answers of the stages, of which each has room for what it keeps, and one of its `plans` if they are given; None
        where there are too few layers, or some stage is busy for `limit` seconds or longer however they are cut."""
        count = len(shapes)
        # per number of layers: of the stages so far, what the busiest takes, and how they are cut
        best: dict[int, tuple[float, Runs]] = {0: (0.0, ())}
        for stage, shape in enumerate(shapes):
            number = self._numbers.setdefault(shape, len(self._numbers))
            found: dict[int, tuple[float, Runs]] = {}
            for start, (longest, behind) in best.items():
                for stop in range(start + 1, self.layers - (count - 1 - stage) + 1):
                    if self._bound(start, stop, shape, number) >= limit:
                        break
                    if (stop == self.layers) != (stage == count - 1):
                        continue
                    own = self._answer(start, stop, shape, number, kept[stage], None if plans is None else plans[stage])
                    if own is None:
                        continue
                    value = max(longest, busy(own, self.prices.micro_batches))
                    if value < min(limit, found[stop][0] if stop in found else inf):
                        found[stop] = value, (*behind, (start, stop, own))
            best = found
        return best[self.layers][1] if self.layers in best else None

    def _bound(self, start: int, stop: int, shape: Shape, number: int) -> float:
        key = start, stop, number
        if key not in self._least:
            self._least[key] = busy(self.prices.bound(start, stop, shape), self.prices.micro_batches)
        return self._least[key]

    def _answer(self, start: int, stop: int, shape: Shape, number: int, kept: int, plans: Container[Any] | None) -> Answer | None:
        """The quickest one that has room, of these plans."""
        key = start, stop, number
        if key not in self._known:
            self._known[key] = tuple(self.prices.ask(start, stop, shape))
        fits = (a for a in self._known[key] if a.most_in_flight >= kept and (plans is None or a.plan in plans))
        return min(fits, key=lambda a: busy(a, self.prices.micro_batches), default=None)
