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
from math import isclose

from hapx.errors import HapError, PlanError
from hapx.ir import Graph, Kind
from hapx.plan import Communication, LocalBlock, LocalIndices, LocalOffset, LocalShape, LocalSize, Plan, Program, ProgramKey, Stage
from hapx.predict import predictions, stored_in
from hapx.states import REPLICATED, Cut, Placement, Property, Sharded
from hapx.theory.derive import derive
from hapx.theory.replay import replay
from hapx.theory.triple import Theory
from hapx.verify_graphs import verify_graph, where_of
from hapx.verify_stages import SHARES, verify_boundaries, verify_frame, verify_schedule, verify_storage

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
    verify_frame(plan)
    for key in plan.graphs:
        verify_graph(plan, key)
    verify_storage(plan)
    theories = []
    for key in plan.graphs:
        for number in range(len(plan.stages)):
            theory = _verify_program(plan, number, key)
            theories += [theory] if key == plan.first else []
        if plan.schedules:
            verify_boundaries(plan, key)
            verify_schedule(plan, key)
    _verify_predictions(plan, theories[0])


# ---- programs --------------------------------------------------------------------------------------------------------------


def _verify_program(plan: Plan, number: int, key: ProgramKey) -> Theory:
    stage, graph = plan.stages[number], plan.part(key, number)
    where = where_of(key) if len(plan.stages) == 1 else f"stage {number}, {where_of(key)}"
    program, lengths = stage.programs[key], stage.lengths[key]
    if program.key != key:
        raise PlanError(f"program is for {program.key}", where=where)
    storage = stored_in(plan, number, key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators without a rule were named when the plan was made
        theory = derive(graph, stage.mesh)
    _replay(program, theory, storage, where if len(plan.stages) > 1 else "")
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
    for placement in (p for name, p in storage.items() if graph.refs[name].kind is not Kind.RECEIVED):
        for state in placement.states:
            if isinstance(state, Sharded) and state.cut.row.kind != "even" and first.get(state.cut) != lengths.get(state.cut):
                raise PlanError(f"lengths of stored cut {state} differ between programs", where=where)
    return theory


def _replay(program: Program, theory: Theory, storage: Mapping[str, Placement], where: str) -> None:
    """The replay; of several stages, an error says whose program it is."""
    try:
        replay(program, theory, storage)
    except PlanError as error:
        if not where:
            raise
        raise PlanError(error.what, where=f"{where}, {error.where}", allowed=error.allowed, hint=error.hint) from error


def _verify_ends(program: Program, graph: Graph, storage: Mapping[str, Placement], where: str) -> None:
    """A program needs all that there is at the start, and gives the graph's outputs in order."""
    whole = Placement((REPLICATED,) * len(program.mesh.axes))
    given = {Property(name, p) for name, p in storage.items()}
    given |= {Property(r.name, whole) for r in graph.sources}
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
