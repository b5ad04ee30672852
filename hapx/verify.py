"""Verification of a whole plan: every program is replayed, every number that must agree is compared. Needs no model.

In: a plan, perhaps from a file that somebody changed. Out: nothing, or one PlanError. Invariant: whatever is changed in the programs, the lengths,
the storage, the graphs or the predictions of a plan, either the plan is still the same or it is refused; two things that only people read are let
through, where a node comes from (module, source line) and how a mesh and its axes are called.

The predictions (time, memory, shares) are computed anew: a plan is what the cost model says of its program, so a plan cannot be passed off
as faster than it is, and a change that is sound but not what was planned (another form of a collective) is found as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from math import isclose, prod

from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.cost.remat import chosen_blocks, with_blocks, without_blocks
from hapx.errors import HapError, PlanError
from hapx.graph.borders import candidate_segments, carried, is_coarser
from hapx.graph.segments import find_blocks, graph_hash
from hapx.ir import FLOATING, Graph, Kind, TorchConst
from hapx.lower import Candidate, memory, work_shares
from hapx.plan import VERSION, Communication, LocalBlock, LocalIndices, LocalOffset, LocalShape, LocalSize, Mesh, Plan, Program, ProgramKey, Stage
from hapx.simulate import simulate_program
from hapx.states import REPLICATED, Cut, Placement, Property, Sharded
from hapx.theory.derive import derive
from hapx.theory.discover import verify_probed
from hapx.theory.replay import replay
from hapx.theory.triple import Theory

SHARES = 1e-6  # how far shares may be from what they must be
PREDICTIONS = 1e-6  # the same, relative, for seconds and bytes: sums of floats in another order


def verify(plan: Plan) -> None:
    """Raise PlanError unless the plan is sound: programs replay, lengths sum to their units, storage, graphs and predictions agree."""
    try:
        _verify(plan)
    except PlanError:
        raise
    except HapError as error:
        raise PlanError(error.what, where=error.where, allowed=error.allowed, hint=error.hint) from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError) as error:
        # data of the right types that contradicts itself in a way that no check below names
        raise PlanError(
            f"the plan contradicts itself ({type(error).__name__}: {error})", where="plan", hint="the file was changed; plan again"
        ) from error


def _verify(plan: Plan) -> None:
    _verify_frame(plan)
    (stage,) = plan.stages
    _verify_mesh(plan, stage.mesh)
    _verify_storage(plan)
    for key, graph in plan.graphs.items():
        _verify_graph(plan, key, graph)
        theory = _verify_program(plan, stage, key, graph)
        if key == plan.first:
            _verify_predictions(plan, theory)
    if not set(stage.programs) == set(stage.lengths) == set(plan.graphs):
        raise PlanError("has programs or lengths without a graph", where="stage 0")


def _verify_frame(plan: Plan) -> None:
    """What is fixed for every plan so far: one stage on all devices, no pipeline."""
    if plan.version != VERSION:
        raise PlanError(f"plan version {plan.version}", allowed=str(VERSION), hint="make the plan again")
    if len(plan.stages) != 1 or plan.schedules:
        raise PlanError(f"{len(plan.stages)} stages, {len(plan.schedules)} schedules", allowed="1 stage and no schedule")
    if not plan.graphs:
        raise PlanError("no program", where="graphs")
    (stage,) = plan.stages
    everything = {key: (0, len(graph.nodes)) for key, graph in plan.graphs.items()}
    if stage.nodes != everything:
        raise PlanError(f"nodes {list(stage.nodes.values())}", where="stage 0", allowed=f"{list(everything.values())}, all nodes of every graph")
    if stage.devices != stage.mesh.devices:
        raise PlanError(f"devices {stage.devices} are not those of its mesh, {stage.mesh.devices}", where="stage 0")
    used = {cut.row for lengths in stage.lengths.values() for cut in lengths}
    segments = range(plan.graphs[plan.first].segments)
    chosen = {stage.mesh.row(stage.mesh.uneven, segment=s) for s in segments} if stage.mesh.uneven is not None else set()
    if not used <= set(stage.shares) <= used | chosen:
        raise PlanError(f"ratios of rows {', '.join(map(str, stage.shares))}", where="stage 0", allowed=", ".join(map(str, used | chosen)))
    for row, shares in stage.shares.items():
        if len(shares) != stage.mesh.sizes[row.axis] or not _is_distribution(shares):
            raise PlanError(f"ratios {shares} of row {row} do not sum to 1 over {stage.mesh.sizes[row.axis]}", where="stage 0")


def _verify_mesh(plan: Plan, mesh: Mesh) -> None:
    """All devices of a possible cluster in order; at most one axis uneven."""
    ClusterSpec.load(plan.cluster.to_dict())  # raises for numbers that no cluster file may have
    devices = plan.cluster.devices
    if mesh.devices != tuple(range(len(devices))) or prod(mesh.sizes) != len(devices):
        raise PlanError(f"mesh devices {mesh.devices} in {'x'.join(map(str, mesh.sizes))} are not the cluster's", where="mesh")
    if any(a.kind == "micro_batches" for a in mesh.axes):
        raise PlanError("an axis of micro-batches", where="mesh", allowed="axes of devices")
    if mesh.uneven is not None and not 0 <= mesh.uneven < len(mesh.axes):
        raise PlanError(f"uneven axis {mesh.uneven}", where="mesh", allowed=f"below {len(mesh.axes)}")


def _verify_storage(plan: Plan) -> None:
    """Every parameter and buffer of the graphs is stored once, under its names."""
    refs = {r.name for g in plan.graphs.values() for k in (Kind.PARAMETER, Kind.BUFFER) for r in g.of_kind(k)}
    aliases = {group[0]: group[1:] for g in plan.graphs.values() for group in g.tied}
    names = [s.name for s in plan.storage]
    if len(set(names)) != len(names) or set(names) != refs:
        odd = sorted(set(names) ^ refs) or sorted({n for n in names if names.count(n) > 1})
        raise PlanError(f"{', '.join(odd)}: stored more or less than once", where="storage")
    for stored in plan.storage:
        if stored.aliases != aliases.get(stored.name, ()):
            raise PlanError(f"other names {stored.aliases}", where=f"storage of {stored.name}", allowed=str(aliases.get(stored.name, ())))
        if len(stored.copies) != 1 or stored.copies[0].stage != 0:
            raise PlanError(f"{len(stored.copies)} copies", where=f"storage of {stored.name}", allowed="one, in stage 0")


# ---- graphs ----------------------------------------------------------------------------------------------------------------


def _verify_graph(plan: Plan, key: ProgramKey, graph: Graph) -> None:
    where = _where(key)
    if graph.hash != graph_hash(graph):
        raise PlanError("the graph was changed after it was captured", where=where)
    shapes = tuple(graph.refs[n].shape for n in graph.input_names)
    if (key.mode, key.shapes) != (graph.mode, shapes):
        raise PlanError(f"the graph is for {graph.mode} {list(map(list, shapes))}", where=where)
    under = {value.name for r in graph.regions if r.kind == "autocast" for _, value in r.options if isinstance(value, TorchConst)}
    if key.autocast is not None and (key.autocast not in FLOATING or key.autocast not in under):
        raise PlanError(f"under autocast {key.autocast}, but no part of the graph is", where=where)
    _verify_tensors(graph, where)
    verify_probed(graph, where)
    _verify_regions(graph, where)
    if graph.block_of != find_blocks(graph.nodes, graph.refs) or len(graph.segment_of) != len(graph.nodes):
        raise PlanError("the segments or repeated blocks are not those of its nodes", where=where)
    _verify_segments(plan, key, graph, where)


def _verify_segments(plan: Plan, key: ProgramKey, graph: Graph, where: str) -> None:
    """The first program's segments are parts of the model, several of them where the restriction allows it; those of the others follow."""
    rule = plan.restriction
    if key != plan.first:
        if graph.segment_of != carried(plan.graphs[plan.first], graph):
            raise PlanError("the segments are not those of the first program", where=where)
        return
    parts = candidate_segments(graph, rule.segments if rule.most_segments > 1 else 1)
    if not is_coarser(graph.segment_of, parts) or graph.segments > rule.most_segments:
        raise PlanError("the segments are not made of parts of the model", where=where, allowed=f"up to {rule.most_segments}, of the parts {parts}")


