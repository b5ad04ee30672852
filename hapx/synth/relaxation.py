"""The relaxed problem behind the bound of the A* search, as tables.

For any weights w_j >= 0 with sum 1, max_j x_j >= sum_j w_j x_j. So if every maximum over device kinds is replaced by the weighted sum, the cost of
a program becomes additive and the pending vectors leave the state:

    cost(rest) >= max over w of ( sum_j w_j (pf_j + pb_j) + H_w(rest) ).

H_w is relaxed once more, so that it can be tabulated: of everything that is live, only one value keeps what is available, and only as long as that is
what follows for free from one placement; anything else may be in any placement for nothing. With H_k(v, p) for value v in placement p before step k,

    H_k(v, p) = min over choices c of  w.cost(c) + w.conversion(p -> need_c) + max( H_k+1(v, p'), H_k+1(o, give_c) for each result o ),

backward over the steps, as matrices (placements x choices x weights).

A parameter that is used again later (a tied embedding) would be free there in this relaxation. So there is one such table per *context*: the masks of
the stored parameters that are live, each priced at its next use (of the largest ones, `hapx.synth.outline.PRICED`, where that is not next to nothing;
the others are free there).
These tables are followed back a few levels only. Below, what is known is that they are above the general ones by so much at least; and that
nothing is below the cost of coming to their first level and what is least there.

Where one more use follows, the last one, each choice also pays what tables that know where the parameter is then are above the general ones, at
least. So does the step that stores a parameter, in tables of their own up to there (`coming`): all that was found before it, and not after it, would
otherwise take the second use to be free. What several parameters add must not be added up, as another choice may be the answer to all of them.

What several values that one step reads cost together has tables of its own (`hapx.synth.ahead`); what these say of a single value, or of none, is
part of the general ones.

Where steps repeat themselves (equal layers), the tables of one repetition differ from those of the next by a constant after a few of them, or nearly.
A table that is larger by a constant at least makes the tables of all steps before larger by it at least: from there on tables are taken over, and
only the constants are summed up.

Invariant: never more than the true cost of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from hapx.cost.edges import Array, Mask, Numbers
from hapx.synth.ahead import Ahead
from hapx.synth.grid import Prices, Weights, padded
from hapx.synth.joins import Join
from hapx.synth.moves import Moves
from hapx.synth.outline import Outline, Value
from hapx.synth.periods import Repetition
from hapx.synth.problem import Problem, StepClass
from hapx.synth.sheet import Priced, Sheet, Weighted
from hapx.synth.tables import TensorTable, bits

LOSS = (1e-3, 1e-2)  # part of what a repetition costs by which the bound may be too low where tables of repetitions are taken over: of the last,
LATE = 6  # and, where so many that follow were not alike, of those before them
SLIGHT = (1e-12, 1e-2)  # part of what follows that where a parameter is must be able to cost, if a context is to say it, on one axis and on several
DEEPEST = (32, 16)  # levels that a context is followed back at most; the latter on meshes of several axes, in problems of more steps than
FEW_STEPS = 150
MANY = 64  # contexts, from which on new ones are of one parameter: of two, they are as many as there are pairs of placements, each takes as long as
# ten partial programs, and what they say more is little beside potentials
TOGETHER = 2**23  # numbers in an array, up to which contexts are made at once
GENERAL = -1  # whatever is available
FEW_ROWS = 32  # of values, up to which it is not worth while to turn its rows around
Rows = dict[int, Array]  # by where a value has its bits before the level, GENERAL: by none of them


class Use(NamedTuple):
    """The next use of a parameter that is stored: the step, the slot, and the placements that are available; 0: it is the first use, of two."""

    level: int
    slot: int
    mask: int


Below = tuple[tuple["Context", tuple[float, ...]], ...]


@dataclass(eq=False, slots=True)
class Context:
    """Tables before the levels from `bottom` on: rows[level] + offsets[level - bottom], of what comes before `end`, with the placements in `uses`.
    added: what it adds there to the general one at least, and whether it does so everywhere; below: further down, the most of what other tables say
    and what is to be added to that (per weight). parts: contexts of which it is the least. What is added and below, and the tables of one with parts,
    are made when they are asked for (see `Relaxation.rows` and `Relaxation.below`), as most of them never are."""

    bottom: int
    end: int
    rows: dict[int, Rows]
    offsets: list[Array]
    uses: tuple[Use, ...] = ()
    parts: tuple[Context, ...] = ()
    added: tuple[Array, bool] | None = None
    below: Below | None = None

    @property
    def top(self) -> int:
        """The last level for which there is a table."""
        return self.bottom + len(self.offsets) - 1


class Relaxation:
    """Tables of the relaxed problem at the prices and shares of `moves`. Public: what `hapx.synth.bound` reads."""

    def __init__(self, problem: Problem, moves: Moves):
        self.problem, self.moves = problem, moves
        several = len(problem.theory.mesh.axes) > 1
        self.deepest, self.slight = DEEPEST[several and len(problem.steps) > FEW_STEPS], SLIGHT[several]
        self.weights = Weights(problem.terms.kinds)
        if problem.repetition is None:
            problem.repetition = Repetition(problem.steps)
        self.repetition: Repetition = problem.repetition
        if problem.outline is None:
            problem.outline = Outline(problem.steps)
        self.outline: Outline = problem.outline
        if problem.sheet is None:
            problem.sheet = Sheet(problem, moves.grid, self.outline)
        self.priced = self._priced(problem.sheet)
        self._classes: dict[tuple[int, tuple[bool, ...]], Weighted] = {}
        # levels whose step ends phases, and from which level on there is such a step before
        self._cuts: Set[int] = problem.sheet.cutting if self.priced.cuts else frozenset()
        self._cutting = min(self._cuts, default=len(problem.steps)) + 1
        self.ahead: dict[int, Ahead] = {}  # by the level of a join
        self.general = self._tabulate(len(problem.steps), {GENERAL: np.zeros((1, len(self.weights)))}, self.ahead)
        self._contexts: dict[tuple[Use, ...], Context] = {(): self.general}
        self._until: dict[int, Context] = {}
        self._coming: dict[int, Context] = {}
        self._later: dict[tuple[int, int], Array] = {}
        self._mattering: dict[tuple[int, int], bool] = {}

    def rows(self, context: Context, level: int) -> tuple[Rows, Array]:
        """The table before a level, which is not below the context's bottom, and what is to be added to it."""
        known = context if level <= context.top else self.general
        offset = known.offsets[level - known.bottom]
        if level not in known.rows:
            parts = [self._known(part, level, offset) for part in known.parts]
            known.rows[level] = {n: np.minimum.reduce([own[n] for own in parts]) for n in parts[0]}
        return known.rows[level], offset

    def below(self, context: Context) -> Below:
        """What is known below the context's bottom."""
        if context.below is None:
            level, (_, even) = context.bottom, self._added_by(context)
            known, more = self._lower(context)
            context.below = ((known, tuple(more.tolist())),)
            if level > 0 and not even:
                rows, offset = self.rows(context, level)
                context.below += ((self.until(level), tuple(self._through(level, rows[GENERAL][0] + offset).tolist())),)
        return context.below

    def few(self, uses: tuple[Use, ...]) -> tuple[Use, ...]:
        """All of them; the first one where too many tables would be made: the others are free then."""
        return uses if len(self._contexts) < MANY or uses in self._contexts else uses[:1]

    def context(self, uses: tuple[Use, ...]) -> Context:
        """The table that knows the placements of the parameters that are live."""
        if uses not in self._contexts:
            self._contexts[uses] = self._contextual(uses)
        return self._contexts[uses]

    def _make(self, several: Sequence[tuple[Use, ...]]) -> None:
        """Contexts whose uses differ in their placements only, at once."""
        new = [uses for uses in several if uses not in self._contexts and not self._apart(uses)]
        if not new:
            return
        top, rows, steps = max(u.level for u in new[0]), self.general.rows, self.problem.steps
        levels = range(max(0, top - self.deepest), top + 1)
        largest = max(len(steps[level].kind.choices) * sum(map(len, rows[level + 1].values())) for level in levels) * len(self.weights)
        size = max(1, TOGETHER // largest)
        for some in (new[at : at + size] for at in range(0, len(new), size)):
            self._contexts.update(zip(some, self._followed(some), strict=True))

    def matters(self, level: int, slot: int) -> bool:
        """Whether it costs enough to have a stored parameter where a use needs it, from wherever it is, for a context to say where it is."""
        key = level, slot
        if key not in self._mattering:
            direct, (rows, offset) = self.priced.direct(self.problem.steps[level].kind.slots[slot].table), self.rows(self.general, level)
            most = direct.max(axis=(0, 1), where=np.isfinite(direct), initial=0.0)
            self._mattering[key] = bool((most > self.slight * (rows[GENERAL][0] + offset)).any())
        return self._mattering[key]

    def placed(self, level: int) -> bool:
        """Whether a step stores the first of the parameters that contexts know."""
        return self.outline.placed[level] and any(self.matters(at, slot) for at, slot, _, _ in self.outline.stored[level + 1])

    def knows(self, uses: tuple[Use, ...]) -> bool:
        """Whether there is a table for these already."""
        return uses in self._contexts

    def until(self, level: int) -> Context:
        """The tables of what it costs to come to a level, without what follows there."""
        if level not in self._until:
            nothing = {at: np.zeros_like(rows) for at, rows in self.general.rows[level].items()}
            self._until[level] = self._tabulate(level, nothing, {})
        return self._until[level]

    def _contextual(self, uses: tuple[Use, ...]) -> Context:
        """From the last use backward, not as far as there are steps. What the context adds to the general table is often the same everywhere soon:
        from there on the least that it adds is a bound, because adding a constant to a table adds it to the table one step before. It adds little,
        though, where the general table is high itself. So what it costs to come there, and then at least, is another bound.

        A parameter that is available in several placements comes from one of them: of the tables for each, the least."""
        parts = tuple([self.context(own) for own in self._apart(uses)])
        if parts:
            top, bottom = max(u.level for u in uses), min([part.bottom for part in parts])
            offset = self.general.offsets[top + 1]
            return Context(bottom, self.general.end, {}, [offset] * (top + 1 - bottom), uses, parts)
        return self._followed([uses])[0]

    def _followed(self, several: Sequence[tuple[Use, ...]]) -> list[Context]:
        """Contexts, none of them of parts, whose uses differ in their placements only: made at once, with the weights of one beside those of the next
        in every array, as a call of numpy takes longer than what it does for a few weights."""
        general, width = self.general, len(self.weights)
        top, left = max(u.level for u in several[0]), list(range(len(several)))
        bottom = max(0, top - self.deepest)
        offset, found = general.offsets[top + 1], dict[int, Context]()
        tables: list[dict[int, Rows]] = [{} for _ in several]
        after = {n: np.tile(own, len(left)) for n, own in general.rows[top + 1].items()}
        for level in range(top, bottom - 1, -1):
            uses = [[u for u in several[k] if u.level == level] for k in left]
            weighted = _beside([self._weighted_with(level, own, level == top) for own in uses])
            mine, offsets = Rows(), np.tile(offset, len(left))
            self._step(level, mine, after, weighted, offsets)
            if self.ahead:  # of joins only the general tables know
                more = general.offsets[level] - offset
                mine = {n: np.maximum(own, np.tile(general.rows[level][n] + more, len(left))) for n, own in mine.items()}
            added, even = self._adds(level, mine, offsets)
            every = {n: own.reshape(len(own), len(left), width) for n, own in mine.items()}
            for number, k in enumerate(left):
                tables[k][level] = {n: np.ascontiguousarray(own[:, number]) for n, own in every.items()}
                if even[number] or level == bottom:
                    more = added[number * width : (number + 1) * width]
                    found[k] = Context(level, general.end, tables[k], [offset] * len(tables[k]), several[k], (), (more, bool(even[number])))
            stay = [number for number, k in enumerate(left) if k not in found]
            if not stay:
                break
            after = mine if len(stay) == len(left) else {n: own[:, stay].reshape(len(own), -1) for n, own in every.items()}
            left = [left[number] for number in stay]
        return [found[k] for k in range(len(several))]

    def _apart(self, uses: tuple[Use, ...]) -> list[tuple[Use, ...]]:
        """The same uses, the first one that is of several placements, and the last of its parameter, with each of them; none if there is no such."""
        for k, use in enumerate(uses):
            masks = self._table(use).apart(use.mask) if self.outline.again[use.level, use.slot] is None else []
            if len(masks) > 1:
                return [(*uses[:k], use._replace(mask=mask), *uses[k + 1 :]) for mask in masks]
        return []

    def _known(self, context: Context, level: int, offset: Array) -> Rows:
        """What a context says before a level, wherever that is; `offset` is to be added to it."""
        more = -offset
        while level < context.bottom:
            context, added = self._lower(context)
            more = more + added
        rows, own = self.rows(context, level)
        more = more + own
        return {n: known + more for n, known in rows.items()} if more.any() else rows

    def _added(self, level: int, mine: Rows, offset: Array) -> tuple[Array, Mask]:
        """What a table adds to the general one at least, per weight; and whether it adds (nearly) that everywhere. Of several, see `_followed`."""
        rows, own, width = self.general.rows[level], self.general.offsets[level], len(self.weights)
        times = len(offset) // width
        before, after = (np.concatenate([known[n] for n in rows]) for known in (rows, mine))
        before, own = (before, own) if times == 1 else (np.tile(before, times), np.tile(own, times))
        with np.errstate(invalid="ignore"):  # inf - inf: a placement from which nothing leads on adds nothing
            added = np.where(np.isfinite(before), after - before, np.inf)
        added += offset - own
        more = added.min(axis=0)
        more = np.where(np.isfinite(more), more, 0.0)
        finite = np.where(np.isfinite(added), added, more)
        differ = (finite.max(axis=0) - more).reshape(times, width)
        return more, (differ <= self.slight * (1e-9 + rows[GENERAL].max())).all(axis=1)

    def _lower(self, context: Context) -> tuple[Context, Array]:
        """Below a context's bottom: the one that knows the uses that are left there, and what is to be added to it."""
        more, _ = self._added_by(context)
        return self.context(tuple([u for u in context.uses if u.level < context.bottom])), self._through(context.bottom, more)

    def _added_by(self, context: Context) -> tuple[Array, bool]:
        """See `Context.added`."""
        if context.added is None:
            more, even = self._adds(context.bottom, *self.rows(context, context.bottom))
            context.added = more, bool(even[0])
        return context.added

    def _adds(self, level: int, mine: Rows, offset: Array) -> tuple[Array, Mask]:
        """As `_added`, of contexts, which may have no way on from where their parameters are."""
        possible = np.isfinite(mine[GENERAL].reshape(-1, len(self.weights))).all(axis=1)
        if possible.all():
            return self._added(level, mine, offset)
        with np.errstate(invalid="ignore"):
            more, even = self._added(level, mine, offset)
        return np.where(np.repeat(possible, len(self.weights)), more, np.inf), even | ~possible

    def _through(self, level: int, more: Array) -> Array:
        """What may be added to tables below a level by which the table before it is larger: see `_tabulate`."""
        return more if level < self._cutting else np.full_like(more, more.min())

    def _used(self, use: Use, needs: Numbers, last: bool) -> Array:
        """(choice, weights) -> what a use adds to the price of each choice of its step, which knows that of storing a parameter. last: see
        `_weighted_with`."""
        table = self._table(use)
        if not use.mask:
            gains, ways = self._gains(use), self.priced.first(table, needs)
            after = np.minimum(gains[[k.placement for k in table.stored]][:, None], gains.take(needs, axis=0))
            least = ways.min(axis=0)
            more: Array = np.where(np.isfinite(least), (ways + after).min(axis=0) - np.where(np.isfinite(least), least, 0.0), 0.0)
            return more
        inside = list(bits(use.mask))
        cost = self.priced.direct(table, inside).min(axis=0)
        cost[inside] = 0.0
        if last:
            cost += np.minimum(gains := self._gains(use), gains[inside].min(axis=0))
        found: Array = cost.take(needs, axis=0)
        return found

    def coming(self, level: int) -> Context | None:
        """The tables that know that the largest parameter that is not yet live is used twice, if there is one."""
        first = self.outline.coming[level]
        if first is None:
            return None
        _, at, slot = first
        again = self.outline.again[at, slot]
        assert again is not None, "it is used twice"
        if not self.matters(*again):
            return None
        if at not in self._coming:
            rows, offset = self.rows(self.general, at + 1)
            self._coming[at] = self._tabulate(at + 1, {n: own + offset for n, own in rows.items()}, {}, (Use(at, slot, 0),))
        return self._coming[at]

    def _gains(self, use: Use) -> Array:
        """(placement, weights) -> what the tables after a use of a parameter say more, at least, if it is available in just the placement, where the
        following use is its last one; else nothing. In several placements it is the least of them."""
        key, again = (use.level, use.slot), self.outline.again[use.level, use.slot]
        if key not in self._later:
            table = self._table(use)
            gains = np.zeros((len(table.placements), len(self.weights)))
            if again is not None and self.outline.again[again] is None and self.matters(*again):
                level, nothing = use.level + 1, np.zeros(len(self.weights))
                closures = [table.closure(p) for p in range(len(table.placements))]
                self._make([(Use(*again, mask),) for mask in dict.fromkeys(closures)])
                for mask in dict.fromkeys(closures):
                    more, _ = self._added(level, self._known(self.context((Use(*again, mask),)), level, nothing), nothing)
                    gains[[p for p, own in enumerate(closures) if own == mask]] = self._through(level, more)
            self._later[key] = gains
        return self._later[key]

    def _table(self, use: Use) -> TensorTable:
        return self.problem.steps[use.level].kind.slots[use.slot].table

    def _tabulate(self, end: int, last: Rows, ahead: dict[int, Ahead], uses: tuple[Use, ...] = ()) -> Context:
        """The tables up to a level whose table is `last`, from there backward. ahead: gets those of the joins. uses: in the last step."""
        rows: list[Rows] = [{} for _ in range(end)] + [last]
        offsets = [np.zeros(len(self.weights))] * (end + 1)
        same = False  # whether the tables after this step are those of one period later plus `delta`
        delta = beyond = raised = offsets[-1]  # most levels of a period have one offset: its sum with delta is made once
        for level, (later, moved, joins, alone, alike, taken) in reversed(list(enumerate(self.outline.later(self.repetition, end)))):
            # what is larger by a number per weight may not be so before a step that ends phases
            same = same and alike and level not in self._cuts
            if same and taken:
                before = rows[later]
                rows[level] = {at: before[moved.get(at, at)] for at in self.outline.places[level]} if moved else before
                if offsets[later] is not beyond:
                    beyond = offsets[later]
                    raised = beyond + delta
                offsets[level] = raised
                for join in joins:
                    other = ahead[join.level + later - level]
                    ahead.setdefault(join.level, Ahead(join, self.priced, other.needs, {})).repeat(level, other, later, delta)
                continue
            weighted = self._weighted_with(level, [u for u in uses if u.level == level])
            self._step(level, rows[level], rows[level + 1], weighted, offsets[level + 1])
            offsets[level] = offsets[level + 1]
            for join in joins:
                self._join(level, join, rows, offsets[level], ahead)
            # what is known of joins ahead is not in the tables
            found = self._constant(rows, offsets, level, later, moved) if moved is not None and alone else None
            same = found is not None
            if found is not None:
                delta, raised = found, beyond + found
        return Context(0, end, dict(enumerate(rows)), offsets, uses)

    def _join(self, level: int, join: Join, rows: list[Rows], offset: Array, ahead: dict[int, Ahead]) -> None:
        """What a join that is this step or lies ahead says of what comes before the step."""
        step = self.problem.steps[level]
        if level == join.level:
            weighted = self._weighted_with(level, [])
            then = self._then(level, rows[level + 1], weighted)
            ahead[level] = Ahead(join, self.priced, weighted.needs, {level: weighted.total(then + offset)})
        else:
            ahead[join.level].step(level, step, self._weighted(step.kind, self.outline.first[level]))
        own = ahead[join.level]
        rows[level][GENERAL] = np.maximum(rows[level][GENERAL], own.tables[level].min(axis=0) - offset)
        for part in join.parts[: join.made(level)]:
            known = rows[level][part.shift]
            rows[level][part.shift] = np.maximum(known, own.before(level, part, len(known)) - offset)

    def _constant(self, rows: list[Rows], offsets: list[Array], level: int, later: int, moved: Mapping[int, int]) -> Array | None:
        """What is added to the table of `later` to have that of `level`, None if it is not (nearly) one number per weight: the least, so that the
        bound stays one."""
        mine, other = rows[level], rows[later]
        left, right = (np.concatenate(both) for both in zip(*((r, other[moved.get(at, at)]) for at, r in mine.items()), strict=True))
        finite = np.isfinite(left)
        if not (finite == np.isfinite(right)).all():
            return None
        with np.errstate(invalid="ignore"):
            added = np.where(finite, left - right + (offsets[level] - offsets[later]), np.nan)
        least: Array = np.nanmin(added, axis=0)
        loss = LOSS[self.repetition.rounds(later) >= LATE]
        return least if (np.nanmax(added, axis=0) - least <= loss * np.abs(least) + 1e-13 * (left[0] + offsets[level])).all() else None

    def _step(self, level: int, rows: Rows, after: Rows, weighted: Weighted, offset: Array) -> None:
        """The table before a step from that after it; `offset` is to be added to both. weighted: the step's choices."""
        then = self._then(level, after, weighted)
        rows[GENERAL] = np.minimum.reduce(self._total(weighted, then, offset), axis=0, keepdims=True)
        untouched = []
        for shift in self.outline.values[level]:
            if shift in self.problem.steps[level].slot_shifts:
                rows[shift] = self._value(level, shift, weighted, then, after, offset)
            else:
                untouched.append(shift)
        if untouched:
            parts = [after[shift] for shift in untouched]
            ends = list(accumulate(map(len, parts)))
            found = self._untouched(weighted, then, np.concatenate(parts), offset)
            for shift, start, end in zip(untouched, [0, *ends], ends, strict=False):
                rows[shift] = found[start:end]

    def _total(self, weighted: Weighted, rest: Array, offset: Array) -> Array:
        """As `Weighted.total`, of bounds to which `offset` is to be added."""
        return weighted.total(rest) if weighted.cuts is None else weighted.total(rest + offset) - offset

    def choices(self, context: Context, level: int) -> tuple[Weighted, Array]:
        """Of a step, whose following level is not below the context's bottom: its choices, and the bound of what follows after each (as `rows`),
        without the values that are live."""
        inside = context.bottom <= level <= context.top
        after, offset = self.rows(context, level + 1)
        weighted = self._weighted_with(level, [u for u in context.uses if inside and u.level == level], level == context.top)
        return weighted, self._then(level, after, weighted) + offset

    def _weighted_with(self, level: int, uses: list[Use], last: bool = False) -> Weighted:
        """The step's choices with its `uses` priced. last: no uses later than these are priced, so with what is known of the use after the first of
        these (see `_gains`); of several uses the prices cannot be added up, as another choice may be the answer to both."""
        weighted = self._weighted(self.problem.steps[level].kind, self.outline.first[level])
        for number, use in enumerate(uses):
            cost = self._used(use, weighted.needs[use.slot], last and not number)
            weighted = Weighted(weighted.base + cost, weighted.needs, weighted.gives, weighted.cuts)
        return weighted

    def _then(self, level: int, after: Rows, weighted: Weighted) -> Array:
        """After each choice of the step, the bound by its results alone."""
        step = self.problem.steps[level]
        then = after[GENERAL]  # the same after every choice
        for shift, result, gives in zip(step.result_shifts, step.kind.results, weighted.gives, strict=True):
            if result.live:
                then = np.maximum(then, after[shift].take(gives, axis=0))
        return then

    def _value(self, level: int, shift: int, weighted: Weighted, then: Array, after: Rows, offset: Array) -> Array:
        """Of a value that the step reads: (choice, row, weights) -> the least over the choices, which come first as that is fastest. Where nothing
        is known of it afterwards, of those that need it in the same placement the least."""
        step, value = self.problem.steps[level], self.outline.values[level][shift]
        slot, rest = step.slot_shifts.index(shift), then[:, None]
        needed, need = self.priced.needed(step.kind, slot), self.outline.need(step.kind, slot)
        if not value.several:
            needed = needed[:, : len(value.table.placements)]
        if value.last:
            total = need.least(self._total(weighted, rest, offset))
        else:
            needed = needed.take(need.of, axis=0)
            total = self._total(weighted, np.maximum(rest, self._converted(level, slot, value, after[shift])), offset)
        if total.shape[-1] > needed.shape[-1]:  # several contexts
            total, needed = total.reshape(*total.shape[:-1], -1, needed.shape[-1]), needed[:, :, None]
            return np.minimum.reduce(needed + total).reshape(needed.shape[1], -1)  # type: ignore[no-any-return]
        return np.minimum.reduce(needed + total)  # type: ignore[no-any-return]

    def _untouched(self, weighted: Weighted, then: Array, after: Array, offset: Array) -> Array:
        """The same of the rows of all values that the step does not read."""
        if len(after) > FEW_ROWS:
            return weighted.least(then, after, offset)
        return np.minimum.reduce(self._total(weighted, np.maximum(then[:, None], after), offset))  # type: ignore[no-any-return]

    def _converted(self, level: int, slot: int, value: Value, after: Array) -> Array:
        """(choice, row, weights) -> the bound by a value that is used again, after it was converted to what a choice needs."""
        kind, outline = self.problem.steps[level].kind, self.outline
        if outline.values[level + 1][value.shift].last:
            return np.minimum(outline.least(value.table, after, value.used), after.take(outline.ends(kind)[0][slot], axis=0)[:, None])
        following = outline.following(kind, slot)
        return after.take(following if value.used else following[:, : len(value.table.placements)], axis=0)

    def _weighted(self, kind: StepClass, first: tuple[bool, ...]) -> Weighted:
        """`first`: slots that are parameters used for the first time here."""
        key = id(kind), first
        if key not in self._classes:
            self._classes[key] = self.priced.weighted(kind, first)
        return self._classes[key]

    def _priced(self, sheet: Sheet) -> Priced:
        moves, weights = self.moves, self.weights

        # what is kept holds no moves: these hold the prices, and planning collects no cycles
        priced, counted = moves.edges, moves.capacity is None

        def edges(forward: Array, backward: Array, alone: bool = True) -> Array:
            found = priced.weighted(forward, backward, alone)
            return padded(found if counted else np.zeros_like(found))

        def waited() -> Array:
            none = np.zeros((1, weights.kinds))
            return edges(np.vstack([weights.forward[:-1], none]), np.vstack([weights.backward[:-1], none]), alone=False)

        held = None
        if moves.prices is not None:
            held = np.array([moves.price(term) for term in sheet.held()[0].tolist()])
        prices = Prices(moves.values, weights, moves.capacity, moves.prices)
        pairs = weights.kinds if len(weights.pairs) == weights.kinds**2 else 0
        return Priced(sheet, edges(weights.forward, weights.backward), prices, pairs, held, waited)


def _beside(several: Sequence[Weighted]) -> Weighted:
    """The weights of several side by side; they differ in `base` only."""
    first = several[0]
    if len(several) == 1:
        return first
    cuts = None if first.cuts is None else first.cuts.repeated(len(several))
    return Weighted(np.concatenate([own.base for own in several], axis=1), first.needs, first.gives, cuts)
