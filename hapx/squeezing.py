"""The program and the lengths whose peak is least, for where no program fits at the ratios that were tried.

In: a problem, where to begin. Out: a program at lengths, with its peak. At every start the leanest program is looked for (`hapx.synth.lean`), also
among those that split the batch only, or the model; from the best one on, or the best few, in turns like the alternation (`hapx.turns`),

    B <- the ratios at which the program's sum is least,    lengths <- rounded, moved by single units while that takes the peak down,    Q <- the
    leanest there,

where a sum counts as a part of its limit, and what the peak has less than the sum, or more, is taken to be the same at other ratios, or the same
part of it.

Invariant: peaks are those of exact lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from hapx.balancer.lp import Objective, least_full
from hapx.balancer.rounding import Lengths, fit
from hapx.cost.model import CostModel
from hapx.cost.terms import Shares, Vector
from hapx.fitting import Fitting
from hapx.states import Row
from hapx.synth.lean import leanest
from hapx.synth.moves import Crowded
from hapx.synth.problem import Problem
from hapx.synth.search import EXACT, least_memory
from hapx.synth.seeds import Mask, seeds
from hapx.synth.writer import Solution

ROUNDS = 4  # of balancing and searching, from the best program, or from so many in problems of so few steps
BEGUN = 3
VERY_FEW_STEPS = 30
REACH = 1.3  # times the best part so far, above which no other program is begun with,
FAR = 2.0  # nor where it needs so many times what there is, nor anything squeezed then in problems that are not small
BETTER = 0.005  # relative improvement with which these go on,
MAY_FIT = 1.3  # if they may come that far: a least peak of more times what may be used is not believed to be that far from the true one
UNITS = 10_000  # steps of programs whose peaks are looked at while units are moved

Ratios = Mapping[Row, Vector]
Family = Mapping[int, Mask] | None  # by id of a step class, the choices of its programs; None: all of them


@dataclass(frozen=True, slots=True)
class Tight:
    """A program at lengths. part: its peak on the fullest device, of what may be used there; limits: of sums, which it just keeps if so large a
    part may be used."""

    part: float
    solution: Solution
    lengths: Lengths
    ratios: Ratios
    limits: Vector


class Squeezing:
    """See the module. goal: the terms of a program; lengths: of ratios; free: whether ratios may be changed; fixed: lengths that may not."""

    def __init__(
        self, problem: Problem, fitting: Fitting, goal: Callable[[Solution], Objective], lengths: Callable[[Ratios], Lengths], *, free: bool,
        fixed: Lengths,
    ):  # fmt: skip
        self.problem, self.fitting, self.goal, self.lengths, self.free, self.fixed = problem, fitting, goal, lengths, free, fixed
        self.costs, self.capacity = problem.costs, fitting.capacity
        self.units = UNITS // len(problem.steps)  # peaks that are left to look at
        self.small = len(problem.steps) <= VERY_FEW_STEPS
        # those of a seed have few moves; in problems that are not small they mostly fit where anything does, and are looked at before all programs
        self.families: list[Family] = [None, *seeds(problem)] if self.small else [*seeds(problem), None]

    def tightest(self, starts: Iterable[Ratios]) -> Tight:
        """The first program that fits, else the one of the least peak that was found."""
        found: list[tuple[Tight, Family]] = []
        for ratios in {tuple(self.lengths(r).items()): r for r in starts}.values():
            for family in tuple(self.families):
                own = self._leanest(self.lengths(ratios), ratios, family)
                if own is not None and own.part <= 1:
                    return own
                found += [(own, family)] if own is not None else []
        if not found:
            self.families = [None]
            own = self._leanest(self.lengths(ratios), ratios, None)
            assert own is not None, "of all programs one has the least sum"
            found = [(own, None)]
        found.sort(key=lambda one: one[0].part)
        several = list({own.solution.choices: (own, family) for own, family in reversed(found)}.values())[::-1]
        best = found[0][0]
        if best.part > FAR and len(self.problem.steps) > EXACT:
            return best
        for own, family in several[: BEGUN if self.small else 1] if self.free else ():
            if own is not several[0][0] and own.part > min(REACH * best.part, FAR):
                break
            best = min(best, self._squeezed(own, family), key=attrgetter("part"))
            if best.part <= 1:
                break
        return best

    def _squeezed(self, best: Tight, family: Family) -> Tight:
        """From a program of a family on, among all programs if they can be looked at."""
        for left in reversed(range(ROUNDS)):
            before = best
            balanced = self._by_units(self._balanced(best))
            best = balanced
            if best.part > 1 and balanced.lengths != before.lengths:
                again = self._leanest(balanced.lengths, balanced.ratios, None if None in self.families else family)
                best = again if again is not None and again.part < best.part else best
            gained = before.part - best.part
            if best.part <= 1 or gained < BETTER * before.part or best.part - left * gained > MAY_FIT:
                break
        return best

    def _leanest(self, lengths: Lengths, ratios: Ratios, family: Family) -> Tight | None:
        """Of a family, which is given up where some step has too many moves; if there is no other one, and the beam leads nowhere, the program of the
        least sum."""
        exact, key = self.costs.at_lengths(lengths), self.fitting.key
        own: Solution | None = None
        try:
            own = leanest(self.problem, exact, lengths, key, family)
        except Crowded:
            if len(self.families) > 1:
                self.families = [other for other in self.families if other is not family]
                return None
        if own is None and self.families == [None]:
            own = least_memory(self.problem, self.costs.lengths_to_shares(lengths), tuple(self.capacity.tolist()), key)
        return self._tight(own, lengths, ratios, exact) if own is not None else None

    def _tight(self, own: Solution, lengths: Lengths, ratios: Ratios, exact: CostModel | None = None) -> Tight:
        goal = self.goal(own)
        highest, _ = self.fitting.peak(own, lengths, exact)
        part = float((highest / self.capacity).max())
        limits = np.maximum(part * self.capacity + goal.memory(self._shares(lengths, goal)) - highest, 0.01 * self.capacity)
        return Tight(part, own, lengths, ratios, limits)

    def _balanced(self, best: Tight) -> Tight:
        """At the ratios at which its sum is least, if it is better there."""
        goal, fixed = self.goal(best.solution), self.costs.lengths_to_shares(self.fixed)
        total = goal.memory(self._shares(best.lengths, goal))
        peak = total + best.part * self.capacity - best.limits
        same, part = self.capacity + total - peak, self.capacity * total / np.maximum(peak, 1.0)
        for limits in (np.maximum(own, 0.01 * self.capacity) for own in (same, part)):
            ratios = {**best.ratios, **least_full(goal, self.costs.sizes, limits, best.ratios, fixed)}
            trial = self._tight(best.solution, self.lengths(ratios), ratios)
            best = trial if trial.part < best.part else best
        return best

    def _by_units(self, best: Tight) -> Tight:
        """With lengths moved by single units while that takes the peak down."""

        def used(trial: Lengths) -> Vector:
            self.units -= 1
            return self.fitting.peak(best.solution, trial)[0] / self.capacity if self.units > 0 else np.full(len(self.capacity), np.inf)

        movable = [c for c in self.goal(best.solution).cuts if c not in self.fixed]
        trial = self._tight(best.solution, fit(best.lengths, self.costs.kinds, used, movable), best.ratios)
        return trial if trial.part < best.part else best

    def _shares(self, lengths: Lengths, goal: Objective) -> Shares:
        return self.costs.lengths_to_shares({c: lengths[c] for c in goal.cuts})
