"""A lower bound of the rest of a program, for the A* search.

From the tables of the relaxed problem (`hapx.synth.relaxation`): a partial program's bound is the largest over its live values, and over what those
that one step reads cost together (`hapx.synth.ahead`). With w the unit vectors this contains the bound max_j (pending_j + sum over the rest of the
least comp_j).

A value that is available in several placements, none of which gives the others for free, has no row in the tables. Its bound is the same recursion
from its next use, with the cheapest conversion from any of them; otherwise a search is drawn to paying for a second placement, which would hide
what comes.

By the same prices, what is spent after a decision is bounded for every pair of kinds, one forward and one backward (`Bound.paid`): a state dominates
all that a decision leads to if it has spent no more for any pair, and has as much available.

Searches that are not short make it sharper (`hapx.synth.potentials`): then it is the larger of the two.

Invariant: never more than the true cost of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

import numpy as np

from hapx.cost.edges import Array, Mask, Numbers
from hapx.synth.effect import Vector
from hapx.synth.moves import Moves
from hapx.synth.outline import Value
from hapx.synth.potentials import Potentials
from hapx.synth.problem import Problem
from hapx.synth.relaxation import GENERAL, Context, Relaxation, Use
from hapx.synth.sheet import Weighted
from hapx.synth.tables import bits


class Column(NamedTuple):
    """What is known at a level by the tables of a context: the bound that none of the live values gives, and per value where it has its bits, their
    mask, and the bound by what is available of them."""

    general: Vector
    values: list[tuple[int, int, dict[int, Vector]]]


class Bound:
    """Bounds of a problem at the shares and prices of `moves`; what was computed once is kept."""

    def __init__(self, problem: Problem, moves: Moves):
        self.problem, self.kinds = problem, problem.terms.kinds
        self.relaxation = Relaxation(problem, moves)
        self.none: Vector = (0.0,) * len(self.relaxation.weights)
        self.knows_pairs = len(self.relaxation.weights.pairs) == self.kinds**2  # whether weights are of every pair of kinds
        self._parts: dict[tuple[int, int, int, int], Vector] = {}
        self._columns: dict[tuple[int, int], Column] = {}
        self._priced: list[dict[int, list[Context]]] = [{} for _ in range(len(problem.steps) + 1)]  # by what is available of parameters
        self._at: list[dict[int, Vector]] = [{} for _ in range(len(problem.steps) + 1)]
        self._likely: list[dict[int, Vector]] = [{} for _ in problem.steps]
        self._rows: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._known: dict[tuple[int, int], tuple[Weighted, Array]] = {}
        self._together: dict[tuple[int, int, int], Vector] = {}
        self._several: dict[tuple[int, int, int, int], list[Array]] = {}
        self._steps: dict[tuple[int, int, int], Array] = {}
        self._paid: dict[tuple[int, int], tuple[Array, Array | None, Numbers]] = {}
        self.outline = self.relaxation.outline
        self.potentials: Potentials | None = None  # once it is sharpened

    def sharpen(self, limit: float) -> None:
        """Makes the bound sharper, which takes about as long as a hundred partial programs. limit: seconds of a program that is known."""
        self.potentials = self.potentials or Potentials(self.relaxation)
        self.potentials.refine(self.problem.start, limit)
        for known in self._at:
            known.clear()

    def rest(self, level: int, place: int) -> Vector:
        """Per weight vector, a lower bound of the cost of steps `level` and later when `place` is available."""
        known = self._at[level]
        if place not in known:
            found = self._rest(level, place, self._contexts(level, place))
            known[place] = found if self.potentials is None else tuple(map(max, found, self.potentials.rest(level, place)))
        return known[place]

    def likely(self, level: int, place: int) -> Vector:
        """As `rest`, with what all live values add: no bound."""
        known = self._likely[level]
        if place not in known:
            parts = self._rests(level, place, self._contexts(level, place)[:1], apart=True)
            known[place] = tuple([least + sum([x - least for x in own if x > least]) for least, *own in zip(*parts, strict=True)])
        return known[place]

    def quick(self, level: int, place: int) -> Vector | None:
        """As `rest`, but parameters that are used again are free, or by potentials alone; None where `rest` takes no longer, because their prices are
        known."""
        if self.potentials is not None:
            return self.potentials.rest(level, place) if place not in self._at[level] else None
        if place in self._at[level] or place & self.outline.priced[level] in self._priced[level] or self.relaxation.knows(self._uses(level, place)):
            return None
        return self._rest(level, place, [self.relaxation.general])

    def estimate(self, cost: float, forward: Vector, backward: Vector, rest: Vector) -> float:
        """Cost plus the bound of the rest with these pending vectors."""
        best: float = max(map(add, self.pending(forward, backward), rest))
        return cost + best

    def pending(self, forward: Vector, backward: Vector) -> list[float]:
        """Per weight vector, what is pending."""
        if self.knows_pairs:
            found = [x + y for x in forward for y in backward]
        else:
            found = [forward[i] + backward[j] for i, j in self.relaxation.weights.pairs]
        if self.kinds > 1:
            found.append((sum(forward) + sum(backward)) / self.kinds)
        return found

    def estimates(self, cost: Array, forward: Array, backward: Array, rest: Array) -> Array:
        """As `estimate`, of partial programs one after the other: (program,), (program, kind), (program, kind) and (program, weights)."""
        if self.knows_pairs:
            pending = (forward[:, :, None] + backward[:, None, :]).reshape(len(cost), self.kinds**2)
        else:
            ahead, back = np.array(self.relaxation.weights.pairs).T
            pending = forward[:, ahead] + backward[:, back]
        if self.kinds > 1:
            pending = np.column_stack([pending, (forward.sum(axis=1) + backward.sum(axis=1)) / self.kinds])
        best: Array = (pending + rest).max(axis=1)
        return cost + best

    def several(self, level: int, cost: Array, forward: Array, backward: Array) -> Array:
        """As `estimate`, of partial programs at a level; whatever is available."""
        weights = self.relaxation.weights
        pending = forward @ weights.forward.T + backward @ weights.backward.T
        best: Array = (pending + self._part(level, self.relaxation.general, GENERAL, 0)).max(axis=1)
        return cost + best

    def choices(self, level: int, place: int, cost: float, forward: Vector, backward: Vector) -> Array:
        """Per choice of a step, a lower bound of the cost of a program that has `cost` and these pending vectors before it."""
        weights = self.relaxation.weights
        pending = weights.forward @ np.array(forward) + weights.backward @ np.array(backward)
        rest = self._choice(level, place)
        if self.potentials is not None:
            rest = np.maximum(rest, self.potentials.choices(level, place))
        total: Array = (rest + pending).max(axis=1)
        return cost + total

    def paid(self, level: int, place: int, cost: float, forward: Vector, backward: Vector) -> Array | None:
        """Per choice of a step, a lower bound of what is spent after it, with what is pending on each pair of kinds; None where there are not
        weights for every pair. Arguments as of `choices`."""
        if not self.knows_pairs:
            return None
        step, pairs = self.problem.steps[level], len(self.relaxation.weights.pairs)
        key = level, place & step.reads
        if key not in self._paid:
            weighted = self.relaxation.priced.weighted(step.kind, self.outline.first[level])
            own = (weighted.base if weighted.cuts is None else weighted.base + weighted.cuts.after)[:, :pairs]
            later, ended = self._ended(level, place, weighted)
            behind = own + later if ended.any() and self.relaxation.moves.capacity is None else None  # bytes wait for nothing
            self._paid[key] = own + self._converted(level, place, weighted)[:, :pairs], behind, ended[:, 0] + 2 * ended[:, 1]
        plain, behind, how = self._paid[key]
        pending = [there + back for there in forward for back in backward]
        least: Array = plain + np.array(pending)
        if behind is not None:
            slowest, last = max(forward), max(backward)  # by whether a phase ends forward, and backward
            waited = [slowest + back for _ in forward for back in backward], [there + last for there in forward for _ in backward]
            least = np.maximum(least, behind + np.array([pending, *waited, [slowest + last] * len(pending)])[how])
        return cost + least

    def _ended(self, level: int, place: int, weighted: Weighted) -> tuple[Array, Mask]:
        """Of the conversions of a step: (choice, pairs of kinds) -> what they cost, and (choice, direction) -> whether they end the phase that has
        begun before, whichever they are. Then all kinds have waited for the slowest one, and what comes later costs what it costs every pair. Of what
        may come before that, only what all kinds wait for counts; and only those end it that come before any of a parameter, which is part of the
        step's own cost."""
        step, sheet, prices, pairs = self.problem.steps[level], self.problem.sheet, self.relaxation.priced, len(self.relaxation.weights.pairs)
        read = zip(step.kind.slots, step.slot_shifts, weighted.needs, strict=True)
        slots = [(k, slot.table, place >> at & slot.table.full, needs) for k, (slot, at, needs) in enumerate(read) if slot.fixed is None]
        values = [(k, table, list(bits(mask)), mask, needs) for k, table, mask, needs in slots if not table.stored]
        first = next((k for k, slot in enumerate(step.kind.slots) if slot.table.stored), len(step.kind.slots))
        every = slice(None)
        ends = [
            sheet.ends_phases(table, sources, every).reshape(len(sources), -1, 2).all(axis=0).take(needs, axis=0) & (k < first)
            for k, table, sources, _, needs in values
        ]
        open_ = np.logical_or.reduce([np.zeros((len(weighted.base), 2), dtype=bool), *ends])  # directions in which a phase is still to end
        ended, total = open_, np.zeros((len(weighted.base), pairs))
        for (_, table, sources, mask, needs), own in zip(values, ends, strict=True):
            waited = prices.waited(table, sources, every).reshape(len(sources), -1, pairs + 1).min(axis=0).take(needs, axis=0)
            before, open_ = open_.any(axis=1, keepdims=True), open_ & ~own
            known = np.where(open_.any(axis=1, keepdims=True), waited[:, pairs:], waited[:, :pairs])
            total += np.where(before, known, prices.available(table, mask).take(needs, axis=0)[:, :pairs])
        return total, ended

    def _choice(self, level: int, place: int) -> Array:
        """(choice, weights) -> the least cost of the step and of what follows: the recursion of the relaxation from the placements that there are."""
        step = self.problem.steps[level]
        contexts = self._contexts(level, place)
        reads = step.reads
        for join, made in self.outline.making[level]:
            reads |= join.masks[made]
        key = level, place & reads, id(contexts[0])
        if key not in self._steps:
            known = [self._weighted(context, level) for context in contexts]
            weighted = known[0][0]
            total = np.maximum.reduce([own.total(then) for own, then in known]) + self._converted(level, place, weighted)
            for join, _ in self.outline.making[level]:
                total = np.maximum(total, self.relaxation.ahead[join.level].choices(level, place, step, weighted))
            self._steps[key] = total
        return self._steps[key]

    def _converted(self, level: int, place: int, weighted: Weighted) -> Array:
        """(choice, weights) -> the least cost of having what a step reads where each choice needs it, parameters left out."""
        step = self.problem.steps[level]
        total: Array = np.zeros((1, len(self.relaxation.weights)))
        for slot, shift, needs in zip(step.kind.slots, step.slot_shifts, weighted.needs, strict=True):
            if slot.fixed is None and not slot.table.stored:
                total = total + self.relaxation.priced.available(slot.table, place >> shift & slot.table.full).take(needs, axis=0)
        return total

    def _contexts(self, level: int, place: int) -> list[Context]:
        """The one that knows the placements of the parameters that are live, and the one that knows of a parameter that is not yet."""
        priced = place & self.outline.priced[level]
        known = self._priced[level].get(priced)
        if known is None:
            coming = self.relaxation.coming(level)
            known = [self.relaxation.context(self._uses(level, place))] + ([coming] if coming is not None else [])
            self._priced[level][priced] = known
        return known

    def _uses(self, level: int, place: int) -> tuple[Use, ...]:
        matters = self.relaxation.matters
        uses = [Use(at, slot, place >> shift & full) for at, slot, shift, full in self.outline.stored[level] if matters(at, slot)]
        return self.relaxation.few(tuple(uses))

    def _rest(self, level: int, place: int, contexts: Sequence[Context]) -> Vector:
        if level == len(self.problem.steps):
            return self.none
        found = self._rests(level, place, contexts)
        return found[0] if len(found) == 1 else tuple(map(max, *found))

    def _rests(self, level: int, place: int, contexts: Sequence[Context], apart: bool = False) -> list[Vector]:
        """The bounds by none of the live values, by each of them and by those of each join ahead. apart: none of a value whose join says it."""
        columns, known = [self._column(level, context) for context in contexts], 0
        found = [column.general for column in columns]
        for join, made in self.outline.joined[level]:
            if made:
                key = level, join.level, place & join.masks[made]
                if key not in self._together:
                    self._together[key] = tuple(self.relaxation.ahead[join.level].bound(level, place).tolist())
                found.append(self._together[key])
                known |= join.masks[made]
        for context, column in zip(contexts, columns, strict=True):
            for shift, full, parts in column.values:
                if not apart or not known >> shift & 1:
                    mask = place >> shift & full
                    part = parts.get(mask)
                    if part is None:
                        part = parts[mask] = self._part(level, context, shift, mask)
                    found.append(part)
        return found

    def _column(self, level: int, context: Context) -> Column:
        key = level, id(context)  # contexts are kept by the relaxation
        if key not in self._columns:
            values = [(shift, value.table.full, dict[int, Vector]()) for shift, value in self.outline.values[level].items()]
            self._columns[key] = Column(self._part(level, context, GENERAL, 0), values)
        return self._columns[key]

    def _part(self, level: int, context: Context, shift: int, mask: int) -> Vector:
        """The bound that one live value gives (`GENERAL`: none of them)."""
        key = level, id(context), shift, mask
        if key not in self._parts:
            if level < context.bottom:
                parts = [map(add, self._part(level, other, shift, mask), more) for other, more in self.relaxation.below(context)]
                self._parts[key] = tuple(map(max, *parts)) if len(parts) > 1 else tuple(parts[0])
            elif shift == GENERAL:
                rows, offset = self.relaxation.rows(context, level)
                self._parts[key] = tuple((rows[GENERAL][0] + offset).tolist())
            else:
                self._parts[key] = tuple(self._available(context, level, self.outline.values[level][shift], mask).tolist())
        return self._parts[key]

    def _available(self, context: Context, level: int, value: Value, mask: int) -> Array:
        """The bound by one value that is available in `mask`, not below the context's bottom."""
        rows, offset = self.relaxation.rows(context, level)
        best: Array = self._row(rows[value.shift], value, mask) + offset
        if not value.last and value.use < context.end and not self.outline.including(value.table, mask, value.several)[1]:
            best = np.maximum(best, self._set(context, level, value, mask))
        return best

    def _set(self, context: Context, level: int, value: Value, mask: int) -> Array:
        """By the recursion of the module from the next use of the value, backward."""
        found = self._several.setdefault((id(context), value.shift, mask, value.use), [])
        while len(found) <= value.use - level:
            at = value.use - len(found)
            weighted, then = self._weighted(context, at)
            found.append(weighted.total(np.maximum(then, found[-1])).min(axis=0) if found else self._use(context, value, mask, weighted, then))
        return found[value.use - level]

    def _use(self, context: Context, value: Value, mask: int, weighted: Weighted, then: Array) -> Array:
        """The bound by a value in `mask` just before its next use, which is not the last."""
        table, step = value.table, self.problem.steps[value.use]
        needs = weighted.needs[step.slot_shifts.index(value.shift)]
        cost = self.relaxation.priced.available(table, mask).take(needs, axis=0)
        rows, offset = self.relaxation.rows(context, value.use + 1)
        following = self.outline.values[value.use + 1][value.shift]
        after: dict[int, Array] = {}
        for target in dict.fromkeys(needs.tolist()):
            more = mask | table.closure(target)
            if more == mask:
                after[target] = self._available(context, value.use + 1, following, mask)
            else:
                after[target] = self._row(rows[value.shift], following, more) + offset
        return (cost + weighted.total(np.maximum(then, np.array([after[t] for t in needs.tolist()])))).min(axis=0)  # type: ignore[no-any-return]

    def _weighted(self, context: Context, level: int) -> tuple[Weighted, Array]:
        """The choices of a step, and the bound of what follows after each."""
        key = id(context), level
        if key not in self._known:
            if level + 1 >= context.bottom:
                self._known[key] = self.relaxation.choices(context, level)
            else:
                parts = [self._weighted(other, level)[1] + more for other, more in self.relaxation.below(context)]
                self._known[key] = self._weighted(self.relaxation.general, level)[0], np.maximum.reduce(parts)
        return self._known[key]

    def _row(self, rows: Array, value: Value, mask: int) -> Array:
        """The bound of what is available in `mask` by the rows of a table; those of equal layers are one array."""
        key = id(rows), mask
        known = self._rows.get(key)
        if known is None:  # held with the array, whose identity stays its own
            if value.last:
                found = np.minimum.reduce(rows[list(bits(mask))], axis=0)
            else:
                found = np.maximum.reduce(rows[self.outline.including(value.table, mask, value.several)[0]], axis=0)
            known = self._rows[key] = rows, found
        return known[1]
