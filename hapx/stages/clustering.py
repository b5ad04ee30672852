"""Clusters the operators of a graph into layers, of which pipeline stages are made (Zheng et al., "Alpa", OSDI'22, section 5.2).

In: a graph, perhaps how many layers, delta. Out: `Layers`, node ranges that cover the graph in order. With C(i, k) the bytes that
nodes i .. k receive from nodes before i (`boundaries.received_bytes`), the layers of nodes 1 .. k have

    G(k, r) = min over i of max(G(i - 1, r - 1), C(i, k)),   where FLOPs(i .. k) <= (1 + delta) * total / r            (Alpa, eq. 6)

`least_bottleneck` computes G; `least_sum` then finds, of all clusterings with that G, the one whose FLOPs vary least, and of those the
one that receives least altogether. FLOPs are forward and backward. Beyond Alpa: the FLOPs of what cannot be cut apart (a head over a
large vocabulary) may exceed the limit; where no clustering keeps the limit, the least one that can be kept replaces it; and where G and
the limit permit, and no layer is left without FLOPs, repeated blocks stay whole, so that layers are alike and what is planned for one
holds for the others, and boundaries are not where less crosses both a little before and a little behind.

Every boundary is one of `boundaries.settled_places`. The table has a row and a column per place: of more than `MOST_PLACES`, those are
kept where least crosses, one of all that have the same FLOPs before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from math import ceil

import numpy as np
import numpy.typing as npt

from hapx.cost.compute import work
from hapx.errors import HapError
from hapx.ir import Graph
from hapx.stages.boundaries import Matrix, Vector, allowed_places, crossing_bytes, early_nodes, nearest, received_bytes, settled, settled_places

Layers = tuple[tuple[int, int], ...]

DELTA = 0.6  # how much more FLOPs than the mean a layer may have
MOST_LAYERS = 32  # that are made unasked
MOST_PLACES = 640
MORE_CROSSES = 2.0  # inside of a layer that is cut into parts

_CLOSE = 1 + 1e-9  # FLOPs are sums of floats
_LAST_TIE = 1e-9  # weight of received bytes beside the squares of FLOPs


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer in numbers: forward and backward FLOPs, and the bytes that it receives from layers before it."""

    start: int
    stop: int
    flops: float
    received: int


def find_layers(graph: Graph, number: int | None = None, delta: float = DELTA) -> Layers:
    """(start, stop) of every layer. number: how many, fewer where the graph cannot be cut that often; None: as the model marks them, or else about
    one per repeated block and per part of that size outside of blocks. Raises HapError for a number below 1, a negative delta, or marks
    that cannot be boundaries."""
    if number is None and graph.boundaries:
        return by_boundaries(graph, graph.boundaries)
    if number is not None and number < 1:
        raise HapError(f"{number} layers", allowed="at least 1")
    if delta < 0:
        raise HapError(f"layers with {delta} more FLOPs than the mean", allowed="0 or more")
    flops = node_flops(graph)
    places = [0, *settled_places(graph), len(graph.nodes)]
    number = min(number or natural_number(graph, flops), len(places) - 1)
    whole = [p for p in places if not _in_a_block(graph, p)]
    crossing = crossing_bytes(graph)

    def table(some: Sequence[int]) -> _Table:
        return _Table.of(graph, flops, _thinned(crossing, flops, some, max(number, MOST_PLACES)), number, delta)

    every = table(places)
    for some in (_without_hills(crossing, flops, whole, float(flops.sum()) / number), whole):
        fewer = table(some)
        if fewer.own_work >= number and fewer.limit <= every.limit and fewer.bottleneck <= every.bottleneck:
            return _ranges(fewer.best())
    return _ranges(every.best())


def equal_operators(graph: Graph, number: int) -> Layers:
    """Layers with the same number of operators, as nearly as the graph can be cut there (the ablation of Alpa, section 8.3)."""
    if number < 1:
        raise HapError(f"{number} layers", allowed="at least 1")
    places = settled_places(graph)
    number = min(number, len(places) + 1)
    chosen = [0]
    for k in range(1, number):
        free = [p for p in places[: len(places) - (number - 1 - k)] if p > chosen[-1]]  # enough are left for those that follow
        chosen.append(free[nearest(free, k * len(graph.nodes) / number)])
    return _ranges([*chosen, len(graph.nodes)])


