"""Synthesis: the cheapest program of a theory at given ratios, by A* (HAP section 4.3).

In: a Problem, the share of every cut per device kind, memory limits. Out: a `Solution`: a Program whose cost

    t(Q, B) = sum over phases (comm_i(B) + max_j comp_ij(B)) + synchronisation

is least among all programs that fit, with the costs of its steps for the balancer.

A partial program: for each live value the placements it is available in (one int, closed under free conversions), the pending compute per kind,
forward and backward, and the memory per kind. a dominates b when its placements include b's, memory_a <= memory_b on every kind, and
cost_a + max_j(pf_a - pf_b)_j + max_j(pb_a - pb_b)_j <= cost_b.

Memory is first left out. If the program found then fits, it is the answer, because a relaxation's optimum that is feasible is optimal; only
otherwise memory becomes part of the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import add, le, sub

from hapx.cost.model import CostModel, StepCost
from hapx.cost.terms import Shares, Term
from hapx.errors import InsufficientMemoryError, PlanError
from hapx.plan import Communication, Instruction, Program, ProgramKey, Triple
from hapx.restriction import AUTO, Restriction
from hapx.states import REPLICATED, Placement, Property
from hapx.synth.astar import Statistics, beam, search
from hapx.synth.bound import Bound
from hapx.synth.effect import Vector, compose, plus
from hapx.synth.moves import Move, Moves
from hapx.synth.problem import Problem, build, sources
from hapx.synth.tables import TensorTable, Values, numbered
from hapx.theory.triple import Theory

BEAMS = (1, 4)
BUDGET = 12_000  # partial programs that one search generates at most, once it has a program


@dataclass(frozen=True)
class Solution:
    """`steps`: what each instruction costs, in program order; `storage`: bytes of every parameter and buffer as stored; `cost`: seconds;
    `memory`: bytes per kind."""

    program: Program
    storage_of: Mapping[str, Placement]
    steps: tuple[StepCost, ...]
    storage: tuple[Term, ...]
    cost: float
    memory: Vector
    statistics: Statistics


class State:
    """A partial program; see the module."""

    __slots__ = ("backward", "cost", "dead", "estimate", "forward", "level", "memory", "move", "parent", "place")

    def __init__(self, level: int, place: int, cost: float, forward: Vector, backward: Vector, memory: Vector, estimate: float,
                 parent: State | None, move: Move | None):  # fmt: skip
        self.level, self.place, self.cost, self.forward, self.backward, self.memory = level, place, cost, forward, backward, memory
        self.estimate, self.parent, self.move, self.dead = estimate, parent, move, False


class Synthesis:
    """The domain of the A* search: partial programs of a problem at given shares. limits: bytes per kind, or None if they cannot bind."""

    def __init__(self, problem: Problem, shares: Shares, limits: Vector | None, *, capacity: Vector | None = None):
        self.problem, self.limits = problem, limits
        self.moves = Moves(problem, shares, limits is not None, capacity)
        self.bound = Bound(problem, self.moves)
        self.depth = len(problem.steps)
        self.zero: Vector = (0.0,) * problem.terms.kinds
        self.fixed_memory = self.zero
        for name, placement in problem.unused.items():
            kept = next(k for k in problem.tables[name].stored if problem.tables[name].placements[k.placement] == placement)
            self.fixed_memory = plus(self.fixed_memory, self.moves.values[kept.step.memory])
        self._expanded: list[dict[int, list[tuple[Move, int]]]] = [{} for _ in problem.steps]
        self._left = self._least_memory() if limits is not None else []

    def start(self) -> State | None:
        if self.limits is not None and not all(map(le, map(add, self.fixed_memory, self._left[0]), self.limits)):
            return None
        rest = self.bound.rest(0, self.problem.start)
        estimate = self.bound.estimate(0.0, self.zero, self.zero, rest)
        return State(0, self.problem.start, 0.0, self.zero, self.zero, self.fixed_memory, estimate, None, None)

    def successors(self, state: State, limit: float) -> Iterator[State]:
        step = self.problem.steps[state.level]
        level, kept = state.level + 1, state.place & step.keep
        forward, backward, bound, limits, last = state.forward, state.backward, self.bound, self.limits, level == self.depth
        for move, made in self._moves(state.level, state.place & step.reads):
            effect = move.effect
            memory = tuple(map(add, state.memory, effect.memory))
            if limits is not None and not all(map(le, map(add, memory, self._left[level]), limits)):
                continue
            cost = state.cost + effect.const
            if effect.forward_pre is None:
                pf = tuple(map(add, forward, effect.forward))
            else:
                cost += max(map(add, forward, effect.forward_pre))
                pf = effect.forward
            if effect.backward_pre is None:
                pb = tuple(map(add, backward, effect.backward))
            else:
                cost += max(map(add, backward, effect.backward_pre))
                pb = effect.backward
            if cost >= limit:
                continue
            place = kept | made
            estimate = cost + max(pf) + max(pb) if last else bound.estimate(cost, pf, pb, bound.rest(level, place))
            if estimate < limit:
                yield State(level, place, cost, pf, pb, memory, estimate, state, move)

    def dominates(self, a: State, b: State) -> bool:
        if self.limits is not None and not all(map(le, a.memory, b.memory)):
            return False
        more = max(map(sub, a.forward, b.forward)) + max(map(sub, a.backward, b.backward))
        return bool(a.cost + more <= b.cost + 1e-13 * b.estimate)

    def _moves(self, level: int, mask: int) -> list[tuple[Move, int]]:
        """The moves of a step, and the bits of a partial program that they set."""
        known = self._expanded[level]
        if mask not in known:
            step, kind = self.problem.steps[level], self.problem.steps[level].kind
            masks = tuple(s.fixed if s.fixed is not None else mask >> at & s.table.full for s, at in zip(kind.slots, step.slot_shifts, strict=True))
            parts = [(o, s.table.full, at) for s, o, at in zip(kind.slots, kind.slot_offsets, step.slot_shifts, strict=True) if s.live]
            parts += [(o, r.table.full, at) for r, o, at in zip(kind.results, kind.result_offsets, step.result_shifts, strict=True) if r.live]
            known[mask] = [(m, sum((m.place >> o & full) << at for o, full, at in parts)) for m in self.moves.at(kind, masks)]
        return known[mask]

    def _least_memory(self) -> list[Vector]:
        """Per level, bytes per kind that the steps from there on need at least."""
        left = [self.zero]
        for step in reversed(self.problem.steps):
            new = {n for n, _, _ in step.live}
            masks = []
            for name, slot in zip(step.tensors, step.kind.slots, strict=True):
                first = bool(slot.table.stored) and name not in new
                masks.append(slot.fixed if slot.fixed is not None else 0 if first else slot.table.full)
            needed = [m.effect.memory for m in self.moves.at(step.kind, tuple(masks))]
            left.append(plus(left[-1], tuple(map(min, zip(*needed, strict=True))) if needed else self.zero))
        return left[::-1]


def solve(problem: Problem, shares: Shares, limits: Vector | None, key: ProgramKey) -> Solution:
    """The cheapest program at these shares. limits: bytes per kind (None: not limited).

    Raises InsufficientMemoryError when no program fits."""
    statistics = Statistics()
    relaxed = Synthesis(problem, shares, None)
    best = _search(relaxed, statistics)
    if best is None:
        raise _stuck(problem)
    domain = relaxed
    if limits is not None and not all(map(le, best.memory, limits)):
        domain = Synthesis(problem, shares, limits)
        best = _search(domain, statistics)
        if best is None:
            least = least_memory(problem, shares, limits, key)
            statistics.add(least.statistics)
            if least.cost > 1:
                raise _too_small(problem, least, limits)
            return _timed(problem, shares, least, statistics)
    return _solution(domain, best, key, statistics)


def least_memory(problem: Problem, shares: Shares, limits: Vector, key: ProgramKey) -> Solution:
    """The program whose fullest device kind is least full; its `cost` is that fraction of the limit, not seconds."""
    statistics = Statistics()
    domain = Synthesis(problem, shares, None, capacity=limits)
    best = _search(domain, statistics)
    if best is None:
        raise _stuck(problem)
    return _solution(domain, best, key, statistics)


def synthesize(theory: Theory, costs: CostModel, shares: Shares, limits: Vector | None = None, given: Mapping[str, Placement] | None = None,
               restriction: Restriction = AUTO) -> Solution:  # fmt: skip
    """The cheapest program of a theory at given shares: builds the problem and solves it once."""
    return solve(build(theory, costs, restriction, given), shares, limits, program_key(theory))


def program_key(theory: Theory) -> ProgramKey:
    graph = theory.graph
    return ProgramKey(graph.mode, tuple(graph.refs[n].shape for n in graph.input_names))


def _search(domain: Synthesis, statistics: Statistics) -> State | None:
    """First good programs, one after the other, so that most of what the search would generate is above the best of them."""
    best: State | None = None
    for width in BEAMS:
        best = beam(domain, width, statistics, best)
    return search(domain, statistics, best, BUDGET)


def _stuck(problem: Problem) -> PlanError:
    return PlanError(f"restriction {problem.restriction.name!r} allows no program", where="planner", hint="allow more splits, forms or storage")


def _timed(problem: Problem, shares: Shares, least: Solution, statistics: Statistics) -> Solution:
    """The program of least memory with its cost in seconds (the search for a faster one that fits ended with its budget)."""
    values = Values(problem.terms, shares)
    total = values.effect(numbered(problem.terms, StepCost(None, None, (), None)))
    for step in least.steps:
        total = compose(total, values.effect(numbered(problem.terms, step)))
    seconds = total.const + sum(max(v) for v in (total.forward_pre, total.forward, total.backward_pre, total.backward) if v is not None)
    return replace(least, cost=seconds, statistics=statistics)


def _too_small(problem: Problem, least: Solution, limits: Vector) -> InsufficientMemoryError:
    kind = max(range(len(limits)), key=lambda j: least.memory[j] / limits[j])
    mesh, axis = problem.theory.mesh, problem.theory.mesh.uneven or 0
    devices = [d for d in mesh.devices if mesh.coordinates(d)[axis] in problem.costs.kinds[kind]]
    needs, has = least.memory[kind] / 2**30, limits[kind] / 2**30
    return InsufficientMemoryError(
        f"no program fits: the smallest needs {needs:.2f} GiB there and {has:.2f} GiB is free; {needs - has:.2f} GiB lack",
        where=f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}",
        hint="use a smaller batch, more devices, an optimizer with less state, strategy='auto' with sharded storage, or rematerialisation",
    )


# -- the program -----------------------------------------------------------------------------------------------------------------------------------


def _solution(domain: Synthesis, last: State, key: ProgramKey, statistics: Statistics) -> Solution:
    moves: list[Move] = []
    state: State | None = last
    while state is not None:
        if state.move is not None:
            moves.append(state.move)
        state = state.parent
    writer = _Writer(domain.problem)
    for level, move in enumerate(reversed(moves)):
        writer.step(level, move)
    program = Program(key, domain.problem.theory.mesh, tuple(writer.instructions), writer.needs(), tuple(writer.gives))
    storage_of = dict(writer.storage)
    return Solution(program, storage_of, tuple(writer.steps), tuple(writer.kept), last.estimate, last.memory, statistics)


class _Writer:
    """Turns moves into instructions, with every placement and conversion explicit."""

    def __init__(self, problem: Problem):
        self.problem, self.graph = problem, problem.theory.graph
        self.instructions: list[Instruction] = []
        self.steps: list[StepCost] = []
        self.gives: list[Property] = []
        whole = Placement((REPLICATED,) * len(problem.theory.mesh.axes))
        self.have: dict[str, dict[int, None]] = {r.name: {problem.tables[r.name].number[whole]: None} for r in sources(self.graph)}
        self.storage: dict[str, Placement] = dict(problem.unused)
        tables = problem.tables
        self.kept: list[Term] = [k.memory for n, p in problem.unused.items() for k in tables[n].stored if tables[n].placements[k.placement] == p]

    def step(self, level: int, move: Move) -> None:
        step = self.problem.steps[level]
        for use in move.uses:
            name = step.tensors[use.slot]
            table = self.problem.tables[name]
            if use.kept is not None:
                self.storage[name] = table.placements[use.kept.placement]
                self.kept.append(use.kept.memory)
                self.steps.append(use.kept.cost)
                self.have[name] = {use.kept.placement: None}
            if use.conversion is not None:
                self._free(name, table, use.conversion.source)
                if use.target not in self.have[name]:
                    self._convert(name, table, use.conversion.source, use.target, use.conversion.path)
                    self.steps.append(use.conversion.cost)
            self._free(name, table, use.target)
        if level >= self.problem.num_nodes:
            (use,) = move.uses
            self.gives.append(Property(step.tensors[0], self.problem.tables[step.tensors[0]].placements[use.target]))
            return
        triple = self._triple(level, move)
        self.instructions.append(Instruction(triple))
        if move.choice.cost is not None:
            self.steps.append(move.choice.cost)
        for p in triple.post:
            self.have[p.tensor] = {self.problem.tables[p.tensor].number[p.placement]: None}

    def _triple(self, level: int, move: Move) -> Triple:
        return self.problem.triples[level][move.choice.index]

    def _free(self, name: str, table: TensorTable, target: int) -> None:
        """Make a placement that is free from one that is there."""
        have = self.have[name]
        if target not in have:
            source = next(s for s in have if table.closure(s) >> target & 1)
            self._convert(name, table, source, target, table.free_path(source, target))

    def _convert(self, name: str, table: TensorTable, source: int, target: int, path: tuple[Communication, ...]) -> None:
        pre, post = Property(name, table.placements[source]), Property(name, table.placements[target])
        self.instructions.append(Instruction(Triple(None, (pre,), (post,), path)))
        self.have[name][target] = None

    def needs(self) -> tuple[Property, ...]:
        """Parameters and buffers as stored, inputs and constants whole."""
        whole = Placement((REPLICATED,) * len(self.problem.theory.mesh.axes))
        given = {r.name: whole for r in sources(self.graph)} | self.storage
        return tuple(Property(name, given[name]) for name in self.graph.refs if name in given)