def _verify_regions(graph: Graph, where: str) -> None:
    """Runs of nodes, those of checkpoints apart from each other; the ones that the planner chose are repeated blocks."""
    before = 0
    for region in graph.regions:
        if not 0 <= region.start < region.stop <= len(graph.nodes) or (region.kind == "checkpoint" and region.start < before):
            raise PlanError(
                f"a {region.kind} of nodes {region.start} to {region.stop}", where=where, allowed="nodes of the graph, each in one checkpoint"
            )
        before = region.stop if region.kind == "checkpoint" else before
    if chosen_blocks(graph) and graph.regions != with_blocks(without_blocks(graph)).regions:
        raise PlanError("other blocks are computed again in backward than a planner would choose", where=where, hint="plan again")


def _verify_tensors(graph: Graph, where: str) -> None:
    """Names, kinds and marks that other parts rely on."""
    made = {o.name: o for n in graph.nodes for o in n.outputs}
    for name, ref in graph.refs.items():
        if ref.name != name or made.get(name, ref) != ref:
            raise PlanError(f"two tensors are called {name}", where=where)
    if [o.role for o in graph.outputs].count("loss") != 1:
        raise PlanError("has not exactly one loss", where=where)
    for node in graph.nodes:
        if node.batch_dims != (None,) * len(node.outputs):
            raise PlanError(f"batch dims {node.batch_dims} of {node.call.target}", where=where, allowed="none")


