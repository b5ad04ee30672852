"""Balancing: the best ratios of a fixed program, by linear programming (HAP section 5).

    minimise   t(Q, B) = sum_i n_i (comm_i(B) + max_j comp_ij(B)) + synchronisation(B)          over B
    subject to sum_j sizes_j B_rj = 1, B >= 0      for every ratio row r            (`_solved`)
               memory_j(B) <= capacity_j           for every kind of devices j      (`_memory`)

B_rj is the share of row r on one device of kind j; i runs over the distinct phases, n_i is how often each occurs. Every term is a maximum of
pieces that are affine in B, so every maximum is one variable with one inequality per piece: a term of several pieces u_sj >= piece (`_value`), a
collective y >= piece on every kind (`_collectives`), a phase T_i >= sum of its terms on every kind (`_phases`). At an optimum all are tight.

In: the costs of a program's steps in order, the bytes of what it stores. Out: shares per row and kind. Invariant: `Objective.time` of a program at
any shares is the cost that the search gives it there, and the LP's optimum is `Objective.time` at its shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from hapx.cost.model import StepCost
from hapx.cost.table import Matrix, TermTable
from hapx.cost.terms import Piece, Shares, Term, Vector
from hapx.states import Cut, Row

Ratios = Mapping[Row, Vector]


@dataclass(frozen=True, slots=True)
class Phase:
    """What runs between two collectives that cut, in one direction: terms with how often each occurs."""

    terms: tuple[tuple[Term, int], ...]


@dataclass(frozen=True)
class Objective:
    """The cost of a program as a function of the shares: distinct phases and collectives with multiplicities, and memory."""

    kinds: int
    phases: tuple[tuple[Phase, int], ...]
    collectives: tuple[tuple[Term, int], ...]
    memory_terms: tuple[tuple[Term, int], ...]

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Every cut that anything depends on."""
        return tuple(dict.fromkeys(cut for term in self._terms() for cut in term.cuts))

    def _terms(self) -> Iterable[Term]:
        yield from (t for p, _ in self.phases for t, _ in p.terms)
        yield from (t for t, _ in (*self.collectives, *self.memory_terms))

    def time(self, shares: Shares) -> float:
        """Seconds per iteration."""
        table, maxima, _ = self._compiled
        return float(sum(n * (counts @ table.values(shares)).max(axis=1, initial=0.0).sum() for n, counts in maxima))

    def memory(self, shares: Shares) -> Vector:
        """Bytes per kind."""
        table, _, counts = self._compiled
        return counts @ table.values(shares)

    @cached_property
    def _compiled(self) -> tuple[TermTable, list[tuple[int, Matrix]], Vector]:
        """The terms; per multiplicity the maxima over kinds that occur so often, as counts of terms (maxima x terms); counts in memory."""
        table = TermTable(self.kinds)
        for term in self._terms():
            table.number(term)
        sums = [(n, phase.terms) for phase, n in self.phases] + [(n, ((term, 1),)) for term, n in self.collectives]
        maxima: dict[int, list[Vector]] = {}
        for n, terms in sums:
            maxima.setdefault(n, []).append(_counts(table, terms))
        return table, [(n, np.array(rows)) for n, rows in maxima.items()], _counts(table, self.memory_terms)


def _counts(table: TermTable, terms: Iterable[tuple[Term, int]]) -> Vector:
    counts = np.zeros(len(table.terms))
    for term, n in terms:
        counts[table.number(term)] += n
    return counts


