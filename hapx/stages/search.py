"""Best-first search for the cheapest pipeline over what a book knows, from the last stage to the first.

A label is a suffix of a pipeline: its first layer, what devices are left, the shape of its first stage, and so far the sum of seconds, the largest
period, the largest seconds per iteration and the number of stages. With the bound of `hapx.stages.frontier` on what goes before, labels are looked at
in the order of the least time they can lead to. Of two labels at the same layer, devices and shape one that is no better in any number is dropped:
fewer stages behind mean fewer micro-batches in flight before, and less that crosses behind leaves more of its card to what will cross before.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np

from hapx.stages.book import NOISE, Floats, Ints
from hapx.stages.costs import ONE_WAY
from hapx.stages.frontier import Frontier
from hapx.stages.space import Move

MORE = 1.05  # times what is expected: what more is known makes pipelines look slower
WIDER = 1.25  # times the limit, where nothing is found below it


class Choice(NamedTuple):
    """A stage: layers [start, stop), the option of the book, the move that takes its devices, what crosses to the next stage."""

    start: int
    stop: int
    option: int
    move: Move
    crossing: float


class Label(NamedTuple):
    """A suffix: next to be assigned are the layers before `layer` on the devices of `state`. Stages from the front."""

    layer: int
    state: int
    stages: int
    total: float
    period: float
    iteration: float
    choice: Choice | None
    behind: Label | None

    def choices(self) -> list[Choice]:
        """Stages from the front."""
        label: Label | None = self
        found = []
        while label is not None and label.choice is not None:
            found.append(label.choice)
            label = label.behind
        return found


class Front(NamedTuple):
    """Stages that end before a layer, one entry for each move, first layer and option that may be of interest, and what goes before it at least:
    `ahead` and the largest period `top` [grid, entries]. shapes: of the moves; which: of them, per entry. crossings: seconds per entry of what
    crosses to the stage behind, by its shape (-1: there is none)."""

    moves: list[Move]
    starts: list[int]
    options: list[int]
    shapes: list[int]
    which: Ints
    micro: Floats
    update: Floats
    fits: Ints
    top: Floats
    ahead: Floats
    rest: Floats
    crossings: dict[int, Floats]


class Searcher:
    """A search on one frontier. labels: how many were looked at."""

    def __init__(self, frontier: Frontier):
        self.frontier, self.space, self.book = frontier, frontier.space, frontier.book
        self.prices = frontier.book.prices
        self.labels = 0
        self._crossings: dict[tuple[int, int, int, int], float] = {}
        self._fronts: dict[tuple[int, int, int], Front | None] = {}  # by state, last layer, position

    def cheapest(self, apart: bool = False, most: int = 1, patience: float = math.inf, expected: float = 0.0) -> list[tuple[float, Label]] | None:
        """The cheapest pipelines below the frontier's limit, best first: one, or with `apart` the best of every number of stages, up to `most`. None
        where more than `patience` labels would have to be looked at. expected: seconds of the cheapest one, perhaps: the nearer the limit is to
        them, the quicker this is."""
        if self.frontier.infinite:
            return []
        limit, found = self.frontier.limit, list[tuple[float, Label]]()
        first = limit if apart else max(1.2 * self.frontier.n * self.frontier.least_top, MORE * expected)
        for factor in (1.0, WIDER, 2 * WIDER, math.inf):
            guess = factor * first if WIDER * factor * first <= limit else limit
            self.frontier.below(guess)
            self._fronts.clear()
            found = self._search(apart, most, patience)
            if self.labels > patience:
                return None
            if len(found) == most or guess >= limit:
                break
        return found

    def _search(self, apart: bool, most: int, patience: float) -> list[tuple[float, Label]]:
        found: list[tuple[float, Label]] = []
        order, numbers = count(), set[int]()
        root = Label(self.book.num_layers, self.space.start, 0, 0.0, 0.0, 0.0, None, None)
        heap = [(0.0, next(order), root)]
        known: dict[tuple[int, ...], list[Label]] = {}
        while heap and len(found) < most and self.labels <= patience:
            time, _, label = heappop(heap)
            self.labels += 1
            if label.layer == 0:
                if label.stages not in numbers:
                    found.append((time, label))
                    numbers.add(label.stages)
                continue
            for value, child in self._children(label):
                assert child.choice is not None
                others = known.setdefault((child.layer, child.state, child.choice.move.shape, child.stages if apart else 0), [])
                if not any(_no_worse(o, child) for o in others):
                    others.append(child)
                    heappush(heap, (value, next(order), child))
        return found

    def _children(self, label: Label) -> list[tuple[float, Label]]:
        """Suffixes with one more stage in front that may be below the limit, with the least time they can lead to."""
        frontier = self.frontier
        stop, n, hides = label.layer, frontier.n, frontier.discipline.hides
        key = label.state, stop, frontier.position(label.stages + 1)
        if key not in self._fronts:
            self._fronts[key] = self._front(*key)
        front = self._fronts[key]
        if front is None:
            return []
        back = label.choice.move.shape if label.choice is not None else -1
        crossing = front.crossings.get(back)
        if crossing is None:
            crossing = front.crossings[back] = np.array([self._crossing(label, shape) for shape in front.shapes])[front.which]
        total = label.total + front.micro + crossing
        behind = ONE_WAY * (crossing + (label.choice.crossing if label.choice is not None else 0.0))  # of the stage behind the new one
        period = np.maximum(np.maximum(front.micro, behind) if hides else front.micro + crossing, label.period)
        update = np.maximum(front.update, label.iteration)
        if n > 1:
            rest = np.minimum.reduce(front.ahead + (n - 1) * np.maximum(period, front.top), axis=0)
        else:
            rest = front.ahead[0]
        value = total + rest + np.maximum(update, front.rest)
        good = (value < frontier.limit) & (front.fits >= frontier.discipline.in_flight(n, label.stages + 1))
        made = []
        for k in good.nonzero()[0].tolist():
            move = front.moves[k]
            choice = Choice(front.starts[k], stop, front.options[k], move, float(crossing[k]))
            new = Label(choice.start, move.target, label.stages + 1, float(total[k]), float(period[k]), float(update[k]), choice, label)
            made.append((float(value[k]), new))
        return made

    def _front(self, state: int, stop: int, position: int) -> Front | None:
        """What is known of the stages that moves make before layer `stop`, and of what goes before; None where nothing is of interest."""
        frontier, moves = self.frontier, self.space.moves[state]
        width = min(max((frontier.width[m.shape] for m in moves), default=0), stop)
        if not width:
            return None
        shapes, targets = [m.shape for m in moves], [m.target for m in moves]
        runs = np.s_[stop - width : stop]
        at = shapes, runs, stop
        micro, update, fits = frontier.micro[at], frontier.iteration[at], self.book.fits[at]  # [move, start, option]
        top, ahead, rest = frontier.top[targets, position, runs], frontier.sums[targets, position, :, runs], frontier.rest[targets, runs]
        low = micro + np.minimum.reduce(ahead, axis=1)[..., None]
        period, iteration = np.maximum(micro, top[..., None]), np.maximum(update, rest[..., None])
        of_interest = low + ((frontier.n - 1) * period if frontier.n > 1 else 0.0) + iteration < frontier.limit
        move, first, option = of_interest.nonzero()
        if not len(move):
            return None
        known, which = np.unique(np.array(shapes)[move], return_inverse=True)
        return Front(
            [moves[m] for m in move.tolist()], (first + (stop - width)).tolist(), option.tolist(), known.tolist(), which, micro[of_interest],
            update[of_interest], fits[of_interest], np.maximum(top[move, first], frontier.before[:, None]), ahead[move, :, first].T,
            rest[move, first], {},
        )  # fmt: skip

    def _crossing(self, label: Label, shape: int) -> float:
        if label.choice is None:
            return 0.0
        key = (label.layer, shape, label.choice.move.shape, self.space.links[label.state])
        if key not in self._crossings:
            shapes, link = self.space.shapes, self.space.kinds_of_link[key[3]]
            self._crossings[key] = crossing = self.prices.crossing(label.layer, shapes[shape], shapes[key[2]], link)
            least = self.book.least_crossing[shape, key[3], label.layer]
            assert crossing >= least * (1 - NOISE), f"boundary {label.layer}: crosses faster than possible"
        return self._crossings[key]


def _no_worse(a: Label, b: Label) -> bool:
    assert a.choice is not None and b.choice is not None
    same = a.total <= b.total and a.period <= b.period and a.iteration <= b.iteration and a.stages <= b.stages
    return same and a.choice.crossing <= b.choice.crossing
