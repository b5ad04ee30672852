"""A lower bound of the rest of a program, for the A* search.

For any weights w_j >= 0 with sum 1, max_j x_j >= sum_j w_j x_j. So if every maximum over device kinds is replaced by the weighted sum, the cost of
a program becomes additive and the pending vectors leave the state:

    cost(rest) >= max over w of ( sum_j w_j (pf_j + pb_j) + H_w(rest) ).

H_w is relaxed once more, so that it can be tabulated: of everything that is live, only one value keeps its available placements; all others may be
in any placement for nothing. H_w(k, v, mask) is then a dynamic program over the steps k, backward: the cheapest move, plus what is left for v or for
one of the move's results, whichever is more. A state's bound is the largest over its live values. With w the unit vectors this contains the bound
max_j (pending_j + sum over the rest of the least comp_j).

Invariant: never more than the true cost of the rest.
"""

from __future__ import annotations

from operator import add

from hapx.synth.effect import Effect, Vector
from hapx.synth.moves import Move, Moves
from hapx.synth.problem import Problem, Step, StepClass

Key = tuple[int, str, int]  # step, value ("" for none), mask


class Bound:
    def __init__(self, problem: Problem, moves: Moves):
        self.problem, self.moves = problem, moves
        self.kinds = problem.terms.kinds
        n = self.kinds
        units: list[Vector] = [tuple(float(i == j) for i in range(n)) for j in range(n)]
        self.weights: list[Vector] = units + ([(1.0 / n,) * n] if n > 1 else [])
        self.none = (0.0,) * len(self.weights)
        self._table: dict[Key, Vector] = {}
        self._at: list[dict[int, Vector]] = [{} for _ in range(len(problem.steps) + 1)]
        self._moves: dict[tuple[int, tuple[int, ...]], list[tuple[Vector, Move]]] = {}

    def rest(self, level: int, place: int) -> Vector:
        """Per weight vector, a lower bound of the cost of steps `level` and later when `place` is available."""
        known = self._at[level]
        if place not in known:
            known[place] = self._rest(level, place)
        return known[place]

    def estimate(self, cost: float, forward: Vector, backward: Vector, rest: Vector) -> float:
        """Cost plus the bound of the rest with these pending vectors."""
        pending = tuple(map(add, forward, backward))
        best = max(map(add, pending, rest))  # zip stops before the uniform weights
        if self.kinds > 1:
            best = max(best, sum(pending) / self.kinds + rest[-1])
        return cost + best

    def _rest(self, level: int, place: int) -> Vector:
        if level == len(self.problem.steps):
            return self.none
        live = [(name, place >> shift & table.full) for name, table, shift in self.problem.steps[level].live if not table.parameter]
        found = [self._value((level, name, mask)) for name, mask in live] or [self._value((level, "", 0))]
        return found[0] if len(found) == 1 else tuple(map(max, *found))

    def _value(self, wanted: Key) -> Vector:
        """The dynamic program, on demand, without recursion (graphs are deeper than Python's stack)."""
        table, stack = self._table, [wanted]
        while stack:
            key = stack[-1]
            if key in table:
                stack.pop()
                continue
            branches = self._branches(key)
            missing = [next_key for _, nexts in branches for next_key in nexts if next_key not in table]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            best = (float("inf"),) * len(self.weights)
            for cost, nexts in branches:
                rest = [table[n] for n in nexts]
                top = rest[0] if len(rest) == 1 else tuple(map(max, *rest)) if rest else self.none
                best = tuple(map(min, best, map(add, cost, top)))
            table[key] = best
        return table[wanted]

    def _branches(self, key: Key) -> list[tuple[Vector, list[Key]]]:
        """The relaxed moves: (weighted costs, the states of which one value is known afterwards)."""
        level, name, mask = key
        step, after = self.problem.steps[level], level + 1
        result: dict[tuple[Key, ...], Vector] = {}
        for cost, move in self._priced(step, name, mask):
            nexts = [(after, o, move.place >> at & r.table.full) for o, r, at in zip(step.outputs, step.kind.results, step.kind.result_offsets, strict=True) if r.live]
            if name in step.tensors:
                i = step.tensors.index(name)
                if step.kind.slots[i].live:
                    nexts.append((after, name, move.place >> step.kind.slot_offsets[i] & step.kind.slots[i].table.full))
            elif name:
                nexts.append((after, name, mask))
            if not nexts and after < len(self.problem.steps):
                nexts.append((after, "", 0))
            states = tuple(nexts)
            result[states] = tuple(map(min, result[states], cost)) if states in result else cost
        return [(cost, list(states)) for states, cost in result.items()]

    def _priced(self, step: Step, name: str, mask: int) -> list[tuple[Vector, Move]]:
        masks = tuple(self._mask(step.kind, i, t, step.slot_shifts[i], name, mask) for i, t in enumerate(step.tensors))
        masks = tuple(0 if m and self._first_use(step, i) else m for i, m in enumerate(masks))
        key = id(step.kind), masks
        if key not in self._moves:
            self._moves[key] = [(tuple(_weighted(m.effect, w) for w in self.weights), m) for m in self.moves.at(step.kind, masks)]
        return self._moves[key]

    def _mask(self, kind: StepClass, index: int, tensor: str, shift: int, name: str, mask: int) -> int:
        slot = kind.slots[index]
        if slot.fixed is not None:
            return slot.fixed
        return mask if tensor == name else slot.table.full

    def _first_use(self, step: Step, index: int) -> bool:
        """Whether the slot is a parameter that is used here for the first time (it is tracked, but not live before the step)."""
        return step.slot_shifts[index] >= 0 and bool(step.kind.slots[index].table.stored) and all(n != step.tensors[index] for n, _, _ in step.live)


def _weighted(effect: Effect, weights: Vector) -> float:
    total = effect.const
    for vector in (effect.forward_pre, effect.forward, effect.backward_pre, effect.backward):
        if vector is not None:
            total += sum(w * x for w, x in zip(weights, vector, strict=True))
    return total
