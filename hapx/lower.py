"""Program -> Plan: a candidate of the planner as data that the runtime, the report and the verifier read.

In: a program, its lengths and costs. Out: a Plan of one stage, or a plan with one more program. Invariant: memory and shares are those of the exact
integer lengths of every single device, not of device kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from hapx.cluster.spec import ClusterSpec
from hapx.cost.liveness import all_in_flight, peak
from hapx.cost.model import CostModel
from hapx.cost.terms import Vector
from hapx.ir import Graph, Kind, OpCall
from hapx.layout import Lengths, local_shape
from hapx.plan import VERSION, Copy, Mesh, Plan, Program, ProgramKey, Stage, Storage
from hapx.restriction import Restriction
from hapx.states import Cut, Placement, Row, Sharded
from hapx.theory.triple import Theory


@dataclass(frozen=True)
class Candidate:
    """A program with integer lengths. cost: seconds by the additive cost model; time: by the simulator, once it is ranked. gap: by how
    much, relative, the search that found the program may have missed the cheapest one (at the ratios that it was given)."""

    theory: Theory
    costs: CostModel
    program: Program
    storage_of: Mapping[str, Placement]
    lengths: Lengths
    shares: Mapping[Row, tuple[float, ...]]
    cost: float
    time: float
    gap: float = 0.0

    @property
    def mesh(self) -> Mesh:
        return self.theory.mesh

    @cached_property
    def exact(self) -> CostModel:
        """The cost model at the lengths."""
        return self.costs.at_lengths(self.lengths)

    @cached_property
    def peak(self) -> Vector:
        """The most bytes that are allocated, per kind of `exact`."""
        return _peak(self, self.exact)

    @property
    def fits(self) -> bool:
        """Whether the peak fits on every kind of devices."""
        return bool((self.peak <= np.asarray(self.exact.capacity) * (1 + 1e-9)).all())

    def proven(self, bound: float) -> Candidate:
        """With the gap that a lower bound of the cost of all programs leaves."""
        return replace(self, gap=max(0.0, 1 - bound / self.cost))


def at_their_best(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The cheapest candidate of every program, the cheapest program first."""
    found = sorted(candidates, key=attrgetter("cost"))
    of_program = {id(c.program): c for c in reversed(found)}
    return sorted(of_program.values(), key=attrgetter("cost"))


def lower(
    best: Candidate, graph: Graph, key: ProgramKey, cluster: ClusterSpec, rule: Restriction, precision: str, optimizer: str,
    statistics: Mapping[str, Any],
) -> Plan:  # fmt: skip
    """The plan of a candidate."""
    lengths = used_lengths(best)
    rows = {cut.row for cut in lengths}
    shares = {row: own for row, own in best.shares.items() if row in rows or row.kind == "compute"}
    stage = Stage(best.mesh.devices, {key: (0, len(graph.nodes))}, best.mesh, shares, {key: lengths}, {key: best.program})
    return Plan(
        VERSION, {key: graph}, cluster, rule, storage(graph, best.storage_of), (stage,), {}, best.time,
        memory(best), work_shares(best), precision, optimizer, {**statistics, "cost": best.cost, "mesh": best.mesh.name},
    )  # fmt: skip


def extended(plan: Plan, best: Candidate, graph: Graph, key: ProgramKey, statistics: Mapping[str, Any]) -> Plan:
    """The plan with one more program on its stage."""
    stage = plan.stages[0]
    nodes = {**stage.nodes, key: (0, len(graph.nodes))}
    longer = replace(stage, nodes=nodes, lengths={**stage.lengths, key: used_lengths(best)}, programs={**stage.programs, key: best.program})
    known = {s.name for s in plan.storage}
    more = tuple(s for s in storage(graph, best.storage_of) if s.name not in known)
    counted = {**plan.statistics, "programs": (*plan.statistics.get("programs", ()), {**statistics, "iteration_time": best.time})}
    return replace(plan, graphs={**plan.graphs, key: graph}, storage=plan.storage + more, stages=(longer,), statistics=counted)


