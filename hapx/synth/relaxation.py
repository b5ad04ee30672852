"""The relaxed problem behind the bound of the A* search, as tables.

For any weights w_j >= 0 with sum 1, max_j x_j >= sum_j w_j x_j. So if every maximum over device kinds is replaced by the weighted sum, the cost of
a program becomes additive and the pending vectors leave the state:

    cost(rest) >= max over w of ( sum_j w_j (pf_j + pb_j) + H_w(rest) ).

H_w is relaxed once more, so that it can be tabulated: of everything that is live, only one value keeps what is available, and only as long as that is
what follows for free from one placement; anything else may be in any placement for nothing. With H_k(v, p) for value v in placement p before step k,

    H_k(v, p) = min over choices c of  w.cost(c) + w.conversion(p -> need_c) + max( H_k+1(v, p'), H_k+1(o, give_c) for each result o ),

backward over the steps, as matrices (placements x choices x weights).

A parameter that is used again later (a tied embedding) would be free there in this relaxation. So there is one such table per *context*: the masks of
the stored parameters that are live, each priced at its next use (of the largest ones, `hapx.synth.outline.PRICED`; the others are free there).

Where steps repeat themselves (equal layers), the tables of one repetition differ from those of the next by a constant after a few of them, or nearly.
A table that is larger by a constant at least makes the tables of all steps before larger by it at least: from there on tables are taken over, and
only the constants are summed up.

Invariant: never more than the true cost of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hapx.cost.edges import Array, Mask, Numbers
from hapx.synth.grid import Grid, Prices, Weights, padded
from hapx.synth.moves import Moves
from hapx.synth.outline import Outline
from hapx.synth.periods import Names, Repetition
from hapx.synth.problem import Problem, Step, StepClass
from hapx.synth.tables import TensorTable, bits
from hapx.transposes import forward_collective

LOSS = 1e-3  # part of what a repetition costs by which the bound may be too low where tables of repetitions are taken over
DEEPEST = (32, 8)  # levels that a context is followed back at most, on meshes of one axis and of several
Rows = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Choices with communication of their own that ends a phase, forward and backward, and what they do after it (choices x weights)."""

    forward: Mask
    backward: Mask
    after: Array
    pairs: int  # kinds, where every pair of them has a weight; else 0

    def freed(self, rest: Array) -> Array:
        """That and what follows it: in a new phase another kind may be the slowest, so any weight of that direction is a bound."""
        total: Array = self.after + rest
        both = self.forward & self.backward
        if self.pairs:
            grid = total[..., : self.pairs**2].reshape(*total.shape[:-1], self.pairs, self.pairs)
            for cut, axis in ((self.forward & ~both, -2), (self.backward & ~both, -1)):
                best = np.broadcast_to(grid.max(axis=axis, keepdims=True), grid.shape).reshape(*total.shape[:-1], -1)
                best = np.concatenate([best, total[..., self.pairs**2 :]], axis=-1)
                total = np.where(cut[:, None], best, total)
        return np.where(both[:, None], total.max(axis=-1, keepdims=True), total)


@dataclass(frozen=True, slots=True)
class Weighted:
    """A step class: weighted cost per choice (choices x weights), without `cuts.after`; the placement that each choice needs of a slot, and gives of
    a result."""

    base: Array
    needs: tuple[Numbers, ...]
    gives: tuple[Numbers, ...]
    cuts: Cuts | None

    def total(self, rest: Array) -> Array:
        """(..., choice, weights) -> the bound before the step, conversions left out, by the bound after it."""
        return self.base + (rest if self.cuts is None else self.cuts.freed(rest))


class Use(NamedTuple):
    """The next use of a parameter that is stored: the step, the slot, and the placements that are available."""

    level: int
    slot: int
    mask: int


class Context(NamedTuple):
    """`rows` + `offset` from level `bottom` on; below, the general table and `more` (per weight)."""

    bottom: int
    rows: list[Rows]
    offset: Array
    more: Array
    uses: tuple[Use, ...]


def _least(values: Array) -> Array:
    """(row, choice, weights) -> the least over the choices."""
    found: Array = np.minimum.reduce(values, axis=1)
    return found


