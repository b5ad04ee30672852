"""How long a pipeline takes by its answers, under real schedules: nearer to the truth than `hapx.stages.costs.latency`, and still quick.

In: a pipeline of the inter-operator program, the cluster. Out: seconds. What the additive cost leaves out: stages on one machine share its network
card, in each direction; cotangents wait behind activations; how many micro-batches must be under way to hide the links, and whether they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import islice, pairwise

from hapx.cluster.spec import ClusterSpec
from hapx.schedules import Crossing, Seconds, Style, duration_of, everywhere, hidings, make, patient
from hapx.stages.costs import ONE_WAY, Assigned, Pipeline

SLACKS = (1, 2)  # micro-batches between every two submeshes
ENOUGH = 6  # micro-batches per submesh, until a pipeline repeats itself
FORWARD = 1 / 3  # of a stage's seconds; the rest is backward


def simulated(pipeline: Pipeline, cluster: ClusterSpec) -> float:
    """Seconds of an iteration: interleaved where submeshes have several stages, else the fastest one of 1F1B, those with some slack at every link
    and, where these do not fit by the answers, the warm ones that do and hide most, as if transfers never waited for each other and as if they did.
    Forwards take a third of a stage, and half of what crosses goes each way. Of many micro-batches a part is simulated."""
    stages = pipeline.stages
    crossings = [Crossing(i, i + 1) for i in range(len(stages) - 1)]
    micro, updates = [s.answer.micro for s in stages], tuple(s.answer.iteration for s in stages)
    crossing, links = dict[tuple[int, int], float](), dict[tuple[int, int], tuple[Hashable, ...]]()
    for i, (front, back) in enumerate(pairwise(stages)):
        crossing[i, i + 1] = crossing[i + 1, i] = ONE_WAY * front.crossing
        links |= {(i, i + 1): _links(front, back, cluster), (i + 1, i): _links(back, front, cluster)}
    seconds = Seconds(tuple(FORWARD * t for t in micro), tuple((1 - FORWARD) * t for t in micro), updates, crossing, links)
    numbers = {own: g for g, own in enumerate(dict.fromkeys(s.devices for s in stages))}
    groups = [numbers[s.devices] for s in stages]
    if len(numbers) < len(stages):
        styles = ["interleaved"]
    else:
        room = [s.answer.most_in_flight for s in stages]
        slack = [style for number in SLACKS if _fits(style := everywhere(len(stages), number), room)]
        hiding = (hidings(s, crossings) for s in (seconds, patient(seconds)) if len(slack) < len(SLACKS))
        fitting = [*slack, *(style for found in hiding for style in islice((s for s in found if _fits(s, room)), 1))]
        styles = list(dict.fromkeys(["1f1b", *map(str, fitting)]))

    def total(style: str, micro_batches: int) -> float:
        return _duration(style, tuple(groups), micro_batches)(seconds)

    number, some = pipeline.micro_batches, ENOUGH * len(numbers)
    if number <= some:
        return min(total(style, number) for style in styles)
    # in between, a pipeline repeats itself
    at = {style: (total(style, some - len(numbers)), total(style, some)) for style in styles}
    return min(late + (late - early) / len(numbers) * (number - some) for early, late in at.values())


@lru_cache(maxsize=128)
def _duration(style: str, groups: tuple[int, ...], micro_batches: int) -> Callable[[Seconds], float]:
    """Of stages that pass on to the next one: many pipelines have the same schedule."""
    return duration_of(make(style, groups, [Crossing(i, i + 1) for i in range(len(groups) - 1)], (1,) * micro_batches))


def _links(source: Assigned, target: Assigned, cluster: ClusterSpec) -> tuple[Hashable, ...]:
    """Network cards, in one direction; inside a machine, what no other stages share."""
    out, into = ({cluster.devices[d].machine for d in s.devices} for s in (source, target))
    if out == into and len(out) == 1:
        return ("inside", source.devices, target.devices)
    return (*(("card out", m) for m in sorted(out)), *(("card in", m) for m in sorted(into)))


def _fits(style: Style, room: Sequence[int]) -> bool:
    """Whether every stage has room for the micro-batches that a style keeps there; answers may be off by one."""
    extra = style.numbers or (0,) * len(room)
    return all(len(room) - i + more <= most + 1 for i, (more, most) in enumerate(zip(extra, room, strict=True)))
