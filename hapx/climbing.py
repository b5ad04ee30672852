"""The best pipelines of the inter-operator program made better, step by step.

In: pipelines that were put together (`hapx.put_together`), with who answered for their stages. Out: a faster one, or the best of them. Answers rank
pipelines within a few per cent only, and the layers of the program are coarse (two blocks of a deep model). So first neighbours are looked at
(`hapx.stages.neighbours`): another arrangement of devices, layers cut anew. Then the layers themselves are cut into parts, and what the stages of the
best arrangements compute is shared out among them once more. What was planned exactly corrects the answers on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import replace

from hapx.cluster.spec import ClusterSpec
from hapx.plan import Plan
from hapx.put_together import PUT_TOGETHER, Made, put_together
from hapx.setting import Setting
from hapx.stage_prices import PLAIN, Asker
from hapx.stages.clustering import finer
from hapx.stages.costs import Pipeline, Prices
from hapx.stages.neighbours import arrangements, at_least, cut_anew, neighbours
from hapx.stages.simulated import simulated

TIGHT = 0.6  # of a device's memory: then more room may make a plan faster
NEIGHBOURS = 6  # of the best pipeline that are put together, as long as
NEARBY = 0.003  # of its time may be gained; where memory binds, estimates are worse, and as long as
UNCERTAIN = 0.005  # of its time is not lost
PARTS = 4  # of a layer,
FINER = 3  # pipelines of which are put together, as long as
WORTH = 0.01  # of the time may be gained;
CHEAP = 350  # arrangements of devices, times parts, up to which other arrangements are looked at, too, and these
MORE_PARTS = 8  # of a layer:
STEPS = 12  # pipelines are put together then, as long as `UNCERTAIN` of the time is not lost

Near = Callable[[Pipeline, int, ClusterSpec, Prices], Iterable[Pipeline]]
Watch = Callable[[str], None]


def climbed(plans: Sequence[Made], asked: Setting, watch: Watch, tried: set[Hashable]) -> Made:
    """The fastest pipeline that is found from the best ones by looking at neighbours: the most promising first, as what was planned so far tells.
    tried: pipelines that were put together; those that are now, too."""

    def least(best: Made) -> float:
        return -UNCERTAIN if is_short(best) else NEARBY

    return _climbed(plans, asked, watch, tried, neighbours, NEIGHBOURS, least)


def in_parts(plans: Sequence[Made], asked: Setting, watch: Watch) -> Made:
    """The fastest pipeline near the best ones whose stages are made of parts of layers: on their submeshes, and where that is cheap on others."""
    found, before = list(plans), 0
    for parts in (PARTS, MORE_PARTS):
        starts = _cut(plans, parts)
        number = sum(len(m.asker.layers) for m in starts)
        if number == before:  # as few cuts are possible as there were
            break
        tried: set[Hashable] = {key_of(m.pipeline) for m in starts}
        cheap = all(_arrangements(m, asked.cluster) * len(m.asker.layers) <= CHEAP for m in starts)
        if cheap:
            found.append(_climbed(starts, asked, watch, tried, neighbours, STEPS, lambda _: -UNCERTAIN))
        elif parts == PARTS:
            found.append(_climbed(starts, asked, watch, tried, cut_anew, FINER, lambda _: WORTH))
        if not cheap:  # nor are more parts
            break
        before = number
    return min(found, key=_seconds)


def _cut(plans: Sequence[Made], parts: int) -> list[Made]:
    """The same pipelines as stages of parts of their layers; of those whose layers can be cut."""
    found: list[Made] = []
    for asker in {id(m.asker): m.asker for m in plans}.values():
        layers = finer(asker.asked.graph, tuple(asker.layers), parts)
        own = [m for m in plans if m.asker is asker and len(m.pieces) > 1]
        if own and len(layers) > len(asker.layers):
            among, pipelines = asker.finer(layers, [m.pipeline for m in own])
            found += [replace(m, pipeline=p, asker=among) for m, p in zip(own, pipelines, strict=True)]
    return found


def _arrangements(made: Made, cluster: ClusterSpec) -> int:
    """Of devices, near those of a pipeline."""
    return sum(1 for _ in arrangements(tuple(s.devices for s in made.pipeline.stages), cluster))


def _climbed(
    plans: Sequence[Made], asked: Setting, watch: Watch, tried: set[Hashable], near: Near, most: int, least: Callable[[Made], float]
) -> Made:
    """At most so many are put together, as long as at least this part of the time may be gained."""
    starts = sorted(plans, key=_seconds)[:PUT_TOGETHER]
    best = starts[0]
    for _ in range(most):
        limit = (1 - least(best)) * _seconds(best)
        found: list[tuple[float, Pipeline, Asker]] = []
        for made in starts:
            other = _nearest(made, asked, limit, tried, near)
            found += [(*other, made.asker)] if other is not None else []
        if not found:
            break
        seconds, pipeline, asker = min(found, key=lambda f: f[0])
        tried.add(key_of(pipeline))
        watch(f"a neighbour of the best pipeline, perhaps {1 - seconds / _seconds(best):.1%} faster")
        again = put_together(asker, pipeline, asked.rule, dict(best.plan.statistics))
        if again is not None and faster(again, best):
            best = again
            starts = [again, *starts[: PUT_TOGETHER - 1]]
    return best


def _nearest(made: Made, asked: Setting, limit: float, tried: Container[Hashable], near: Near) -> tuple[float, Pipeline] | None:
    """The neighbour that takes least, with its seconds; None where none takes less than the limit, or was not tried before."""
    asker, cluster = made.asker, asked.cluster
    stages = [
        replace(s, answer=replace(s.answer, micro=p.times.micro, iteration=p.times.iteration, most_in_flight=asker.fits(p)))
        for s, p in zip(made.pipeline.stages, made.pieces, strict=True)
    ]
    exact = replace(made.pipeline, stages=tuple(stages))
    scale = _seconds(made) / simulated(exact, cluster)  # what estimates leave out is taken to be the same for both
    others = [(scale * at_least(p), p) for p in near(exact, len(asker.layers), cluster, asker.corrected())]
    best: tuple[float, Pipeline] | None = None
    for low, other in sorted(others, key=lambda o: o[0]):
        if low >= limit:
            break
        if key_of(other) not in tried and len(other.stages) <= asked.rule.max_stages:
            seconds = scale * simulated(other, cluster)
            if seconds < limit:
                best, limit = (seconds, other), seconds
    return best


def key_of(pipeline: Pipeline) -> Hashable:
    """Of pipelines of the same layers: all schedules are tried of what is put together."""
    return (pipeline.micro_batches, *((s.start, s.stop, s.shape) for s in pipeline.stages))


def faster(a: Made, b: Made) -> bool:
    """Whether one takes less time than the other."""
    return _seconds(a) < _seconds(b)


def is_tight(plan: Plan) -> bool:
    """Whether a device is so full that more room might make the plan faster."""
    return any(held > TIGHT * plan.cluster.type_of(d).memory for d, held in enumerate(plan.memory))


def is_short(made: Made) -> bool:
    """Whether memory binds: a device is full, or a stage computes blocks again or keeps parameters in shards to save memory."""
    return is_tight(made.plan) or any(s.answer.plan != PLAIN for s in made.pipeline.stages)


def _seconds(made: Made) -> float:
    return made.plan.iteration_time
