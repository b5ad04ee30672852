"""Rematerialisation as a choice: repeated blocks of a graph become checkpoint regions, which keep their inputs and are computed again in backward.

In: a captured graph. Out: the graph with one region per repetition of every kind of block for which this keeps fewer bytes. Invariant: only
`Graph.regions` differs, so the computation, its hash and its theory are the same; regions that the model has itself stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from hapx.cost.memory import kept_bytes
from hapx.ir import CHOSEN, Graph, Region


def with_blocks(graph: Graph, most: int | None = None) -> Graph:
    """The graph whose repeated blocks are checkpoint regions; the graph itself if that would save nothing. most: so many of every kind, the first
    ones: backward comes to them when what later ones kept is free already, so there is room to compute them again."""
    current, best = graph, kept_bytes(graph)
    for regions in _blocks(graph):
        trial = _with(current, regions[:most])
        held = kept_bytes(trial)
        if held < best:
            current, best = trial, held
    return current


def without_blocks(graph: Graph) -> Graph:
    """The graph as it was captured."""
    return replace(graph, regions=tuple(r for r in graph.regions if not r.chosen))


def chosen_blocks(graph: Graph) -> int:
    """How many regions were chosen by the planner."""
    return sum(r.chosen for r in graph.regions)


def most_blocks(graph: Graph) -> int:
    """How many blocks of one kind can be computed again, at most."""
    return max(map(len, _blocks(graph)), default=0)


def _blocks(graph: Graph) -> list[list[Region]]:
    """Regions of each kind of block, those with a checkpoint of the model's own inside left out."""
    taken = {i for r in graph.regions if r.kind == "checkpoint" for i in range(r.start, r.stop)}
    found: dict[int, list[Region]] = {}
    for block, members in groupby(range(len(graph.nodes)), key=lambda i: graph.block_of[i]):
        nodes = list(members)
        if block is not None and not taken.intersection(nodes):
            found.setdefault(block[0], []).append(Region("checkpoint", nodes[0], nodes[-1] + 1, CHOSEN))
    return list(found.values())


def _with(graph: Graph, regions: list[Region]) -> Graph:
    return replace(graph, regions=tuple(sorted([*graph.regions, *regions], key=lambda r: (r.start, -r.stop, r.kind))))