# ---- programs --------------------------------------------------------------------------------------------------------------


def _verify_program(plan: Plan, stage: Stage, key: ProgramKey, graph: Graph) -> Theory:
    where = _where(key)
    if key not in stage.programs or key not in stage.lengths:
        raise PlanError("has a graph but no program or lengths", where=where)
    program, lengths = stage.programs[key], stage.lengths[key]
    if program.key != key:
        raise PlanError(f"program is for {program.key}", where=where)
    storage = _storage(plan, graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators without a rule were named when the plan was made
        theory = derive(graph, stage.mesh)
    replay(program, theory, storage)
    _verify_ends(program, graph, storage, where)
    if any(i.remat is not None for i in program.instructions):
        raise PlanError("rematerialises", where=where, allowed="programs without rematerialisation")
    cuts = {c for c in cuts_of(program, storage) if c.row.kind != "even"}
    if cuts != set(lengths):
        odd = next(iter(cuts ^ set(lengths)))
        raise PlanError(f"{'no lengths for' if odd in cuts else 'lengths for unused'} {odd.units} units of row {odd.row}", where=where)
    for cut, own in lengths.items():
        _verify_lengths(cut, own, stage, where)
    first = stage.lengths[plan.first]
    for placement in storage.values():
        for state in placement.states:
            if isinstance(state, Sharded) and state.cut.row.kind != "even" and first.get(state.cut) != lengths.get(state.cut):
                raise PlanError(f"lengths of stored cut {state} differ between programs", where=where)
    return theory


def _verify_ends(program: Program, graph: Graph, storage: Mapping[str, Placement], where: str) -> None:
    """A program needs all that there is at the start, and gives the graph's outputs in order."""
    whole = Placement((REPLICATED,) * len(program.mesh.axes))
    given = {Property(name, p) for name, p in storage.items()}
    given |= {Property(r.name, whole) for r in graph.refs.values() if r.kind in (Kind.INPUT, Kind.CONSTANT) and r.name not in graph.producer}
    if set(program.needs) != given or len(program.needs) != len(given):
        odd = set(program.needs) ^ given
        raise PlanError(f"needs other things than it is given: {', '.join(sorted(map(str, odd))) or 'one of them twice'}", where=where)
    named = [o.tensor for o in graph.outputs]
    if [p.tensor for p in program.gives] not in (named, list(dict.fromkeys(named))):
        raise PlanError("does not give the graph's outputs, each once and in order", where=where)
    for i in program.instructions:
        body, ref = i.triple.body, graph.refs[i.triple.post[0].tensor]
        if isinstance(body, tuple) and (i.triple.work or any(c.free and not _may_be_freed(c, ref.kind, graph) for c in body)):
            raise PlanError(f"{i} divides work or frees what was not gathered from a parameter's shards", where=where)


def _may_be_freed(c: Communication, kind: Kind, graph: Graph) -> bool:
    return graph.mode == "train" and kind is Kind.PARAMETER and c.gradient and isinstance(c.source, Sharded) and not isinstance(c.target, Sharded)


def _verify_lengths(cut: Cut, got: tuple[int, ...], stage: Stage, where: str) -> None:
    if len(got) != stage.mesh.sizes[cut.row.axis] or min(got) < 0 or sum(got) != cut.units:
        raise PlanError(f"lengths {got} of row {cut.row} do not sum to {cut.units} units over {stage.mesh.sizes[cut.row.axis]}", where=where)


def _storage(plan: Plan, graph: Graph) -> dict[str, Placement]:
    """Stored placement of every parameter and buffer of a graph."""
    names = [r.name for k in (Kind.PARAMETER, Kind.BUFFER) for r in graph.of_kind(k)]
    return {name: plan.storage_of[name].copies[0].placement for name in names}


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
                if isinstance(value, LocalShape | LocalSize | LocalOffset | LocalIndices | LocalBlock):
                    add(value.placement)
    return tuple(found)


# ---- predictions -----------------------------------------------------------------------------------------------------------


def predictions(plan: Plan, theory: Theory | None = None) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
    """(iteration time, memory, shares) of a plan by the cost model and the simulator. Raises HapError for an unknown optimizer."""
    stage, key = plan.stages[0], plan.first
    graph, program, lengths = plan.graphs[key], stage.programs[key], stage.lengths[key]
    known = theory or derive(graph, stage.mesh)
    costs = CostModel(known, plan.cluster, plan.precision, plan.optimizer, key.mode)
    candidate = Candidate(known, costs, program, _storage(plan, graph), lengths, stage.shares, 0.0, 0.0)
    exact = costs.at_lengths(lengths)
    return simulate_program(program, graph, costs, lengths).total, memory(candidate, exact), work_shares(candidate, exact)


def _verify_predictions(plan: Plan, theory: Theory) -> None:
    time, held, shares = predictions(plan, theory)
    where, hint = "predictions", "plan again with this hapx"
    if not isclose(plan.iteration_time, time, rel_tol=PREDICTIONS):
        raise PlanError(f"an iteration of {plan.iteration_time} s", where=where, allowed=f"{time} s, by the cost model", hint=hint)
    if not _all_close(plan.memory, held, PREDICTIONS, 1.0):
        raise PlanError(f"memory {plan.memory}", where=where, allowed=f"{held} bytes per device, by the cost model", hint=hint)
    if not _all_close(plan.shares, shares, 0.0, SHARES):
        raise PlanError(f"shares {plan.shares}", where=where, allowed=f"{shares}, by the lengths", hint=hint)


def _all_close(found: Iterable[float], wanted: Iterable[float], relative: float, absolute: float) -> bool:
    a, b = tuple(found), tuple(wanted)
    return len(a) == len(b) and all(isclose(x, y, rel_tol=relative, abs_tol=absolute) for x, y in zip(a, b, strict=True))


def _is_distribution(shares: tuple[float, ...]) -> bool:
    return min(shares) > -1e-9 and isclose(sum(shares), 1.0, abs_tol=SHARES)


def _where(key: ProgramKey) -> str:
    return f"program {key.mode} {list(map(list, key.shapes))}"
