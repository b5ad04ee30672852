"""Fast programs at lengths at which their peaks fit, for small problems in which memory binds.

Sums of memory, which the search and the linear program know, say little of peaks where temporaries are large. At given lengths a beam that knows
peaks (`hapx.synth.momentary`) looks for programs that fit, and for those that need somewhat more: these are faster, and often fit once single units
were moved to other kinds of devices (`hapx.balancer.rounding.fit`).

In: a problem, lengths, what is known already. Out: programs with lengths; and lengths near others. Invariant: the peaks fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, permutations

import numpy as np

from hapx.balancer.lp import Objective
from hapx.balancer.rounding import Lengths, deal, fit, per_device
from hapx.cost.terms import Vector
from hapx.fitting import Fitting
from hapx.states import Cut
from hapx.synth.astar import Statistics
from hapx.synth.momentary import Momentary
from hapx.synth.moves import Crowded
from hapx.synth.problem import Problem
from hapx.synth.writer import Solution

# of what may be used, what programs may need before units are moved; and its price where beams choose, in times of what the fastest program takes
SEVERAL = (1.0, 1.0), (1.0, 3.0), (1.0, 0.0), (1.2, 0.0), (1.2, 3.0), (1.6, 0.0)
ON_AXES = (1.0, 3.0), (1.0, 0.0), (1.2, 0.0), (1.6, 0.0)
FEW = (1.0, 3.0), (1.0, 1.0)  # in problems that are not small, whose beams take long: until one finds something
AT_ONCE = 1 / 3  # of the budget that is left, after which no other beam begins at the same lengths
LOOKED = 6  # programs of a beam whose peaks are looked at
BUDGET = 2_000_000  # partial programs, times the steps of the problem, after which no other beam begins
AROUND = (1 / 4, 1 / 16)  # parts of a row that are moved
TIMES = 2  # that units of one program are moved, from different lengths


class ByPeaks:
    """See the module. goal: the terms of a program; movable: cuts whose lengths may change. everywhere: many lengths are looked at, so that there is
    a budget; else a few, however long that takes."""

    def __init__(self, problem: Problem, fitting: Fitting, goal: Callable[[Solution], Objective], movable: Iterable[Cut], everywhere: bool):
        self.problem, self.fitting, self.goal, self.movable = problem, fitting, goal, frozenset(movable)
        self.left = BUDGET // max(1, len(problem.steps))  # partial programs
        self.everywhere = everywhere
        self.beams = FEW if not everywhere else ON_AXES if len(problem.theory.mesh.axes) > 1 else SEVERAL
        self._moved = Counter[tuple[int, ...]]()

    def at(self, lengths: Lengths, below: Callable[[], float], statistics: Statistics) -> Iterator[tuple[Solution, Lengths]]:
        """Programs with lengths. below: seconds that are not to be reached."""
        if self.everywhere and self.left <= 0:
            return
        with suppress(Crowded):
            beams = Momentary(self.problem, self.problem.costs.at_lengths(lengths), lengths)
            least = (1 - AT_ONCE) * self.left
            for part, price in self.beams:
                began, before = statistics.generated, below()
                yield from self._of_beam(beams.fastest(self.fitting.key, statistics, part, before, price), lengths)
                self.left -= statistics.generated - began
                if self.left <= least if self.everywhere else below() < before:
                    return

    def _of_beam(self, found: Iterator[Solution], lengths: Lengths) -> Iterator[tuple[Solution, Lengths]]:
        """Of programs, the fastest first: the first one that does not fit, if units can be moved until it does, and the first one that fits."""
        nearest: Solution | None = None
        for own in islice(found, LOOKED):
            if self.fitting.holds(own, lengths):
                yield own, lengths
                break
            if nearest is None and self._moved[own.choices] < TIMES:
                nearest = own
        if nearest is not None:
            self._moved[nearest.choices] += 1
            fitting = self._made_to_fit(nearest, lengths)
            if fitting is not None:
                yield nearest, fitting

    def _made_to_fit(self, solution: Solution, lengths: Lengths) -> Lengths | None:
        cuts = self.goal(solution).cuts
        movable = [c for c in cuts if c in self.movable]
        if not movable:
            return None
        estimated, capacity = self.fitting.estimate(solution, lengths, cuts), self.fitting.capacity
        peak = estimated or (lambda trial: self.fitting.peak(solution, trial)[0])
        own = fit(lengths, self.problem.costs.kinds, lambda trial: peak(trial) / capacity, movable)
        return own if self.fitting.holds(solution, own) else None


def around(
    lengths: Mapping[Cut, tuple[int, ...]], kinds: Sequence[Sequence[int]], movable: Sequence[Cut], shares: Sequence[Vector]
) -> Iterator[Lengths]:
    """Lengths where one cut of a row, or all of its others, are dealt out by given shares (per device of each kind); and where a part of a row is
    moved from one kind of devices to another, in all of its cuts."""
    rows = {row: [c for c in movable if c.row == row] for row in dict.fromkeys(c.row for c in movable)}
    trials = [dealt for own in rows.values() for dealt in _as_given(own, kinds, shares)]
    trials += [_shifted(lengths, own, giver, taker, part) for part in AROUND for own in rows.values() for giver, taker in permutations(kinds, 2)]
    for moved in trials:
        if any(moved[cut] != lengths[cut] for cut in moved):
            yield {**lengths, **moved}


def _as_given(cuts: Sequence[Cut], kinds: Sequence[Sequence[int]], shares: Sequence[Vector]) -> Iterator[Lengths]:
    dealt = [{cut: deal(cut.units, per_device(own.tolist(), kinds)) for cut in cuts} for own in shares]
    for each in dealt:
        if len(cuts) > 2:
            yield from ({c: n for c, n in each.items() if c != cut} for cut in cuts)
        yield from ({cut: each[cut]} for cut in cuts)


def _shifted(lengths: Mapping[Cut, tuple[int, ...]], cuts: Sequence[Cut], giver: Sequence[int], taker: Sequence[int], part: float) -> Lengths:
    moved = {}
    for cut in cuts:
        shares = np.array(lengths[cut], dtype=float) / cut.units
        has = shares[list(giver)].sum()
        if has > 0:
            shares[list(giver)] *= 1 - min(part, has) / has
            shares[list(taker)] += min(part, has) / len(taker)
            moved[cut] = deal(cut.units, shares.tolist())
    return moved
