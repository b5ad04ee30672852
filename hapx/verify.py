"""Verification of a whole plan: every program is replayed, every number that must agree is compared. Needs no model."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose

from hapx.errors import PlanError
from hapx.graph.segments import graph_hash
from hapx.ir import Graph, Kind
from hapx.plan import VERSION, Communication, LocalBlock, LocalIndices, LocalOffset, LocalShape, Plan, Program, ProgramKey, Stage
from hapx.states import Cut, Placement, Sharded
from hapx.theory.derive import derive
from hapx.theory.replay import replay


def verify(plan: Plan) -> None:
    """Raise PlanError unless the plan is sound: programs replay, lengths sum to their units, storage and graphs agree."""
    if plan.version != VERSION:
        raise PlanError(f"plan version {plan.version}", allowed=str(VERSION), hint="make the plan again")
    if len(plan.stages) != 1:
        raise PlanError(f"{len(plan.stages)} stages", allowed="1")
    if len(plan.memory) != len(plan.cluster.devices) or len(plan.shares) != len(plan.cluster.devices):
        raise PlanError("memory and shares need one number per device of the cluster")
    if not isclose(sum(plan.shares), 1.0, abs_tol=1e-6) or min(plan.shares) < 0:
        raise PlanError(f"shares {plan.shares} do not sum to 1")
    for key, graph in plan.graphs.items():
        if graph.hash != graph_hash(graph):
            raise PlanError("the graph was changed after it was captured", where=f"program {key.mode}")
        for stage in plan.stages:
            _verify_stage(plan, stage, key, graph)


def _verify_stage(plan: Plan, stage: Stage, key: ProgramKey, graph: Graph) -> None:
    where = f"program {key.mode} {list(map(list, key.shapes))}"
    if key not in stage.programs or key not in stage.lengths:
        raise PlanError("has a graph but no program or lengths", where=where)
    if sorted(stage.mesh.devices) != list(range(len(plan.cluster.devices))):
        raise PlanError(f"mesh devices {stage.mesh.devices} are not the cluster's", where=where)
    program = stage.programs[key]
    if program.key != key:
        raise PlanError(f"program is for {program.key}", where=where)
    for row, shares in stage.shares.items():
        if len(shares) != stage.mesh.sizes[row.axis] or min(shares) < -1e-9 or not isclose(sum(shares), 1.0, abs_tol=1e-6):
            raise PlanError(f"ratios {shares} of row {row} do not sum to 1 over {stage.mesh.sizes[row.axis]}", where=where)
    storage = _storage(plan, graph, where)
    replay(program, derive(graph, stage.mesh), storage)
    lengths = stage.lengths[key]
    for cut in cuts_of(program, storage):
        if cut.row.kind != "even":
            _verify_lengths(cut, lengths, stage, where)
    first = next(iter(stage.lengths.values()))
    for placement in storage.values():
        for state in placement.states:
            if isinstance(state, Sharded) and state.cut.row.kind != "even" and first.get(state.cut) != lengths.get(state.cut):
                raise PlanError(f"lengths of stored cut {state} differ between programs", where=where)


def _verify_lengths(cut: Cut, lengths: Mapping[Cut, tuple[int, ...]], stage: Stage, where: str) -> None:
    if cut not in lengths:
        raise PlanError(f"no lengths for {cut.units} units of row {cut.row}", where=where)
    got = lengths[cut]
    if len(got) != stage.mesh.sizes[cut.row.axis] or min(got) < 0 or sum(got) != cut.units:
        raise PlanError(f"lengths {got} of row {cut.row} do not sum to {cut.units} units over {stage.mesh.sizes[cut.row.axis]}", where=where)


def _storage(plan: Plan, graph: Graph, where: str) -> dict[str, Placement]:
    """Stored placement of every parameter and buffer of a graph."""
    found = {}
    for ref in (*graph.of_kind(Kind.PARAMETER), *graph.of_kind(Kind.BUFFER)):
        if ref.name not in plan.storage_of:
            raise PlanError(f"{ref.name} is not stored", where=where)
        (copy,) = plan.storage_of[ref.name].copies
        found[ref.name] = copy.placement
    return found


def cuts_of(program: Program, storage: Mapping[str, Placement]) -> tuple[Cut, ...]:
    """Every cut that a program or its storage uses, in order of appearance."""
    found: dict[Cut, None] = {}

    def add(placement: Placement) -> None:
        for state in placement.states:
            if isinstance(state, Sharded):
                found[state.cut] = None

    for placement in storage.values():
        add(placement)
    for instruction in program.instructions:
        triple = instruction.triple
        for p in (*triple.pre, *triple.post):
            add(p.placement)
        if isinstance(triple.body, tuple):
            for step in triple.body:
                assert isinstance(step, Communication)
                add(Placement((step.source, step.target)))
        else:
            for _, value in triple.body.args:
                if isinstance(value, LocalShape | LocalOffset | LocalIndices | LocalBlock):
                    add(value.placement)
    return tuple(found)
