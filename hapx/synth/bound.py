"""A lower bound of the rest of a program, for the A* search.

For any weights w_j >= 0 with sum 1, max_j x_j >= sum_j w_j x_j. So if every maximum over device kinds is replaced by the weighted sum, the cost of
a program becomes additive and the pending vectors leave the state:

    cost(rest) >= max over w of ( sum_j w_j (pf_j + pb_j) + H_w(rest) ).

H_w is relaxed once more, so that it can be tabulated: of everything that is live, only one value keeps what is available, and only as long as that is
what follows for free from one placement; anything else may be in any placement for nothing. With H_k(v, p) for value v in placement p before step k,

    H_k(v, p) = min over choices c of  w.cost(c) + w.conversion(p -> need_c) + max( H_k+1(v, p'), H_k+1(o, give_c) for each result o ),

backward over the steps, as matrices (placements x choices x weights). A partial program's bound is the largest over its live values. With w the unit
vectors this contains the bound max_j (pending_j + sum over the rest of the least comp_j).

A parameter that is used again later (a tied embedding) would be free there in this relaxation. So there is one such table per *context*: the masks of
the stored parameters that are live, each priced at its next use.

Where steps repeat themselves (equal layers), the tables of one repetition differ from those of the next by a constant after a few of them, or nearly.
A table that is larger by a constant at least makes the tables of all steps before larger by it at least: from there on tables are taken over, and
only the constants are summed up.

Invariant: never more than the true cost of the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import permutations
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hapx.synth.effect import Effect, Vector
from hapx.synth.moves import Moves
from hapx.synth.periods import periods
from hapx.synth.problem import Problem, Step, StepClass
from hapx.synth.tables import TensorTable, bits
from hapx.transposes import forward_collective

LOSS = 1e-3  # part of what a repetition costs by which the bound may be too low where tables of repetitions are taken over
DEEPEST = 8  # levels that a context is followed back at most
Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Rows = dict[str, Array]
Names = dict[str, str]


@dataclass(frozen=True, slots=True)
class Weighted:
    """A step class: weighted cost per choice (choices x weights); the placement that each choice needs of a slot, and gives of a result."""

    base: Array
    needs: tuple[Numbers, ...]
    gives: tuple[Numbers, ...]


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


class Bound:
    def __init__(self, problem: Problem, moves: Moves):
        self.problem, self.moves = problem, moves
        self.kinds = n = problem.terms.kinds
        self.weights = np.vstack([np.eye(n), np.full((1, n), 1.0 / n)]) if n > 1 else np.ones((1, 1))
        self.none: Vector = (0.0,) * len(self.weights)
        self._directs: dict[int, Array] = {}
        self._converted: dict[int, Array] = {}
        self._classes: dict[tuple[int, tuple[bool, ...]], Weighted] = {}
        self._after: dict[int, Numbers] = {}
        # the table before level k is _base[k] + _offsets[k]
        self._base: list[Rows] = [{} for _ in problem.steps] + [{"": np.zeros((1, len(self.weights)))}]
        self._offsets: list[Array] = [np.zeros(len(self.weights))] * (len(problem.steps) + 1)
        self._lives()
        self._tabulate()
        self._parts: dict[tuple[int, int, int, int], Vector] = {}
        self._contexts: dict[tuple[Use, ...], Context] = {}
        self._at: list[dict[int, Vector]] = [{} for _ in range(len(problem.steps) + 1)]
        self._bounds: dict[tuple[int, int], list[int]] = {}

    def rest(self, level: int, place: int) -> Vector:
        """Per weight vector, a lower bound of the cost of steps `level` and later when `place` is available."""
        known = self._at[level]
        if place not in known:
            known[place] = self._rest(level, place)
        return known[place]

    def estimate(self, cost: float, forward: Vector, backward: Vector, rest: Vector) -> float:
        """Cost plus the bound of the rest with these pending vectors."""
        pending = tuple(map(add, forward, backward))
        best: float = max(map(add, pending, rest))  # one unit vector per kind; map stops before the uniform weights
        if self.kinds > 1:
            best = max(best, sum(pending) / self.kinds + rest[-1])
        return cost + best

    def _rest(self, level: int, place: int) -> Vector:
        if level == len(self.problem.steps):
            return self.none
        stored, others = self._live[level]
        context = self._context(tuple([Use(at, slot, place >> shift & full) for at, slot, shift, full in stored]))
        found = [self._part(level, context, -1, 0)]
        for i, (shift, full) in enumerate(others):
            found.append(self._part(level, context, i, place >> shift & full))
        return found[0] if len(found) == 1 else tuple(map(max, *found))

    def _part(self, level: int, context: Context, value: int, mask: int) -> Vector:
        """The bound that one live value gives (-1: none of them)."""
        key = level, id(context), value, mask
        if key not in self._parts:
            if level < context.bottom:
                more, rows = context.more + self._offsets[level], self._base[level]
            else:
                more, rows = context.offset, context.rows[level - context.bottom]
            if value < 0:
                best = rows[""][0]
            else:
                name, table = self._tracked[level][value]
                best = rows[name][self._bounding(table, mask)].max(axis=0)
            self._parts[key] = tuple((best + more).tolist())
        return self._parts[key]

    def _bounding(self, table: TensorTable, mask: int) -> list[int]:
        """Placements from which all of `mask` is free (any of them bounds it), and "anywhere"."""
        key = id(table), mask
        if key not in self._bounds:
            self._bounds[key] = [i for i in range(len(table.placements)) if table.closure(i) & mask == mask] + [len(table.placements)]
        return self._bounds[key]

    def _context(self, uses: tuple[Use, ...]) -> Context:
        """The table that knows the placements of the parameters that are live."""
        if uses not in self._contexts:
            self._contexts[uses] = self._contextual(uses)
        return self._contexts[uses]

    def _lives(self) -> None:
        """Per level, of the parameters that are live the next use (level, slot) and their bits, and of the other values their bits."""
        self._live: list[tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]]] = []
        self._tracked: list[list[tuple[str, TensorTable]]] = []
        following: dict[str, tuple[int, int]] = {}
        for level in range(len(self.problem.steps) - 1, -1, -1):
            step = self.problem.steps[level]
            following |= {name: (level, slot) for slot, name in enumerate(step.tensors)}
            stored = [(*following[n], shift, t.full) for n, t, shift in step.live if t.stored]
            self._live.append((stored, [(shift, t.full) for _, t, shift in step.live if not t.stored]))
            self._tracked.append([(n, t) for n, t, _ in step.live if not t.stored])
        self._live.reverse()
        self._tracked.reverse()

    # -- the dynamic program -----------------------------------------------------------------------------------------------------------------------

    def _contextual(self, uses: tuple[Use, ...]) -> Context:
        """From the last use backward. What the context adds soon is the same everywhere: from there on the least that it adds is a bound,
        because adding a constant to a table adds it to the table one step before."""
        if not uses:
            return Context(len(self._base), [], self._offsets[-1], self._offsets[-1])
        top, bottom = max(u.level for u in uses), min(u.level for u in uses)
        rows: list[Rows] = []
        level = top
        while True:
            mine: Rows = {}
            self._step(level, mine, rows[-1] if rows else self._base[top + 1], [u for u in uses if u.level == level])
            rows.append(mine)
            with np.errstate(invalid="ignore"):  # inf - inf: a placement from which nothing leads on adds nothing
                added = np.concatenate([np.where(np.isfinite(b), mine[n] - b, np.inf) for n, b in self._base[level].items()])
            added += self._offsets[top + 1] - self._offsets[level]
            more = added.min(axis=0)
            more = np.where(np.isfinite(more), more, 0.0)
            finite = np.where(np.isfinite(added), added, more)
            even = bool((finite.max(axis=0) - more <= 1e-12 * (1e-9 + self._base[level][""].max())).all())
            if level == 0 or (level <= bottom and even) or top - level >= DEEPEST:
                return Context(level, rows[::-1], self._offsets[top + 1], more if level <= bottom else np.zeros(len(self.weights)))
            level -= 1

    def _tabulate(self) -> None:
        """The general tables, from the last step backward."""
        steps = self.problem.steps
        repetition = _Repetition(steps)
        same: Names | None = None  # names one period later, where the tables after this step are those of one period later plus `delta`
        delta = self._offsets[-1]
        for level in range(len(steps) - 1, -1, -1):
            later = level + repetition.period[level]
            names = repetition.names(level)
            if names is not None and same is not None and repetition.continues(level, names, same) and self._first(level) == self._first(later):
                self._base[level] = {n: self._base[later][names.get(n, "")] for n in ("", *(n for n, t, _ in steps[level].live if not t.stored))}
                self._offsets[level] = self._offsets[later] + delta
                same = names
                continue
            self._step(level, self._base[level], self._base[level + 1], [])
            self._offsets[level] = self._offsets[level + 1]
            found = self._constant(level, later, names) if names is not None else None
            same, delta = (names, found) if found is not None else (None, delta)

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

    def _first(self, level: int) -> tuple[bool, ...]:
        """Per slot, whether it is a parameter used for the first time."""
        step = self.problem.steps[level]
        known = {n for n, _, _ in step.live}
        return tuple(bool(s.table.stored) and s.fixed is None and n not in known for n, s in zip(step.tensors, step.kind.slots, strict=True))

    def _step(self, level: int, rows: Rows, after: Rows, uses: list[Use]) -> None:
        step = self.problem.steps[level]
        weighted = self._weighted(step.kind, self._first(level))
        for use in uses:
            table = step.kind.slots[use.slot].table
            inside = list(bits(use.mask))
            cost = self._direct(table)[inside].min(axis=0)[: len(table.placements)]
            cost[inside] = 0.0
            weighted = Weighted(weighted.base + cost[weighted.needs[use.slot]], weighted.needs, weighted.gives)
        then = np.broadcast_to(after[""], weighted.base.shape)
        for name, result, gives in zip(step.outputs, step.kind.results, weighted.gives, strict=True):
            if result.live:
                then = np.maximum(then, after[name][gives])
        rows[""] = (weighted.base + then).min(axis=0, keepdims=True)
        for name, table, _ in step.live:
            if not table.stored:
                rows[name] = self._value(step, name, table, weighted, then, after)

    def _value(self, step: Step, name: str, table: TensorTable, weighted: Weighted, then: Array, after: Rows) -> Array:
        if name not in step.tensors:
            return (weighted.base[None] + np.maximum(then[None], after[name][:, None])).min(axis=1)  # type: ignore[no-any-return]
        slot = step.tensors.index(name)
        needs = weighted.needs[slot]
        cost = weighted.base[None] + self._conversions(table)[:, needs]
        if step.kind.slots[slot].live:
            return (cost + np.maximum(then[None], after[name][self._afterwards(table)[:, needs]])).min(axis=1)  # type: ignore[no-any-return]
        return (cost + then[None]).min(axis=1)  # type: ignore[no-any-return]

    def _weighted(self, kind: StepClass, first: tuple[bool, ...]) -> Weighted:
        """`first`: slots that are parameters used for the first time here."""
        key = id(kind), first
        if key not in self._classes:
            base = []
            for choice, effect in zip(kind.choices, self.moves.effects(kind), strict=True):
                cost = self._weigh(effect)
                for slot, target in choice.needs:
                    part = kind.slots[slot]
                    if part.fixed == 0 or first[slot]:
                        found = [self._weigh(o.effect) for o in self.moves.options(part.table, 0, target, part.fixed != 0)]
                        cost = cost + (np.min(found, axis=0) if found else np.inf)
                base.append(cost)
            last = [dict(reversed(c.needs)) for c in kind.choices]  # one placement per slot; a second one can only cost more
            needs = tuple(np.array([n[i] for n in last]) for i in range(len(kind.slots)))
            gives = tuple(np.array([c.gives[i] for c in kind.choices]) for i in range(len(kind.results)))
            self._classes[key] = Weighted(np.array(base), needs, gives)
        return self._classes[key]

    def _weigh(self, effect: Effect) -> Array:
        total = np.array(effect.forward) + effect.backward
        for vector in (effect.forward_pre, effect.backward_pre):
            if vector is not None:
                total = total + vector
        return effect.const + self.weights @ total

    def _afterwards(self, table: TensorTable) -> Numbers:
        """(placement, target) -> the placement from which everything is free after the conversion, or "anywhere"."""
        if id(table) not in self._after:
            n = len(table.placements)
            closures = [table.closure(i) for i in range(n)]
            rows = [[p if closures[p] >> t & 1 else t if closures[t] & closures[p] == closures[p] else n for t in range(n)] for p in range(n)]
            self._after[id(table)] = np.array([*rows, [n] * n])
        return self._after[id(table)]

    def _conversions(self, table: TensorTable) -> Array:
        """(placement, target) -> the least weighted cost of a conversion from anything that is free from the placement; last row: nothing."""
        if id(table) not in self._converted:
            n = len(table.placements)
            direct = self._direct(table)[:, :n]
            rows = np.zeros((n + 1, n, len(self.weights)))
            for p in range(n):
                sources = [s for s in range(n) if table.closure(p) >> s & 1]
                rows[p] = direct[sources].min(axis=0)
                rows[p][sources] = 0.0
            self._converted[id(table)] = rows
        return self._converted[id(table)]

    def _direct(self, table: TensorTable) -> Array:
        """Least weighted cost over all paths between any two placements: every order of the axes, the cheapest edge on each."""
        if id(table) in self._directs:
            return self._directs[id(table)]
        size, axes, w = len(table.all_placements), len(self.problem.theory.mesh.axes), len(self.weights)
        edge = np.full((axes, size, size, w), np.inf)
        index = np.array(table.codes)
        for a in range(axes):
            for p, code in enumerate(table.codes):
                edge[a, p, p] = 0.0
                for state in range(index[:, a].max() + 1):
                    q = table.at_code.get(code[:a] + (state,) + code[a + 1 :])
                    if q is not None and q != p:
                        found = [self._weigh(self.moves.edge(e)) for e in table.edges(p, q)]
                        if found:
                            edge[a, p, q] = np.min(found, axis=0)
        lookup = np.full(index.max(axis=0) + 2, -1)
        lookup[tuple(index.T)] = np.arange(size)
        best = np.full((size, size, w), np.inf)
        for order in permutations(range(axes)):
            at = np.repeat(np.arange(size)[:, None], size, axis=1)
            cost = np.zeros((size, size, w))
            for a in order:
                codes = index[at]
                codes[:, :, a] = index[None, :, a]
                after = lookup[tuple(np.moveaxis(codes, 2, 0))]
                cost += np.where((at >= 0)[..., None] & (after >= 0)[..., None], edge[a][at, after], np.inf)
                at = after
            best = np.minimum(best, cost)
        self._directs[id(table)] = best + self._held(table) if self.moves.prices is not None else best
        return self._directs[id(table)]

    def _held(self, table: TensorTable) -> Array:
        """The price of what a conversion between two placements leaves in memory (a gathered parameter may be freed)."""
        states = [p.states for p in table.all_placements]
        prices = np.zeros((len(states), len(states), 1))
        if not table.parameter:
            of_target = [self.moves.price(table.held(q)) for q in table.all_placements]
            for p, source in enumerate(states):
                for q, target in enumerate(states):
                    if any(s != t and forward_collective(s, t) is not None for s, t in zip(source, target, strict=True)):
                        prices[p, q] = of_target[q]
        return prices


class _Repetition:
    """What of a sequence of steps is what, one period later."""

    def __init__(self, steps: tuple[Step, ...]):
        self.steps = steps
        self.period = periods([id(s.kind) for s in steps])
        self.uses: dict[str, list[int]] = {}
        for k, step in enumerate(steps):
            for name in step.tensors:
                self.uses.setdefault(name, []).append(k)

    def names(self, level: int) -> Names | None:
        """For every value that is live before `level`, the one that is used alike one period later; None if they are not alike."""
        period = self.period[level]
        if not period:
            return None
        there = {n: t for n, t, _ in self.steps[level + period].live}
        found = {name: other for name, table, _ in self.steps[level].live if there.get(other := self._later(name, level, period)) is table}
        return found if len(found) == len(self.steps[level].live) == len(there) == len(set(found.values())) else None

    def continues(self, level: int, names: Names, after: Names) -> bool:
        """Whether the step does with `names` what the step one period later does, given the names after it."""
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
