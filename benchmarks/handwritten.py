"""From a table of cuts to a program: what people write by hand when they know how each parameter is cut.

In: a theory, one `CutTable` per mesh axis. Out: a program that passes `replay`, and how parameters are stored. There is no search and no cost: nodes
are visited in order, and each takes the triple that agrees with the tables, moves the fewest operands, and otherwise splits samples on axes
that are for samples. A sum that a cut parameter leaves is all-reduced at once, as Megatron's `g` does.

Raises PlanError for a node that no triple of the tables runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.cuts import CutTable, Part
from hapx.errors import PlanError
from hapx.ir import Kind, Node, OpCall, TensorRef
from hapx.plan import Communication, Instruction, Program, ProgramKey, Triple
from hapx.states import INVARIANT, REPLICATED, Invariant, Partial, Placement, Property, Replicated, Sharded, State
from hapx.theory.conversion import direct_paths
from hapx.theory.factors import gathered
from hapx.theory.replay import replay
from hapx.theory.triple import Theory
from hapx.transposes import backward_collective, forward_collective

# which state is taken where several move nothing: parameters whose gradients are summed after backward are Replicated on a "batch" axis
LIKED: Mapping[str, Mapping[type, int]] = {
    "batch": {Sharded: 1, Replicated: 1, Partial: 2, Invariant: 3},
    "whole": {Invariant: 0, Replicated: 1, Sharded: 2, Partial: 3},
}


def write(theory: Theory, tables: Sequence[CutTable], key: ProgramKey) -> tuple[Program, dict[str, Placement]]:
    """The program of the tables (one per axis), and how parameters and buffers are stored."""
    assert len(tables) == len(theory.mesh.axes), "one table per axis"
    writer = _Writer(theory, tuple(tables))
    for index in range(len(theory.graph.nodes)):
        writer.node(index)
    gives = []
    for output in theory.graph.outputs:
        target = theory.outputs[output.tensor][0]
        writer.bring(output.tensor, target)
        gives.append(Property(output.tensor, target))
    given = writer.sources | writer.storage
    needs = tuple(Property(n, given[n]) for n in writer.graph.refs if n in given)
    program = Program(key, theory.mesh, tuple(writer.instructions), needs, tuple(dict.fromkeys(gives)))
    replay(program, theory, writer.storage)
    return program, writer.storage


@dataclass
class _Writer:
    """`have`: placements in which each tensor is there; `sources`: inputs and constants, whole; `storage`: of parameters and buffers."""

    theory: Theory
    tables: tuple[CutTable, ...]
    have: dict[str, list[Placement]] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph = self.theory.graph
        whole = Placement((REPLICATED,) * len(self.tables))
        kinds = (Kind.INPUT, Kind.CONSTANT)
        self.sources = {r.name: whole for r in self.graph.refs.values() if r.kind in kinds and r.name not in self.graph.producer}
        self.storage = {name: self._stored(self.graph.refs[name]) for name in self.theory.stored}
        self.have = {name: [placement] for name, placement in (self.sources | self.storage).items()}

    def _stored(self, ref: TensorRef) -> Placement:
        """Cut parameters as they are cut; whole ones whole, or in shards, as the table says."""

        def fits(state: State, table: CutTable) -> bool:
            part = table.part(ref.name)
            if part is not None:
                return _is(state, part) and not _only_kept(state)
            in_shards = table.storage != "used" and ref.kind is Kind.PARAMETER and ref.size >= table.threshold
            return _in_shards(state) if in_shards else not isinstance(state, Sharded)

        options = self.theory.stored[ref.name]
        fitting = [p for p in options if all(map(fits, p.states, self.tables))]
        if not fitting:  # fewer rows than devices: whole
            fitting = [p for p in options if not any(isinstance(s, Sharded) for s in p.states)]
        return min(fitting, key=_units)

    # -- nodes -------------------------------------------------------------------------------------------------------------------------------

    def node(self, index: int) -> None:
        """Appends the node in the way of the tables, with the conversions that it needs."""
        node = self.graph.nodes[index]
        allowed = [t for t in self.theory.triples[index] if self._agrees(t, node)]
        if not allowed:
            raise PlanError("no triple agrees with the cut tables", where=f"node {index}, {node}")
        triple = min(allowed, key=self._key)
        for p in triple.pre:
            self.bring(p.tensor, p.placement)
        self.instructions.append(Instruction(triple))
        for p in triple.post:
            self.have[p.tensor] = [p.placement]
            self._sum_up(p)

    def _agrees(self, triple: Triple, node: Node) -> bool:
        """Whether parameters and marked values are cut as the tables say, and only chosen weights send their factors."""
        assert isinstance(triple.body, OpCall)
        weight = node.call.get("weight")
        if gathered(triple.body) is not None and not (weight is not None and all(weight.name in t.factors for t in self.tables)):
            return False
        if gathered(triple.body) is None and weight is not None and any(weight.name in t.factors for t in self.tables):
            return False
        for axis, table in enumerate(self.tables):
            for p in triple.pre:
                if self.graph.refs[p.tensor].kind is Kind.PARAMETER and not _cut_as(p.placement.states[axis], table.part(p.tensor)):
                    return False
            part = table.value(node.source) if node.outputs[0].requires_grad else None
            if part is not None and not _is(triple.post[0].placement.states[axis], part):
                return False
        return True

    def _key(self, triple: Triple) -> tuple[int, int, int, int]:
        """Least moved, then most split by samples, then the states that are liked, then the coarsest cuts."""
        moved = sum(self._moves(p) for p in dict.fromkeys(triple.pre))
        split, liked = 0, 0
        for p in dict.fromkeys((*triple.pre, *triple.post)):
            for axis, state in enumerate(p.placement.states):
                table = self.tables[axis]
                if isinstance(state, Sharded) and table.activations == "batch" and (p.tensor, state) in self.theory.batch:
                    split += 1
                else:
                    liked += LIKED[table.activations][type(state)]
        return moved, -split, liked, sum(_units(p.placement) for p in (*triple.pre, *triple.post))

    def _moves(self, wanted: Property) -> int:
        """Communications, forward and backward, that bring an operand where it is wanted. A parameter's own do not count: they are the table's."""
        ref = self.graph.refs[wanted.tensor]
        if ref.kind is Kind.PARAMETER:
            return 0
        return min(_collectives(ref, have, wanted.placement) for have in self.have[wanted.tensor])

    # -- conversions -------------------------------------------------------------------------------------------------------------------------

    def bring(self, tensor: str, target: Placement) -> None:
        """Make a tensor available in `target`, from where that moves least."""
        ref, have = self.graph.refs[tensor], self.have[tensor]
        if target in have:
            return
        ways = [(s, p) for s in have for p in direct_paths(ref, self.theory.mesh, s, target, frozenset({"padded"}))]
        if not ways:
            raise PlanError(f"{ref} is in {', '.join(map(str, have))} and cannot come to {target}", where="cut tables")
        source, path = min(ways, key=lambda w: (_collectives(ref, w[0], target), _big(w[0], w[1])))
        if ref.kind is Kind.PARAMETER and self.graph.mode == "train":
            path = tuple(replace(c, free=self.tables[c.axis].storage == "free" and _gathers(c)) for c in path)
        self.instructions.append(Instruction(Triple(None, (Property(tensor, source),), (Property(tensor, target),), path)))
        have.append(target)

    def _sum_up(self, made: Property) -> None:
        """All-reduces what a cut parameter left as a sum."""
        ref = self.graph.refs[made.tensor]
        placement = made.placement
        for axis, table in enumerate(self.tables):
            if table.activations == "whole" and isinstance(placement.states[axis], Partial):
                placement = placement.with_state(axis, INVARIANT if ref.requires_grad else REPLICATED)
        if placement != made.placement:
            self.bring(made.tensor, placement)


def _is(state: State, part: Part) -> bool:
    return isinstance(state, Sharded) and (state.dim, state.outer) == (part.dim, part.outer)


def _cut_as(state: State, part: Part | None) -> bool:
    return not isinstance(state, Sharded) if part is None else _is(state, part)


def _in_shards(state: State) -> bool:
    """Dealt out by rows, for keeping only."""
    return isinstance(state, Sharded) and state.cut.row.kind != "compute" and (state.outer, state.inner) == (1, 1)


def _only_kept(state: State) -> bool:
    return isinstance(state, Sharded) and state.cut.row.kind == "storage"


def _units(placement: Placement) -> int:
    return sum(s.cut.units for s in placement.states if isinstance(s, Sharded))


def _gathers(c: Communication) -> bool:
    return c.gradient and isinstance(c.source, Sharded) and isinstance(c.target, Replicated)


def _collectives(ref: TensorRef, source: Placement, target: Placement) -> int:
    changed = [(s, t) for s, t in zip(source.states, target.states, strict=True) if s != t]
    forward = sum(forward_collective(s, t) is not None for s, t in changed)
    return forward + (sum(backward_collective(s, t) is not None for s, t in changed) if ref.requires_grad else 0)


def _big(source: Placement, path: Sequence[Communication]) -> int:
    """How many steps of a path move a tensor that an earlier step has made whole: shards are synchronised before they are gathered."""
    return sum(isinstance(c.source, Sharded) * (len(path) - k) for k, c in enumerate(path))