def objective(steps: Sequence[StepCost], storage: Sequence[Term], kinds: int) -> Objective:
    """The phases of a program: in each direction, a collective that cuts begins a new one; communications come before the step's compute."""
    forward: list[list[Term]] = [[]]
    backward: list[list[Term]] = [[]]
    numbers: dict[int, int] = {}
    unique: list[Term] = []
    collectives: Counter[int] = Counter()
    memory: Counter[int] = Counter()

    def number(term: Term) -> int:
        """In order of appearance: addresses would order the rows of the linear program anew in every run."""
        if id(term) not in numbers:
            numbers[id(term)] = len(unique)
            unique.append(term)
        return numbers[id(term)]

    for step in steps:
        for c in step.communication:
            running = forward if c.direction == "forward" else backward
            if c.direction == "synchronise":
                collectives[number(c.term)] += 1
            elif c.cuts:
                collectives[number(c.term)] += 1
                running.append([])
            else:
                running[-1].append(c.term)
        if step.forward is not None:
            forward[-1].append(step.forward)
        if step.backward is not None:
            backward[-1].append(step.backward)
        if step.memory is not None:
            memory[number(step.memory)] += 1
    for term in storage:
        memory[number(term)] += 1
    phases = Counter(tuple(sorted(Counter(map(number, terms)).items())) for terms in (*forward, *backward) if terms)
    named = tuple((Phase(tuple((unique[i], m) for i, m in phase)), n) for phase, n in phases.items())
    return Objective(kinds, named, tuple((unique[i], n) for i, n in collectives.items()), tuple((unique[i], n) for i, n in memory.items()))


def balance(goal: Objective, sizes: Sequence[int], capacity: Vector | None, start: Ratios, fixed: Shares | None = None) -> dict[Row, Vector] | None:
    """The best ratios of a program: per row, the share of one device of each kind. None if it fits at no ratios.

    sizes: devices per kind. capacity: bytes per kind (None: not limited). start: ratios now; rows that the program does not use keep them.
    fixed: cuts whose shares may not change (per kind)."""
    rows = tuple(dict.fromkeys(c.row for c in goal.cuts if c not in (fixed or {})))
    if not rows:
        fits = capacity is None or bool((goal.memory(fixed or {}) <= capacity * (1 + 1e-9)).all())
        return dict(start) if fits else None
    return _Model(goal, tuple(sizes), rows, fixed or {}, start).solve(capacity)


def least_full(goal: Objective, sizes: Sequence[int], limits: Vector, start: Ratios, fixed: Shares | None = None) -> dict[Row, Vector]:
    """The ratios at which memory takes the least part of a device kind's limit (bytes), the largest over kinds. Else as `balance`."""
    rows = tuple(dict.fromkeys(c.row for c in goal.cuts if c not in (fixed or {})))
    if not rows:
        return dict(start)
    found = _Model(goal, tuple(sizes), rows, fixed or {}, start).least_full(limits)
    assert found is not None, "any ratios will do"
    return found