def by_boundaries(graph: Graph, marks: Sequence[int]) -> Layers:
    """Layers between the nodes before which there is a mark. Raises HapError where the nodes around a mark must stay together."""
    allowed, early = frozenset(allowed_places(graph)), early_nodes(graph)
    for p in marks:
        if not 0 < p < len(graph.nodes):
            raise HapError(f"a boundary of layers before node {p}", allowed=f"1 to {len(graph.nodes) - 1}")
        if p not in allowed:
            raise HapError(
                "a boundary of layers lies inside of what must stay together", where=graph.nodes[p].source or graph.nodes[p].module,
                allowed="places outside of checkpointed functions, and not between the users of a buffer that forward writes",
                hint="call mark_layer_boundary() elsewhere",
            )  # fmt: skip
    return _ranges([0, *sorted({settled(graph, p, early, allowed) for p in marks}), len(graph.nodes)])


def finer(graph: Graph, layers: Layers, parts: int) -> Layers:
    """The layers, each cut into at most so many of about equally many FLOPs, where at most `MORE_CROSSES` times as much crosses as at its own ends.
    Layers that the model marks stay whole."""
    if graph.boundaries:
        return layers
    crossing, before = crossing_bytes(graph), np.concatenate([[0.0], np.cumsum(node_flops(graph))])
    places, found = settled_places(graph), [0]
    for start, stop in layers:
        most = MORE_CROSSES * max(crossing[start], crossing[stop] if stop < len(graph.nodes) else 0.0)
        inner = [p for p in places if start < p < stop and crossing[p] <= most and before[start] < before[p] < before[stop]]
        apart = {before[p]: p for p in sorted(inner, key=lambda p: -crossing[p])}  # of those with the same FLOPs before them, where least crosses
        for k in range(1, parts):
            wanted = before[start] + k / parts * (before[stop] - before[start])
            nearest_one = min(apart.values(), key=lambda p: abs(before[p] - wanted), default=start)
            found += [nearest_one] if nearest_one > found[-1] else []
        found.append(stop)
    return _ranges(found)


def layer_costs(graph: Graph, layers: Layers) -> tuple[LayerCost, ...]:
    """What every layer of a clustering computes and receives."""
    received = received_bytes(graph, [0, *(stop for _, stop in layers)])
    flops = node_flops(graph)
    return tuple(LayerCost(a, b, float(flops[a:b].sum()), int(received[i, i + 1])) for i, (a, b) in enumerate(layers))


def node_flops(graph: Graph) -> Vector:
    """FLOPs per node, of backward too in training; bytes moved, if the whole graph multiplies no matrices."""
    works = [work(graph, node) for node in graph.nodes]
    train = graph.mode == "train"
    flops = np.array([w.forward + w.backward * train for w in works])
    if flops.any():
        return flops
    return np.array([sum(size for _, size in (*w.moved, *(w.moved_back * train))) for w in works], dtype=np.float64)


def natural_number(graph: Graph, flops: Vector) -> int:
    """About one layer per repetition of a block, and per part of its size outside of blocks; where there are no blocks, per part of the size of the
    heaviest node. Where these would be more than `MOST_LAYERS`, two repetitions make a layer, or three, and so on."""
    kinds = [-1 if block is None else block[0] for block in graph.block_of]
    runs = [list(group) for _, group in groupby(range(len(kinds)), kinds.__getitem__)]
    parts: list[tuple[float, int]] = []  # FLOPs, and into how many layers they can be divided
    sizes: list[float] = []
    for run in runs:
        last = graph.block_of[run[-1]]
        total = float(flops[run].sum())
        parts.append((total, int(np.count_nonzero(flops[run])) if last is None else last[1] + 1))
        sizes += [total / (last[1] + 1)] * (last[1] + 1) if last is not None and total > 0 else []
    unit = float(np.median(sizes)) if sizes else float(flops.max(initial=0.0))
    if unit == 0:
        return 1
    for repetitions in range(1, len(graph.nodes) + 1):
        found = sum(min(round(total / (repetitions * unit)), ceil(most / repetitions)) for total, most in parts)
        if found <= MOST_LAYERS:
            break
    return max(found, 1)


