"""Pipelines near a given one: devices of one or two of its stages changed and layers cut anew, or one layer moved over a boundary.

In: a pipeline, the number of layers, the cluster, prices. Out: pipelines under 1F1B whose slowest stage is about as quick as that of the given one,
or quicker. Answers are off by a few per cent, differently on different submeshes, so what the inter-operator program finds is near the best pipeline
rather than the best: what was planned exactly corrects answers (`hapx.stage_prices.Asker.corrected`), and the neighbours by these are worth a look.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise, permutations

from hapx.cluster.spec import ClusterSpec
from hapx.stages.costs import ONE_F_ONE_B, Pipeline, Prices
from hapx.stages.cutting import Cutter, busy
from hapx.stages.plain import pipeline_by_hand
from hapx.stages.simulated import FORWARD
from hapx.stages.submeshes import Shape, shape_of, units

SLOWER = 1.1  # than the slowest stage of the pipeline: no stage of a neighbour is
Groups = tuple[tuple[int, ...], ...]


def neighbours(pipeline: Pipeline, layers: int, cluster: ClusterSpec, prices: Prices) -> Iterator[Pipeline]:
    """Each arrangement of devices once, with the layers cut such that the stage that is busy for longest is so for the shortest time, and with the
    cuts that are one layer away from this one; the pipeline's own arrangement also with those that are one layer away from its own."""
    return _neighbours(pipeline, layers, cluster, prices, arrangements(tuple(s.devices for s in pipeline.stages), cluster))


def cut_anew(pipeline: Pipeline, layers: int, cluster: ClusterSpec, prices: Prices) -> Iterator[Pipeline]:
    """Those of its neighbours that have its own arrangement of devices."""
    return _neighbours(pipeline, layers, cluster, prices, [tuple(s.devices for s in pipeline.stages)])


def _neighbours(pipeline: Pipeline, layers: int, cluster: ClusterSpec, prices: Prices, every: Iterable[Groups]) -> Iterator[Pipeline]:
    cutter, n = Cutter(layers, prices), pipeline.micro_batches
    limit = SLOWER * max(busy(s.answer, n) for s in pipeline.stages)
    own = tuple(s.devices for s in pipeline.stages)
    tried = {_key(own, given := (0, *(s.stop for s in pipeline.stages)), cluster)}
    found: list[tuple[Groups, tuple[int, ...]]] = [(own, ends) for ends in _moved(given)]
    for groups in every:
        shapes = [shape_of(cluster, g) for g in groups]
        kept = [ONE_F_ONE_B.in_flight(n, len(groups) - i) for i in range(len(groups))]
        runs = cutter.cut(shapes, kept, limit)
        if runs is not None:
            ends = (0, *(stop for _, stop, _ in runs))
            found += [(groups, near) for near in (ends, *_moved(ends))]
    for groups, ends in found:
        key = _key(groups, ends, cluster)
        if key not in tried:
            tried.add(key)
            made = pipeline_by_hand(ends, groups, cluster, prices, ONE_F_ONE_B)
            if made is not None:
                yield made


def _key(groups: Groups, ends: Sequence[int], cluster: ClusterSpec) -> Hashable:
    return tuple(shape_of(cluster, g) for g in groups), tuple(ends)


def _moved(ends: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """One layer moved over a boundary."""
    for i in range(1, len(ends) - 1):
        for step in (-1, 1):
            moved = (*ends[:i], ends[i] + step, *ends[i + 1 :])
            if all(a < b for a, b in pairwise(moved)):
                yield moved


def arrangements(groups: Groups, cluster: ClusterSpec) -> Iterator[Groups]:
    """Devices of the stages as they are; with a unit moved from one stage to another; two of unlike kinds exchanged; two stages in each other's
    place; two neighbours as one stage; one stage as two. A unit is a machine; where there is only one, a device of it. Stages inside of a machine
    are halved, and two neighbours in one machine joined; else a part of a machine stays where it is. Of arrangements that no cost can tell apart
    only the first comes."""
    seen: set[tuple[Shape, ...]] = set()
    for made in (groups, *_arranged(groups, cluster)):
        key = tuple(shape_of(cluster, g) for g in made)
        if key not in seen:
            seen.add(key)
            yield made


def _arranged(groups: Groups, cluster: ClusterSpec) -> Iterator[Groups]:
    held = [[u for u in units(cluster) if set(u) <= set(g)] for g in groups]
    whole = [i for i, g in enumerate(groups) if sum(map(len, held[i])) == len(g)]
    kinds = {u: shape_of(cluster, u) for u in units(cluster)}

    def firsts(stage: int) -> list[tuple[int, ...]]:
        """A unit of each kind."""
        return list({kinds[u]: u for u in reversed(held[stage])}.values())

    def changed(new: dict[int, set[int]]) -> Groups:
        return tuple(tuple(sorted(new[i])) if i in new else g for i, g in enumerate(groups))

    for i in whole:
        for j in whole:
            if i == j:
                continue
            a, b = set(groups[i]), set(groups[j])
            if len(held[i]) > 1:
                yield from (changed({i: a - {*u}, j: b | {*u}}) for u in firsts(i))
            if i < j:
                pairs = ((u, v) for u in firsts(i) for v in firsts(j) if kinds[u] != kinds[v])
                yield from (changed({i: a - {*u} | {*v}, j: b - {*v} | {*u}}) for u, v in pairs)
                yield changed({i: b, j: a})
    for i in whole:
        for front, back in _halves(held[i], kinds):
            yield (*groups[:i], front, back, *groups[i + 1 :])
        if i + 1 in whole and len(groups) > 2:
            yield _joined(groups, i)
    inside = [{cluster.devices[d].machine for d in g} for g in groups] if len(cluster.machines) > 1 else []
    for i, machines in enumerate(inside):
        if len(machines) == 1 and len(groups[i]) > 1:
            own = sorted(groups[i])
            half = 1 << (len(own) - 1).bit_length() - 1
            for front, back in permutations((tuple(own[:half]), tuple(own[half:]))):
                yield (*groups[:i], front, back, *groups[i + 1 :])
        if len(machines) == 1 and machines in inside[i + 1 : i + 2] and len(groups) > 2:
            yield _joined(groups, i)


def _joined(groups: Groups, at: int) -> Groups:
    """A stage and the next one as one."""
    return (*groups[:at], tuple(sorted((*groups[at], *groups[at + 1]))), *groups[at + 2 :])


def _halves(own: Sequence[tuple[int, ...]], kinds: dict[tuple[int, ...], Shape]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Units apart: one kind and the others, in both orders; of a single kind half and half."""
    unlike = list(dict.fromkeys(kinds[u] for u in own))
    parts = [[u for u in own if kinds[u] == k] for k in unlike] if len(unlike) > 1 else [list(own[: len(own) // 2])]
    for part in parts if len(own) > 1 else ():
        front, back = (tuple(sorted(d for u in us for d in u)) for us in (part, [u for u in own if u not in part]))
        yield front, back
        yield back, front


def at_least(pipeline: Pipeline) -> float:
    """Seconds that a pipeline takes at least (`hapx.stages.simulated`): every stage waits for the first forwards before it, and is busy then."""
    micro, n = [s.answer.micro for s in pipeline.stages], pipeline.micro_batches
    return max(FORWARD * sum(micro[:i]) + busy(s.answer, n) for i, s in enumerate(pipeline.stages))
