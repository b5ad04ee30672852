"""The prices of all conversions and choices of a problem at once, for bounds.

In: a problem, shares, and weights over device kinds. Out: arrays of weighted seconds (`hapx.cost.edges`). What does not depend on shares is laid out
once per problem: the edges between placements, the paths that they make, the terms of every choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from hapx.cost.edges import Array, Bundle, Mask, Numbers
from hapx.synth.problem import Problem
from hapx.synth.tables import StepTerms, TensorTable, Values
from hapx.theory.conversion import INNER, OUTER

NONE, STAYS = -2, -1  # numbers of edges that are none
_NO_PATHS = np.zeros((5, 0), dtype=np.int64)  # through shards of the inner axis
FEW = 3  # kinds up to which every pair of them has weights


def padded(prices: Array) -> Array:
    """Weighted seconds with those of `NONE` and `STAYS`."""
    return np.vstack([prices, np.full((1, prices.shape[1]), np.inf), np.zeros((1, prices.shape[1]))])


@dataclass(frozen=True, slots=True)
class Paths:
    """Prices of a table's edges (see `EdgePrices.price_of`): for each order of the axes, of the one on each between any two placements (`NONE`,
    `STAYS`; orders x axes x sources and targets); source, target and those of every path through shards of the inner axis."""

    orders: Numbers
    shared: Numbers

    def priced(self, price_of: Numbers) -> Paths:
        """From the numbers of edges to those of their prices."""
        return Paths(price_of[self.orders], np.concatenate([self.shared[:2], price_of[self.shared[2:]]]))

    def at(self, placements: int) -> Numbers:
        """Where those through shards lead from and to, among all pairs of so many placements."""
        found: Numbers = self.shared[0] * placements + self.shared[1]
        return found


@dataclass(frozen=True, slots=True)
class Ways:
    """What tables have in common whose placements are related in the same way. along: of each axis, source and target of every edge, and whether the
    variant is allowed that keeps what it gathers, or frees it; numbers: of the edge between two placements (axis x source x target), from 0 on;
    orders: as in `Paths`, of these numbers."""

    along: tuple[tuple[Numbers, Numbers, Mask, Mask], ...]
    numbers: Numbers
    orders: Numbers


def _ways_of(table: TensorTable) -> Ways:
    reach, pattern, size, n = table.reach, table.reach.pattern, len(table.codes), len(table.placements)
    steps = np.full((len(reach.states), size + 1, size + 1), NONE)  # the last: there is none
    steps[:, range(size), range(size)] = STAYS
    along, count, codes = [], 0, np.array(table.codes)
    for axis, (sources, targets) in enumerate(pattern.along):
        variants = [[table.variants(axis, s, t) for t in reach.states[axis]] for s in reach.states[axis]]  # by codes
        kept, freed = (np.array([[free in own for own in of_source] for of_source in variants]) for free in (False, True))
        between = codes[sources, axis], codes[targets, axis]
        there = kept[between] | freed[between]
        along.append((sources[there], targets[there], kept[between][there], freed[between][there]))
        own = np.arange(count, count + np.count_nonzero(there))
        count += len(own)
        steps[axis, sources[there], targets[there]] = own
    if len(steps) == 1:
        return Ways(tuple(along), steps, steps[:, :n, :n].reshape(1, 1, -1))
    orders = np.array([[steps[axis, at, after].ravel() for axis, at, after in order] for order in pattern.orders])
    return Ways(tuple(along), steps, orders)


class Grid:
    """What of the prices of a problem does not depend on shares."""

    def __init__(self, problem: Problem):
        tables = list({id(t): t for t in problem.tables.values()}.values())
        bundles: list[Bundle] = []
        self.count = 0  # of edges in `bundles`
        self._known: dict[Any, Ways] = {}
        self._begun: dict[int, tuple[Ways, int]] = {}  # by the id of a table, with the number of its first edge
        paths = {id(table): self._paths(table, bundles) for table in tables}
        self.edges = problem.costs.edge_prices(bundles, problem.restriction.forms)
        price_of = np.append(self.edges.price_of, [NONE, STAYS])
        self.paths = {key: own.priced(price_of) for key, own in paths.items()}

    def number(self, table: TensorTable, axis: int, source: int, target: int) -> int | None:
        """Of the edge between two placements of a table; None for those on paths through shards of the inner axis."""
        ways, begun = self._begun[id(table)]
        found = int(ways.numbers[axis, source, target]) if source >= 0 else NONE
        return begun + found if found >= 0 else None

    def _paths(self, table: TensorTable, every: list[Bundle]) -> Paths:
        ways, begun = self._begun[id(table)] = self._ways(table), self.count
        for axis, (sources, targets, kept, freed) in enumerate(ways.along):
            self._take(Bundle(table.ref, axis, table.all_placements, sources, targets, kept, freed), every)
        orders = np.where(ways.orders < 0, ways.orders, ways.orders + begun)
        return Paths(orders, self._shared(table, every) if len(ways.along) > 1 else _NO_PATHS)  # on one axis nothing lies between

    def _ways(self, table: TensorTable) -> Ways:
        """Those of tensors like that of a table: of equal patterns, whose conversions are as free to be chosen."""
        key = id(table.reach.pattern), table.parameter, table.forbidden
        if key not in self._known:
            self._known[key] = _ways_of(table)
        return self._known[key]

    def _take(self, bundle: Bundle, every: list[Bundle]) -> Numbers:
        """The numbers of the edges of one more bundle."""
        every.append(bundle)
        self.count += len(bundle)
        return np.arange(self.count - len(bundle), self.count)

    def _shared(self, table: TensorTable, every: list[Bundle]) -> Numbers:
        paths = table.all_passed
        if not paths:
            return _NO_PATHS
        place = {p: k for k, p in enumerate(dict.fromkeys(p for passed in paths.values() for p in passed))}
        at = np.array([[place[p] for p in passed] for passed in paths.values()])
        keeps = np.ones(len(at), dtype=bool)
        bundles = (Bundle(table.ref, axis, tuple(place), at[:, k], at[:, k + 1], keeps, ~keeps) for k, axis in enumerate((INNER, OUTER, INNER)))
        return np.array([*np.transpose(list(paths)), *(self._take(bundle, every) for bundle in bundles)])


class Weights:
    """Weights over kinds (weights x kinds) of what runs forward and of what runs backward: every pair of kinds where there are few, else every kind
    for both; last, all kinds alike."""

    def __init__(self, kinds: int):
        self.kinds, one = kinds, range(kinds)
        self.pairs = tuple(product(one, one)) if kinds <= FEW else tuple((k, k) for k in one)
        unit, alike = np.eye(kinds), np.full((1, kinds), 1.0 / kinds)
        self.forward = np.vstack([unit[[i for i, _ in self.pairs]], alike])
        self.backward = np.vstack([unit[[j for _, j in self.pairs]], alike])

    def __len__(self) -> int:
        return len(self.forward)


class Prices:
    """Weighted seconds of terms and choices at the shares of `values`. capacity, prices: as in `hapx.synth.moves.Moves`."""

    def __init__(self, values: Values, weights: Weights, capacity: tuple[float, ...] | None, prices: tuple[float, ...] | None):
        matrix = np.vstack([values.matrix, np.zeros((1, values.matrix.shape[1]))])  # -1: nothing
        self.forward, self.backward, self.worst = matrix @ weights.forward.T, matrix @ weights.backward.T, matrix.max(axis=1, keepdims=True)
        self.capacity = (matrix / capacity) @ weights.forward.T if capacity is not None else None
        self.memory = matrix @ np.array(prices) if prices is not None else None

    def steps(self, layout: Layout) -> Array:
        """(step, weights) -> weighted seconds."""
        if self.capacity is not None:
            of_memory: Array = self.capacity.take(layout.memory, axis=0)
            return of_memory
        total: Array = self.forward.take(layout.forward, axis=0) + self.backward.take(layout.backward, axis=0)
        for at, term, joins, ahead, _ in layout.communication:
            np.add.at(total, at, np.where(joins[:, None], self.worst.take(term, axis=0), self._apart(term, ahead)))
        return total if self.memory is None else total + self.memory[layout.memory][:, None]

    def after(self, layout: Layout) -> Array:
        """The part of `steps` that comes after the last communication that ends a phase: compute, and communication for which not all kinds wait."""
        total: Array = self.forward.take(layout.forward, axis=0) + self.backward.take(layout.backward, axis=0)
        for at, term, _, ahead, late in layout.communication:
            np.add.at(total, at[late], self._apart(term, ahead)[late])
        return total

    def _apart(self, term: Numbers, ahead: Mask) -> Array:
        seconds: Array = np.where(ahead[:, None], self.forward.take(term, axis=0), self.backward.take(term, axis=0))
        return seconds


@dataclass(frozen=True, slots=True)
class Layout:
    """Numbers of the terms of several steps. communication: (step, term, whether all kinds wait, whether it runs forward, whether it belongs to the
    phase after one that the step ends); whether a step's communication ends a phase, forward and backward."""

    forward: Numbers
    backward: Numbers
    memory: Numbers
    communication: tuple[tuple[Numbers, Numbers, Mask, Mask, Mask], ...]
    cuts_forward: Mask
    cuts_backward: Mask


def layout(steps: Sequence[StepTerms]) -> Layout:
    """Of steps in terms."""
    events = [event for i, step in enumerate(steps) for event in _events(i, step)]
    columns = tuple(np.array(column) for column in zip(*events, strict=True))
    ahead, back = (np.array([any(cuts and way == w for way, _, cuts in s.communication) for s in steps]) for w in ("forward", "backward"))
    forward, backward, memory = (np.array([getattr(s, name) for s in steps], dtype=np.int64) for name in ("forward", "backward", "memory"))
    return Layout(forward, backward, memory, ((columns[0], columns[1], columns[2], columns[3], columns[4]),) if events else (), ahead, back)


def _events(number: int, step: StepTerms) -> Iterator[tuple[int, int, bool, bool, bool]]:
    ended: set[str] = set()  # directions in which a phase has ended
    for way, term, cuts in step.communication:
        yield number, term, cuts or way == "synchronise", way == "forward", not cuts and way in ended
        if cuts:
            ended.add(way)
