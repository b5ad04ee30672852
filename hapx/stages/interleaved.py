"""Pipelines that pass every submesh several times, for interleaved 1F1B.

In: a pipeline, the number of layers, prices. Out: pipelines on the same submeshes in the same order, each with several stages, and how long they
take. With v stages on every submesh the bubbles are shorter by v, and v times as much crosses (Narayanan et al., SC 2021, section 2.2): so this pays
where micro-batches are few and links quick. Layers are cut so that the slowest stage is as quick as it can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hapx.cluster.spec import ClusterSpec
from hapx.stages.costs import Assigned, Discipline, Pipeline, Prices
from hapx.stages.cutting import Cutter, Runs, busy
from hapx.stages.simulated import simulated

ROUNDS = (2, 3, 4)  # stages per submesh that are looked at
INTERLEAVED = Discipline("interleaved")


def interleavings(pipeline: Pipeline, layers: int, cluster: ClusterSpec, prices: Prices) -> Iterator[Pipeline]:
    """The pipeline with 2, 3 and 4 stages on every submesh, where there are layers for them that fit into memory; `Pipeline.time` is simulated."""
    cutter, n, size = Cutter(layers, prices), pipeline.micro_batches, len(pipeline.stages)
    limit = max(busy(s.answer, n) for s in pipeline.stages)
    for rounds in ROUNDS if size > 1 else ():
        kept = [_kept(group, size, rounds, n) for group in range(size)]
        plans = [_roomy(s, most, rounds, prices) for s, most in zip(pipeline.stages, kept, strict=True)]
        runs = cutter.cut([s.shape for s in pipeline.stages] * rounds, kept * rounds, limit, plans * rounds)
        if runs is not None:
            made = _assigned(pipeline, runs, cluster, prices)
            yield replace(made, time=simulated(made, cluster))


def _kept(group: int, groups: int, rounds: int, micro_batches: int) -> int:
    """Micro-batches in flight on a submesh, summed over its stages: Megatron-LM's warm forwards and one."""
    return min(rounds * micro_batches, (rounds - 1) * groups + 2 * (groups - 1 - group) + 1)


def _roomy(stage: Assigned, kept: int, rounds: int, prices: Prices) -> set[Any]:
    """Plans of answers for stages that share a submesh. Together they store what a single stage there stores, and each of the micro-batches that
    they keep takes a part of what it takes there."""
    return {a.plan for a in prices.ask(stage.start, stage.stop, stage.shape) if rounds * a.most_in_flight >= kept}


def _assigned(pipeline: Pipeline, runs: Runs, cluster: ClusterSpec, prices: Prices) -> Pipeline:
    """Stages on the submeshes of the pipeline in turn. Each is made for its part of the micro-batches in flight."""
    size, stages = len(pipeline.stages), []
    rounds = len(runs) // size
    for i, (start, stop, own) in enumerate(runs):
        here = pipeline.stages[i % size]
        kept = -(-_kept(i % size, size, rounds, pipeline.micro_batches) // rounds)
        stages.append(Assigned(start, stop, here.shape, here.devices, own, kept, 0.0))
    crossing = [_crossing(a, b, cluster, prices) for a, b in pairwise(stages)]
    stages = [replace(s, crossing=x) for s, x in zip(stages, [*crossing, 0.0], strict=True)]
    return Pipeline(0.0, pipeline.micro_batches, INTERLEAVED, tuple(stages))


def _crossing(front: Assigned, back: Assigned, cluster: ClusterSpec, prices: Prices) -> float:
    return prices.crossing(back.start, front.shape, back.shape, cluster.link((*front.devices, *back.devices)))
