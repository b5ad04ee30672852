"""Pipelines that pass every submesh several times, for interleaved 1F1B.

In: a pipeline, the number of layers, prices. Out: pipelines on the same submeshes in the same order, each with several stages, and how long they
take. With v stages on every submesh the bubbles are shorter by v, and v times as much crosses (Narayanan et al., SC 2021, section 2.2): so this pays
where micro-batches are few and links quick. Layers are cut so that the slowest stage is as quick as it can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

from hapx.cluster.spec import ClusterSpec
from hapx.stages.costs import Answer, Assigned, Discipline, Pipeline, Prices
from hapx.stages.simulated import simulated

ROUNDS = (2, 3, 4)  # stages per submesh that are looked at
INTERLEAVED = Discipline("interleaved")


def interleavings(pipeline: Pipeline, layers: int, cluster: ClusterSpec, prices: Prices) -> Iterator[Pipeline]:
    """The pipeline with 2, 3 and 4 stages on every submesh, where there are layers for them that fit into memory; `Pipeline.time` is simulated."""
    for rounds in ROUNDS:
        cuts = _cut(pipeline, rounds, layers, prices) if len(pipeline.stages) > 1 else None
        if cuts is not None:
            made = _assigned(pipeline, cuts, cluster, prices)
            yield replace(made, time=simulated(made, cluster))


def _cut(pipeline: Pipeline, rounds: int, layers: int, prices: Prices) -> list[tuple[int, int, Answer]] | None:
    """Layers [start, stop) and answers of `rounds` stages per submesh, such that the slowest stage takes least; None where layers are too few, or no
    stages fit that take less than the slowest one of the pipeline."""
    submeshes = pipeline.stages
    known: dict[tuple[int, int, int], Answer | None] = {}

    def answer(start: int, stop: int, group: int) -> Answer | None:
        key = start, stop, group
        if key not in known:
            flight = _kept(group, len(submeshes), rounds, pipeline.micro_batches)
            fits = [a for a in prices.ask(start, stop, submeshes[group].shape) if a.most_in_flight >= flight]
            known[key] = min(fits, key=lambda a: (a.micro, a.iteration), default=None)
        return known[key]

    # per number of layers: of the stages so far, the slowest, and how they are cut
    limit = max(s.answer.micro for s in submeshes)
    best: dict[int, tuple[float, tuple[tuple[int, int, Answer], ...]]] = {0: (0.0, ())}
    count = rounds * len(submeshes)
    for stage in range(count):
        group = stage % len(submeshes)
        found: dict[int, tuple[float, tuple[tuple[int, int, Answer], ...]]] = {}
        for start, (slowest, behind) in best.items():
            for stop in range(start + 1, layers - (count - 1 - stage) + 1):
                if prices.bound(start, stop, submeshes[group].shape).micro >= limit:
                    break
                if (stop == layers) != (stage == count - 1):
                    continue
                own = answer(start, stop, group)
                if own is not None and max(slowest, own.micro) < min(limit, found[stop][0] if stop in found else inf):
                    found[stop] = max(slowest, own.micro), (*behind, (start, stop, own))
        best = found
    return list(best[layers][1]) if layers in best else None


def _kept(group: int, groups: int, rounds: int, micro_batches: int) -> int:
    """Micro-batches in flight on a submesh, summed over its stages: Megatron-LM's warm forwards and one."""
    return min(rounds * micro_batches, (rounds - 1) * groups + 2 * (groups - 1 - group) + 1)


def _assigned(pipeline: Pipeline, cuts: Sequence[tuple[int, int, Answer]], cluster: ClusterSpec, prices: Prices) -> Pipeline:
    """Stages on the submeshes of the pipeline in turn. Each is made for its part of the micro-batches in flight."""
    size, stages = len(pipeline.stages), []
    rounds = len(cuts) // size
    for i, (start, stop, own) in enumerate(cuts):
        here = pipeline.stages[i % size]
        kept = -(-_kept(i % size, size, rounds, pipeline.micro_batches) // rounds)
        stages.append(Assigned(start, stop, here.shape, here.devices, own, kept, 0.0))
    crossing = [_crossing(a, b, cluster, prices) for a, b in pairwise(stages)]
    stages = [replace(s, crossing=x) for s, x in zip(stages, [*crossing, 0.0], strict=True)]
    return Pipeline(0.0, pipeline.micro_batches, INTERLEAVED, tuple(stages))


def _crossing(front: Assigned, back: Assigned, cluster: ClusterSpec, prices: Prices) -> float:
    return prices.crossing(back.start, front.shape, back.shape, cluster.link((*front.devices, *back.devices)))
