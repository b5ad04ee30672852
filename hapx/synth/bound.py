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

A value that is available in several placements, none of which gives the others for free, has no row. Its bound is the same recursion from its next
use, with the cheapest conversion from any of them; otherwise a search is drawn to paying for a second placement, which would hide what comes.

Invariant: never more than the true cost of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hapx.synth.effect import Effect, Vector
from hapx.synth.moves import Moves
from hapx.synth.problem import Problem, Step, StepClass
from hapx.synth.tables import TensorTable, bits

DEEPEST = 60  # levels that a context is followed back at most
Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Rows = dict[str, Array]


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
    """`rows` from level `bottom` on; below, the general table and `more` (per weight)."""

    bottom: int
    rows: list[Rows]
    more: Array
    uses: tuple[Use, ...]


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
        self._base: list[Rows] = [{} for _ in problem.steps] + [{"": np.zeros((1, len(self.weights)))}]
        for level in range(len(problem.steps) - 1, -1, -1):
            self._step(level, self._base[level], self._base[level + 1], [])
        self._contexts: dict[tuple[Use, ...], Context] = {}
        self._at: list[dict[int, Vector]] = [{} for _ in range(len(problem.steps) + 1)]
        self._bounds: dict[tuple[int, int], list[int]] = {}
        self._known: dict[tuple[tuple[Use, ...], int], tuple[Weighted, Array]] = {}
        self._several: dict[tuple[tuple[Use, ...], str, int, int], list[Array]] = {}

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
        context = self._context(level, place)
        more, rows = (context.more, self._base[level]) if level < context.bottom else (0.0, context.rows[level - context.bottom])
        best = rows[""][0]
        for name, table, shift in self.problem.steps[level].live:
            if not table.stored:
                mask = place >> shift & table.full
                best = np.maximum(best, self._available(context, level, name, table, mask))
        return tuple((best + more).tolist())

    def _available(self, context: Context, level: int, name: str, table: TensorTable, mask: int) -> Array:
        """The bound by one value that is available in `mask` (below the context's bottom without what the context adds)."""
        bounding = self._bounding(table, mask)
        best: Array = self._rows(context, level)[name][bounding].max(axis=0)
        if all(table.closure(i) != mask for i in bounding[:-1]):
            best = np.maximum(best, self._set(context, level, name, table, mask))
        return best

    def _set(self, context: Context, level: int, name: str, table: TensorTable, mask: int) -> Array:
        """By the recursion of the module from the next use of the value, backward."""
        steps = self.problem.steps
        use = next(k for k in range(level, len(steps)) if name in steps[k].tensors)
        found = self._several.setdefault((context.uses, name, mask, use), [])
        while len(found) <= use - level:
            at = use - len(found)
            weighted, then = self._weighted_then(context, at)
            if found:
                value = (weighted.base + np.maximum(then, found[-1])).min(axis=0)
            else:
                value = self._use_of_set(context, at, steps[at].tensors.index(name), table, mask, weighted, then)
            found.append(value - context.more if at == context.bottom - 1 else value)
        return found[use - level]

    def _use_of_set(self, context: Context, level: int, slot: int, table: TensorTable, mask: int, weighted: Weighted, then: Array) -> Array:
        needs, step = weighted.needs[slot], self.problem.steps[level]
        cost = weighted.base + self._conversions(table)[list(bits(mask))].min(axis=0)[needs]
        if not step.kind.slots[slot].live:
            return (cost + then).min(axis=0)  # type: ignore[no-any-return]
        after: dict[int, Array] = {}
        for target in dict.fromkeys(needs.tolist()):
            more = mask | table.closure(target)
            if more == mask:
                after[target] = self._available(context, level + 1, step.tensors[slot], table, mask)
            else:
                after[target] = self._rows(context, level + 1)[step.tensors[slot]][self._bounding(table, more)].max(axis=0)
        return (cost + np.maximum(then, np.array([after[t] for t in needs.tolist()]))).min(axis=0)  # type: ignore[no-any-return]

    def _rows(self, context: Context, level: int) -> Rows:
        inside = 0 <= level - context.bottom < len(context.rows)
        return context.rows[level - context.bottom] if inside else self._base[level]

    def _weighted_then(self, context: Context, level: int) -> tuple[Weighted, Array]:
        """Of a step in a context: its choices, and the bound of what follows after each, without the values that are live."""
        key = context.uses, level
        if key not in self._known:
            inside = context.bottom <= level < context.bottom + len(context.rows)
            uses = [u for u in context.uses if inside and u.level == level]
            self._known[key] = self._choices(level, self._rows(context, level + 1), uses)
        return self._known[key]

    def _bounding(self, table: TensorTable, mask: int) -> list[int]:
        """Placements from which all of `mask` is free (any of them bounds it), and "anywhere"."""
        key = id(table), mask
        if key not in self._bounds:
            self._bounds[key] = [i for i in range(len(table.placements)) if table.closure(i) & mask == mask] + [len(table.placements)]
        return self._bounds[key]

    def _context(self, level: int, place: int) -> Context:
        """The table that knows the placements of the parameters that are live."""
        steps = self.problem.steps
        uses = []
        for name, table, shift in steps[level].live:
            if table.stored:
                at = next(k for k in range(level, len(steps)) if name in steps[k].tensors)
                uses.append(Use(at, steps[at].tensors.index(name), place >> shift & table.full))
        known = tuple(uses)
        if known not in self._contexts:
            self._contexts[known] = self._contextual(known)
        return self._contexts[known]

    # -- the dynamic program -----------------------------------------------------------------------------------------------------------------------

    def _contextual(self, uses: tuple[Use, ...]) -> Context:
        """From the last use backward. What the context adds soon is the same everywhere: from there on the least that it adds is a bound,
        because adding a constant to a table adds it to the table one step before."""
        if not uses:
            return Context(0, self._base, np.zeros(len(self.weights)), uses)
        top, bottom = max(u.level for u in uses), min(u.level for u in uses)
        rows: list[Rows] = []
        level = top
        while True:
            mine: Rows = {}
            self._step(level, mine, rows[-1] if rows else self._base[top + 1], [u for u in uses if u.level == level])
            rows.append(mine)
            with np.errstate(invalid="ignore"):  # inf - inf: a placement from which nothing leads on adds nothing
                added = np.concatenate([np.where(np.isfinite(b), mine[n] - b, np.inf) for n, b in self._base[level].items()])
            more = added.min(axis=0)
            more = np.where(np.isfinite(more), more, 0.0)
            finite = np.where(np.isfinite(added), added, more)
            even = bool((finite.max(axis=0) - more <= 1e-12 * (1e-9 + self._base[level][""].max())).all())
            if level == 0 or (level <= bottom and even) or top - level >= DEEPEST:
                return Context(level, rows[::-1], more if level <= bottom else np.zeros(len(self.weights)), uses)
            level -= 1

    def _step(self, level: int, rows: Rows, after: Rows, uses: list[Use]) -> None:
        step = self.problem.steps[level]
        weighted, then = self._choices(level, after, uses)
        rows[""] = (weighted.base + then).min(axis=0, keepdims=True)
        for name, table, _ in step.live:
            if not table.stored:
                rows[name] = self._value(step, name, table, weighted, then, after)

    def _choices(self, level: int, after: Rows, uses: list[Use]) -> tuple[Weighted, Array]:
        """The step's choices with its `uses` priced; after each, the bound by its results alone."""
        step = self.problem.steps[level]
        known = {n for n, _, _ in step.live}
        first = tuple(bool(s.table.stored) and s.fixed is None and n not in known for n, s in zip(step.tensors, step.kind.slots, strict=True))
        weighted = self._weighted(step.kind, first)
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
        return weighted, then

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
        self._directs[id(table)] = best
        return best
