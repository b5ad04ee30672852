"""How many of a model's repeated blocks are computed again in backward, where memory binds.

In: a setting, and the planner. Out: the fastest candidate that was found, and its setting. The model is first planned as if memory were no matter: if
that fits, it is the answer, because a relaxation's optimum that is feasible is optimal. Else compared are, by the simulator,

- the fewest blocks computed again with which what would be fastest without limits fits (they are the first ones, see `hapx.cost.remat`);
- none of them with memory as a limit (parameters in shards, uneven shares);
- where as many as there are do not suffice, so many of them with memory as a limit;

the last two only on mesh views on which they were faster than what was found, as if memory were no matter (`WORTH`): that is a bound.

Recomputing costs a part of forward, sharded parameters cost communication: which is less depends on the links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from operator import attrgetter

import numpy as np

from hapx.alternation import Counters, Setting
from hapx.cost.remat import most_blocks, with_blocks
from hapx.errors import InsufficientMemoryError
from hapx.ir import Graph
from hapx.lower import Candidate
from hapx.plan import Mesh

ROOM = 10**6  # times the memory that there is: more than a mistyped unit lacks
WORTH = 5e-3  # relative gain below which nothing is searched for: prices of memory are no better (`hapx.synth.search`)
NEARLY = 1.05  # times what there is: what needs more with as many blocks computed again as save most does not fit with others
TRIES = 3  # numbers of blocks between none and all

Chosen = tuple[Setting, Candidate]
Times = Mapping[str, float | None]  # by mesh view; None where nothing comes near the best one
Planner = Callable[[Setting, Counters, Sequence[Mesh] | None], list[Candidate]]
Unlimited = Callable[[Setting, Sequence[Mesh]], Candidate]


def fastest(setting: Setting, counters: Counters, meshes: Sequence[Mesh], plan: Planner, tell: Callable[[float], None] = lambda _: None) -> Chosen:
    """See the module. counters: get the time of all that is planned, and what is told of the one that is chosen. tell: is told, where memory binds,
    how many seconds the answer takes at least: as if memory were no matter, then with the blocks that it takes. Raises InsufficientMemoryError where
    nothing fits, PlanError where there is no program."""
    free = roomy(setting, counters, meshes, plan)
    if free.fits:
        return as_chosen(setting, free)
    tell(free.time)
    told: list[Counters] = []
    found: list[tuple[Setting, Candidate, Counters]] = []
    failures: list[InsufficientMemoryError] = []

    def unlimited(own: Setting, on: Sequence[Mesh]) -> Candidate:
        told.append(Counters())
        best = roomy(own, told[-1], on, plan)
        if best.fits:
            found.append((own, best, told[-1]))
        return best

    def least() -> float:
        return min((best.time for _, best, _ in found), default=inf)

    def limited(own: Setting, times: Times) -> bool:
        """With memory as a limit, where there is something to gain beside what was found; whether anything was."""
        on = [m for m in meshes if least() == inf or (times[m.name] or inf) < least() * (1 - WORTH)]
        if not on:
            return False
        told.append(Counters())
        try:
            found.append((own, plan(replace(own, tight=True, strict=True), told[-1], on)[0], told[-1]))
        except InsufficientMemoryError as error:
            failures.append(error)
            return False
        return True

    without = _times(counters)
    full: list[tuple[Candidate, Setting, Times]] = []
    too_few = 0, _fullest(free)
    for most, graph in _thrifty(setting.graph):
        own = replace(setting, graph=graph)
        best = unlimited(own, meshes)
        if best.fits:
            _with_fewer(setting, most, too_few, best, unlimited)
            break
        too_few = most, _fullest(best)
        full.append((best, own, _times(told[-1])))
        if len(full) == 1:
            limited(setting, without)
        if best.time > least():  # and with more blocks
            break
    else:
        tell(min(least(), *(best.time for best, _, _ in full)))
        for _, own, times in sorted(full, key=lambda one: _fullest(one[0])):
            before = len(failures)
            if limited(own, times) or any(f.times > NEARLY for f in failures[before:]):
                break
    if not full:
        limited(setting, without)
    if not found:
        raise min(failures, key=attrgetter("times"))
    own, best, of_best = min(found, key=lambda one: one[1].time)
    for other in told:
        counters.include(other)
    counters.views, counters.tried, counters.search.gap = of_best.views, of_best.tried, best.gap
    return as_chosen(own, best)


def _times(counters: Counters) -> Times:
    return {outcome["view"]: outcome.get("time") for outcome in counters.tried}


def as_chosen(setting: Setting, best: Candidate) -> Chosen:
    """A candidate and its setting, with the segments that it has."""
    return replace(setting, graph=best.theory.graph), best


def _thrifty(graph: Graph) -> list[tuple[int, Graph]]:
    """The graph with as many blocks computed again as may save anything, and how many: all but the last one, whose backward comes first, when what it
    would keep is needed; and all of them, for what comes after the last one may need more memory than any block."""
    most = most_blocks(graph)
    several = ((number, with_blocks(graph, number)) for number in (most - 1, most))
    return [(number, own) for number, own in several if own is not graph]


def roomy(setting: Setting, counters: Counters, meshes: Sequence[Mesh] | None, plan: Planner) -> Candidate:
    """The best candidate as if memory were no matter, at the costs of the actual devices."""
    types = {name: replace(kind, memory=kind.memory * ROOM) for name, kind in setting.cluster.device_types.items()}
    found = plan(replace(setting, cluster=replace(setting.cluster, device_types=types)), counters, meshes)[0]
    return replace(found, costs=found.costs.changed(cluster=setting.cluster))


def _with_fewer(setting: Setting, most: int, too_few: tuple[int, float], thrifty: Candidate, unlimited: Unlimited) -> None:
    """Looks with fewer than `most` blocks for what fits, on the view that is best with these: first with as many as bytes say, as peaks are nearly
    linear. too_few: with so many blocks the fullest device needs so much of what there is."""
    (few, needs), least = too_few, _fullest(thrifty)
    for _ in range(TRIES):
        if most - few < 2:
            break
        number = min(max(few + ceil((most - few) * (needs - 1) / max(needs - least, 1e-9)), few + 1), most - 1)
        graph = with_blocks(setting.graph, number)
        if graph is setting.graph:  # so few save nothing
            few = number
            continue
        best = unlimited(replace(setting, graph=graph), [thrifty.mesh])
        if best.fits:
            most, least = number, _fullest(best)
        else:
            few, needs = number, _fullest(best)


def _fullest(candidate: Candidate) -> float:
    """The peak of the fullest device, of what may be used there."""
    return float((candidate.peak / np.asarray(candidate.exact.capacity)).max())
