"""Plans of several stages: the planner's programs for parts of a graph on parts of a cluster, put together as a pipeline.

In: the graph of one micro-batch, where it is cut, the devices of every part, the number of micro-batches. Out: a Plan whose stages run one after
another. Every stage is planned as a program of its own (`hapx.planner.plan_spmd`) on the cluster of its devices, for the seconds of a micro-batch and
its part of what happens once per iteration, with as many micro-batches in memory as its place in the pipeline asks for.

Invariant: the programs of the stages compute what the graph computes; a parameter that several stages use is stored by each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hapx.cost.model import CostModel
from hapx.errors import PlanError
from hapx.ir import Graph, Kind
from hapx.layout import Lengths
from hapx.lower import Candidate, used_lengths
from hapx.parts import crossing, part
from hapx.plan import VERSION, Copy, Mesh, Plan, Program, ProgramKey, Schedule, Stage, Storage
from hapx.planner import plan_spmd
from hapx.predict import Staged
from hapx.schedules import Crossing, Style, check, crossings_between, groups_of, make
from hapx.setting import Counters, Setting
from hapx.simulate import StageTimes, stage_times
from hapx.states import Placement, Row, Sharded
from hapx.theory.derive import derive


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
    return [piece_of(candidate, nodes, tuple(sorted(devices))) for candidate in plan_spmd(setting, counters)]


def piece_of(candidate: Candidate, nodes: tuple[int, int], devices: tuple[int, ...]) -> Piece:
    """A planned program as a stage."""
    exact = candidate.costs.changed(lengths=candidate.lengths, repeats=1, in_flight=1)
    return Piece(nodes, devices, candidate.theory.graph, candidate, stage_times(candidate.program, candidate.theory.graph, exact))


def agree(one: Piece, other: Piece) -> bool:
    """Whether two stages can be on the same devices, which keep one piece of every parameter: both store alike what both use."""
    both = one.candidate.storage_of.keys() & other.candidate.storage_of.keys()
    return not both or (one.mesh == other.mesh and all(_kept(one, name) == _kept(other, name) for name in both))


def _kept(piece: Piece, name: str) -> tuple[Placement, list[tuple[int, ...] | None]]:
    """Where a stage stores a parameter, and how many units on each device (None along an even axis)."""
    own = piece.candidate
    at = own.storage_of[name]
    return at, [own.lengths.get(state.cut) for state in at.states if isinstance(state, Sharded)]


def extend_piece(plan: Plan, number: int, graph: Graph, nodes: tuple[int, int], asked: Setting, counters: Counters) -> Piece:
    """A further program for a stage of a plan: parameters stay where they are, in the lengths they have."""
    stage = plan.stages[number]
    local = sorted(stage.devices)
    mesh = replace(stage.mesh, devices=tuple(local.index(d) for d in stage.mesh.devices))
    own = part(graph, *nodes)
    given = {s.name: c.placement for s in plan.storage for c in s.copies if c.stage == number and s.name in own.refs}
    setting = replace(asked, graph=own, cluster=asked.cluster.part(local)).storing(given, stage.lengths[plan.first], stage.shares)
    best = plan_spmd(setting, counters, [mesh])[0] if own.nodes else _nothing(setting, mesh, stage.shares)
    return piece_of(best, nodes, tuple(local))


def _nothing(setting: Setting, mesh: Mesh, shares: Mapping[Row, tuple[float, ...]]) -> Candidate:
    """Of a stage that has nothing to do: it was dropout, say, and in evaluation there is none."""
    theory = derive(setting.graph, mesh)
    costs = CostModel(theory, setting.cluster, setting.precision, setting.optimizer, setting.key.mode, repeats=setting.repeats)
    return Candidate(theory, costs, Program(setting.key, mesh, (), (), ()), {}, {}, shares, 0.0, 0.0)


def extend_stages(plan: Plan, key: ProgramKey, graph: Graph, parts: Callable[[int], Graph]) -> Plan:
    """A plan of several stages with a further program (another batch size, or evaluation): parameters stay where they are, in the lengths they have.
    parts: gives the graph of one of so many micro-batches."""
    if not graph.batch:
        raise PlanError("the batch is empty", where="HAP", allowed="in a pipeline, batches of at least one sample", hint="leave out empty batches")
    micro = parts(_like_before(graph.batch, plan.schedules[plan.first].micro_batches))
    assert micro.micro_batches is not None
    rule = replace(plan.restriction, storage="auto") if plan.restriction.storage == "as-used" else plan.restriction
    asked = Setting(micro, key, plan.cluster, replace(rule, segments="none"), plan.precision, plan.optimizer, repeats=micro.micro_batches.number)
    counters = Counters()
    pieces = [extend_piece(plan, i, micro, nodes, asked, counters) for i, nodes in enumerate(cuts_like(plan, micro))]
    stages = tuple(
        replace(
            stage, nodes={**stage.nodes, key: piece.nodes}, lengths={**stage.lengths, key: used_lengths(piece.candidate)},
            programs={**stage.programs, key: piece.program},
        )
        for stage, piece in zip(plan.stages, pieces, strict=True)
    )  # fmt: skip
    known = {s.name for s in plan.storage}
    more = tuple(s for s in _storage(micro, pieces) if s.name not in known)
    longer = replace(plan, graphs={**plan.graphs, key: micro}, storage=plan.storage + more, stages=stages)
    style = plan.schedules[plan.first].name
    return replace(longer, schedules={**plan.schedules, key: scheduled(longer, key, style)})


def _like_before(batch: int, before: Sequence[int]) -> int:
    """Micro-batches of another batch: as many as there were, or nearly, but none larger than those, for which memory may not suffice."""
    numbers = [n for n in range(1, batch + 1) if batch % n == 0 and batch // n <= max(before)]
    return max((n for n in numbers if n <= len(before)), default=numbers[0])


def cuts_like(plan: Plan, graph: Graph) -> list[tuple[int, int]]:
    """Where a graph of the same model is cut so that every stage has the parameters that its nodes use; where this leaves a choice, as the plan's
    first graph is, or else where the fewest bytes cross. Raises PlanError where no cut does it."""
    homes = {name: {c.stage for c in s.copies} for name, s in plan.storage_of.items()}
    wanted = [[homes[n] for n in node.call.refs() if n in homes] for node in graph.nodes]
    places = _counterparts(plan.graphs[plan.first], graph)
    cuts = [0]
    for stage in range(1, len(plan.stages)):
        # a node that only earlier stages can run comes before the cut, one that only later stages can run after it
        first = max([i + 1 for i, found in enumerate(wanted) for h in found if max(h) < stage], default=0)
        last = min([i for i, found in enumerate(wanted) for h in found if min(h) >= stage], default=len(graph.nodes))
        first = max(first, cuts[-1])
        if first > last:
            raise PlanError(
                f"the model uses parameters of stage {stage} before those of stage {stage - 1}", where=f"{graph.mode} program",
                hint="another call order than the planned one cannot run on the same stages",
            )  # fmt: skip
        like = places[plan.stages[stage].nodes[plan.first][0]]
        cuts.append(like if first <= like <= last else min(range(first, last + 1), key=lambda c: sum(r.bytes for r in crossing(graph, c))))
    return list(pairwise([*cuts, len(graph.nodes)]))


def _counterparts(known: Graph, graph: Graph) -> list[int]:
    """For every node of a known graph of the same model, and behind its last one: the node that does the same at the same place in the model, for the
    same time there; where there is none, that of the next node that has one."""
    at: dict[tuple[Any, ...], int] = {}
    for i, named in enumerate(_named(graph)):
        at[named] = i
    places = [len(graph.nodes)]
    for named in reversed(_named(known)):
        places.append(at.get(named, places[-1]))
    return places[::-1]


def _named(graph: Graph) -> list[tuple[Any, ...]]:
    """Of every node what it is and where, and how many such ones are before it."""
    seen: Counter[tuple[Any, ...]] = Counter()
    found = []
    for node in graph.nodes:
        key = node.call.target, node.module, node.source
        found.append((*key, seen[key]))
        seen[key] += 1
    return found


def assemble(pieces: Sequence[Piece], asked: Setting, style: Style | str, statistics: Mapping[str, Any]) -> Plan:
    """The plan of a pipeline with a schedule of the given style. Devices without a stage are idle."""
    plan = joined(pieces, asked, statistics)
    return predicted(Staged(replace(plan, schedules={asked.key: scheduled(plan, asked.key, style)})))


def joined(pieces: Sequence[Piece], asked: Setting, statistics: Mapping[str, Any]) -> Plan:
    """The stages of a pipeline, which nobody has scheduled yet."""
    key, graph = asked.key, _with_blocks_of(pieces, asked.graph)
    stages = []
    for piece in pieces:
        best = piece.candidate
        lengths: Lengths = used_lengths(best)
        rows = {cut.row for cut in lengths}
        chosen: dict[Row, tuple[float, ...]] = {row: s for row, s in best.shares.items() if row in rows or row.kind == "compute"}
        stages.append(Stage(piece.devices, {key: piece.nodes}, piece.mesh, chosen, {key: lengths}, {key: piece.program}))
    none = (0,) * asked.cluster.num_devices
    return Plan(
        VERSION, {key: graph}, asked.cluster, asked.rule, _storage(graph, pieces), tuple(stages), {}, 0.0, none, none,
        asked.precision, asked.optimizer, statistics,
    )  # fmt: skip


def predicted(staged: Staged) -> Plan:
    """The plan with what it is predicted to do."""
    seconds, held, shares = staged.predictions
    return replace(staged.plan, iteration_time=seconds, memory=held, shares=shares)


def _with_blocks_of(pieces: Sequence[Piece], graph: Graph) -> Graph:
    """The graph in which exactly those blocks are computed again in backward that the stages compute again."""
    own = [replace(r, start=r.start + p.graph.first, stop=r.stop + p.graph.first) for p in pieces for r in p.graph.regions if r.chosen]
    given = [r for r in graph.regions if not r.chosen]
    return replace(graph, regions=tuple(sorted([*given, *own], key=lambda r: (r.start, -r.stop, r.kind))))


def scheduled(plan: Plan, key: ProgramKey, style: Style | str) -> Schedule:
    """A schedule for a program of a plan, checked."""
    return checked(plan, key, drafted(plan, key, style))


def drafted(plan: Plan, key: ProgramKey, style: Style | str, most: int | None = None) -> Schedule:
    """A schedule as it is made, to be simulated: the one that is chosen is to be `checked`. most: micro-batches, where a part of the iteration is
    enough."""
    graph = plan.graphs[key]
    assert graph.micro_batches is not None, "a graph of micro-batches"
    number = graph.micro_batches.number
    sizes = (graph.batch,) * (number if most is None else min(number, most))
    return make(style if key.mode == "train" else "forward", groups_of(plan), _crossings(plan, key), sizes, plan.ties)


def checked(plan: Plan, key: ProgramKey, schedule: Schedule) -> Schedule:
    """The schedule, which is one for that program of a plan. Raises PlanError where it is not."""
    check(schedule, groups_of(plan), _crossings(plan, key), plan.ties)
    return schedule


def _crossings(plan: Plan, key: ProgramKey) -> tuple[Crossing, ...]:
    return crossings_between(plan.boundaries(key), plan.graphs[key].refs, key.mode == "train")


def _storage(graph: Graph, pieces: Sequence[Piece]) -> tuple[Storage, ...]:
    """How each parameter and buffer is kept, in the graph's order, by every stage that uses it."""
    aliases = {group[0]: group[1:] for group in graph.tied}
    placed: dict[str, list[Copy]] = {}
    for i, piece in enumerate(pieces):
        for name, placement in piece.candidate.storage_of.items():
            placed.setdefault(name, []).append(Copy(i, placement))
    refs = [r for r in graph.refs.values() if r.kind in (Kind.PARAMETER, Kind.BUFFER)]
    return tuple(Storage(r.name, tuple(aliases.get(r.name, ())), tuple(placed[r.name])) for r in refs)
