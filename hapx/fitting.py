"""Whether a program fits into memory: by its sum, which the search and the linear program can add up, and by the peak of its moments, which decides.

In: a theory with its cost model; programs at integer lengths. Out: whether the peak is within what may be used of every device, and the limits under
which the sums are to stay. The sum (parameters, gradients, state, everything that is kept) is more than the peak where gradients are made while
activations are freed, and less where temporaries are large; the difference is much the same for programs that are much the same. So

    limits = capacity + (sum - peak) of the last program that was looked at,

and the search is made again. Invariant: nothing is accepted whose peak exceeds the capacity, whatever the limits are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hapx.affine_peaks import AffinePeak
from hapx.cluster.units import show
from hapx.cost.liveness import Peak, all_in_flight, peak
from hapx.cost.model import CostModel
from hapx.cost.terms import Vector
from hapx.errors import InsufficientMemoryError
from hapx.layout import Lengths
from hapx.lower import Candidate
from hapx.plan import ProgramKey
from hapx.states import Cut
from hapx.synth.writer import Solution
from hapx.theory.triple import Theory

NEAR = 0.005  # relative error of estimated peaks that are used
SPARED = 0.6  # of the capacity: a program whose sum is below that has its peak looked at only if it is the one that is chosen


class Fitting:
    """`capacity`: bytes per kind that may be used; `limits`: for the sums. strict: the peak of every program is looked at."""

    def __init__(self, theory: Theory, costs: CostModel, key: ProgramKey, strict: bool = False):
        self.theory, self.costs, self.key = theory, costs, key
        self.capacity: Vector = np.asarray(costs.capacity)
        self._estimates: dict[int, AffinePeak] = {}  # by the identity of programs, which they hold
        self.reset()
        self.strict = strict

    def reset(self, limits: Vector | None = None) -> None:
        """As if no program had been looked at; or with limits that one has shown."""
        self.limits: Vector = self.capacity.copy() if limits is None else limits

    def correct(self, solution: Solution | Candidate, total: Vector, lengths: Lengths) -> bool:
        """Whether the peak fits; the limits become those that this program would have needed. total: the program's sum at the lengths; where that is
        far below the capacity, the peak is not looked at (unless strict)."""
        if self.spares(total):
            return True
        highest, _ = self.peak(solution, lengths)
        self.limits = np.maximum(self.capacity + total - highest, 0.01 * self.capacity)
        return self._within(highest)

    def spares(self, total: Vector) -> bool:
        """Whether a sum is so far below the capacity that the peak is not looked at."""
        return not self.strict and bool((total <= SPARED * self.capacity).all())

    def holds(self, solution: Solution | Candidate, lengths: Lengths) -> bool:
        """Whether the peak fits; whatever the sum is, and the limits stay."""
        return self._within(self.peak(solution, lengths)[0])

    def _within(self, highest: Vector) -> bool:
        return bool((highest <= self.capacity * (1 + 1e-9)).all())

    def peak(self, solution: Solution | Candidate, lengths: Lengths, exact: CostModel | None = None) -> tuple[Vector, Peak]:
        """Bytes per kind (of its fullest device), and the peak at the exact lengths. exact: the costs there, if they are known."""
        exact = exact or self.costs.at_lengths(lengths)
        found = peak(solution.program, self.theory.graph, exact, solution.storage_of)
        total = all_in_flight(found, exact)
        of_coordinate = {c: float(total[k]) for k, kind in enumerate(exact.kinds) for c in kind}
        return np.array([max(of_coordinate[c] for c in kind) for kind in self.costs.kinds]), found

    def estimate(self, solution: Solution | Candidate, lengths: Lengths, cuts: Sequence[Cut]) -> Callable[[Lengths], Vector] | None:
        """What peaks of a small program are at other lengths, for many of them; None where nothing simple says that. lengths: to begin with; cuts:
        those that it uses."""
        if self.costs.in_flight > 1 or self.costs.repeats > 1 or not cuts:
            return None
        key = id(solution.program)
        if key not in self._estimates:
            self._estimates[key] = AffinePeak(solution.program, self.costs, solution.storage_of, lengths, cuts)
        found = self._estimates[key]
        return found.at if found.error < NEAR else None

    def too_small(self, least: Solution, lengths: Lengths) -> InsufficientMemoryError:
        """The error: which devices lack how much, and when, by the program of least memory."""
        highest, found = self.peak(least, lengths)
        kind = int((highest / self.capacity).argmax())
        exact = self.costs.at_lengths(lengths)
        moment = next(m for m, own in zip(found.moments, exact.kinds, strict=True) if set(own) & set(self.costs.kinds[kind]))
        mesh, axis = self.theory.mesh, self.theory.mesh.uneven or 0
        devices = [d for d in mesh.devices if mesh.coordinates(d)[axis] in self.costs.kinds[kind]]
        needs, has, lack = (show(float(n), "size") for n in (highest[kind], self.capacity[kind], highest[kind] - self.capacity[kind]))
        return InsufficientMemoryError(
            f"no program fits: the smallest needs {needs} there ({moment}) and {has} is free; {lack} lack",
            where=f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}",
            needs={d: highest[k] for k, own in enumerate(self.costs.view.devices) for d in own if highest[k] > self.capacity[k]},
            times=float(highest[kind] / self.capacity[kind]),
        )
