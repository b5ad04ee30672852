"""What comes before a step that reads several values, as tables by what it will choose.

A bound that follows one value at a time sees the conversion of one of them. So for a join (`hapx.synth.joins`) at level U, and every weight w of
`hapx.synth.relaxation`:

    T_U(c) = w.cost(c) + bound of what follows c
    T_k(c) = min over choices d of step k of  w.cost(d) + sum over the results of k that U reads of w.conversion(give_d -> need_c) + T_k+1(c)

With the placements p_v of the values that are live before step k, min_c ( T_k(c) + sum over v of w.conversion(p_v -> need_c) ) is a bound. A
conversion is the cheapest path, so whatever else a value is converted to in between, the way to what c needs costs as much at least.

A value v that a step r reads in between is followed: before r there is T_k(p, c) by its placement, and

    T_r(p, c) = min over d of  w.cost(d) + w.conversion(p -> need_d) + w.conversion(p and need_d -> need_c) + sum over results + T_r+1(c)

Invariant: never more than the true cost of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hapx.cost.edges import Array, Numbers
from hapx.synth.joins import Between, Join, Part
from hapx.synth.problem import Step
from hapx.synth.sheet import Priced, Weighted
from hapx.synth.tables import bits


@dataclass
class Ahead:
    """The tables of a join. needs: per slot of the join, what its choices need. tables: T_k, (choice, weights), from the level of the join down to
    that of the first value's step; followed: (placement, choice, weights), of those levels before which a value waits for the step in between."""

    join: Join
    priced: Priced
    needs: tuple[Numbers, ...]
    tables: dict[int, Array]
    followed: dict[int, Array] = field(default_factory=dict)
    _sums: dict[tuple[int, bool, int], Array] = field(default_factory=dict)

    def step(self, level: int, step: Step, weighted: Weighted) -> None:
        """The tables before a step that comes before the join."""
        read = self.join.waiting(level)
        if read is not None:
            every = list(range(len(read.part.table.placements)))
            self.followed[level] = self._waiting(level, step, weighted, read, every, 0.0).min(axis=0)
            self.tables[level] = self.followed[level].min(axis=0)
        else:
            self.tables[level] = self._steps(level, step, weighted, 0.0).min(axis=0)

    def repeat(self, level: int, other: Ahead, later: int, more: Array) -> None:
        """The tables before a level are those that another join has later, and more."""
        self.tables[level] = other.tables[later] + more
        if later in other.followed:
            self.followed[level] = other.followed[later] + more

    def before(self, level: int, part: Part, rows: int) -> Array:
        """(row, weights) -> the bound before a level by one of the values, in each of the first rows of its table."""
        if self._waits(level, part):
            found: Array = self.followed[level].min(axis=1)
        else:
            found = (self._conversions(part)[:rows] + self.tables[level]).min(axis=1)
        return found

    def bound(self, level: int, place: int) -> Array:
        """(weights) -> the bound before a level by all of the values that are live, with the placements in `place`."""
        table, read = self.tables[level], self.join.waiting(level)
        if read is not None:
            table = self.followed[level][_available(read.part, place)].min(axis=0)
        found: Array = (table + self._sum(level, place)).min(axis=0)
        return found

    def choices(self, level: int, place: int, step: Step, weighted: Weighted) -> Array:
        """(choice of a step before the join, weights) -> the bound before it by all of the values that are live, with the placements in `place`, and
        its results."""
        read, more = self.join.waiting(level), self._sum(level, place)
        if read is not None:
            found: Array = self._waiting(level, step, weighted, read, _available(read.part, place), more).min(axis=(1, 2))
        else:
            found = self._steps(level, step, weighted, more).min(axis=1)
        return found

    def _steps(self, level: int, step: Step, weighted: Weighted, more: Array | float) -> Array:
        """(choice of the step, choice of the join, weights), with more after it."""
        rest, choices = self.tables[level + 1], len(weighted.base)
        made = next((p for p in self.join.parts if self._waits(level + 1, p)), None)
        if made is not None:  # by this step
            rest = self.followed[level + 1][weighted.gives[step.result_shifts.index(made.shift)]]
        return weighted.total(self._with_results(level, step, weighted, np.broadcast_to(rest + more, (choices, *self.tables[level + 1].shape))))

    def _waiting(self, level: int, step: Step, weighted: Weighted, read: Between, rows: list[int], more: Array | float) -> Array:
        """(choice of the step, row, choice of the join, weights), before a step up to the one in between."""
        if level < read.level:
            rest, cost = self.followed[level + 1][rows][None] + more, None
        else:
            own = self._conversions(read.part)  # from where it was, or from where the step needs it
            rest = np.minimum(own[rows], own[weighted.needs[read.slot]][:, None]) + (self.tables[level + 1] + more)
            need = self.priced.sheet.outline.need(step.kind, read.slot)
            cost = self.priced.needed(step.kind, read.slot)[:, rows, None].take(need.of, axis=0)
        rest = np.broadcast_to(rest, (len(weighted.base), *rest.shape[1:]))
        rest = self._with_results(level, step, weighted, rest)
        total = weighted.total(rest.reshape(len(rest), -1, rest.shape[-1])).reshape(rest.shape)
        return total if cost is None else total + cost

    def _with_results(self, level: int, step: Step, weighted: Weighted, rest: Array) -> Array:
        """And what it costs to have the results of a step where the join needs them; not of one that waits then."""
        for part in self.join.parts:
            if part.made == level and not self._waits(level + 1, part):
                own = self._conversions(part)[weighted.gives[step.result_shifts.index(part.shift)]]
                rest = rest + (own if rest.ndim == 3 else own[:, None])
        return rest

    def _sum(self, level: int, place: int) -> Array:
        """(choice, weights) -> what it costs to have the values that are live, but for one that waits, where each choice needs them."""
        return self._first(self.join.made(level), self.join.waiting(level), place)

    def _first(self, made: int, read: Between | None, place: int) -> Array:
        """The same of the first so many values."""
        key = made, read is None, place & self.join.masks[made]
        if key not in self._sums:
            if made:
                part = self.join.parts[made - 1]
                self._sums[key] = self._first(made - 1, read, place)
                if read is None or read.part is not part:
                    available = self.priced.available(part.table, place >> part.shift & part.table.full)
                    self._sums[key] = self._sums[key] + available[self.needs[part.slot]]
            else:
                self._sums[key] = np.zeros_like(self.tables[self.join.level])
        return self._sums[key]

    def _waits(self, level: int, part: Part) -> bool:
        read = self.join.waiting(level)
        return read is not None and read.part is part

    def _conversions(self, part: Part) -> Array:
        """(row, choice, weights) -> the price of what each choice needs, from what is available in the row."""
        return self.priced.conversions(part.table, targets=self.needs[part.slot])


def _available(part: Part, place: int) -> list[int]:
    return list(bits(place >> part.shift & part.table.full))