@dataclass(frozen=True)
class _Table:
    """Everything about the layers [places[i], places[k]), as matrices. `heaviest`: FLOPs of the heaviest run inside that cannot be cut; `wanted`:
    the limit of FLOPs."""

    places: Sequence[int]
    number: int
    received: Matrix
    flops: Matrix
    heaviest: Matrix
    wanted: float

    @staticmethod
    def of(graph: Graph, flops: Vector, places: Sequence[int], number: int, delta: float) -> _Table:
        number = min(number, len(places) - 1)
        before = np.concatenate([[0.0], np.cumsum(flops)])[list(places)]
        starts = [0, *allowed_places(graph)]
        runs = np.add.reduceat(flops, starts)
        cells = np.concatenate([[0.0], np.maximum.reduceat(runs, np.searchsorted(starts, places[:-1]))])
        heaviest = np.maximum.accumulate(np.triu(np.broadcast_to(cells, (len(places), len(places))), 1), axis=1)
        between = np.triu(before[None, :] - before[:, None], 1)
        return _Table(places, number, received_bytes(graph, places), between, heaviest, (1 + delta) * float(before[-1]) / number)

    @property
    def own_work(self) -> int:
        """How many parts between adjacent places have FLOPs."""
        return int(np.count_nonzero(np.diagonal(self.flops, 1)))

    @cached_property
    def limit(self) -> float:
        """The FLOPs that no layer exceeds but those that are mainly one uncuttable run: what is wanted, or else the least possible."""
        possible = least_bottleneck(np.where(self.flops <= self.heaviest * _CLOSE, 0.0, self.flops), self.number)
        return max(self.wanted, possible / _CLOSE) * _CLOSE

    @cached_property
    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which layers keep the limit."""
        return self.flops <= np.maximum(self.limit, self.heaviest * _CLOSE)

    @cached_property
    def bottleneck(self) -> float:
        """G: the least that the layer which receives most can receive."""
        return least_bottleneck(np.where(self.allowed, self.received, np.inf), self.number)

    def best(self) -> list[int]:
        """The places of the best clustering."""
        mean = self.flops[0, -1] / self.number or 1.0
        cost = (self.flops / mean) ** 2 + _LAST_TIE * self.received / max(self.bottleneck, 1.0)
        allowed = self.allowed & (self.received <= self.bottleneck)
        return [self.places[i] for i in least_sum(np.where(allowed, cost, np.inf), self.number)]


def least_bottleneck(cost: Matrix, number: int) -> float:
    """The least that the largest of `number` layers can cost: cost[i, k] is that of a layer from place i to place k, for i < k."""
    cost = _forward(cost)
    best = cost[0]
    for _ in range(number - 1):
        best = np.maximum(best[:, None], cost).min(axis=0)
    return float(best[-1])


def least_sum(cost: Matrix, number: int) -> list[int]:
    """Indices of the places, the first and the last included, of `number` layers that cost least together; of equal ones, those with early
    boundaries."""
    cost = _forward(cost)
    best, origins = cost[0], []
    for _ in range(number - 1):
        sums = best[:, None] + cost
        origins.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    assert np.isfinite(best[-1]), "no clustering"
    found = [len(cost) - 1]
    for origin in reversed(origins):
        found.append(int(origin[found[-1]]))
    return [0, *reversed(found)]


def _forward(cost: Matrix) -> Matrix:
    """No layer ends where it begins, or before."""
    return np.where(np.tri(len(cost), dtype=bool), np.inf, cost)


def _thinned(crossing: Vector, flops: Vector, places: Sequence[int], most: int) -> list[int]:
    """At most about `most` of the places: of those with the same FLOPs before them, in steps if need be, the first where least crosses."""
    if len(places) <= most:
        return list(places)
    before = np.concatenate([[0.0], np.cumsum(flops)])
    inner = places[1:-1]
    if len({before[p] for p in inner}) > most:
        before = np.floor(before / before[-1] * most)
    kept = [min(group, key=lambda p: (crossing[p], p)) for _, group in groupby(inner, lambda p: float(before[p]))]
    return [places[0], *kept, places[-1]]


def _without_hills(crossing: Vector, flops: Vector, places: Sequence[int], reach: float) -> list[int]:
    """The places but those for which there is one before and one behind, at most `reach` FLOPs away, where less crosses."""
    sizes, before = crossing[list(places[1:-1])], np.concatenate([[0.0], np.cumsum(flops)])[list(places[1:-1])]
    firsts, lasts = np.searchsorted(before, before - reach), np.searchsorted(before, before + reach, side="right")
    kept = [
        p
        for k, (p, a, b) in enumerate(zip(places[1:-1], firsts, lasts, strict=True))
        if sizes[a : k + 1].min() == sizes[k] or sizes[k:b].min() == sizes[k]
    ]
    return [places[0], *kept, places[-1]]


def _in_a_block(graph: Graph, place: int) -> bool:
    """Whether a place is inside of a repetition of a block."""
    return 0 < place < len(graph.nodes) and graph.block_of[place] is not None and graph.block_of[place - 1] == graph.block_of[place]


def _ranges(places: Sequence[int]) -> Layers:
    return tuple(pairwise(places))
