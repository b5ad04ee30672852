"""Synthesis and balancing in turns on one mesh (HAP section 3.3),

    Q <- A*(B),   B <- LP(Q),   until the lengths were searched before or nothing improves,

from several starting ratios (`_starts`, and for small problems those of `hapx.starts`). Every pair of a program and integer lengths that is met and
fits into memory is kept as a candidate.

In: a setting, the theory of its graph on a mesh. Out: candidates. Invariant: the least cost seen never rises along an alternation, and a candidate's
cost, memory and program are those of its integer lengths.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from math import inf
from operator import attrgetter, itemgetter
from typing import Any, Literal

import numpy as np

from hapx.balancer.descent import descend
from hapx.balancer.lp import Objective, balance, objective
from hapx.balancer.rounding import Lengths, fit, fullest, improve, level_ratios, per_device, round_ratios
from hapx.by_peaks import ByPeaks, around
from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.cost.terms import Vector
from hapx.errors import HapError, InsufficientMemoryError, PlanError
from hapx.fitting import Fitting
from hapx.ir import Graph
from hapx.lower import Candidate, at_their_best
from hapx.plan import Mesh, Plan, ProgramKey
from hapx.progress import Teller, Watcher
from hapx.restriction import AUTO, BASELINES, Restriction
from hapx.squeezing import VERY_FEW_STEPS, Squeezing, Tight
from hapx.starts import carried, further, kept_otherwise, where_little_is_left, where_memory_binds
from hapx.states import Cut, Placement, Row
from hapx.synth.astar import Statistics
from hapx.synth.forbidden import NOTHING, Forbidden
from hapx.synth.problem import Problem, build
from hapx.synth.search import BUDGET, HOPELESS, attempt, least
from hapx.synth.writer import Solution
from hapx.theory.triple import Theory

MAX_ALTERNATIONS = 8
STALLED = 1e-3  # relative improvement below which the alternation ends
SLIGHT = 1e-4  # and for which a program that is not proven is not taken
NEEDLESS = 1.03  # what costs that much more than it may on a needless mesh is not begun with again from elsewhere,
UNLIKELY = 1.1  # nor, where memory binds and searches take long, what costs that much more than the best of the others
CORRECTIONS = 4  # searches at most for one program whose peak fits
FEW_STEPS = 100  # nodes and outputs of a problem that is searched from further starts,
FEW_STEPS_ON_AXES = 50  # and on meshes of several axes
MANY_STEPS = 300  # of one that is searched from one start only where it is known that memory binds
ROUGH = 3e-3  # relative distance from the optimum at which searches from further starts end, on one axis: that of the best one is made to the end
UNLEVEL = 1.1  # how much fuller rounding may make the fullest device before lengths that are level are tried
MAY_FIT = 1.3  # times what may be used: a least peak that is larger is not believed to be that far from the true one
MUCH = 20_000  # partial programs, after which a problem is not also searched as strategies by name:
BY_NAME = ("tensor-parallel", "zero")
NAMED = 3  # programs of each of them that are candidates
TURNS = 3  # of beams that know peaks, each at the lengths of what the one before found
ROUNDS = 4  # around the best lengths, each from better ones
DESCENTS = 3  # of the best programs whose ratios peaks limit, each followed by an alternation; of one that is not small, 1
ROUGHLY = 1.002  # times what may be used: what is estimated to need more is not looked at
NEAR = 0.01  # `Setting.within` above which ratios need not be that good

_ROW_KINDS: tuple[Literal["compute", "storage"], ...] = ("compute", "storage")


@dataclass
class Counters:
    """What planning cost, for `Plan.statistics`."""

    theory_time: float = 0.0
    search_time: float = 0.0  # of which:
    problem_time: float = 0.0
    balance_time: float = 0.0
    segments_time: float = 0.0
    simulation_time: float = 0.0
    alternations: int = 0
    kept: list[tuple[float, ...]] = field(default_factory=list)  # per start, the least cost seen after every step of the alternation
    ended: Counter[str] = field(default_factory=Counter)  # why alternations ended
    views: list[str] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)  # per view: what came of it
    search: Statistics = field(default_factory=Statistics)

    def include(self, other: Counters) -> None:
        """What another plan cost, of which nothing else is told."""
        for name in (*(f.name for f in fields(self) if f.name.endswith("_time")), "alternations"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.search.add(other.search)

    def as_dict(self) -> dict[str, Any]:
        times = {f.name: getattr(self, f.name) for f in fields(self) if f.name.endswith("_time")}
        counts = {f.name: getattr(self.search, f.name) for f in fields(self.search)}
        ended = {f"ended_{why}": n for why, n in sorted(self.ended.items())}
        return {**times, **counts, "alternations": self.alternations, **ended, "views": tuple(self.views), "tried": tuple(map(dict, self.tried))}


@dataclass(frozen=True)
class Setting:
    """What a program is planned for.

    Attributes:
        given, fixed: placements of parameters, and lengths, that are settled already (those of a plan that gets a further program).
        start: ratios to begin with, instead of the usual ones.
        progress: is told what is done. forbidden: choices that are left out.
        strict: the peak of every program is looked at, not only of those that come near the capacity.
        tight: it is known that what would be fastest does not fit. beside: seconds of what was found otherwise; what is far slower is not improved.
        old: a plan of the same restriction; where its mesh is tried again, it is a start and a candidate.
        within: relative distance from the optimum at which searches may end, if they need not be exact.
        repeats, in_flight: of a stage, how many micro-batches it runs per iteration, and how many of them it keeps at once.
    """

    graph: Graph
    key: ProgramKey
    cluster: ClusterSpec
    rule: Restriction
    precision: str
    optimizer: str
    given: Mapping[str, Placement] = field(default_factory=dict)
    fixed: Mapping[Cut, tuple[int, ...]] = field(default_factory=dict)
    start: Mapping[Row, tuple[float, ...]] | None = None
    progress: Watcher | None = None
    forbidden: Forbidden = NOTHING
    strict: bool = False
    tight: bool = False
    beside: float = inf
    old: Plan | None = None
    repeats: int = 1
    in_flight: int = 1
    within: float = 0.0


def needless(mesh: Mesh, cluster: ClusterSpec) -> bool:
    """Whether a mesh has several axes where there is one machine."""
    return len(mesh.axes) > 1 and len(cluster.machines) == 1


class Alternation:
    """Q <- A*(B), B <- LP(Q) on one mesh."""

    def __init__(
        self, setting: Setting, theory: Theory, counters: Counters, told: Teller, best: Candidate | None = None, costs: CostModel | None = None
    ):
        """best: of the views before; on several axes its shares are where the alternation begins. costs: of the same setting and theory, if they
        are known already."""
        self.setting, self.theory, self.counters, self.told, self.before = setting, theory, counters, told, best
        self.costs = costs or CostModel(
            theory, setting.cluster, setting.precision, setting.optimizer, setting.key.mode, repeats=setting.repeats, in_flight=setting.in_flight
        )
        began = time.perf_counter()
        self.problem: Problem = build(theory, self.costs, setting.rule, setting.given, setting.forbidden)
        counters.problem_time += time.perf_counter() - began
        self.problem.watch, self.problem.within = told.watch(), setting.within
        self.hopeless = 0.0  # how many times as much as the best of the views before its first program costs, where that ended it
        self.fitting = Fitting(theory, self.costs, setting.key, setting.strict)
        self.rejected: tuple[Solution, Lengths] | None = None  # the last program whose peak did not fit at balanced ratios
        self.kinds, self.sizes = self.costs.kinds, self.costs.sizes
        axis, segments = theory.mesh.uneven, range(setting.graph.segments)
        self.rows = tuple(theory.mesh.row(axis, kind, s) for s in segments for kind in _ROW_KINDS) if axis is not None else ()
        self.fixed = {cut: own for cut, own in setting.fixed.items() if cut.row in self.rows}
        self.cuts = sorted(self.problem.cuts, key=str)  # sets of them have another order in every process
        self.found: dict[tuple[Any, ...], Candidate] = {}
        self.goals: dict[int, tuple[Solution, Objective]] = {}  # by the identity of a program's steps
        self.balanced: dict[tuple[int, tuple[float, ...]], dict[Row, Vector] | None] = {}  # by a program's steps (held by `goals`) and limits
        self.searched: set[tuple[tuple[int, ...], ...]] = set()  # lengths, in the order of `cuts`: the same lengths have the same program
        self.binds = False  # whether a cheapest program did not fit
        self.prices: tuple[float, ...] | None = None  # of memory, once there are some with which programs fit
        self.peaks = ByPeaks(self.problem, self.fitting, self._goal, [c for c in self.cuts if self.free and c not in self.fixed])
        self.beams = self.small and not setting.within and self.costs.in_flight == self.costs.repeats == 1  # whether they look for what fits
        self.beamed: set[tuple[tuple[int, ...], ...]] = set()  # lengths, as in `searched`, at which they did
        self._generated = counters.search.generated  # partial programs, before
        self.budget: int | None = BUDGET  # with which small problems are searched to the end also where memory binds
        capacity = np.asarray(self.costs.capacity)
        self.old = carried(setting.old, setting.key, theory, self.costs, capacity) if setting.old is not None else None

    @property
    def limits(self) -> tuple[float, ...]:
        """Bytes per kind for the sums of the search and of the balancer."""
        return tuple(self.fitting.limits.tolist())

    def limits_of(self, candidate: Candidate, total: Vector) -> Vector:
        """`limits` that would just admit a program. total: its sum, per kind."""
        own = Fitting(self.theory, self.costs, self.setting.key, self.fitting.strict)
        own.correct(candidate, total, candidate.lengths)
        return own.limits

    @property
    def small(self) -> bool:
        """Whether a search is so short that there are many."""
        return len(self.problem.steps) <= (FEW_STEPS if len(self.theory.mesh.axes) == 1 else FEW_STEPS_ON_AXES)

    @property
    def free(self) -> bool:
        """Whether ratios are chosen here."""
        return self.setting.rule.ratios == "balanced" and bool(self.rows)

    def candidates(self, known: float) -> list[Candidate]:
        """All pairs of program and lengths that were met and fit. known: cost of the best candidate of other views; none where the bound says that
        nothing comes near it."""
        self._meet(known)
        if self.free and self.found and self.setting.within <= NEAR and self._best().cost <= UNLIKELY * known:
            self._descend(known)
        return [*self.found.values(), *([self.old] if self.old is not None and self.found else [])]

    def _meet(self, known: float) -> None:
        """From all starts."""
        failure: InsufficientMemoryError | None = None
        away = 0.0
        self.problem.brief = self._hurried(known)
        if self.old is not None:
            with suppress(InsufficientMemoryError):
                self._alternate(self._by_kind(self.old.shares), known, self.old.lengths)
        for ratios in self._starts():
            times = self._least_times(ratios, known)
            if times > HOPELESS:
                away = times
                continue
            try:
                self._alternate(ratios, known)
            except InsufficientMemoryError as error:
                failure = failure or error
        if self.prices is not None and self.free and self.setting.start is None and not self.small:
            with suppress(InsufficientMemoryError):
                self._alternate(self._by_memory(), known)
        if not self.found:
            if failure is None and self.rejected is None:
                self.hopeless = away
                return
            try:
                self._squeeze(known)
            except InsufficientMemoryError as error:
                failure = error
        segments = self.setting.graph.segments > 1 and not self.setting.given
        several = self.free and (self.setting.start is None or segments) and self.small
        early = not (self.found and self.small)
        if early and not self._far(min(known, self.setting.beside)):
            self._by_name(known)
        if not self.found:
            assert failure is not None
            raise failure
        if several:
            self._further(known)
        self.problem.brief = False
        if self._hurried(known) and self._best().cost < known:
            self._once_more(known)
        if several and not early:
            self._by_name(known)

    def _descend(self, known: float) -> None:
        """Where memory limits ratios: those of the best programs at which their peaks just fit (`hapx.balancer.descent`), and what is found from
        there."""
        looked: set[int] = set()
        for _ in range(DESCENTS if self.small else 1):
            before = self._best().cost
            for candidate in at_their_best(self.found.values())[:NAMED]:
                if id(candidate.program) not in looked and candidate.cost <= UNLIKELY * before:
                    looked.add(id(candidate.program))
                    self._downhill(candidate)
            best = self._best()
            if best.cost >= (1 - STALLED) * before:
                return
            with suppress(InsufficientMemoryError):  # what was found fits
                self._alternate(self._by_kind(best.shares), known, {c: best.lengths[c] for c in self._goal_of(best)[1].cuts})

    def _downhill(self, candidate: Candidate) -> None:
        """Keeps a candidate also at ratios that are better and fit, if there are any and memory may have limited its own."""
        solution, goal = self._goal_of(candidate)
        if not self.binds and self.fitting.spares(goal.memory(self._shares(candidate.lengths, goal.cuts))):
            return
        movable = [c for c in goal.cuts if c not in self.fixed]

        def deal(ratios: Mapping[Row, Vector]) -> Lengths:
            dealt = self._lengths(ratios)
            return {**candidate.lengths, **{c: dealt[c] for c in movable}}

        estimated = self.fitting.estimate(solution, candidate.lengths, goal.cuts) if self.small else None
        usable = self.fitting.capacity * ROUGHLY

        def fits(own: Lengths) -> bool:
            return (estimated is None or bool((estimated(own) <= usable).all())) and self.fitting.holds(solution, own)

        start, lengths = self._by_kind(candidate.shares), dict(candidate.lengths)
        ratios, lengths = descend(start, lengths, self.kinds, movable, deal, lambda own: goal.time(self._shares(own, goal.cuts)), fits)
        if lengths != candidate.lengths:
            self._keep(solution, goal, lengths, ratios)

    def _goal_of(self, candidate: Candidate) -> tuple[Solution, Objective]:
        """The solution of a candidate that was found here, and its cost as a function of shares."""
        return next(own for own in self.goals.values() if own[0].program is candidate.program)

    def _far(self, known: float) -> bool:
        """Whether nothing was found that comes near `known` seconds."""
        return known < inf and (not self.found or self._best().cost > HOPELESS * known)

    def _hurried(self, known: float) -> bool:
        """Whether searches are to be short, as another view is known and this one is needless."""
        return known < inf and needless(self.theory.mesh, self.setting.cluster)

    def _squeeze(self, known: float) -> None:
        """Where nothing was found that fits: the program and the lengths of the least peak, if they fit, and what is found from there. Raises
        InsufficientMemoryError."""
        tight = self.tightest
        candidate = self._keep(tight.solution, self._goal(tight.solution), tight.lengths, tight.ratios)
        if candidate is None:
            raise self.fitting.too_small(tight.solution, tight.lengths)
        with suppress(InsufficientMemoryError):  # the candidate fits
            self._alternate(dict(tight.ratios), known, tight.lengths, limits=self.fitting.limits)

    @cached_property
    def tightest(self) -> Tight:
        """What fits into least memory."""
        return Squeezing(self.problem, self.fitting, self._goal, self._lengths, free=self.free, fixed=self.fixed).tightest(self._starts_tight())

    def _starts_tight(self) -> Iterator[dict[Row, Vector]]:
        """Where that is looked for."""
        free = self.free and self.setting.start is None
        if not free or self.small:  # in larger problems a search takes long
            yield from self._starts()
        if free and len(self.problem.steps) > VERY_FEW_STEPS:
            yield self._by_memory()
        elif free:
            speeds, capacity = np.asarray(self.costs.speeds), self.fitting.capacity
            several = where_memory_binds(speeds, self.sizes, capacity, lambda: speeds), where_little_is_left(self.sizes, capacity)
            for compute, storage in chain.from_iterable(several):
                yield {r: storage if r.kind == "storage" else compute for r in self.rows}

    def fits(self) -> InsufficientMemoryError | None:
        """Whether a program fits; the error if none was found."""
        tight = self.tightest
        return self.fitting.too_small(tight.solution, tight.lengths) if tight.part > 1 else None

    def _least_times(self, ratios: Mapping[Row, Vector], known: float) -> float:
        """How many times `known` seconds of a program of another view every program at these ratios takes, at least: where that is hopeless, even if
        no sum of gradients counted, as the simulator may hide those. 0 where nothing is known, or these ratios were looked at."""
        lengths = self._lengths(ratios)
        if known == inf or self._at(lengths) in self.searched:
            return 0.0
        shares = self.costs.lengths_to_shares(lengths)
        times = least(self.problem, shares) / known
        if times > HOPELESS:
            self.problem.exposed = 0.0
            times = least(self.problem, shares) / known
            self.problem.exposed = 1.0
        return times

    def _at(self, lengths: Mapping[Cut, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """What the same lengths have in common: the program that is best there."""
        return tuple([lengths[c] for c in self.cuts])

    # -- where it begins ---------------------------------------------------------------------------------------------------------------------------

    def _further(self, known: float) -> None:
        """From more starts, as far as they lead somewhere."""
        most = NEEDLESS if self._hurried(known) else HOPELESS if self.prices is None else UNLIKELY
        if self._best().cost > most * known:
            return
        self.budget = None  # where memory binds, prices of it tell well enough where a start leads
        before, several = self._best(), len(self.theory.mesh.axes) > 1
        # a short search tells where a start leads; only where that is the best, one is made to the end
        self.problem.brief = self.prices is None and (several or before.gap > STALLED)
        self.problem.rough = 0.0 if several or self.prices is not None else ROUGH
        # what is begun with as it is, is as it was rounded and improved; on one axis, where a search costs little, first as it is rounded
        for improved in (True,) if several else (False, True):
            for start in self._starts_further():
                now = self._best()
                shares, least = self._by_kind(now.shares), min(known, now.cost)
                alike = {row for row, own in start.items() if row in shares and np.array_equal(own, shares[row])} if improved else ()
                as_now = {c: own for c, own in now.lengths.items() if c.row in alike}
                with suppress(InsufficientMemoryError):  # something else fits
                    self._alternate(start, least, as_now, above=HOPELESS * least)
        for ratios in (self._starts()[0], self._by_kind(self._best().shares)):
            lengths, least = self._levelled(ratios), min(known, self._best().cost)
            if lengths is not None:
                with suppress(InsufficientMemoryError):  # something else fits
                    self._alternate(ratios, least, lengths, above=HOPELESS * least)
        self.problem.brief, self.problem.rough = self._hurried(known), 0.0
        # what a search did not solve to the end at the first shares, it hardly does at others
        if self.prices is None and before.gap <= STALLED:
            self._prove(before, known)

    def _by_name(self, known: float) -> None:
        """Where memory binds, what strategies by name find: their searches have so few programs that they see some that are passed over here. From
        the best of them on, everything is allowed again."""
        setting, rule, spent = self.setting, self.setting.rule, self.counters.search.generated - self._generated
        plain = self.free and setting.start is None and not (setting.graph.segments > 1 or setting.given or setting.within)
        if not plain or (rule.split, rule.storage, rule.sfb) != (AUTO.split, AUTO.storage, AUTO.sfb):
            return
        if (self.found and not self.binds) or (self.small and spent > MUCH):
            return
        for name in BY_NAME:
            known_as = BASELINES[name]
            own = replace(rule, split=known_as.split, storage=known_as.storage, sfb=known_as.sfb)
            before = self._least()
            with suppress(InsufficientMemoryError, PlanError):  # something else may fit
                other = Alternation(replace(self.setting, rule=own, old=None), self.theory, self.counters, self.told, costs=self.costs)
                other.beams = False  # of fewer programs than here
                other._meet(min(known, before))
                self.goals |= other.goals
                for found in at_their_best(other.found.values())[:NAMED]:  # of which the simulator may like another one than the cheapest
                    lengths = self._lengths(self._by_kind(found.shares)) | dict(found.lengths)  # of all cuts that there are here
                    bound = least(self.problem, self.costs.lengths_to_shares(lengths))  # what is proven there is of fewer programs
                    self.found[name, id(found.program)] = replace(found.proven(bound), lengths=lengths)
                best = self._best()
                if best.cost < before:
                    self._alternate(self._by_kind(best.shares), known, best.lengths)

    def _prove(self, before: Candidate, known: float) -> None:
        """Searches to the end where short searches have found the best program; unless that is hardly better than `before`, of which more is proven:
        then it is dropped."""
        found = self._best()
        if found.gap <= before.gap:
            return
        if found.cost < (1 - SLIGHT) * before.cost:
            self._once_more(known)
        else:
            self.found = {key: c for key, c in self.found.items() if c.gap <= before.gap or c.cost >= before.cost}

    def _once_more(self, known: float) -> None:
        """From the best candidate, although its lengths were searched before."""
        found = self._best()
        self.searched.discard(self._at(found.lengths))
        with suppress(InsufficientMemoryError):  # what was found fits
            self._alternate(self._by_kind(found.shares), known, found.lengths)

    def _starts_further(self) -> Iterator[dict[Row, Vector]]:
        """With segments, whose compute rows are those of a program that perhaps keeps nothing in shards, only the storage rows differ."""
        if self.setting.graph.segments > 1:
            for storage in kept_otherwise(self.sizes):
                best = self._by_kind(self._best().shares)
                yield {r: storage if r.kind == "storage" else best[r] for r in self.rows}
            return
        row, speeds = self.rows[0], np.asarray(self.costs.speeds)

        def compute() -> Vector:
            return self._by_kind(self._best().shares)[row]

        for start in further(speeds, self.sizes, compute):
            yield {r: start[r.kind == "storage"] for r in self.rows}
        if self.prices is not None:
            for start in where_memory_binds(speeds, self.sizes, self.fitting.capacity, compute):
                yield {r: start[r.kind == "storage"] for r in self.rows}

    def around(self) -> list[Candidate]:
        """Candidates that beams find at lengths near the best ones, where memory binds. For the best view only."""
        if not (self.beams and self.binds and self.free and self.found):
            return []
        known, movable = set(self.found), [c for c in self.cuts if c not in self.fixed]
        shares = np.full(len(self.sizes), 1.0 / sum(self.sizes)), np.asarray(self.costs.speeds)
        for _ in range(ROUNDS):
            best = self._best()
            for lengths in around(best.lengths, self.kinds, movable, shares):
                self._by_peaks(lengths, 1.0)
                if self._least() < (1 - STALLED) * best.cost:
                    break
            else:
                break
        return [candidate for key, candidate in self.found.items() if key not in known]

    def from_even_shares(self) -> list[Candidate]:
        """Candidates from even shares, where `_starts` left them out because a search on several axes costs more. For the best view only."""
        even = np.full(len(self.sizes), 1.0 / sum(self.sizes))
        if not self.free or self.setting.start is not None or len(self.theory.mesh.axes) == 1 or np.allclose(even, self.costs.speeds):
            return []
        known = set(self.found)
        with suppress(InsufficientMemoryError):  # something else fits
            self._alternate(dict.fromkeys(self.rows, even), inf)
        return [candidate for key, candidate in self.found.items() if key not in known]

    def exposing(self, part: float, above: float) -> list[Candidate]:
        """The program that is best where only this part of the sums of gradients counts (see `hapx.overlap`), at the best ratios so far (where none
        counts: at those where everything begins), and at its own. None where the bound says that all programs take more than `above` then. What
        is known of all sums stays as it is."""
        start = self._by_kind(self._best().shares) if part else self._starts()[0]
        known = self.found, self.searched, self.prices, self.fitting.limits, list(self.problem.programs)
        self.found, self.searched, self.problem.exposed = {}, set(), part
        try:
            with suppress(InsufficientMemoryError):  # something else fits
                self._alternate(start, inf, above=above, most=1)
            return list(self.found.values())
        finally:
            self.found, self.searched, self.prices, self.fitting.limits, self.problem.programs = known
            self.problem.exposed = 1.0

    def _best(self) -> Candidate:
        return min(self.found.values(), key=attrgetter("cost"))

    def _least(self) -> float:
        """Its cost, if anything was found."""
        return self._best().cost if self.found else inf

    def _by_kind(self, shares: Mapping[Row, tuple[float, ...]]) -> dict[Row, Vector]:
        """Shares per coordinate as shares per kind; of a row without shares, proportional to speed."""
        own = {row: np.array([max(shares[row][c] for c in kind) for kind in self.kinds]) for row in self.rows if row in shares}
        return dict.fromkeys(self.rows, np.asarray(self.costs.speeds)) | own

    def _starts(self) -> list[dict[Row, Vector]]:
        n = sum(self.sizes)
        even, speed = np.full(len(self.sizes), 1.0 / n), np.asarray(self.costs.speeds)
        ratios = self.setting.rule.ratios
        if isinstance(ratios, tuple):
            return [self._explicit(ratios)]
        if self.setting.start is not None:
            return [self._by_kind(self.setting.start)]
        if ratios == "balanced" and self.setting.tight and self.rows and len(self.problem.steps) > MANY_STEPS:
            return [self._by_memory()]
        if ratios == "balanced" and self.before is not None and len(self.theory.mesh.axes) > 1 and len(self.problem.steps) > FEW_STEPS:
            return [self._as_before(self.before)]
        # on several axes a search costs more, and ratios that differ only between machines start nearer to the best
        single = np.allclose(even, speed) or (len(self.theory.mesh.axes) > 1 and len(self.problem.steps) > FEW_STEPS)
        both: list[Vector] = [speed] if single else [speed, even]
        chosen = [even] if ratios == "even" else [speed] if ratios == "speed" else both
        return [dict.fromkeys(self.rows, shares) for shares in chosen]

    def _by_memory(self) -> dict[Row, Vector]:
        """Everything in proportion to memory."""
        capacity = self.fitting.capacity
        return dict.fromkeys(self.rows, capacity / (capacity * self.sizes).sum())

    def _as_before(self, best: Candidate) -> dict[Row, Vector]:
        """The shares of a candidate of another view, added up over the devices of each coordinate."""
        mesh, found = self.theory.mesh, self._by_kind({})
        for row in self.rows:
            known = best.shares.get(best.mesh.row(best.mesh.uneven, row.kind)) if best.mesh.uneven is not None and row.kind != "even" else None
            if known is None or best.mesh.uneven is None:
                continue
            inside = best.mesh.sizes[best.mesh.uneven]
            of_device = {d: known[best.mesh.coordinates(d)[best.mesh.uneven]] * inside / len(best.mesh.devices) for d in best.mesh.devices}
            at = [0.0] * mesh.sizes[row.axis]
            for d in mesh.devices:
                at[mesh.coordinates(d)[row.axis]] += of_device[d]
            found[row] = np.array([sum(at[c] for c in kind) / len(kind) for kind in self.kinds])
        return found

    def _explicit(self, shares: tuple[float, ...]) -> dict[Row, Vector]:
        n = sum(self.sizes)
        if len(shares) != n or min(shares) < 0 or sum(shares) <= 0:
            raise HapError(f"ratios {shares}", where="restriction", allowed=f"{n} numbers >= 0, one per coordinate of the uneven axis, not all 0")
        total = sum(shares)
        return dict.fromkeys(self.rows, np.array([max(shares[c] for c in kind) / total for kind in self.kinds]))

    def _lengths(self, ratios: Mapping[Row, Vector]) -> Lengths:
        explicit = self.setting.rule.ratios
        per = {row: explicit if isinstance(explicit, tuple) else per_device(shares.tolist(), self.kinds) for row, shares in ratios.items()}
        return {**round_ratios(per, self.cuts), **{c: own for c, own in self.fixed.items() if c in self.problem.cuts}}

    def _levelled(self, ratios: Mapping[Row, Vector]) -> Lengths | None:
        """Lengths whose fullest devices are as little full as can be, where largest remainders make those of a cut of few units much fuller: there a
        program that uses such a cut looks slower than it is once its lengths are improved."""
        per = {row: per_device(shares.tolist(), self.kinds) for row, shares in ratios.items()}
        rounded = self._lengths(ratios)
        levelled = level_ratios(per, [c for c in self.cuts if c not in self.fixed])
        much = any(fullest(rounded[c], per[c.row]) > UNLEVEL * fullest(own, per[c.row]) for c, own in levelled.items())
        return rounded | levelled if much else None

    # -- how it goes on ----------------------------------------------------------------------------------------------------------------------------

    def _alternate(
        self, ratios: dict[Row, Vector], known: float, given: Mapping[Cut, tuple[int, ...]] | None = None, above: float = inf,
        most: int = MAX_ALTERNATIONS, limits: Vector | None = None,
    ) -> None:  # fmt: skip
        """Adds what it meets to `found`. given: lengths that are not rounded from the ratios. above: a first program that takes more is not looked
        for. most: rounds. limits: for sums, to begin with. Raises InsufficientMemoryError if no program fits at any ratios that were tried."""
        lengths = self._lengths(ratios) | {c: own for c, own in (given or {}).items() if c in self.problem.cuts}
        kept: list[float] = []
        why = "too small"
        self.fitting.reset(limits)
        try:
            why = self._run(ratios, lengths, known, kept, above, most)
        finally:
            self.counters.ended[why] += 1
            self.counters.kept.append(tuple(kept))

    def _run(
        self, ratios: Mapping[Row, Vector], lengths: Lengths, known: float, kept: list[float], above: float = inf, most: int = MAX_ALTERNATIONS
    ) -> str:
        """One alternation; why it ended. kept: gets the least cost after every step."""
        best = inf
        for _ in range(most):
            at = self._at(lengths)
            if at in self.searched:
                return "repeated"
            self.searched.add(at)
            self.counters.alternations += 1
            self.told("searching", best)
            solution, others = self._solutions(lengths, above if best == inf else inf, min(known, self._least()))
            if solution is None and not others:
                return "hopeless"
            if solution is not None:
                own = self._keep(solution, self._goal(solution), lengths, ratios)
                best = min(best, own.cost if own is not None else inf)
                kept.append(best)
                if not self.free:
                    return "given"
                if best > HOPELESS * known:
                    self.hopeless = best / known
                    return "hopeless"
            began = time.perf_counter()
            balanced = self._balanced([solution, *others] if solution is not None else others, ratios) if self.free else None
            self.counters.balance_time += time.perf_counter() - began
            if balanced is None and best == inf:
                raise InsufficientMemoryError("no program fits at these ratios")  # how much is lacking, `_squeeze` says
            before = best
            if balanced is not None:
                ratios, lengths, candidate = balanced
                best = min(best, candidate.cost)
            kept.append(best)
            if best >= before * (1 - STALLED):
                return "stalled"
        return "limit" if most > 1 else "once"

    def _balanced(self, solutions: Sequence[Solution], ratios: Mapping[Row, Vector]) -> tuple[Mapping[Row, Vector], Lengths, Candidate] | None:
        """Of the programs at their best ratios, the fastest whose peak fits there; None if none does."""
        fixed = self.costs.lengths_to_shares(self.fixed)
        for _ in range(CORRECTIONS):
            found: list[tuple[float, Solution, Objective, dict[Row, Vector]]] = []
            for solution in solutions:
                goal = self._goal(solution)
                best = self._ratios(solution, goal, ratios, fixed)
                if best is not None:
                    seconds = goal.time({cut: fixed[cut] if cut in fixed else best[cut.row] for cut in goal.cuts})
                    found.append((seconds, solution, goal, best))
            if not found:
                return None
            for _, solution, goal, own in sorted(found, key=itemgetter(0)):
                lengths = self._rounded(goal, self._lengths(own))
                candidate = self._keep(solution, goal, lengths, own)
                if candidate is not None:
                    return own, lengths, candidate
        return None

    def _ratios(self, solution: Solution, goal: Objective, ratios: Mapping[Row, Vector], fixed: Mapping[Cut, Vector]) -> dict[Row, Vector] | None:
        """The best ratios of a program: once, wherever an alternation comes from. Rows that it does not use keep theirs."""
        key = id(solution.steps), tuple(self.fitting.limits.tolist())
        if key not in self.balanced:
            self.balanced[key] = balance(goal, self.sizes, self.fitting.limits, ratios, fixed)
        best = self.balanced[key]
        return {**ratios, **{r: best[r] for r in dict.fromkeys(c.row for c in goal.cuts)}} if best is not None else None

    def _goal(self, solution: Solution) -> Objective:
        """The cost of a program as a function of shares; equal programs of a problem have the same steps."""
        known = self.goals.get(id(solution.steps))
        if known is None:  # held with its solution, whose steps keep their identity
            known = self.goals[id(solution.steps)] = solution, objective(solution.steps, solution.storage, len(self.sizes))
        return known[1]

    def _solutions(self, lengths: Lengths, above: float, known: float) -> tuple[Solution | None, tuple[Solution, ...]]:
        """The best program at these lengths whose peak fits, if any does; and what other ratios may make fit: the cheapest program without limits,
        then, where none fits, the one of least memory. Nothing where all programs take more than `above`; a good one will do where all take more than
        `known`."""
        found, others = self._by_sums(lengths, above, known)
        if self.beams and others and self.problem.exposed == 1 and others[0].cost < UNLIKELY * self._least():
            self._by_peaks(lengths)
        return found, others

    def _by_peaks(self, lengths: Lengths, times: float = UNLIKELY) -> None:
        """Keeps what beams find that know peaks (`hapx.by_peaks`), if it costs less than so many times the best; and what they find at the lengths of
        that, as long as it is better."""
        limits = self.fitting.limits
        for _ in range(TURNS):
            at, before = self._at(lengths), self._least()
            if at in self.beamed:
                break
            self.beamed.add(at)
            for solution, own in self.peaks.at(lengths, lambda: times * self._least(), self.counters.search):
                goal = self._goal(solution)
                self._keep(solution, goal, own, self._ratios_of(own, goal.cuts))
            if self._least() >= (1 - STALLED) * before:
                break
            lengths = {**lengths, **self._best().lengths}
        self.fitting.limits = limits

    def _ratios_of(self, lengths: Lengths, cuts: Iterable[Cut]) -> dict[Row, Vector]:
        """Shares per kind that lengths stand for: those of the finest cut of each row."""
        finest = {c.row: c for c in sorted(cuts, key=attrgetter("units"))}
        own = {row: np.array([np.mean([lengths[c][i] for i in kind]) / c.units for kind in self.kinds]) for row, c in finest.items()}
        return self._by_kind({}) | own

    def _by_sums(self, lengths: Lengths, above: float, known: float) -> tuple[Solution | None, tuple[Solution, ...]]:
        """The same, by searches that know sums of memory."""
        shares, spare = self.costs.lengths_to_shares(lengths), None
        others: tuple[Solution, ...] = ()
        for _ in range(CORRECTIONS):
            found, others = attempt(self.problem, shares, self.limits, self.setting.key, self.prices, self.budget, above, known, self._possible)
            for solution in (found,) if found is not None else others:
                self.counters.search.add(solution.statistics)
            self.binds = self.binds or bool(others)
            if found is not None:
                self.prices = found.prices or self.prices
                if self.fitting.correct(found, np.asarray(found.memory), lengths):
                    return found, others
            else:  # what does not fit by the sum may fit by its moments
                better = next((s for s in others if self.fitting.correct(s, np.asarray(s.memory), lengths)), None)
                if better is None or spare is not None:
                    break
                spare = better
                if better is others[0]:
                    break
        return spare, others

    def _possible(self) -> bool:
        """Whether it is worth while to look for a program that fits."""
        return bool(self.found) or self.tightest.part <= MAY_FIT

    def _rounded(self, goal: Objective, lengths: Lengths) -> Lengths:
        """Lengths after rounding, made to fit, then improved where units are few."""
        used = goal.cuts
        movable = [c for c in used if c not in self.fixed]

        def parts(trial: Lengths) -> Vector:
            return goal.memory(self._shares(trial, used)) / self.fitting.limits

        def cost(trial: Lengths) -> float:
            shares = self._shares(trial, used)
            return goal.time(shares) if (goal.memory(shares) <= self.fitting.limits).all() else inf

        lengths = fit(lengths, self.kinds, parts, movable)
        return improve(lengths, self.kinds, cost, movable)

    def _shares(self, lengths: Mapping[Cut, tuple[int, ...]], cuts: Iterable[Cut]) -> Mapping[Cut, Vector]:
        return self.costs.lengths_to_shares({c: lengths[c] for c in cuts})

    def _keep(self, solution: Solution, goal: Objective, lengths: Lengths, ratios: Mapping[Row, Vector]) -> Candidate | None:
        """The candidate, if its peak fits."""
        shares = self._shares(lengths, goal.cuts)
        if not self.fitting.correct(solution, goal.memory(shares), lengths):
            self.rejected = solution, lengths
            return None
        used = set(goal.cuts)
        key = (solution.choices, tuple((c, n) for c, n in lengths.items() if c in used))
        if key not in self.found:
            per = {row: per_device(own.tolist(), self.kinds) for row, own in ratios.items()}
            if isinstance(self.setting.rule.ratios, tuple):
                total = sum(self.setting.rule.ratios)
                per = {row: tuple(s / total for s in self.setting.rule.ratios) for row in per}
            cost = goal.time(shares)
            self.found[key] = Candidate(
                self.theory, self.costs, solution.program, solution.storage_of, lengths, per, cost, cost, solution.statistics.gap
            )
        elif solution.statistics.gap < self.found[key].gap:
            self.found[key] = replace(self.found[key], gap=solution.statistics.gap)
        return self.found[key]
