"""Synthesis and balancing in turns on one mesh, from one start on (HAP section 3.3),

    Q <- A*(B),   B <- LP(Q),   until the lengths were searched before or nothing improves.

In: a setting, the theory of its graph on a mesh; ratios to begin with. Out: candidates: every pair of a program and integer lengths that is met and
fits into memory is kept. Invariant: the least cost seen never rises on the way, and a candidate's cost, memory and program are those of its integer
lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import inf
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from hapx.balancer.lp import Objective, balance, objective
from hapx.balancer.rounding import Lengths, fit, fullest, improve, level_ratios, per_device, round_ratios
from hapx.by_peaks import ByPeaks
from hapx.cost.exposed import ALL
from hapx.cost.model import CostModel
from hapx.cost.terms import Shares, Vector
from hapx.errors import InsufficientMemoryError
from hapx.fitting import Fitting
from hapx.lower import Candidate
from hapx.progress import Teller
from hapx.setting import Counters, Setting
from hapx.squeezing import MAY_FIT, Squeezing, Tight
from hapx.starts import Starts
from hapx.states import Cut, Row
from hapx.synth.problem import Problem, build
from hapx.synth.search import BUDGET, HOPELESS, alternatives, attempt
from hapx.synth.writer import Solution
from hapx.theory.triple import Theory

MAX_ALTERNATIONS = 8
STALLED = 1e-3  # relative improvement below which the alternation ends
CORRECTIONS = 4  # searches at most for one program whose peak fits
UNLEVEL = 1.1  # how much fuller rounding may make the fullest device before lengths that are level are tried
UNLIKELY = 1.1  # where memory binds and searches take long, what costs that much more than the best is not begun with
SLOW = 1.25  # what takes so many times `Setting.beside` is not improved
BEAMED_ON_AXES = 30  # nodes and outputs of a problem of several axes up to which beams know peaks: with more, its moves take long
BEAMED = 150  # and of any problem in which what fits is far slower than it would be without limits
TURNS = 3  # of beams that know peaks, each at the lengths of what the one before found


class Turns:
    """See the module. before: the best candidate of the views before; costs: of the same setting and theory, if they are known already."""

    def __init__(
        self, setting: Setting, theory: Theory, counters: Counters, told: Teller, before: Candidate | None = None, costs: CostModel | None = None
    ):
        self.setting, self.theory, self.counters, self.told = setting, theory, counters, told
        self.costs = costs or CostModel(
            theory, setting.cluster, setting.precision, setting.optimizer, setting.key.mode, repeats=setting.repeats, in_flight=setting.in_flight
        )
        began = time.perf_counter()
        self.problem: Problem = build(theory, self.costs, setting.rule, setting.given, setting.forbidden)
        counters.problem_time += time.perf_counter() - began
        self.problem.watch, self.problem.within = told.watch(), setting.within
        self.starts = Starts(setting, theory, self.costs, len(self.problem.steps), before)
        self.small, self.free = self.starts.small, self.starts.free
        self.hopeless = 0.0  # how many times as much as the best of the views before its first program costs, where that ended it
        self.fitting = Fitting(theory, self.costs, setting.key, setting.strict)
        self.rejected: tuple[Solution, Lengths] | None = None  # the last program whose peak did not fit at balanced ratios
        self.kinds, self.sizes = self.costs.kinds, self.costs.sizes
        self.fixed = {cut: own for cut, own in setting.fixed.items() if cut.row in self.starts.rows}
        self.cuts = sorted(self.problem.cuts, key=str)  # sets of them have another order in every process
        self.found: dict[tuple[Any, ...], Candidate] = {}
        self.goals: dict[int, tuple[Solution, Objective]] = {}  # by the identity of a program's steps
        self.balanced: dict[tuple[int, tuple[float, ...]], dict[Row, Vector] | None] = {}  # by a program's steps (held by `goals`) and limits
        self.searched: set[tuple[tuple[int, ...], ...]] = set()  # lengths, in the order of `cuts`: the same lengths have the same program
        self.cheapest = inf  # seconds of the fastest program that did not fit
        self.prices: tuple[float, ...] | None = None  # of memory, once there are some with which programs fit
        everywhere = self.small and (len(theory.mesh.axes) == 1 or len(self.problem.steps) <= BEAMED_ON_AXES)
        self.goal: Callable[[Solution], Objective] = partial(_goal, self.goals, len(self.sizes))  # the cost of a program as a function of shares
        self.peaks = ByPeaks(self.problem, self.fitting, self.goal, [c for c in self.cuts if self.free and c not in self.fixed], everywhere)
        exact = not setting.within and self.costs.in_flight == self.costs.repeats == 1
        self.beams = everywhere and exact  # whether they look for what fits, everywhere
        self.shifted = not self.beams  # whether what fits by its sum and not by its peak is balanced, too
        self.beamable = not everywhere and len(self.problem.steps) <= BEAMED and exact  # or at few lengths, where it is worth while
        self.beamed: set[tuple[tuple[int, ...], ...]] = set()  # lengths, as in `searched`, at which they did
        self.budget: int | None = BUDGET  # with which small problems are searched to the end also where memory binds

    def close(self) -> None:
        """Ends it: what is not freed otherwise is dropped."""
        self.problem.forget()

    @property
    def limits(self) -> tuple[float, ...]:
        """Bytes per kind for the sums of the search and of the balancer."""
        return tuple(self.fitting.limits.tolist())

    def limits_of(self, candidate: Candidate, total: Vector) -> Vector:
        """`limits` that would just admit a program. total: its sum, per kind."""
        own = Fitting(self.theory, self.costs, self.setting.key, self.fitting.strict)
        own.correct(candidate, total, candidate.lengths)
        return own.limits

    @cached_property
    def tightest(self) -> Tight:
        """What fits into least memory."""
        return Squeezing(self.problem, self.fitting, self.goal, self.lengths, free=self.free, fixed=self.fixed).tightest(self.starts.tight())

    @property
    def binds(self) -> bool:
        """Whether a program that would have been the cheapest did not fit."""
        return self.cheapest < inf

    def best(self) -> Candidate:
        return min(self.found.values(), key=attrgetter("cost"))

    def least(self) -> float:
        """Its cost, if anything was found."""
        return self.best().cost if self.found else inf

    def _known(self) -> float:
        """Seconds of the fastest that is known, here or beside."""
        return min(self.least(), self.setting.beside)

    # -- how it goes on ------------------------------------------------------------------------------------------------------------------------------

    def alternate(
        self, ratios: dict[Row, Vector], known: float, given: Mapping[Cut, tuple[int, ...]] | None = None, above: float = inf,
        most: int = MAX_ALTERNATIONS, limits: Vector | None = None,
    ) -> None:  # fmt: skip
        """Adds what it meets to `found`. given: lengths that are not rounded from the ratios. above: a first program that takes more is not looked
        for. most: rounds. limits: for sums, to begin with. Raises InsufficientMemoryError if no program fits at any ratios that were tried."""
        lengths = self.lengths(ratios) | {c: own for c, own in (given or {}).items() if c in self.problem.cuts}
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
            at = self.at(lengths)
            if at in self.searched:
                return "repeated"
            self.searched.add(at)
            self.counters.alternations += 1
            self.told("searching", best)
            solution, others = self._solutions(lengths, above if best == inf else inf, min(known, self._known()))
            if solution is None and not others:
                return "hopeless"
            if solution is not None:
                own = self.keep(solution, self.goal(solution), lengths, ratios)
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
            if best > SLOW * self.setting.beside:
                return "hopeless"
            if best >= before * (1 - STALLED):
                return "stalled"
        return "limit" if most > 1 else "once"

    def _balanced(self, solutions: Sequence[Solution], ratios: Mapping[Row, Vector]) -> tuple[Mapping[Row, Vector], Lengths, Candidate] | None:
        """Of the programs at their best ratios, the fastest whose peak fits there; None if none does."""
        fixed = self.costs.lengths_to_shares(self.fixed)
        for _ in range(CORRECTIONS):
            found: list[tuple[float, Solution, Objective, dict[Row, Vector]]] = []
            for solution in solutions:
                goal = self.goal(solution)
                best = self._ratios(solution, goal, ratios, fixed)
                if best is not None:
                    seconds = goal.time({cut: fixed[cut] if cut in fixed else best[cut.row] for cut in goal.cuts})
                    found.append((seconds, solution, goal, best))
            if not found:
                return None
            for _, solution, goal, own in sorted(found, key=itemgetter(0)):
                lengths = self._rounded(goal, self.lengths(own))
                candidate = self.keep(solution, goal, lengths, own)
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

    def _rounded(self, goal: Objective, lengths: Lengths) -> Lengths:
        """Lengths after rounding, made to fit, then improved where units are few."""
        used = goal.cuts
        movable = [c for c in used if c not in self.fixed]

        def parts(trial: Lengths) -> Vector:
            return goal.memory(self.shares(trial, used)) / self.fitting.limits

        def cost(trial: Lengths) -> float:
            shares = self.shares(trial, used)
            return goal.time(shares) if (goal.memory(shares) <= self.fitting.limits).all() else inf

        lengths = fit(lengths, self.kinds, parts, movable)
        return improve(lengths, self.kinds, cost, movable)

    def keep(self, solution: Solution, goal: Objective, lengths: Lengths, ratios: Mapping[Row, Vector]) -> Candidate | None:
        """The candidate, if its peak fits."""
        shares = self.shares(lengths, goal.cuts)
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

    # -- searches ------------------------------------------------------------------------------------------------------------------------------------

    def _solutions(self, lengths: Lengths, above: float, known: float) -> tuple[Solution | None, tuple[Solution, ...]]:
        """The best program at these lengths whose peak fits, if any does; and what other ratios may make fit: the cheapest program without limits,
        then, where none fits, the one of least memory, and, in problems that are not small, those whose sums fit here, but not their peaks. Nothing
        where all programs take more than `above`; a good one will do where all take more than `known`."""
        found, others, high = self._by_sums(lengths, above, known)
        worth = bool(others) and self.problem.exposed == ALL and others[0].cost < UNLIKELY * self._known()
        if self.beams and worth and self.possible():
            self.by_peaks(lengths)
        return found, (*others, *high) if self.shifted else others

    def _by_sums(self, lengths: Lengths, above: float, known: float) -> tuple[Solution | None, tuple[Solution, ...], Iterable[Solution]]:
        """The same, by searches that know sums of memory; apart, those whose peaks do not fit."""
        shares, spare, aside = self.costs.lengths_to_shares(lengths), None, None
        refused: set[tuple[int, ...]] = set()  # programs whose peaks do not fit, by their choices
        others: tuple[Solution, ...] = ()
        high: dict[tuple[int, ...], Solution] = {}  # by their choices
        for _ in range(CORRECTIONS):
            found, others = attempt(self.problem, shares, self.limits, self.setting.key, self.prices, self.budget, above, known, self.possible)
            for solution in (found,) if found is not None else others:
                self.counters.search.add(solution.statistics)
            self.cheapest = min([self.cheapest, *(one.cost for one in others[:1])])
            if found is not None:
                self.prices = found.prices or self.prices
                if self.fitting.correct(found, np.asarray(found.memory), lengths):
                    return _cheaper(found, aside), others, high.values()
                high[found.choices] = found
                refused.add(found.choices)
                aside = aside or self._aside(shares, lengths, refused)
                if aside is not None and found.cost >= aside.cost:
                    break
            else:  # what does not fit by the sum may fit by its moments
                better = next((s for s in others if self.fitting.correct(s, np.asarray(s.memory), lengths)), None)
                if better is None or spare is not None:
                    break
                spare = better
                if better is others[0]:
                    break
        return _cheaper(spare, aside), others, high.values()

    def _aside(self, shares: Shares, lengths: Lengths, refused: set[tuple[int, ...]]) -> Solution | None:
        """The fastest program whose peak fits of those that were found where memory has a price. refused: gets others."""
        for own in alternatives(self.problem, shares, self.setting.key):
            if own.choices not in refused:
                if self.fitting.holds(own, lengths):
                    return own
                refused.add(own.choices)
        return None

    def possible(self) -> bool:
        """Whether it is worth while to look for a program that fits."""
        return bool(self.found) or self.tightest.part <= MAY_FIT

    def by_peaks(self, lengths: Lengths, times: float = UNLIKELY, known: float = inf) -> None:
        """Keeps what beams find that know peaks (`hapx.by_peaks`), if it costs less than so many times the best here, and that beside, and `known`
        seconds; and what they find at the lengths of that, as long as it is better."""
        limits = self.fitting.limits
        for _ in range(TURNS):
            at, before = self.at(lengths), self.least()
            if at in self.beamed:
                break
            self.beamed.add(at)
            for solution, own in self.peaks.at(lengths, lambda: times * min(self._known(), known), self.counters.search):
                goal = self.goal(solution)
                self.keep(solution, goal, own, self._ratios_of(own, goal.cuts))
            if self.least() >= (1 - STALLED) * before:
                break
            lengths = {**lengths, **self.best().lengths}
        self.fitting.limits = limits

    # -- lengths and costs ---------------------------------------------------------------------------------------------------------------------------

    def lengths(self, ratios: Mapping[Row, Vector]) -> Lengths:
        explicit = self.setting.rule.ratios
        per = {row: explicit if isinstance(explicit, tuple) else per_device(shares.tolist(), self.kinds) for row, shares in ratios.items()}
        return {**round_ratios(per, self.cuts), **{c: own for c, own in self.fixed.items() if c in self.problem.cuts}}

    def levelled(self, ratios: Mapping[Row, Vector]) -> Lengths | None:
        """Lengths whose fullest devices are as little full as can be, where largest remainders make those of a cut of few units much fuller: there a
        program that uses such a cut looks slower than it is once its lengths are improved."""
        per = {row: per_device(shares.tolist(), self.kinds) for row, shares in ratios.items()}
        rounded = self.lengths(ratios)
        levelled = level_ratios(per, [c for c in self.cuts if c not in self.fixed])
        much = any(fullest(rounded[c], per[c.row]) > UNLEVEL * fullest(own, per[c.row]) for c, own in levelled.items())
        return rounded | levelled if much else None

    def at(self, lengths: Mapping[Cut, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """What the same lengths have in common: the program that is best there."""
        return tuple([lengths[c] for c in self.cuts])

    def shares(self, lengths: Mapping[Cut, tuple[int, ...]], cuts: Iterable[Cut]) -> Mapping[Cut, Vector]:
        return self.costs.lengths_to_shares({c: lengths[c] for c in cuts})

    def _ratios_of(self, lengths: Lengths, cuts: Iterable[Cut]) -> dict[Row, Vector]:
        """Shares per kind that lengths stand for: those of the finest cut of each row."""
        finest = {c.row: c for c in sorted(cuts, key=attrgetter("units"))}
        own = {row: np.array([np.mean([lengths[c][i] for i in kind]) / c.units for kind in self.kinds]) for row, c in finest.items()}
        return self.starts.by_kind({}) | own

    def goal_of(self, candidate: Candidate) -> tuple[Solution, Objective]:
        """The solution of a candidate that was found here, and its cost as a function of shares."""
        return next(own for own in self.goals.values() if own[0].program is candidate.program)


def _cheaper(*solutions: Solution | None) -> Solution | None:
    """The first one that costs least, if there is any."""
    return min((own for own in solutions if own is not None), key=attrgetter("cost"), default=None)


def _goal(goals: dict[int, tuple[Solution, Objective]], kinds: int, solution: Solution) -> Objective:
    """The cost of a program as a function of shares; equal programs of a problem have the same steps."""
    known = goals.get(id(solution.steps))
    if known is None:  # held with its solution, whose steps keep their identity
        known = goals[id(solution.steps)] = solution, objective(solution.steps, solution.storage, kinds)
    return known[1]
