"""From the moves of a search to a program, with every placement and conversion explicit.

In: the last partial program of a search. Out: a `Solution`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from hapx.cost.model import StepCost
from hapx.cost.terms import Term
from hapx.plan import Communication, Instruction, Program, ProgramKey, Triple
from hapx.states import REPLICATED, Placement, Property
from hapx.synth.astar import Statistics
from hapx.synth.domain import State, moves_of
from hapx.synth.effect import Vector
from hapx.synth.moves import Move
from hapx.synth.problem import Problem
from hapx.synth.tables import TensorTable


@dataclass(frozen=True)
class Solution:
    """`steps`: what each instruction costs, in program order; `storage`: bytes of every parameter and buffer as stored; `cost`: seconds;
    `memory`: bytes per kind. `choices`: equal for equal programs of a problem. `prices`: of memory, seconds per byte and kind, at which the program
    was found (None: memory did not bind)."""

    program: Program
    storage_of: Mapping[str, Placement]
    steps: tuple[StepCost, ...]
    storage: tuple[Term, ...]
    cost: float
    memory: Vector
    statistics: Statistics
    choices: tuple[int, ...]
    prices: Vector | None = None


def choices_of(moves: Sequence[Move]) -> tuple[int, ...]:
    """Equal for equal programs of a problem, at whatever shares and prices they were found."""
    chosen = {id(move): move.does for move in {id(move): move for move in moves}.values()}  # alike steps share their moves
    return tuple(chain.from_iterable([chosen[id(move)] for move in moves]))


def solution(problem: Problem, last: State, cost: float, key: ProgramKey, statistics: Statistics, prices: Vector | None = None) -> Solution:
    """The program of a complete state. Equal choices are written once: searches at other shares often end with the same program."""
    moves = moves_of(last)
    choices = choices_of(moves)
    if (choices, key) not in problem.written:
        writer = _Writer(problem)
        for level, move in enumerate(moves):
            writer.step(level, move)
        program = Program(key, problem.theory.mesh, tuple(writer.instructions), writer.needs(), tuple(writer.gives))
        problem.written[choices, key] = program, dict(writer.storage), tuple(writer.steps), tuple(writer.kept)
    program, storage_of, steps, kept = problem.written[choices, key]
    return Solution(program, storage_of, steps, kept, cost, last.memory, statistics, choices, prices)


class _Writer:
    """Turns moves into instructions, with every placement and conversion explicit."""

    def __init__(self, problem: Problem):
        self.problem, self.graph = problem, problem.theory.graph
        self.instructions: list[Instruction] = []
        self.steps: list[StepCost] = []
        # by the graph's outputs; of those that may leave in several ways it is found later
        self.gives = [Property(o.tensor, problem.tables[o.tensor].placements[0]) for o in self.graph.outputs]
        whole = Placement((REPLICATED,) * len(problem.theory.mesh.axes))
        self.have: dict[str, dict[int, None]] = {r.name: {problem.tables[r.name].number[whole]: None} for r in self.graph.sources}
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
            number = self.problem.outputs[level - self.problem.num_nodes]
            self.gives[number] = Property(step.tensors[0], self.problem.tables[step.tensors[0]].placements[use.target])
            return
        choice = move.choice
        made = self.problem.instructions.get((level, choice.index))
        if made is None:
            made = self._made((level, choice.index), (id(step.kind), choice.index), self.problem.triples[level][choice.index])
        self.instructions.append(made)
        if choice.cost is not None:
            self.steps.append(choice.cost)
        for name, given in zip(step.outputs, choice.gives, strict=True):
            self.have[name] = {given: None}

    def _free(self, name: str, table: TensorTable, target: int) -> None:
        """Make a placement that is free from one that is there."""
        have = self.have[name]
        if target not in have:
            source = next(s for s in have if table.closure(s) >> target & 1)
            self._convert(name, table, source, target, table.free_path(source, target))

    def _convert(self, name: str, table: TensorTable, source: int, target: int, path: tuple[Communication, ...]) -> None:
        made = self.problem.instructions.get((name, source, target, id(path)))  # of a path that the instruction holds
        if made is None:
            before, after = (self.problem.theory.names.of(name, table.placements[p]) for p in (source, target))
            kind = id(table), source, target, id(path)
            made = self._made((name, source, target, id(path)), kind, Triple(None, (before,), (after,), path))
        self.instructions.append(made)
        self.have[name][target] = None

    def _made(self, key: object, kind: object, triple: Triple) -> Instruction:
        """An instruction that is made once for all programs; those of a kind cost the same."""
        made = self.problem.instructions[key] = Instruction(triple)
        first = self.problem.firsts.setdefault(kind, made)
        self.problem.costs.has_form_of(triple, first.triple)
        return made

    def needs(self) -> tuple[Property, ...]:
        """Parameters and buffers as stored, inputs and constants whole."""
        whole = Placement((REPLICATED,) * len(self.problem.theory.mesh.axes))
        given = {r.name: whole for r in self.graph.sources} | self.storage
        return tuple(Property(name, given[name]) for name in self.graph.refs if name in given)