class Relaxation:
    """Tables of the relaxed problem at the prices and shares of `moves`. Public: what `hapx.synth.bound` reads."""

    def __init__(self, problem: Problem, moves: Moves):
        self.problem, self.moves = problem, moves
        self.deepest = DEEPEST[len(problem.theory.mesh.axes) > 1]
        self.weights = Weights(problem.terms.kinds)
        self.grid: Grid = moves.grid
        self.prices = Prices(moves.values, self.weights, moves.capacity, moves.prices)
        edges = moves.edges.weighted(self.weights.forward, self.weights.backward)
        self.edges = padded(edges if moves.capacity is None else np.zeros_like(edges))
        self._firsts: dict[tuple[int, bool], Array] = {}
        self._directs: dict[int, Array] = {}
        self._converted: dict[int, Array] = {}
        self._needs: dict[tuple[int, int], Array] = {}
        self._classes: dict[tuple[int, tuple[bool, ...]], Weighted] = {}
        self._contexts: dict[tuple[Use, ...], Context] = {}
        # the table before level k is _base[k] + _offsets[k]
        self._base: list[Rows] = [{} for _ in problem.steps] + [{"": np.zeros((1, len(self.weights)))}]
        self._offsets: list[Array] = [np.zeros(len(self.weights))] * (len(problem.steps) + 1)
        if problem.repetition is None:
            problem.repetition = Repetition(problem.steps)
        self.repetition: Repetition = problem.repetition
        if problem.outline is None:
            problem.outline = Outline(problem.steps)
        self.outline: Outline = problem.outline
        of_class = {id(kind): self.cutting(kind) for kind in problem.classes}
        cutting = [of_class[id(s.kind)] for s in problem.steps]
        self._cutting = cutting.index(True) + 1 if any(cutting) else len(cutting) + 1  # from which level on there is such a step before
        self._tabulate(cutting)

    def rows(self, context: Context, level: int) -> tuple[Rows, Array]:
        """The table before a level, and what is to be added to it; below the context's bottom without what the context adds."""
        if 0 <= level - context.bottom < len(context.rows):
            return context.rows[level - context.bottom], context.offset
        return self._base[level], self._offsets[level]

    def context(self, uses: tuple[Use, ...]) -> Context:
        """The table that knows the placements of the parameters that are live."""
        if uses not in self._contexts:
            self._contexts[uses] = self._contextual(uses)
        return self._contexts[uses]

    def knows(self, uses: tuple[Use, ...]) -> bool:
        """Whether there is a table for these already."""
        return not uses or uses in self._contexts

    def _contextual(self, uses: tuple[Use, ...]) -> Context:
        """From the last use backward. What the context adds soon is the same everywhere: from there on the least that it adds is a bound,
        because adding a constant to a table adds it to the table one step before."""
        if not uses:
            return Context(len(self._base), [], self._offsets[-1], self._offsets[-1], uses)
        top, bottom = max(u.level for u in uses), min(u.level for u in uses)
        rows: list[Rows] = []
        level = top
        while True:
            mine: Rows = {}
            self._step(level, mine, rows[-1] if rows else self._base[top + 1], [u for u in uses if u.level == level], self._offsets[top + 1])
            rows.append(mine)
            with np.errstate(invalid="ignore"):  # inf - inf: a placement from which nothing leads on adds nothing
                added = np.concatenate([np.where(np.isfinite(b), mine[n] - b, np.inf) for n, b in self._base[level].items()])
            added += self._offsets[top + 1] - self._offsets[level]
            more = added.min(axis=0)
            more = np.where(np.isfinite(more), more, 0.0)
            finite = np.where(np.isfinite(added), added, more)
            even = bool((finite.max(axis=0) - more <= 1e-12 * (1e-9 + self._base[level][""].max())).all())
            if level == 0 or (level <= bottom and even) or top - level >= self.deepest:
                if level >= self._cutting:
                    more = np.full_like(more, more.min())  # see `_tabulate`
                return Context(level, rows[::-1], self._offsets[top + 1], more if level <= bottom else np.zeros(len(self.weights)), uses)
            level -= 1

    def _tabulate(self, cutting: Sequence[bool]) -> None:
        """The general tables, from the last step backward. cutting: per step, see there."""
        steps = self.problem.steps
        repetition, first = self.repetition, self.outline.first
        same = False  # whether the tables after this step are those of one period later plus `delta`
        delta = self._offsets[-1]
        for level in range(len(steps) - 1, -1, -1):
            later = level + repetition.period[level]
            names = repetition.names(level)
            if cutting[level]:  # what is larger by a number per weight may not be so before a cut
                same = False
            if names is not None and same and repetition.continues(level) and first[level] == first[later]:
                before = self._base[later]
                self._base[level] = {n: before[names.get(n, "")] for n in self.outline.names[level]}
                self._offsets[level] = self._offsets[later] + delta
                continue
            self._step(level, self._base[level], self._base[level + 1], [], self._offsets[level + 1])
            self._offsets[level] = self._offsets[level + 1]
            found = self._constant(level, later, names) if names is not None else None
            same, delta = (True, found) if found is not None else (False, delta)

    def _constant(self, level: int, later: int, names: Names) -> Array | None:
        """What is added to the table of `later` to have that of `level`, None if it is not (nearly) one number per weight: the least, so that the
        bound stays one."""
        mine, other = self._base[level], self._base[later]
        left, right = (np.concatenate(rows) for rows in zip(*((r, other[names.get(n, "")]) for n, r in mine.items()), strict=True))
        finite = np.isfinite(left)
        if not (finite == np.isfinite(right)).all():
            return None
        with np.errstate(invalid="ignore"):
            added = np.where(finite, left - right + (self._offsets[level] - self._offsets[later]), np.nan)
        least: Array = np.nanmin(added, axis=0)
        return least if (np.nanmax(added, axis=0) - least <= LOSS * np.abs(least) + 1e-13 * (left[0] + self._offsets[level])).all() else None

    def _step(self, level: int, rows: Rows, after: Rows, uses: list[Use], offset: Array) -> None:
        """The table before a step from that after it; `offset` is to be added to both."""
        step = self.problem.steps[level]
        weighted, then = self._choices(level, after, uses)
        rows[""] = np.minimum.reduce(self._total(weighted, then, offset), axis=0, keepdims=True)
        for name, table, _, _ in self.outline.values[level]:
            rows[name] = self._value(step, name, table, weighted, then, after, offset)

    def _total(self, weighted: Weighted, rest: Array, offset: Array) -> Array:
        """As `Weighted.total`, of bounds to which `offset` is to be added."""
        return weighted.total(rest) if weighted.cuts is None else weighted.total(rest + offset) - offset

    def choices(self, context: Context, level: int) -> tuple[Weighted, Array]:
        """Of a step in a context: its choices, and the bound of what follows after each (as `rows`), without the values that are live."""
        inside = context.bottom <= level < context.bottom + len(context.rows)
        after, offset = self.rows(context, level + 1)
        weighted, then = self._choices(level, after, [u for u in context.uses if inside and u.level == level])
        return weighted, then + offset

    def _choices(self, level: int, after: Rows, uses: list[Use]) -> tuple[Weighted, Array]:
        """The step's choices with its `uses` priced; after each, the bound by its results alone."""
        step = self.problem.steps[level]
        weighted = self._weighted(step.kind, self.outline.first[level])
        for use in uses:
            table = step.kind.slots[use.slot].table
            inside = list(bits(use.mask))
            cost = self._direct(table)[inside].min(axis=0)
            cost[inside] = 0.0
            weighted = Weighted(weighted.base + cost[weighted.needs[use.slot]], weighted.needs, weighted.gives, weighted.cuts)
        then = after[""]  # the same after every choice
        for name, result, gives in zip(step.outputs, step.kind.results, weighted.gives, strict=True):
            if result.live:
                then = np.maximum(then, after[name][gives])
        return weighted, then

    def _value(self, step: Step, name: str, table: TensorTable, weighted: Weighted, then: Array, after: Rows, offset: Array) -> Array:
        if name not in step.tensors:
            return _least(self._total(weighted, np.maximum(then[None], after[name][:, None]), offset))
        slot = step.tensors.index(name)
        rest = np.maximum(then[None], after[name][self.outline.following(step.kind, slot)]) if step.kind.slots[slot].live else then[None]
        return _least(self._needed(step.kind, slot) + self._total(weighted, rest, offset))

    def _needed(self, kind: StepClass, slot: int) -> Array:
        """(row, choice, weights) -> the least cost of converting a slot to what each choice needs (see `conversions`)."""
        key = id(kind), slot
        if key not in self._needs:
            self._needs[key] = self.conversions(kind.slots[slot].table)[:, self.outline.ends(kind)[0][slot]]
        return self._needs[key]

    def _weighted(self, kind: StepClass, first: tuple[bool, ...]) -> Weighted:
        """`first`: slots that are parameters used for the first time here."""
        key = id(kind), first
        if key not in self._classes:
            needs, gives = self.outline.ends(kind)
            base, cuts = self._own(kind)
            for slot, of_slot, own in zip(kind.slots, needs, first, strict=True):
                if slot.fixed == 0 or own:
                    base = base + self._first_use(slot.table, slot.fixed == 0)[of_slot]
            self._classes[key] = Weighted(base, needs, gives, cuts)
        return self._classes[key]

    def _own(self, kind: StepClass) -> tuple[Array, Cuts | None]:
        """What the choices of a class cost, without what comes after communication of their own that ends a phase, and that."""
        layout = self.grid.of_class(kind)
        base = self.prices.steps(layout)
        if not self.cutting(kind):
            return base, None
        after = self.prices.after(layout)
        cuts = (layout.cuts_forward, layout.cuts_backward)
        either = (cuts[0] | cuts[1])[:, None]
        pairs = self.weights.kinds if len(self.weights.pairs) == self.weights.kinds**2 else 0
        return np.where(either, base - after, base), Cuts(*cuts, np.where(either, after, 0.0), pairs)

    def cutting(self, kind: StepClass) -> bool:
        """Whether a choice of a class communicates itself in forward, ending a phase. (Gathers of sufficient factors run backward; nearly every
        product may have them, and they matter too little to pay for.)"""
        return self.moves.capacity is None and bool(self.grid.of_class(kind).cuts_forward.any())

    def _first_use(self, table: TensorTable, once: bool) -> Array:
        """(target, weights) -> the least price of storing a parameter and having it in `target`."""
        key = id(table), once
        if key not in self._firsts:
            n = len(table.placements)
            of_kept = np.array([k.placement for k in table.stored])
            cost = self.prices.steps(self.grid.of_stored(table))[:, None] + self.conversions(table)[of_kept, :n]
            if once:
                cost = np.where(self.grid.kept(table)[..., None], cost, np.inf)
            self._firsts[key] = cost.min(axis=0)
        return self._firsts[key]

    def conversions(self, table: TensorTable) -> Array:
        """(row, target) -> the least weighted cost of a conversion from anything that is available in the row; nothing for "anything"."""
        if id(table) not in self._converted:
            n, direct, inside = len(table.placements), self._direct(table), self.outline.inside(table)
            rows = np.minimum.reduce(np.where(inside[:, :, None, None], direct[None], np.inf), axis=1)
            rows[inside] = 0.0
            rows[n] = 0.0
            self._converted[id(table)] = rows
        return self._converted[id(table)]

    def _direct(self, table: TensorTable) -> Array:
        """Least weighted price over all paths between any two placements: every order of the axes, the cheapest edge on each."""
        if id(table) not in self._directs:
            best = self.grid.direct(table, self.edges)
            self._directs[id(table)] = best + self._held(table) if self.moves.prices is not None else best
        return self._directs[id(table)]

    def _held(self, table: TensorTable) -> Array:
        """The price of what a conversion between two placements leaves in memory (a gathered parameter may be freed)."""
        states = [p.states for p in table.placements]
        prices = np.zeros((len(states), len(states), 1))
        if not table.parameter:
            of_target = [self.moves.price(table.held(q)) for q in table.placements]
            for p, source in enumerate(states):
                for q, target in enumerate(states):
                    if any(s != t and forward_collective(s, t) is not None for s, t in zip(source, target, strict=True)):
                        prices[p, q] = of_target[q]
        return prices
