"""Where a sequence of steps repeats itself, so that what was found for one repetition is not computed again for the others.

In: a number per step, equal for steps that are alike. Out: per step its *period*: the distance to the later step that it repeats, 0 where it
repeats none. Invariant: a step with period p is in a run of steps each of which equals the step p after it, at least p steps long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from hapx.repeats import runs
from hapx.synth.problem import Step

Names = dict[str, str]
Pairs = tuple[tuple[int, int, int], ...]


class Jump(NamedTuple):
    """Over `times` rounds: bits of every value that is live after them, of the one that it stands for before them, and their mask."""

    times: int
    pairs: Pairs


def periods(kinds: Sequence[int]) -> list[int]:
    """The period of every step, from the longest run that it is part of."""
    found = [0] * len(kinds)
    for period, start, stop in sorted(runs(kinds, len(kinds) // 2), key=lambda run: (run.stop - run.start, -run.period, run.start)):
        found[start:stop] = [period] * (stop - start)  # longer runs are written last
    return found


class Repetition:
    """What of a sequence of steps is what, one period later."""

    def __init__(self, steps: tuple[Step, ...]):
        self.steps = steps
        self.period = periods([id(s.kind) for s in steps])
        self.uses: dict[str, list[int]] = {}
        for k, step in enumerate(steps):
            for name in step.tensors:
                self.uses.setdefault(name, []).append(k)
        self._before = {level + period: period for level, period in enumerate(self.period) if period}
        self._names: dict[int, Names | None] = {}
        self._pairs: dict[tuple[int, int], Pairs | None] = {}
        self._jumps: dict[tuple[int, int], Jump | None] = {}  # by level and number of rounds
        self._ends: dict[int, int] = {}  # where the run of steps with one period ends
        for level in sorted(self._before, reverse=True):
            same = self._before.get(level + 1) == self._before[level]
            self._ends[level] = self._ends[level + 1] if same else level + 1
        self._starts: dict[int, int] = {}  # and where it starts
        for level, period in sorted(self._before.items()):
            self._starts[level] = self._starts[level - 1] if self._before.get(level - 1) == period else level - period

    @cached_property
    def _standing(self) -> list[int]:
        """Numbers, equal for levels of one period where what is live has its bits in the same places and is used alike, after the one as after the
        other; a negative one where a level repeats none."""
        numbers: dict[Any, int] = {}
        found = [-1] * (len(self.steps) + 1)
        coming: dict[str, tuple[int, int, tuple[int, bool]]] = {}  # of the next use: level, period, slot and whether it is the last one
        first = {name: own[0] for name, own in self.uses.items()}
        for level in range(len(self.steps) - 1, -1, -1):
            step, period = self.steps[level], self.period[level]
            for slot, name in enumerate(step.tensors):
                coming[name] = level, period, (slot, name not in coming)
            if period:
                # of a use that the same period repeats, the distance; of another one, where it is
                live = [
                    (at, id(table), first[name] < level, k - level if again == period else ~k, use)
                    for name, table, at in step.live
                    for k, again, use in (coming[name],)
                ]
                found[level] = numbers.setdefault((period, tuple(live)), len(numbers))
        return found

    @cached_property
    def stays(self) -> list[bool]:
        """Per level whether what is live before it has its bits in the same places one period later, and is used alike. (Where it does not say so, it
        may be so.)"""
        standing, periods = self._standing, [*self.period, 0]
        return [own >= 0 and own == standing[level + period] for level, (own, period) in enumerate(zip(standing, periods, strict=True))]

    def moved(self, level: int) -> Mapping[int, int] | None:
        """Where what is live has its bits one period later, if that is elsewhere; None where the two places are not alike."""
        if self.stays[level]:
            return {}
        pairs = self.pairs(level + self.period[level], self.period[level]) if self.names(level) is not None else None
        return {before: now for now, before, _ in pairs if now != before} if pairs is not None else None

    def before(self, level: int) -> int:
        """The period of the step that `level` repeats, 0 if it repeats none."""
        return self._before.get(level, 0)

    def rounds(self, level: int) -> int:
        """How many whole periods from a level on repeat those before them."""
        return (self._ends[level] - level) // self._before[level] if level in self._before else 0

    def done(self, level: int) -> int:
        """How many whole periods before a level are alike, and as the one that begins there."""
        return (level - self._starts[level]) // self._before[level] if level in self._before else 0

    def pairs(self, level: int, period: int) -> Pairs | None:
        """Bits of every value that is live before `level`, of its counterpart one period before, and their mask; None if the two places are not
        alike. period: that of the step one period before."""
        if level == len(self.steps):
            return None
        if (level, period) not in self._pairs:
            before = level - period
            names = self.names(before) if self.period[before] == period else None  # else they are of another distance
            shifts = {n: at for n, _, at in self.steps[level].live}
            self._pairs[level, period] = (
                tuple([(shifts[names[n]], at, t.full) for n, t, at in self.steps[before].live]) if names is not None else None
            )
        return self._pairs[level, period]

    def jump(self, level: int, most: float = inf) -> Jump | None:
        """Over all rounds that are left from a level on, or as many of them as there may be, if there are at least two and they are alike."""
        times = int(min(self.rounds(level), most))
        return self._jump(level, times) if times > 1 else None

    def _jump(self, level: int, times: int) -> Jump | None:
        """From that of one round less, one period later."""
        period, at, left = self._before[level], level, times
        while (at, left) not in self._jumps and left > 1:
            at, left = at + period, left - 1
        while left <= times:
            if (at, left) not in self._jumps:
                pairs, later = self.pairs(at + period, period), self._jumps.get((at + period, left - 1))
                if pairs is None or left == 1:
                    self._jumps[at, left] = Jump(1, pairs) if pairs is not None else None
                elif later is None:
                    self._jumps[at, left] = None
                else:
                    origin = {now: before for now, before, _ in pairs}
                    self._jumps[at, left] = Jump(left, tuple([(now, origin[before], full) for now, before, full in later.pairs]))
            at, left = at - period, left + 1
        return self._jumps[level, times]

    def names(self, level: int) -> Names | None:
        """For every value that is live before `level`, the one that is used alike one period later; None if they are not alike."""
        if level not in self._names:
            self._names[level] = self._alike(level)
        return self._names[level]

    def _alike(self, level: int) -> Names | None:
        period = self.period[level]
        if not period:
            return None
        there = {n: t for n, t, _ in self.steps[level + period].live}
        before = (self._names.get(level - 1) if level and self.period[level - 1] == period else None) or {}
        read = self.steps[level - 1].tensors
        found = {}
        for name, table, _ in self.steps[level].live:
            # what was not read by the step before is used next where it was
            other = before[name] if name in before and name not in read else self._later(name, level, period)
            if there.get(other) is table:
                found[name] = other
        return found if len(found) == len(self.steps[level].live) == len(there) == len(set(found.values())) else None

    def continues(self, level: int) -> bool:
        """Whether the step does with what is live what the step one period later does."""
        if self.stays[level] and self.stays[level + 1]:  # what stays live keeps its bits
            step, other = self.steps[level], self.steps[level + self.period[level]]
            return (step.keep, step.result_shifts) == (other.keep, other.result_shifts)
        names, after = self.names(level), self.names(level + 1)
        return names is not None and after is not None and self._does(level, names, after)

    def _does(self, level: int, names: Names, after: Names) -> bool:
        step, other = self.steps[level], self.steps[level + self.period[level]]
        made = zip(step.outputs, step.kind.results, other.outputs, strict=True)
        return all(after.get(n) == o for n, result, o in made if result.live) and all(names.get(n, o) == o for n, o in after.items() if n in names)

    def _later(self, name: str, level: int, period: int) -> str:
        """What stands for `name` one period later: by its next use, or itself where that use is not repeated."""
        uses = self.uses[name]
        k = uses[bisect_left(uses, level)]
        if k + period >= len(self.steps) or self.steps[k].kind is not self.steps[k + period].kind:
            return name
        return self.steps[k + period].tensors[self.steps[k].tensors.index(name)]
