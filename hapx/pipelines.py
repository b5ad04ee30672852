"""Plans of several stages: the planner's programs for parts of a graph on parts of a cluster, put together as a pipeline.

In: the graph of one micro-batch, where it is cut, the devices of every part, the number of micro-batches. Out: a Plan whose stages run one after
another. Every stage is planned as a program of its own (`hapx.planner.plan_spmd`) on the cluster of its devices, for the seconds of a micro-batch and
its part of what happens once per iteration, with as many micro-batches in memory as its place in the pipeline asks for.

Invariant: the programs of the stages compute what the graph computes; a parameter that several stages use is stored by each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hapx.alternation import Counters, Setting
from hapx.cost.model import CostModel
from hapx.ir import Graph, Kind
from hapx.layout import Lengths
from hapx.lower import Candidate, memory, used_lengths, work_shares
from hapx.parts import part
from hapx.plan import VERSION, Copy, Mesh, Plan, Program, Schedule, Stage, Storage
from hapx.planner import plan_spmd
from hapx.simulate import StageTimes, stage_times
from hapx.states import Row


@dataclass(frozen=True)
class Piece:
    """A stage before it is part of a plan. nodes: [start, stop) of the graph; candidate: planned on the cluster of `devices`, numbered from 0."""

    nodes: tuple[int, int]
    devices: tuple[int, ...]
    graph: Graph
    candidate: Candidate
    times: StageTimes

    @property
    def mesh(self) -> Mesh:
        own = self.candidate.mesh
        return replace(own, devices=tuple(self.devices[d] for d in own.devices))

    @property
    def program(self) -> Program:
        return replace(self.candidate.program, mesh=self.mesh)


def plan_piece(asked: Setting, nodes: tuple[int, int], devices: Sequence[int], counters: Counters) -> list[Piece]:
    """Stages for nodes [start, stop) of the graph of a setting on some devices of its cluster, best first. The setting's `repeats` and `in_flight`
    are those of the stage. Raises InsufficientMemoryError or PlanError where there is none."""
    graph = part(asked.graph, *nodes)
    setting = replace(asked, graph=graph, cluster=asked.cluster.part(sorted(devices)))
    found = []
    for candidate in plan_spmd(setting, counters):
        exact = replaced(candidate.costs.at_lengths(candidate.lengths), repeats=1, in_flight=1)
        found.append(
            Piece(nodes, tuple(sorted(devices)), candidate.theory.graph, candidate, stage_times(candidate.program, candidate.theory.graph, exact))
        )
    return found


def replaced(costs: CostModel, repeats: int, in_flight: int) -> CostModel:
    """The cost model for another number of micro-batches."""
    theory, lengths = costs.theory, costs.view.lengths
    return CostModel(theory, costs.cluster, costs.precision, costs.optimizer, costs.mode, lengths=lengths, repeats=repeats, in_flight=in_flight)


def assemble(pieces: Sequence[Piece], asked: Setting, schedule: Schedule, iteration_time: float, statistics: Mapping[str, Any]) -> Plan:
    """The plan of a pipeline. Devices without a stage are idle."""
    key, graph = asked.key, asked.graph
    stages, total = [], [0] * asked.cluster.num_devices
    shares = [0.0] * asked.cluster.num_devices
    work = [p.times.micro * sum(asked.cluster.type_of(d).speed(asked.precision) for d in p.devices) for p in pieces]
    for piece, own in zip(pieces, work, strict=True):
        best = piece.candidate
        lengths: Lengths = used_lengths(best)
        rows = {cut.row for cut in lengths}
        chosen: dict[Row, tuple[float, ...]] = {row: s for row, s in best.shares.items() if row in rows or row.kind == "compute"}
        stages.append(Stage(piece.devices, {key: piece.nodes}, piece.mesh, chosen, {key: lengths}, {key: piece.program}))
        exact = best.costs.at_lengths(best.lengths)
        for d, size, share in zip(piece.devices, memory(best, exact), work_shares(best, exact), strict=True):
            total[d] += size
            shares[d] += share * own / sum(work)
    return Plan(
        VERSION, {key: graph}, asked.cluster, asked.rule, _storage(graph, pieces), tuple(stages), {key: schedule}, iteration_time,
        tuple(total), tuple(shares), asked.precision, asked.optimizer, statistics,
    )  # fmt: skip


def _storage(graph: Graph, pieces: Sequence[Piece]) -> tuple[Storage, ...]:
    """How each parameter and buffer is kept, in the graph's order, by every stage that uses it."""
    aliases = {group[0]: group[1:] for group in graph.tied}
    placed: dict[str, list[Copy]] = {}
    for i, piece in enumerate(pieces):
        for name, placement in piece.candidate.storage_of.items():
            placed.setdefault(name, []).append(Copy(i, placement))
    refs = [r for r in graph.refs.values() if r.kind in (Kind.PARAMETER, Kind.BUFFER)]
    return tuple(Storage(r.name, tuple(aliases.get(r.name, ())), tuple(placed[r.name])) for r in refs)
