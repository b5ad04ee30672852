"""Verification of how a plan is laid out: stages over nodes and devices, what is stored where, what crosses, schedules.

In: a plan, perhaps from a file that somebody changed. Out: nothing, or one PlanError. What holds afterwards: the stages' nodes cover every program's
graph in order; devices are those of the cluster, in groups that are disjoint; every stage stores the parameters that it uses, one that several stages
on the same devices use in one way; what a stage receives an earlier stage gives, in a layout that flows back as it came; the schedules are those
of their names. A plan without schedules has one stage, on all devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from math import isclose, prod

from hapx.cluster.spec import ClusterSpec
from hapx.errors import PlanError
from hapx.ir import Kind, TensorRef
from hapx.pieces import Layout
from hapx.plan import VERSION, Mesh, Plan, ProgramKey, Stage, Storage
from hapx.schedules import check, crossings_between, groups_of, make
from hapx.states import Invariant, Placement, Replicated, Sharded
from hapx.verify_graphs import where_of

SHARES = 1e-6  # how far shares may be from what they must be


def verify_frame(plan: Plan) -> None:
    """Raises PlanError unless programs, stages, devices and ratios fit together."""
    if plan.version != VERSION:
        raise PlanError(f"plan version {plan.version}", allowed=str(VERSION), hint="make the plan again")
    if not plan.graphs or not plan.stages:
        raise PlanError("no program", where="graphs")
    if plan.schedules and set(plan.schedules) != set(plan.graphs):
        raise PlanError(f"{len(plan.schedules)} schedules", allowed=f"{len(plan.graphs)}, one per program, or one stage without any")
    if not plan.schedules and len(plan.stages) != 1:
        raise PlanError(f"{len(plan.stages)} stages without a schedule", allowed="1 stage")
    for key, graph in plan.graphs.items():
        if bool(plan.schedules) != (graph.micro_batches is not None):
            raise PlanError(f"the graph is of {'a whole batch' if plan.schedules else 'micro-batches'}", where=where_of(key))
    ClusterSpec.load(plan.cluster.to_dict())  # raises for numbers that no cluster file may have
    _verify_devices(plan)
    _verify_nodes(plan)
    for number, stage in enumerate(plan.stages):
        _verify_mesh(stage.mesh, f"stage {number}")
        _verify_rows(plan, stage, f"stage {number}")


def _verify_devices(plan: Plan) -> None:
    """Without a schedule, all devices in order; else groups of some, in any order."""
    everything = tuple(range(plan.cluster.num_devices))
    for number, stage in enumerate(plan.stages):
        where = f"stage {number}"
        if stage.devices != stage.mesh.devices:
            raise PlanError(f"devices {stage.devices} are not those of its mesh, {stage.mesh.devices}", where=where)
        if not stage.devices or len(set(stage.devices)) < len(stage.devices) or not set(stage.devices) <= set(everything):
            raise PlanError(f"mesh devices {stage.devices}", where=where, allowed=f"devices of the cluster, each once, of {everything}")
        if not plan.schedules and stage.devices != everything:
            raise PlanError(f"mesh devices {stage.devices}", where=where, allowed=f"all of the cluster, {everything}")
    for a, b in combinations(plan.groups, 2):
        if set(a) & set(b):
            raise PlanError(f"stages on devices {a} and on {b}", where="stages", allowed="stages on the same devices, or on other ones")


def _verify_nodes(plan: Plan) -> None:
    """The stages' parts of every graph, one after another, are the graph."""
    for number, stage in enumerate(plan.stages):
        if not set(stage.nodes) == set(stage.programs) == set(stage.lengths) == set(plan.graphs):
            raise PlanError("has programs, lengths or nodes without a graph, or a graph without them", where=f"stage {number}")
    for key, graph in plan.graphs.items():
        at = 0
        for number, stage in enumerate(plan.stages):
            start, stop = stage.nodes[key]
            if start != at or stop < start:
                raise PlanError(f"nodes {start} to {stop} after {at}", where=f"stage {number}, {where_of(key)}", allowed="all nodes, in order")
            at = stop
        if at != len(graph.nodes):
            raise PlanError(f"the stages end with node {at}", where=where_of(key), allowed=f"{len(graph.nodes)}, all nodes of the graph")


def _verify_mesh(mesh: Mesh, where: str) -> None:
    """At most one axis uneven."""
    if prod(mesh.sizes) != len(mesh.devices) or min(mesh.sizes, default=0) < 1:
        raise PlanError(f"{len(mesh.devices)} devices in {'x'.join(map(str, mesh.sizes))}", where=where)
    if any(a.kind == "micro_batches" for a in mesh.axes):
        raise PlanError("an axis of micro-batches", where=where, allowed="axes of devices")
    if mesh.uneven is not None and not 0 <= mesh.uneven < len(mesh.axes):
        raise PlanError(f"uneven axis {mesh.uneven}", where=where, allowed=f"below {len(mesh.axes)}")


def _verify_rows(plan: Plan, stage: Stage, where: str) -> None:
    """Ratios of the rows that are used, and of those that could be, sum to one."""
    used = {cut.row for lengths in stage.lengths.values() for cut in lengths}
    segments = range(plan.graphs[plan.first].segments)
    chosen = {stage.mesh.row(stage.mesh.uneven, segment=s) for s in segments} if stage.mesh.uneven is not None else set()
    if not used <= set(stage.shares) <= used | chosen:
        raise PlanError(f"ratios of rows {', '.join(map(str, stage.shares))}", where=where, allowed=", ".join(map(str, used | chosen)))
    for row, shares in stage.shares.items():
        if len(shares) != stage.mesh.sizes[row.axis] or not _is_distribution(shares):
            raise PlanError(f"ratios {shares} of row {row} do not sum to 1 over {stage.mesh.sizes[row.axis]}", where=where)