def storage(graph: Graph, placements: Mapping[str, Placement]) -> tuple[Storage, ...]:
    """How each parameter and buffer is kept, in the graph's order."""
    aliases = {group[0]: group[1:] for group in graph.tied}
    refs = [r for r in graph.refs.values() if r.kind in (Kind.PARAMETER, Kind.BUFFER)]
    return tuple(Storage(r.name, tuple(aliases.get(r.name, ())), (Copy(0, placements[r.name]),)) for r in refs)


def used_lengths(best: Candidate) -> dict[Cut, tuple[int, ...]]:
    """Lengths of the uneven cuts that the program or its storage mentions."""
    found = {c for p in _placements(best) for s in p.states if isinstance(s, Sharded) and (c := s.cut) in best.lengths}
    return {cut: own for cut, own in best.lengths.items() if cut in found}


def _placements(best: Candidate) -> Iterable[Placement]:
    for instruction in best.program.instructions:
        for p in (*instruction.triple.pre, *instruction.triple.post):
            yield p.placement
    yield from best.storage_of.values()


def memory(best: Candidate, otherwise: CostModel | None = None) -> tuple[int, ...]:
    """Predicted peak bytes of every device of the cluster, by number. otherwise: with other numbers of micro-batches than its own."""
    total = best.peak if otherwise is None else _peak(best, otherwise)
    return tuple(round(x) for x in _per_device(best.mesh, otherwise or best.exact, total))


def _peak(best: Candidate, exact: CostModel) -> Vector:
    return all_in_flight(peak(best.program, best.theory.graph, exact, best.storage_of), exact)


def work_shares(best: Candidate) -> tuple[float, ...]:
    """Share of the batch per device; where the program does not split the batch, the share of the divided work."""
    return _batch_shares(best) or _divided_work(best, best.exact)


def _batch_shares(best: Candidate) -> tuple[float, ...] | None:
    """Shares of the first input that is split along its batch; devices that hold the same part share it."""
    graph, mesh, batch = best.theory.graph, best.mesh, best.theory.batch
    for instruction in best.program.instructions:
        for p in instruction.triple.pre:
            ref = graph.refs[p.tensor]
            if ref.kind is Kind.INPUT and any(isinstance(s, Sharded) and (p.tensor, s) in batch for s in p.placement.states):
                split = [s.dim for s in p.placement.states if isinstance(s, Sharded) and (p.tensor, s) in batch][0]
                own = [local_shape(ref.shape, p.placement, mesh.sizes, best.lengths, mesh.coordinates(d))[split] for d in sorted(mesh.devices)]
                return tuple(n / sum(own) for n in own)
    return None


def _divided_work(best: Candidate, exact: CostModel) -> tuple[float, ...]:
    """Parts of the instructions whose work is divided among devices (of all instructions if none is), by the seconds that they take forward."""
    triples = [i.triple for i in best.program.instructions if isinstance(i.triple.body, OpCall)]
    own: Vector = np.zeros(len(exact.kinds))
    for t in [t for t in triples if any(c is not None for c in t.work)] or triples:
        seconds = exact.instruction(t).forward
        part = exact.view.work(t.work or (None,) * len(best.mesh.axes), [p.placement for p in (*t.pre, *t.post)])
        own += (float(seconds.at({}).max()) if seconds is not None else 0.0) * np.array(part.const)
    of_device = _per_device(best.mesh, exact, own if own.any() else np.ones(len(exact.kinds)))
    return tuple(x / sum(of_device) for x in of_device)


def _per_device(mesh: Mesh, exact: CostModel, values: Vector) -> list[float]:
    """Values per kind (coordinates of the uneven axis) as values per device of the cluster."""
    axis = mesh.uneven
    kind_of = {c: k for k, kind in enumerate(exact.kinds) for c in kind}
    return [float(values[kind_of[mesh.coordinates(d)[axis]] if axis is not None else 0]) for d in sorted(mesh.devices)]
