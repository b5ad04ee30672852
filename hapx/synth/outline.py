"""What of a problem does not depend on shares, and is asked at every step of every search.

In: the steps of a problem. Out: per level, which slots are the first use of a parameter; what is live, as values that keep their placements and as
parameters with their next use; per table, the sets of placements that the bound knows. Made once per problem.

A value is made in one placement (and what follows for free), and before its last use whatever it has been converted to is as good as the best of
it. So tables know sets of several placements only for values between their first use and their last.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from hapx.cost.edges import Array, Mask, Numbers
from hapx.synth.joins import Join, find_joins
from hapx.synth.needs import Need
from hapx.synth.periods import Repetition
from hapx.synth.problem import Step, StepClass
from hapx.synth.tables import TensorTable

# parameters that are live whose next use the bound prices, the largest ones: each more multiplies the tables that a search needs. A block that is
# called four times has a dozen
PRICED = 2
WORTH = 0.05  # of the bytes of the largest of them, below which one is not priced: a bias beside its weight
LARGE = 0.5  # of the bytes of the largest value that is live: those that are large
PAIRS = 1000  # sets of two placements that the tables of the bound have rows for, if there are not more of them


class Value(NamedTuple):
    """A live value: its next use, where it has its bits, whether it was used before, and whether the next use is the last; several: it was, and it
    is not, so that sets of placements count."""

    table: TensorTable
    use: int
    shift: int
    used: bool
    last: bool
    several: bool


class Later(NamedTuple):
    """What a level, in tables up to some end, has to do with the one a period later. moved: where what is live has its bits there, None where the
    tables have other rows; joins: those ahead before the end; alone: none of them has begun; alike: whether the same joins lie ahead there; taken:
    whether the table is that of the later level, if those after the two are one."""

    level: int
    moved: Mapping[int, int] | None
    joins: tuple[Join, ...]
    alone: bool
    alike: bool
    taken: bool


class Outline:
    """Per level: `first`: per slot, whether it is a parameter used for the first time. `stored`: of the largest parameters that are live the next use
    (level, slot) and their bits (shift, mask); `priced`: all of these bits; `placed`: whether the step makes such ones live where there were none;
    `values`: the other values, by where they have their bits. `places`: that, and -1."""

    def __init__(self, steps: tuple[Step, ...]):
        kinds = {id(step.kind): step.kind for step in steps}.values()
        keeps = {id(kind): any(slot.table.stored and slot.fixed is None for slot in kind.slots) for kind in kinds}
        self.first = [_first(step) if keeps[id(step.kind)] else (False,) * len(step.kind.slots) for step in steps]
        self.stored: list[tuple[tuple[int, int, int, int], ...]] = []
        self.values: list[dict[int, Value]] = []
        self.again: dict[tuple[int, int], tuple[int, int] | None] = {}  # after a use of a tensor, by level and slot, the next one
        # per level, of the parameters that are used twice and not yet live, the first use of the largest one, by its bytes, level and slot
        self.coming: list[tuple[int, int, int] | None] = [None]
        following: dict[str, tuple[int, int]] = {}
        value: dict[str, Value] = {}  # by its name, as it is before its next use
        first: dict[str, int] = {}
        for level, step in enumerate(steps):
            for name in step.tensors:
                first.setdefault(name, level)
        for level in range(len(steps) - 1, -1, -1):
            step = steps[level]
            twice: list[tuple[int, int, int] | None] = []
            for slot, (name, shift) in enumerate(zip(step.tensors, step.slot_shifts, strict=True)):
                used, last = first[name] < level, name not in following
                self.again[level, slot] = again = following.get(name)
                if self.first[level][slot] and again is not None and again[0] > level and self.again[again] is None:
                    twice.append((step.kind.slots[slot].table.ref.bytes, level, slot))
                following[name] = level, slot
                if shift >= 0:
                    value[name] = Value(step.kind.slots[slot].table, level, shift, used, last, used and not last)
            self.coming.append(max([*twice, self.coming[-1]], key=lambda c: c[0] if c is not None else -1) if twice else self.coming[-1])
            stored: list[tuple[str, TensorTable, int]] = []
            values: dict[int, Value] = {}
            for name, table, shift in step.live:
                if table.stored:
                    stored.append((name, table, shift))
                else:
                    values[shift] = value[name]
            self.stored.append(tuple([(*following[n], shift, t.full) for n, t, shift in _largest(stored)]) if stored else ())
            self.values.append(values)
        self.stored.reverse()
        self.priced = [sum(full << shift for _, _, shift, full in own) for own in (*self.stored, ())]  # the bits of these
        self.coming.reverse()
        self.placed = [bool(after) and not before for before, after in pairwise([*self.stored, ()])]
        self.values.reverse()
        self.places = [(-1, *values) for values in self.values]
        between = [v for values in self.values for v in values.values() if v.several]
        # and parameters that are used three times
        thrice = [use for use in self.again.values() if use is not None and self.again[use] is not None]
        shared = [steps[level].kind.slots[slot].table for level, slot in thrice]
        self._several = {id(v.table) for v in between} | {id(table) for table in shared if table.stored}
        # classes and slots that read values between their first use and their last
        self.wide = {(id(steps[v.use].kind), steps[v.use].slot_shifts.index(v.shift)) for v in dict.fromkeys(between)}
        self.joins = find_joins(steps)
        # per level, joins from the one that makes their first value on, with how many are made before; and those of which it makes one
        self.joined: list[list[tuple[Join, int]]] = [[] for _ in range(len(steps) + 1)]
        for join in self.joins:
            for level in range(join.parts[0].made, join.level + 1):
                self.joined[level].append((join, join.made(level)))
        self.making = [[(join, made) for join, made in joined if join.made(level + 1) > made] for level, joined in enumerate(self.joined)]
        self._later: dict[int, list[Later]] = {}
        self._ends: dict[int, tuple[tuple[Numbers, ...], tuple[Numbers, ...]]] = {}
        self._sets: dict[tuple[int, bool], tuple[list[int], list[tuple[int, int]]]] = {}  # these by `_like`
        self._inside: dict[tuple[int, bool], Mask] = {}
        self._including: dict[tuple[int, bool, int, bool], tuple[Numbers, bool]] = {}
        self._afterwards: dict[tuple[int, bool], Numbers] = {}
        self._following: dict[tuple[int, int], Numbers] = {}
        self._needs: dict[tuple[int, int], Need] = {}

    def ends(self, kind: StepClass) -> tuple[tuple[Numbers, ...], tuple[Numbers, ...]]:
        """Per slot the placement that each choice needs, per result the one that it gives."""
        if id(kind) not in self._ends:
            last = [dict(reversed(c.needs)) for c in kind.choices]  # one placement per slot; a second one can only cost more
            needs = tuple([np.array([n[i] for n in last]) for i in range(len(kind.slots))])
            self._ends[id(kind)] = needs, tuple([np.array([c.gives[i] for c in kind.choices]) for i in range(len(kind.results))])
        return self._ends[id(kind)]

    def need(self, kind: StepClass, slot: int) -> Need:
        """What the choices of a class need of a slot."""
        key = id(kind), slot
        if key not in self._needs:
            self._needs[key] = Need.by(self.ends(kind)[0][slot])
        return self._needs[key]

    @cached_property
    def large(self) -> list[int]:
        """Per level, the bits of the large values."""
        return [_large(values) for values in self.values]

    def later(self, repetition: Repetition, end: int) -> list[Later]:
        """Per level below the end."""
        if end not in self._later:
            self._later[end] = [self._one_period_later(repetition, level, end) for level in range(end)]
        return self._later[end]

    def _one_period_later(self, repetition: Repetition, level: int, end: int) -> Later:
        later, moved = level + repetition.period[level], repetition.moved(level)
        if moved is not None and (later > end or not (repetition.stays[level] or self._as_later(level, later, moved))):
            moved = None
        taken = moved is not None and self.first[level] == self.first[later] and repetition.continues(level)
        if not self.joined[level] and not self.joined[later]:  # as nearly everywhere
            return Later(later, moved, (), True, True, taken)
        joined = [(join, made) for join, made in self.joined[level] if join.level < end]
        others = {j.level - later: j for j, _ in self.joined[later]}
        alike = len(others) == len(joined) and all((o := others.get(j.level - level)) is not None and j.repeats(o) for j, _ in joined)
        return Later(later, moved, tuple(join for join, _ in joined), not any(made for _, made in joined), alike, taken)

    def _as_later(self, level: int, later: int, moved: Mapping[int, int]) -> bool:
        """Whether the tables before a level and one period later have the same rows. moved: where what is live before the one has its bits before the
        other."""
        other = self.values[later]
        for at, v in self.values[level].items():
            o = other[moved.get(at, at)]
            if v.used != o.used or v.last != o.last:
                return False
        return True

    def sets(self, table: TensorTable) -> list[int]:
        """The masks that a table has rows for: what one placement gives for free; where some value needs them, anything, and what two placements give
        together."""
        return self._of(table)[0]

    def pairs(self, table: TensorTable) -> list[tuple[int, int]]:
        """Of the sets of two placements, in order, their rows."""
        return self._of(table)[1]

    def _of(self, table: TensorTable) -> tuple[list[int], list[tuple[int, int]]]:
        key = self._like(table)
        if key not in self._sets:
            closures, (_, several) = [table.closure(i) for i in range(len(table.placements))], key
            found = [*closures, table.full] if several else closures
            row = {mask: i for i, mask in reversed(list(enumerate(found)))}
            together = {a | b: (row[a], row[b]) for a, b in combinations(dict.fromkeys(closures if several else ()), 2)}
            pairs = {mask: rows for mask, rows in together.items() if mask not in row}
            pairs = pairs if len(pairs) <= PAIRS else {}
            self._sets[key] = [*found, *pairs], list(pairs.values())
        return self._sets[key]

    def _like(self, table: TensorTable) -> tuple[int, bool]:
        """Equal for tables whose sets are the same."""
        return id(table.reach.pattern), id(table) in self._several

    def including(self, table: TensorTable, mask: int, wide: bool) -> tuple[Numbers, bool]:
        """The rows of all that includes a mask, any of which bounds it, and whether there is one for just this. wide: all sets are rows, else those
        of single placements."""
        key = *self._like(table), mask, wide
        if key not in self._including:
            sets = self.sets(table) if wide else self.sets(table)[: len(table.placements)]
            self._including[key] = np.array([i for i, known in enumerate(sets) if known & mask == mask]), mask in sets
        return self._including[key]

    def inside(self, table: TensorTable) -> Mask:
        """(row, placement) -> whether the placement is in the row's set."""
        key = self._like(table)
        if key not in self._inside:
            n, sets = len(table.placements), self.sets(table)
            self._inside[key] = np.array([[bool(mask >> p & 1) for p in range(n)] for mask in sets])
        return self._inside[key]

    def afterwards(self, table: TensorTable) -> Numbers:
        """(row, target) -> the row of what is available after a conversion; of "anything" where there is none."""
        key = self._like(table)
        if key not in self._afterwards:
            n, sets = len(table.placements), self.sets(table)
            row = {mask: i for i, mask in reversed(list(enumerate(sets)))}
            found = [[r if mask >> t & 1 else row.get(mask | table.closure(t), n) for t in range(n)] for r, mask in enumerate(sets)]
            found[n] = [n] * n
            self._afterwards[key] = np.array(found)
        return self._afterwards[key]

    def following(self, kind: StepClass, slot: int) -> Numbers:
        """(choice, row) -> the row of what is available of a slot after each choice of a class (see `afterwards`)."""
        key = id(kind), slot
        if key not in self._following:
            self._following[key] = self.afterwards(kind.slots[slot].table).T[self.ends(kind)[0][slot]]
        return self._following[key]

    def least(self, table: TensorTable, rows: Array, used: bool) -> Array:
        """The rows of a value before its last use: the best of each set of placements, from those of single placements."""
        if not used:
            return rows
        ones, twos = np.array(self.pairs(table), dtype=np.int64).reshape(-1, 2).T
        every = rows.min(axis=0, keepdims=True)
        known = np.concatenate([rows, every])
        return np.concatenate([known, np.minimum(known.take(ones, axis=0), known.take(twos, axis=0))])


def _large(values: Mapping[int, Value]) -> int:
    most = max([v.table.ref.bytes for v in values.values()], default=0)
    return sum(v.table.full << at for at, v in values.items() if v.table.ref.bytes >= LARGE * most)


def _largest(stored: list[tuple[str, TensorTable, int]]) -> list[tuple[str, TensorTable, int]]:
    """Of parameters that are live, those whose next use is priced."""
    stored.sort(key=lambda live: -live[1].ref.bytes)
    return [live for live in stored[:PRICED] if live[1].ref.bytes >= WORTH * stored[0][1].ref.bytes]


def _first(step: Step) -> tuple[bool, ...]:
    known = {n for n, _, _ in step.live}
    return tuple([bool(s.table.stored) and s.fixed is None and n not in known for n, s in zip(step.tensors, step.kind.slots, strict=True)])