def _is_distribution(shares: tuple[float, ...]) -> bool:
    return min(shares) > -1e-9 and isclose(sum(shares), 1.0, abs_tol=SHARES)


# ---- storage ---------------------------------------------------------------------------------------------------------------


def verify_storage(plan: Plan) -> None:
    """Every parameter and buffer of the graphs is stored once, under its names, by every stage that has it."""
    refs = {r.name for g in plan.graphs.values() for r in _kept(g.refs.values())}
    aliases = {group[0]: group[1:] for g in plan.graphs.values() for group in g.tied}
    names = [s.name for s in plan.storage]
    if len(set(names)) != len(names) or set(names) != refs:
        odd = sorted(set(names) ^ refs) or sorted({n for n in names if names.count(n) > 1})
        raise PlanError(f"{', '.join(odd)}: stored more or less than once", where="storage")
    wanted = _stages_of(plan)
    for stored in plan.storage:
        where = f"storage of {stored.name}"
        if stored.aliases != aliases.get(stored.name, ()):
            raise PlanError(f"other names {stored.aliases}", where=where, allowed=str(aliases.get(stored.name, ())))
        if [c.stage for c in stored.copies] != wanted[stored.name]:
            raise PlanError(f"copies in stages {[c.stage for c in stored.copies]}", where=where, allowed=f"{wanted[stored.name]}, which use it")
        _verify_copies(plan, stored, where)


def _kept(refs: Iterable[TensorRef]) -> list[TensorRef]:
    return [r for r in refs if r.kind in (Kind.PARAMETER, Kind.BUFFER)]


def _stages_of(plan: Plan) -> dict[str, list[int]]:
    """The stages that have a parameter or buffer, by the first program that has it. Those of further programs have no others."""
    found: dict[str, list[int]] = {}
    for key in plan.graphs:
        own: dict[str, list[int]] = {}
        for stage in range(len(plan.stages)):
            for ref in _kept(plan.part(key, stage).refs.values()):
                own.setdefault(ref.name, []).append(stage)
        for name, stages in own.items():
            known = found.setdefault(name, stages)
            if not set(stages) <= set(known):
                raise PlanError(f"{name} is used in stages {stages}", where=where_of(key), allowed=f"{known}, which store it")
    return found


def _verify_copies(plan: Plan, stored: Storage, where: str) -> None:
    """Stages on the same devices keep one piece of a parameter: it must be the same for all of them."""
    for a, b in combinations(stored.copies, 2):
        one, two = plan.stages[a.stage], plan.stages[b.stage]
        if one.devices != two.devices:
            continue
        if a.placement != b.placement or one.mesh.sizes != two.mesh.sizes or _cut(plan, one, a.placement) != _cut(plan, two, b.placement):
            raise PlanError(f"stages {a.stage} and {b.stage} are on the same devices, but store it otherwise", where=where)


def _cut(plan: Plan, stage: Stage, placement: Placement) -> list[tuple[int, ...] | None]:
    return [stage.lengths[plan.first].get(s.cut) for s in placement.states if isinstance(s, Sharded)]


# ---- boundaries and schedules ----------------------------------------------------------------------------------------------


def verify_boundaries(plan: Plan, key: ProgramKey) -> None:
    """What a stage receives an earlier one gives. Both layouts leave tensors whole or cut them; one with a gradient is Invariant where it is whole:
    its cotangent has the same layout. The programs must have passed."""
    refs, where = plan.graphs[key].refs, where_of(key)
    wanted = {(n, r.name) for n in range(len(plan.stages)) for r in plan.part(key, n).of_kind(Kind.RECEIVED)}
    boundaries = plan.boundaries(key)
    if {(b.target[0], b.tensor) for b in boundaries} != wanted or len(boundaries) != len(wanted):
        raise PlanError("what stages receive is not what earlier stages give", where=where)
    for tensor, *ends in boundaries:
        ref = refs[tensor]
        for number, p in ends:
            stage, allowed = plan.stages[number], (Sharded, Invariant) if ref.requires_grad else (Sharded, Invariant, Replicated)
            if not all(isinstance(s, allowed) for s in p.placement.states):
                raise PlanError(f"{p} crosses between stages", where=f"stage {number}, {where}", allowed="tensors that are whole or cut")
            Layout(stage.mesh, p.placement, stage.lengths[key]).check(ref.shape)


def verify_schedule(plan: Plan, key: ProgramKey) -> None:
    """The schedule can be carried out, and is the one of its name."""
    schedule, graph, groups = plan.schedules[key], plan.graphs[key], groups_of(plan)
    assert graph.micro_batches is not None, "a pipeline"
    sizes = (graph.batch,) * graph.micro_batches.number
    if schedule.micro_batches != sizes:
        raise PlanError(f"micro-batches of {schedule.micro_batches} samples", where=f"schedule of {where_of(key)}", allowed=str(sizes))
    if (schedule.name == "forward") != (key.mode == "eval"):
        raise PlanError(f"a schedule {schedule.name}", where=where_of(key), allowed="forward for evaluation, and another one for training")
    crossings = crossings_between(plan.boundaries(key), graph.refs, key.mode == "train")
    check(schedule, groups, crossings, plan.ties)
    if schedule != make(schedule.name, groups, crossings, sizes, plan.ties):
        raise PlanError("it is another order than that of its name", where=f"schedule {schedule.name}", hint="plan again")
