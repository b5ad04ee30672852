"""The oracle of `hapx.stages.dp`: every pipeline there is, one after the other. For small cases.

In: a cluster (not a `Space`: submeshes are sets of devices here), the number of layers, prices, a discipline. Out: the cheapest pipeline. A
pipeline is any sequence of disjoint submeshes, over all devices unless some may idle, that finishes a machine it slices before it begins another; any
cut of the layers into as many runs; any answer of the planner for each run that leaves room for the micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

from hapx.cluster.spec import ClusterSpec, Link
from hapx.stages.costs import Answer, Assigned, Discipline, Pipeline, Prices, latency
from hapx.stages.submeshes import Shape, ordered, shape_of, submeshes

Devices = tuple[int, ...]


def cheapest(num_layers: int, cluster: ClusterSpec, prices: Prices, discipline: Discipline, idle: bool = False) -> Pipeline | None:
    """The cheapest pipeline at one number of micro-batches; None where nothing fits."""
    best: Pipeline | None = None
    for shapes, links, devices in sequences(cluster, num_layers, idle):
        for cuts in combinations(range(1, num_layers), len(shapes) - 1):
            runs = list(pairwise((0, *cuts, num_layers)))
            made = _cheapest(runs, shapes, links, devices, prices, discipline)
            if made is not None and (best is None or made.time < best.time):
                best = made
    return best


def count(num_layers: int, cluster: ClusterSpec, idle: bool = False) -> int:
    """Number of pipelines, answers not counted."""
    return sum(1 for shapes, _, _ in sequences(cluster, num_layers, idle) for _ in combinations(range(1, num_layers), len(shapes) - 1))


def _cheapest(
    runs: list[tuple[int, int]], shapes: tuple[Shape, ...], links: tuple[Link, ...], devices: list[Devices], prices: Prices, discipline: Discipline
) -> Pipeline | None:
    n, last = prices.micro_batches, len(runs) - 1
    flights = [discipline.in_flight(n, len(runs) - i) for i in range(len(runs))]
    crossing = [prices.crossing(runs[i][1], shapes[i], shapes[i + 1], links[i]) for i in range(last)] + [0.0]
    options = [[a for a in prices.ask(*run, shape) if a.most_in_flight >= f] for run, shape, f in zip(runs, shapes, flights, strict=True)]
    best: tuple[float, tuple[Answer, ...]] | None = None
    for chosen in product(*options):
        time = latency(n, discipline, [(a.micro, x, a.iteration) for a, x in zip(chosen, crossing, strict=True)])
        best = (time, chosen) if best is None or time < best[0] else best
    if best is None:
        return None
    stages = [Assigned(*run, shapes[i], devices[i], best[1][i], flights[i], crossing[i]) for i, run in enumerate(runs)]
    return Pipeline(best[0], n, discipline, tuple(stages))


def sequences(cluster: ClusterSpec, most: int, idle: bool) -> Iterator[tuple[tuple[Shape, ...], tuple[Link, ...], list[Devices]]]:
    """Sequences of submeshes from the front that differ in shapes or links, with the links between neighbours."""
    seen = set()
    for found in _laid(cluster, [], most, idle):
        shapes = tuple(shape_of(cluster, s) for s in found)
        links = tuple(_link(cluster, a, b) for a, b in pairwise(found))
        if (shapes, links) not in seen:
            seen.add((shapes, links))
            yield shapes, links, [ordered(cluster, s) for s in found]


def _laid(cluster: ClusterSpec, before: list[Devices], most: int, idle: bool) -> Iterator[list[Devices]]:
    used = {d for s in before for d in s}
    if before and (idle or len(used) == cluster.num_devices):
        yield before
    if len(before) == most:
        return
    for submesh in submeshes(cluster):
        if used.isdisjoint(submesh) and _may_follow(cluster, before, submesh, idle):
            yield from _laid(cluster, [*before, submesh], most, idle)


def _may_follow(cluster: ClusterSpec, before: list[Devices], submesh: Devices, idle: bool) -> bool:
    """Whether a machine that is sliced is not left before it is used up, and not come back to."""
    used = {d for s in before for d in s}
    here = {cluster.devices[d].machine for d in submesh}
    last = {cluster.devices[d].machine for d in before[-1]} if before else set()
    begun = {cluster.devices[d].machine for d in used}
    if here & begun:
        return here == last
    whole = all(d.index in used for d in cluster.devices if d.machine in last)
    return whole or idle


def _link(cluster: ClusterSpec, front: Devices, back: Devices) -> Link:
    return cluster.link((*front, *back))
