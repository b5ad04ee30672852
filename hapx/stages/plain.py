"""Pipelines that people make by hand: a stage per machine, or per run of machines, with layers in equal numbers or in proportion to speed.

In: work per layer, a cluster, prices. Out: `Pipeline`s, so that what the inter-operator program finds with few answers is not worse than these. They
need few answers themselves: a stage per machine and kind of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise

from hapx.cluster.spec import ClusterSpec
from hapx.stages.costs import Answer, Assigned, Discipline, Pipeline, Prices, latency
from hapx.stages.submeshes import ordered, shape_of, units


def plain_pipelines(work: Sequence[float], cluster: ClusterSpec, prices: Prices, discipline: Discipline, precision: str) -> Iterator[Pipeline]:
    """Those that fit. work: FLOPs per layer."""
    parts = units(cluster)
    seen: set[tuple[int, ...]] = set()
    per_stage = 1
    while per_stage < len(parts):
        groups = [list(chain.from_iterable(parts[i : i + per_stage])) for i in range(0, len(parts), per_stage)]
        speeds = [sum(cluster.type_of(d).speed(precision) for d in group) for group in groups]
        for ends in (_ends([1.0] * len(work), [1.0] * len(groups)), _ends(work, speeds)):
            if ends not in seen and all(a < b for a, b in pairwise(ends)):
                seen.add(ends)
                made = pipeline_by_hand(ends, groups, cluster, prices, discipline)
                if made is not None:
                    yield made
        per_stage *= 2


def _ends(work: Sequence[float], speeds: Sequence[float]) -> tuple[int, ...]:
    """Boundaries of runs of layers whose work is as near to the speeds as whole layers can be."""
    done = [0.0, *accumulate(work)]
    wanted = [s / sum(speeds) * done[-1] for s in accumulate(speeds)]
    inner = [min(range(len(done)), key=lambda i: abs(done[i] - w)) for w in wanted[:-1]]
    return (0, *inner, len(work))  # also layers at the ends that are no work


def pipeline_by_hand(
    ends: Sequence[int], groups: Sequence[Sequence[int]], cluster: ClusterSpec, prices: Prices, discipline: Discipline
) -> Pipeline | None:
    """Stages of the layers between `ends` on groups of devices, each with its quickest answer that fits; None where a stage has none."""
    devices, n = [ordered(cluster, group) for group in groups], prices.micro_batches
    shapes = [shape_of(cluster, own) for own in devices]
    stages = []
    for i, (start, stop) in enumerate(pairwise(ends)):
        flight = discipline.in_flight(n, len(groups) - i)
        fitting: list[Answer] = [a for a in prices.ask(start, stop, shapes[i]) if a.most_in_flight >= flight]
        if not fitting:
            return None
        answer = min(fitting, key=lambda a: (a.micro, a.iteration))
        last = i + 1 == len(groups)
        crossing = 0.0 if last else prices.crossing(stop, shapes[i], shapes[i + 1], cluster.link((*groups[i], *groups[i + 1])))
        stages.append(Assigned(start, stop, shapes[i], devices[i], answer, flight, crossing))
    time = latency(n, discipline, [(s.answer.micro, s.crossing, s.answer.iteration) for s in stages])
    return Pipeline(time, n, discipline, tuple(stages))
