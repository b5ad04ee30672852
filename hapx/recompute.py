"""How many of a model's repeated blocks are computed again in backward, where memory binds.

In: a setting, and the planner. Out: the fastest candidate that was found, and its setting. The model is first planned as if memory were no matter: if
that fits, it is the answer, because a relaxation's optimum that is feasible is optimal. Else compared are, by the simulator,

- the fewest blocks computed again with which what would be fastest without limits fits (they are the first ones, see `hapx.cost.remat`): the peak
  of the best program so far, with other numbers of blocks, says how many these may be;
- none of them with memory as a limit (parameters in shards, uneven shares);
- where as many as there are do not suffice, so many of them with memory as a limit;

the last two only on mesh views on which they were faster than what was found, as if memory were no matter (`WORTH`): that is a bound.

Recomputing costs a part of forward, sharded parameters cost communication: which is less depends on the links.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TypeVar

import numpy as np

from hapx.carried import again, goal_of
from hapx.cost.remat import most_blocks, with_blocks
from hapx.errors import InsufficientMemoryError, kept, nearest
from hapx.lower import Candidate
from hapx.plan import Mesh
from hapx.setting import Counters, Setting
from hapx.simulate import iteration_time
from hapx.starts import FEW_STEPS

ROOM = 10**6  # times the memory that there is: more than a mistyped unit lacks
WORTH = 5e-3  # relative gain below which nothing is searched for: prices of memory are no better (`hapx.synth.search`)
NEARLY = 1.05  # times what there is: what needs more with as many blocks computed again as save most does not fit with others
ROUGH = 0.03  # how far from the optimum a quick look may be
TRIES = 3  # numbers of blocks from one program on

Chosen = tuple[Setting, Candidate]
T = TypeVar("T")
Tells = Generator[float, None, T]  # seconds that the answer takes at least, as soon as they are known; then the answer
Times = Mapping[str, float | None]  # by mesh view; None where nothing comes near the best one
Planner = Callable[[Setting, Counters, Sequence[Mesh] | None], list[Candidate]]


def fastest(setting: Setting, counters: Counters, meshes: Sequence[Mesh], plan: Planner) -> Tells[Chosen]:
    """See the module. counters: get the time of all that is planned, and what is told of the one that is chosen. Yields, where memory binds, how
    many seconds the answer takes at least: as if memory were no matter, then with the blocks that it takes. Raises InsufficientMemoryError where
    nothing fits, PlanError where there is no program."""
    free = roomy(setting, counters, meshes, plan)
    if free.fits:
        return as_chosen(setting, free)
    yield free.time
    tried, without, asked = _Tried(setting, meshes, plan), _times(counters), False
    if not tried.sufficient(free):
        full: list[tuple[Candidate, Setting, Times]] = []
        for most in tried.thrifty():
            best = tried.unlimited(most)
            if best.fits:
                tried.fewer(best, most)
                break
            full.append((best, tried.setting_with(most), tried.known[most][1]))
            if not asked:
                tried.limited(setting, without)
                asked = True
            if best.time > tried.least:  # and with more blocks
                break
        else:
            yield min(tried.least, *(best.time for best, _, _ in full))
            for _, own, times in sorted(full, key=lambda one: _fullest(one[0])):
                before = len(tried.failures)
                if tried.limited(own, times) or any(f.times > NEARLY for f in tried.failures[before:]):
                    break
    if not asked:
        tried.limited(setting, without)
    return tried.chosen(counters)


class _Tried:
    """What was planned for a setting. found: what fits; failures: why something did not; known: what is best with so many blocks on all views."""

    def __init__(self, setting: Setting, meshes: Sequence[Mesh], plan: Planner):
        self.setting, self.meshes, self.plan = setting, meshes, plan
        self.found: list[tuple[Setting, Candidate, Counters]] = []
        self.failures: list[InsufficientMemoryError] = []
        self.known: dict[int, tuple[Candidate, Times]] = {}
        self.most = most_blocks(setting.graph)
        self._told: list[Counters] = []
        self._settings: dict[int, Setting] = {}

    @property
    def least(self) -> float:
        """Seconds of the fastest that fits."""
        return min((best.time for _, best, _ in self.found), default=inf)

    def setting_with(self, number: int) -> Setting:
        """With so many blocks computed again."""
        if number not in self._settings:
            self._settings[number] = replace(self.setting, graph=with_blocks(self.setting.graph, number))
        return self._settings[number]

    def saves(self, number: int) -> bool:
        """Whether so many blocks computed again save anything."""
        return self.setting_with(number).graph is not self.setting.graph

    def thrifty(self) -> list[int]:
        """How many may save most: all but the last one, whose backward comes first, when what it would keep is needed; or all of them, for what comes
        after the last one may need more memory than any block."""
        return list(filter(self.saves, (self.most - 1, self.most)))

    def unlimited(self, number: int, program: Candidate | None = None, on: Mesh | None = None) -> Candidate:
        """The best candidate with so many blocks computed again, as if memory were no matter. program: one that fits there, and is the answer where
        the best one does not fit and is hardly faster. on: on this view, else on all. In a large model, where another number was looked at, from what
        was best there: that changes little."""
        if number in self.known:
            return self.known[number][0]
        own, told, meshes = self.setting_with(number), self._counters(), self.meshes if on is None else [on]
        like = min(self.known, key=lambda n: abs(n - number), default=None) if len(own.graph.nodes) > FEW_STEPS else None
        if like is None:
            best, times = roomy(own, told, meshes, self.plan), _times(told)
        else:
            before, times = self.known[like]
            best = roomy(replace(own, start=before.shares), told, [before.mesh], self.plan)
            same = self._carried(before, own, best)
            best = same if same.time < best.time else best
            times = {**times, before.mesh.name: best.time}
        if not best.fits and program is not None:
            carried = self._carried(program, own, best)
            self.found.append((own, carried, told))
            best = carried if carried.time <= best.time * (1 + WORTH) else best
        elif best.fits:
            self.found.append((own, best, told))
        if on is None:
            self.known[number] = best, times
        return best

    @staticmethod
    def _carried(program: Candidate, own: Setting, best: Candidate) -> Candidate:
        """A program with the blocks of another setting, whose best candidate, as if memory were no matter, is known."""
        return _timed(again(program, own.graph)).proven(best.cost * (1 - best.gap))

    def limited(self, own: Setting, times: Times) -> bool:
        """With memory as a limit, where there is something to gain beside what was found; whether anything was. times: what views take without."""
        on = [m for m in self.meshes if self.least == inf or (times[m.name] or inf) < self.least * (1 - WORTH)]
        if not on:
            return False
        told = self._counters()
        try:
            self.found.append((own, self.plan(replace(own, tight=True, strict=True, beside=self.least), told, on)[0], told))
        except InsufficientMemoryError as error:
            self.failures.append(kept(error))
            return False
        return True

    def sufficient(self, program: Candidate) -> bool:
        """Looks for the fewest blocks with which what is best as if memory were no matter fits: as many as the best program so far needs, for what is
        best does not change much from one number to the next. program: what is best with none. Whether there is such a number."""
        few = 0
        for _ in range(TRIES):
            number = self._fewest(program, few, self.most + 1)
            if number is None:
                break
            program = self.unlimited(number, program)
            if program.fits:
                self.fewer(program, number)
                return True
            few = number
        return False

    def fewer(self, program: Candidate, most: int) -> None:
        """Looks for fewer than `most` blocks, with which `program` is the best one and fits, on its view."""
        few, mesh = max((n for n in self.known if n < most), default=0), program.mesh
        for _ in range(TRIES):
            number = self._fewest(program, few, most)
            if number is None:
                break
            program = self.unlimited(number, program, mesh)
            few, most = (few, number) if program.fits else (number, most)

    def chosen(self, counters: Counters) -> Chosen:
        """The fastest that fits. Raises InsufficientMemoryError where nothing does."""
        if not self.found:
            raise nearest(self.failures)
        own, best, told = min(self.found, key=lambda one: one[1].time)
        for other in self._told:
            counters.include(other)
        counters.views, counters.search.gap = told.views, best.gap
        counters.tried = [view | ({"time": best.time} if view["view"] == best.mesh.name else {}) for view in told.tried]
        return as_chosen(own, best)

    def _fewest(self, program: Candidate, few: int, limit: int) -> int | None:
        """The fewest blocks, more than `few` and less than `limit`, with which a program fits: peaks fall with each, but perhaps the last one."""

        def fits(number: int) -> bool:
            return self.saves(number) and again(program, self.setting_with(number).graph).fits

        last = limit - 1
        for high in dict.fromkeys((min(last, self.most - 1), last)):
            if high > few and fits(high):
                return few + 1 + bisect_left(range(few + 1, high), True, key=fits)
        return None

    def _counters(self) -> Counters:
        self._told.append(Counters())
        return self._told[-1]


def _times(counters: Counters) -> Times:
    return {outcome["view"]: outcome.get("time") for outcome in counters.tried}


def as_chosen(setting: Setting, best: Candidate) -> Chosen:
    """A candidate and its setting, with the segments that it has."""
    return replace(setting, graph=best.theory.graph), best


def roomy(setting: Setting, counters: Counters, meshes: Sequence[Mesh] | None, plan: Planner) -> Candidate:
    """The best candidate as if memory were no matter, at the costs of the actual devices."""
    types = {name: replace(kind, memory=kind.memory * ROOM) for name, kind in setting.cluster.device_types.items()}
    found = plan(replace(setting, cluster=replace(setting.cluster, device_types=types)), counters, meshes)[0]
    return replace(found, costs=found.costs.changed(cluster=setting.cluster))


def at_least(setting: Setting, counters: Counters, meshes: Sequence[Mesh], plan: Planner) -> float:
    """Seconds that every candidate takes at least, whatever memory there is, as far as a quick look says."""
    found = roomy(replace(setting, within=ROUGH, progress=None), counters, meshes, plan)
    return found.time * (1 - max(ROUGH, found.gap))


def _timed(candidate: Candidate) -> Candidate:
    """With its cost, and its time by the simulator."""
    cost = goal_of(candidate).time(candidate.costs.lengths_to_shares(candidate.lengths))
    return replace(candidate, cost=cost, time=iteration_time(candidate.program, candidate.theory.graph, candidate.exact))


def _fullest(candidate: Candidate) -> float:
    """The peak of the fullest device, of what may be used there."""
    return float((candidate.peak / np.asarray(candidate.exact.capacity)).max())
