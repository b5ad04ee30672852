"""How many of a model's repeated blocks are computed again in backward, where memory binds.

In: a setting, and the planner. Out: the fastest candidate that was found, and its setting. The model is first planned as if memory were no matter: if
that fits, it is the answer, because a relaxation's optimum that is feasible is optimal. Else compared are, by the simulator,

- the fewest blocks computed again with which what would be fastest without limits fits (they are the first ones, see `hapx.cost.remat`);
- where as many as there are do not suffice, so many of them with memory as a limit (parameters in shards, uneven shares);
- none of them with memory as a limit, as far as that may still be faster.

Recomputing costs a part of forward, sharded parameters cost communication: which is less depends on the links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil

import numpy as np

from hapx.alternation import Counters, Setting
from hapx.cost.remat import most_blocks, with_blocks
from hapx.errors import InsufficientMemoryError
from hapx.ir import Graph
from hapx.lower import Candidate
from hapx.plan import Mesh

ROOM = 1000  # times the memory that there is
TRIES = 3  # numbers of blocks between none and all

Chosen = tuple[Setting, Candidate]
Planner = Callable[[Setting, Counters, Sequence[Mesh] | None], list[Candidate]]


def fastest(setting: Setting, counters: Counters, meshes: Sequence[Mesh] | None, plan: Planner) -> Chosen:
    """See the module. Raises InsufficientMemoryError where nothing fits, PlanError where there is no program."""
    graph = setting.graph
    free = roomy(setting, counters, meshes, plan)
    if free.fits:
        return _as_chosen(setting, free)
    lean = replace(setting, graph=with_blocks(graph, _most(graph)))
    told, found = [counters], list[Chosen]()

    def limited(own: Setting) -> None:
        told.append(Counters())
        found.extend(_as_chosen(own, c) for c in plan(own, told[-1], meshes)[:1])

    failure: InsufficientMemoryError | None = None
    thrifty = roomy(lean, apart := Counters(), meshes, plan)
    told.append(apart)
    if thrifty.fits:
        found += [_as_chosen(lean, thrifty), *_with_fewer(setting, free, thrifty, told, plan)]
    else:
        try:
            limited(lean)
        except InsufficientMemoryError as error:
            failure = error
    try:
        limited(replace(setting, above=min((best.cost for _, best in found), default=setting.above)))
    except InsufficientMemoryError as error:
        failure = failure or error
    for other in told[1:]:
        counters.include(other)
    if not found:
        assert failure is not None
        raise failure
    chosen = min(found, key=lambda one: one[1].time)
    counters.search.gap = chosen[1].gap
    return chosen


def any_that_fits(setting: Setting, counters: Counters, meshes: Sequence[Mesh] | None, plan: Planner) -> Chosen:
    """With as many blocks computed again as saves anything or, where that does not fit, with none. Raises as `fastest`."""
    lean = replace(setting, graph=with_blocks(setting.graph, _most(setting.graph)))
    with suppress(InsufficientMemoryError):
        return _as_chosen(lean, plan(lean, counters, meshes)[0])
    return _as_chosen(setting, plan(setting, counters, meshes)[0])


def _most(graph: Graph) -> int:
    """As many blocks as it saves anything to compute again: all but the last one, whose backward comes first, when what it would keep is needed."""
    number = most_blocks(graph)
    return number - 1 if with_blocks(graph, number - 1) is not graph else number


def roomy(setting: Setting, counters: Counters, meshes: Sequence[Mesh] | None, plan: Planner) -> Candidate:
    """The best candidate as if memory were no matter, at the costs of the actual devices."""
    types = {name: replace(kind, memory=kind.memory * ROOM) for name, kind in setting.cluster.device_types.items()}
    found = plan(replace(setting, cluster=replace(setting.cluster, device_types=types)), counters, meshes)[0]
    return replace(found, costs=found.costs.changed(cluster=setting.cluster))


def _with_fewer(setting: Setting, free: Candidate, thrifty: Candidate, told: list[Counters], plan: Planner) -> list[Chosen]:
    """With fewer blocks than all, which fit; on the view that is best with all of them. As many as bytes say, first: peaks are nearly linear."""
    none, every = 0, _most(setting.graph)
    needs, least = _fullest(free), _fullest(thrifty)
    found: list[Chosen] = []
    for _ in range(TRIES):
        if every - none < 2:
            break
        number = min(max(none + ceil((every - none) * (needs - 1) / max(needs - least, 1e-9)), none + 1), every - 1)
        own = replace(setting, graph=with_blocks(setting.graph, number))
        if own.graph is setting.graph:  # so few save nothing
            none = number
            continue
        told.append(Counters())
        best = roomy(own, told[-1], [thrifty.mesh], plan)
        if best.fits:
            found.append(_as_chosen(own, best))
            every, least = number, _fullest(best)
        else:
            none, needs = number, _fullest(best)
    return found


def _fullest(candidate: Candidate) -> float:
    """The peak of the fullest device, of what may be used there."""
    return float((candidate.peak / np.asarray(candidate.exact.capacity)).max())


def _as_chosen(setting: Setting, best: Candidate) -> Chosen:
    """With the segments that it has."""
    return replace(setting, graph=best.theory.graph), best
