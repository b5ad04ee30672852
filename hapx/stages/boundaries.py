"""Where a graph may be cut into layers, and what then crosses. Pure data, no torch.

In: a graph. Out: places, that is numbers p that stand for a boundary between nodes p - 1 and p, and the bytes that layers receive.

A layer [a, b) receives every tensor that a node before a makes and a node in [a, b) uses, once: tensors go straight from where they are made to every
layer that uses them, so what a layer only passes on costs it nothing. Constants are made again wherever they are needed, parameters and buffers
are where they are used, and the user's inputs are everywhere: none of them crosses.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hapx.ir import Graph, Kind

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

_HELD = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT})


def allowed_places(graph: Graph) -> tuple[int, ...]:
    """All places, ascending, at which the layers may be cut apart: nodes that must stay together do."""
    inside = np.zeros(len(graph.nodes) + 1, dtype=np.int64)
    for first, last in _together(graph):
        inside[first + 1] += 1
        inside[last + 1] -= 1
    return tuple(int(p) for p in np.flatnonzero(np.cumsum(inside)[:-1] == 0) if p > 0)


def _together(graph: Graph) -> Iterator[tuple[int, int]]:
    """(first, last) nodes of runs that belong to one layer: checkpoints; a view of a parameter and the call that casts it; everything that reads or
    makes a buffer that is written."""
    for region in graph.regions:
        if region.kind == "checkpoint" and region.stop > region.start:
            yield region.start, region.stop - 1
    for i, node in enumerate(graph.nodes):
        for name, _ in node.casts:
            if name in graph.producer:
                yield graph.producer[name], i
    written = graph.written
    for name in {*written, *(r.name for r in graph.refs.values() if r.mutated)}:
        nodes = list(graph.consumers[name])
        if written.get(name) in graph.producer:
            nodes.append(graph.producer[written[name]])
        if nodes:
            yield min(nodes), max(nodes)


def settled_places(graph: Graph) -> tuple[int, ...]:
    """The places worth a look: `allowed_places`, each moved to the front of what is computed there for later nodes only, see `settled`."""
    allowed = allowed_places(graph)
    own = early_nodes(graph)
    return tuple(sorted({settled(graph, p, own, frozenset(allowed)) for p in allowed}))


def early_nodes(graph: Graph) -> tuple[bool, ...]:
    """Per node, whether it could run before the model has any input: it reads only parameters, buffers, constants and results of such nodes."""
    held = {r.name for r in graph.refs.values() if r.kind in _HELD and not r.mutated}
    result = []
    for node in graph.nodes:
        early = "random" not in node.tags and all(name in held for name in node.call.refs())
        held.update(o.name for o in node.outputs if early)
        result.append(early)
    return tuple(result)


def settled(graph: Graph, place: int, early: Sequence[bool], allowed: frozenset[int]) -> int:
    """The place moved before the nodes that need no input and serve only nodes behind it (a weight's transpose or cast, a mask): they go with
    their first consumer, and nothing of them crosses."""
    leaves = {o.tensor for o in graph.outputs}
    moved = place
    while moved > 1 and early[moved - 1] and _serves_behind(graph, moved, leaves):
        moved -= 1
    while moved not in allowed:
        moved += 1
    return moved


def _serves_behind(graph: Graph, place: int, leaves: set[str]) -> bool:
    """Whether what the node before a place makes is used behind it only."""
    names = [o.name for o in graph.nodes[place - 1].outputs]
    return all(name not in leaves and (not graph.consumers[name] or graph.consumers[name][0] >= place) for name in names)


def crossing_bytes(graph: Graph) -> Vector:
    """Per place 0 .. number of nodes, the bytes of tensors that are made before and used behind it."""
    change = np.zeros(len(graph.nodes) + 2)
    for made, uses, size in _sent(graph):
        change[made + 1] += size
        change[uses[-1] + 1] -= size
    return np.cumsum(change)[:-1]


def received_bytes(graph: Graph, places: Sequence[int]) -> Matrix:
    """[i, k]: bytes that the layer [places[i], places[k]) receives; places ascend from 0 to the number of nodes."""
    change = np.zeros((len(places) + 1, len(places) + 1))
    for made, uses, size in _sent(graph):
        first = bisect_right(places, made)  # the first place that separates the tensor from its producer
        for cell in dict.fromkeys(bisect_right(places, use) - 1 for use in uses):
            if cell >= first:  # received by a layer that begins in [first, cell] and goes on behind the cell
                change[first, cell + 1] += size
                change[cell + 1, cell + 1] -= size
                first = cell + 1
    return np.triu(np.cumsum(np.cumsum(change, axis=0), axis=1)[:-1, :-1], 1)


def _sent(graph: Graph) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """(producer, consumers, bytes) of every tensor that has to be sent where it is used in another layer."""
    for name, made in graph.producer.items():
        if graph.consumers[name] and graph.refs[name].kind is not Kind.CONSTANT:
            yield made, graph.consumers[name], graph.refs[name].bytes


def nearest(places: Sequence[int], wanted: float) -> int:
    """Index of the place that is nearest to a number; of two, the first."""
    k = bisect_left(places, wanted)
    return min((i for i in (k - 1, k) if 0 <= i < len(places)), key=lambda i: abs(places[i] - wanted))
