"""Verification of the graphs of a plan: they are what was captured, and what is derived from them is what it must be.

In: a plan and one of its graphs, perhaps from a file that somebody changed. Out: nothing, or one PlanError. Invariant: whatever is changed in a graph
is found, but for what only people read (where a node comes from, what mixes samples) and what the user said (where layers begin). Of a graph of
micro-batches it is checked that it fits the inputs of the whole batch; that its losses sum up to that of the whole batch is known only where the
model is (its hash is compared there).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from hapx.cost.remat import chosen_blocks, with_blocks, without_blocks
from hapx.errors import PlanError
from hapx.graph.borders import candidate_segments, carried, is_coarser
from hapx.graph.segments import find_blocks, graph_hash
from hapx.ir import FLOATING, Graph, Kind, MicroBatches, TorchConst
from hapx.plan import Plan, ProgramKey
from hapx.rules import Site
from hapx.states import PARTIAL, REPLICATED
from hapx.theory.discover import verify_probed

Shape = tuple[int, ...]


def where_of(key: ProgramKey) -> str:
    """A program, as messages call it."""
    return f"program {key.mode} {list(map(list, key.shapes))}"


def verify_graph(plan: Plan, key: ProgramKey) -> None:
    """Raises PlanError unless the graph of a program is sound."""
    where, graph = where_of(key), plan.graphs[key]
    if graph.hash != graph_hash(graph):
        raise PlanError("the graph was changed after it was captured", where=where)
    shapes = tuple(_whole_shapes(graph, where).values())
    if (key.mode, key.shapes) != (graph.mode, shapes):
        raise PlanError(f"the graph is for {graph.mode} {list(map(list, shapes))}", where=where)
    under = {value.name for r in graph.regions if r.kind == "autocast" for _, value in r.options if isinstance(value, TorchConst)}
    if key.autocast is not None and (key.autocast not in FLOATING or key.autocast not in under):
        raise PlanError(f"under autocast {key.autocast}, but no part of the graph is", where=where)
    _verify_tensors(graph, where)
    if [o.role for o in graph.outputs].count("loss") != 1:
        raise PlanError("has not exactly one loss", where=where)
    verify_probed(graph, where)
    _verify_regions(graph, where)
    for stage in range(len(plan.stages)):
        _verify_chosen(plan.part(key, stage), where)
    if graph.block_of != find_blocks(graph.nodes, graph.refs) or len(graph.segment_of) != len(graph.nodes):
        raise PlanError("the segments or repeated blocks are not those of its nodes", where=where)
    _verify_segments(plan, key, graph, where)


def _verify_tensors(graph: Graph, where: str) -> None:
    """Names, kinds and marks that other parts rely on."""
    made = {o.name: o for n in graph.nodes for o in n.outputs}
    for name, ref in graph.refs.items():
        if ref.name != name or made.get(name, ref) != ref or ref.kind is Kind.RECEIVED:
            raise PlanError(f"two tensors are called {name}, or it comes from nowhere", where=where)
    marks = (-1, *graph.boundaries, len(graph.nodes))
    if graph.first or any(a >= b for a, b in pairwise(marks)):
        raise PlanError(f"begins with node {graph.first}, layers at {graph.boundaries}", where=where, allowed="0, and ascending nodes")
    for node in graph.nodes:
        if node.batch_dims != (None,) * len(node.outputs):
            raise PlanError(f"batch dims {node.batch_dims} of {node.call.target}", where=where, allowed="none")


# ---- parts of the model ----------------------------------------------------------------------------------------------------


def _verify_segments(plan: Plan, key: ProgramKey, graph: Graph, where: str) -> None:
    """The first program's segments are parts of the model, several of them where the restriction allows it; those of the others follow. Stages of a
    pipeline have one each."""
    rule = plan.restriction
    most = 1 if plan.schedules else rule.most_segments
    if key != plan.first:
        if graph.segment_of != carried(plan.graphs[plan.first], graph):
            raise PlanError("the segments are not those of the first program", where=where)
        return
    parts = candidate_segments(graph, rule.segments if most > 1 else 1)
    if not is_coarser(graph.segment_of, parts) or graph.segments > most:
        raise PlanError("the segments are not made of parts of the model", where=where, allowed=f"up to {most}, of the parts {parts}")


def _verify_regions(graph: Graph, where: str) -> None:
    """Runs of nodes, those of checkpoints apart from each other."""
    before = 0
    for region in graph.regions:
        if not 0 <= region.start < region.stop <= len(graph.nodes) or (region.kind == "checkpoint" and region.start < before):
            raise PlanError(
                f"a {region.kind} of nodes {region.start} to {region.stop}", where=where, allowed="nodes of the graph, each in one checkpoint"
            )
        before = region.stop if region.kind == "checkpoint" else before


def _verify_chosen(part: Graph, where: str) -> None:
    """The checkpoints that the planner chose are the repeated blocks of a stage, or the first ones of them."""
    bare, chosen = without_blocks(part), chosen_blocks(part)
    if chosen and all(part.regions != with_blocks(bare, most).regions for most in range(1, chosen + 1)):
        raise PlanError("other blocks are computed again in backward than a planner would choose", where=where, hint="plan again")


# ---- micro-batches ---------------------------------------------------------------------------------------------------------


def _whole_shapes(graph: Graph, where: str) -> Mapping[str, Shape]:
    """The shapes of the inputs that the user gives: of a graph of micro-batches, those of the whole batch."""
    shapes = {n: graph.refs[n].shape for n in graph.given}
    micro = graph.micro_batches
    if micro is None:
        return shapes
    if micro.number < 1 or len(set(micro.cut)) != len(micro.cut) or not set(micro.cut) <= set(shapes):
        raise PlanError(f"{micro.number} micro-batches, of which each gets a part of {', '.join(micro.cut)}", where=where)
    for name in micro.cut:
        first, *rest = shapes[name]
        shapes[name] = (first * micro.number, *rest)
    if micro.counts is not None:
        _verify_counts(graph, micro.number, micro.counts, shapes, where)
    _verify_results(graph, micro, where)
    return shapes


def _verify_counts(graph: Graph, number: int, counts: Graph, shapes: Mapping[str, Shape], where: str) -> None:
    """What is counted before micro-batches run: computed from inputs of the whole batch, one value per further input."""
    if counts.hash != graph_hash(counts):
        raise PlanError("what is counted over the whole batch was changed", where=where)
    _verify_tensors(counts, where)
    none = (None,) * len(counts.nodes)
    plain = replace(
        counts, regions=(), tied=(), segment_of=(0,) * len(none), block_of=none, batch=graph.batch * number, mode=graph.mode, returns=None, probed=(),
        first=0, boundaries=(), micro_batches=None,
    )  # fmt: skip
    wanted = graph.input_names[len(graph.given) :]
    found = {o.target: counts.refs[o.tensor] for o in counts.outputs if o.role == "result"}
    inputs = [counts.refs[n] for n in counts.input_names]
    if (
        counts != plain
        or graph.given != graph.input_names[: len(graph.given)]
        or sorted(wanted) != sorted(str(o.target) for o in counts.outputs)
        or any((found[n].shape, found[n].dtype) != (graph.refs[n].shape, graph.refs[n].dtype) for n in wanted)
        or any((shapes.get(r.name), graph.refs[r.name].dtype) != (r.shape, r.dtype) for r in inputs)
        or {r.name for r in counts.of_kind(Kind.INPUT)} != set(counts.input_names)
        or counts.of_kind(Kind.PARAMETER)
    ):
        raise PlanError("what is counted over the whole batch does not fit the inputs of its micro-batches", where=where)


def _verify_results(graph: Graph, micro: MicroBatches, where: str) -> None:
    """How the results of micro-batches become those of the whole batch."""
    names = [o.tensor for o in graph.outputs if o.role == "result"]
    if [n for n, _ in micro.results] != names:
        raise PlanError(f"says how {len(micro.results)} results of micro-batches are put together, of {len(names)}", where=where)
    for name, slot in micro.results:
        shape = graph.refs[name].shape
        joined = isinstance(slot, Site) and slot.dim < len(shape) and slot.outer > 0 and shape[slot.dim] % slot.outer == 0
        if not joined and slot not in (REPLICATED, PARTIAL):
            raise PlanError(f"results {name} of micro-batches are put together as {slot}", where=where)