class _Model:
    """Sparse rows of the linear program. Times are in units of the time at the start, so that the solver's tolerances fit."""

    def __init__(self, goal: Objective, sizes: tuple[int, ...], rows: tuple[Row, ...], fixed: Shares, start: Ratios):
        self.goal, self.sizes, self.rows, self.fixed, self.start = goal, sizes, rows, fixed, start
        self.kinds = len(sizes)
        self.column = {(r, j): i * self.kinds + j for i, r in enumerate(rows) for j in range(self.kinds)}
        self.cost: list[float] = [0.0] * len(self.column)
        self.entries: list[tuple[int, int, float]] = []
        self.upper: list[float] = []
        self._values: dict[tuple[int, int], int] = {}
        shares = {c: start[c.row] for c in goal.cuts if c not in fixed} | {c: np.asarray(fixed[c]) for c in goal.cuts if c in fixed}
        self.scale = goal.time(shares) or 1.0

    def solve(self, capacity: Vector | None) -> dict[Row, Vector] | None:
        self._collectives()
        self._phases()
        if capacity is not None:
            self._memory(capacity)
        return self._solved()

    def least_full(self, limits: Vector) -> dict[Row, Vector] | None:
        """See `hapx.balancer.lp.least_full`."""
        top = self._variable(1.0)
        for kind in range(self.kinds):
            self._values = {}  # memory is in units of this kind's limit
            self._at_least(top, *self._sum(self.goal.memory_terms, kind, float(limits[kind])))
        return self._solved()

    def _solved(self) -> dict[Row, Vector] | None:
        height, more = len(self.upper), len(self.rows)
        equal = [(height + i, self.column[r, j], float(n)) for i, r in enumerate(self.rows) for j, n in enumerate(self.sizes)]
        i, j, v = zip(*self.entries, *equal, strict=True)
        matrix = coo_array((v, (i, j)), shape=(height + more, len(self.cost))).tocsc()
        lower, upper = np.array([-np.inf] * height + [1.0] * more), np.array(self.upper + [1.0] * more)
        # HiGHS, as `linprog` has it, which takes half as long again to hand over a program of this size
        result = milp(np.array(self.cost), constraints=LinearConstraint(matrix, lower, upper), bounds=Bounds(0, np.inf))
        if result.status == 2:
            return None
        assert result.status == 0, f"the linear program has a solution: {result.message}"
        found = dict(self.start)
        for r in self.rows:
            share = np.clip([result.x[self.column[r, j]] for j in range(self.kinds)], 0.0, None)
            found[r] = share / (share * self.sizes).sum()
        return found

    def _variable(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def _affine(self, piece: Piece, kind: int, factor: float) -> tuple[float, list[tuple[int, float]]]:
        """factor * piece on a kind as (constant, coefficients)."""
        const, coefficients = piece.const[kind], []
        for cut, slope in piece.slopes:
            if cut in self.fixed:
                const += slope[kind] * float(self.fixed[cut][kind])
            else:
                coefficients.append((self.column[cut.row, kind], factor * slope[kind]))
        return factor * const, coefficients

    def _at_least(self, variable: int, const: float, coefficients: Iterable[tuple[int, float]]) -> None:
        """A row: variable >= const + coefficients."""
        row = len(self.upper)
        self.entries.append((row, variable, -1.0))
        self.entries += [(row, c, v) for c, v in coefficients]
        self.upper.append(-const)

    def _value(self, term: Term, kind: int, scale: float) -> tuple[float, list[tuple[int, float]]]:
        """A term on a kind, / scale: affine itself if it is one piece, else a variable above its pieces."""
        if len(term.pieces) == 1:
            return self._affine(term.pieces[0], kind, 1 / scale)
        key = id(term), kind
        if key not in self._values:
            variable = self._values[key] = self._variable(0.0)
            for piece in term.pieces:
                self._at_least(variable, *self._affine(piece, kind, 1 / scale))
        return 0.0, [(self._values[key], 1.0)]

    def _collectives(self) -> None:
        for term, n in self.goal.collectives:
            top = self._variable(float(n))
            for kind in range(self.kinds):
                for piece in term.pieces:
                    self._at_least(top, *self._affine(piece, kind, 1 / self.scale))

    def _phases(self) -> None:
        for phase, n in self.goal.phases:
            top = self._variable(float(n))
            for kind in range(self.kinds):
                self._at_least(top, *self._sum(phase.terms, kind, self.scale))

    def _memory(self, capacity: Vector) -> None:
        for kind in range(self.kinds):
            self._values = {}  # memory is in units of this kind's capacity
            const, coefficients = self._sum(self.goal.memory_terms, kind, float(capacity[kind]))
            row = len(self.upper)
            self.upper.append(1.0 - const)
            self.entries += [(row, c, v) for c, v in coefficients]

    def _sum(self, terms: Sequence[tuple[Term, int]], kind: int, scale: float) -> tuple[float, list[tuple[int, float]]]:
        total, sums = 0.0, Counter[int]()
        for term, n in terms:
            const, coefficients = self._value(term, kind, scale)
            total += n * const
            for column, value in coefficients:
                sums[column] += n * value  # type: ignore[assignment]
        return total, list(sums.items())
