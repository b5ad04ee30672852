"""The planner: graph and cluster in, plan out.

For every mesh view: the theory is derived once, then synthesis and balancing alternate (`hapx.alternation`). The best candidates of all views are
ranked again by the event-driven simulator, which sees the overlap of gradient synchronisation with backward that the additive cost cannot see.

Invariant: a candidate's time, memory and program are those of its integer lengths, never of fractional ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from hapx.advice import advised
from hapx.alternation import Alternation, needless
from hapx.balancer.borders import WORTH, Freed, free_borders
from hapx.balancer.rounding import per_device
from hapx.balancer.untied import Untied
from hapx.batches import Batches
from hapx.cluster.spec import ClusterSpec
from hapx.cost.coverage import coverage
from hapx.cost.model import CostModel
from hapx.cost.remat import chosen_blocks, with_blocks
from hapx.errors import HapError, InsufficientMemoryError, PlanError, kept, nearest
from hapx.finishing import FEW_NODES, finished
from hapx.graph.borders import candidate_segments, carried, numbered
from hapx.ir import Graph
from hapx.lower import Candidate, at_their_best, extended, lower
from hapx.overlap import overlapped
from hapx.plan import Axis, Mesh, Plan, ProgramKey, key_of
from hapx.processes import at_once, without_collections
from hapx.progress import Teller, Watcher
from hapx.recompute import Tells, as_chosen, at_least, fastest
from hapx.restriction import Restriction, restriction, with_remat
from hapx.setting import Counters, Setting
from hapx.simulate import iteration_time
from hapx.squeezing import MAY_FIT
from hapx.stages.numbers import may_have_stages
from hapx.starts import FEW_STEPS
from hapx.synth.forbidden import NOTHING
from hapx.synth.search import HOPELESS
from hapx.theory.derive import derive
from hapx.theory.discover import discover
from hapx.theory.triple import Theory
from hapx.warnings import warn

if TYPE_CHECKING:
    from torch import nn

    from hapx.graph.captures import Captures

# several axes inside of one machine, whose links are all alike, must be faster by this part: their many small collectives cost more than is priced
SIMPLER = 0.02
SIMULATED = 4  # candidates, and programs at their best lengths, that the simulator ranks
NEAR = 0.02  # by how much, relative, a program may be slower with one row of ratios to be asked what segments bring
MOST_FREED = 2  # of the programs asked, those that are searched for with segments
LARGE = 400  # nodes from which on a quick look tells how long a plan of one stage takes at least: the plan itself takes long


# -- mesh views ------------------------------------------------------------------------------------------------------------------------------------


def views(cluster: ClusterSpec, rule: Restriction) -> tuple[Mesh, ...]:
    """Meshes over the cluster's devices that the restriction (or the cluster file) allows: flat, with uneven ratios, and every a x b whose
    inner groups are equal devices of one machine, uneven over the groups, the fewest groups first: where these are machines, that is the best one
    most often, and at others less is to be looked for. Of given shares there are as many as coordinates. Raises HapError for a view that the cluster
    does not have."""
    wanted = rule.mesh if rule.mesh != "auto" else cluster.mesh
    n = cluster.num_devices
    found = {"flat": Mesh("flat", (Axis("devices", n, "devices"),), tuple(range(n)), 0)}
    for inner in reversed(range(2, n)):
        if _groups_are_equal(cluster, inner):
            machines = all(len(m.devices) == inner for m in cluster.machines)
            outer = Axis("machines" if machines else "groups", n // inner, "machines" if machines else "devices")
            found[f"{n // inner}x{inner}"] = Mesh(f"{n // inner}x{inner}", (outer, Axis("devices", inner, "devices")), tuple(range(n)), 0)
    if wanted == "auto":
        given = [m for m in found.values() if isinstance(rule.ratios, tuple) and m.axes[0].size == len(rule.ratios)]
        return tuple(given or found.values())
    if wanted == "two-level":
        named = [m for m in found.values() if m.axes[0].kind == "machines"]
    else:
        named = [found[wanted]] if wanted in found else []
    if not named:
        raise HapError(f"the cluster {cluster.name!r} has no mesh view {wanted!r}", where="mesh", allowed=", ".join(["auto", *found]))
    return tuple(named)


def _groups_are_equal(cluster: ClusterSpec, inner: int) -> bool:
    """Whether the devices fall, in order, into groups of `inner` equal devices, each group in one machine."""
    n = cluster.num_devices
    if n % inner or inner == n:
        return False
    groups = [cluster.devices[i : i + inner] for i in range(0, n, inner)]
    return all(len({(d.machine, d.type) for d in group}) == 1 for group in groups)


# -- one program ------------------------------------------------------------------------------------------------------------------------------------


@without_collections()
def plan_spmd(
    setting: Setting, counters: Counters, meshes: Sequence[Mesh] | None = None, theories: Mapping[str, Theory] | None = None
) -> list[Candidate]:
    """Candidates for one graph on all devices, best first, on every allowed view. theories: by the name of a view, where they are known.

    Raises InsufficientMemoryError or PlanError where no view has a program."""
    alternations: dict[str, Alternation] = {}
    try:
        return _of_all_views(setting, counters, views(setting.cluster, setting.rule) if meshes is None else meshes, theories or {}, alternations)
    finally:
        for alternation in alternations.values():
            alternation.close()


def _of_all_views(
    setting: Setting, counters: Counters, meshes: Sequence[Mesh], theories: Mapping[str, Theory], alternations: dict[str, Alternation]
) -> list[Candidate]:
    """The same. alternations: gets that of every view."""
    found: list[Candidate] = []
    old: list[Candidate] = []
    failures: list[HapError] = []
    exact = setting  # strict once memory binds, but not where that is found: what corrections of limits mean would change on the way
    derived: dict[tuple[int, int | None], Theory] = {}
    for number, mesh in enumerate(meshes, 1):
        if setting.tight and not found and _far_too_large(setting, failures):
            break
        began = time.perf_counter()
        known = min((c.cost for c in found), default=inf)
        told = Teller(setting.progress, counters.search, mesh.name, number, len(meshes), known)
        told("deriving rules")
        kind = len(mesh.axes), mesh.uneven
        theory = theories.get(mesh.name) or derive(setting.graph, mesh, like=derived.get(kind))
        derived[kind] = theory
        counters.theory_time += time.perf_counter() - began
        began = time.perf_counter()
        outcome: dict[str, Any] = {"view": mesh.name}
        try:
            alternation = alternations[mesh.name] = Alternation(exact, theory, counters, told, min(found, key=lambda c: c.cost, default=None))
            own = alternation.candidates(known / (1 + SIMPLER * needless(mesh, setting.cluster)))
            found += own
            old += [alternation.old] if alternation.old is not None else []
            outcome |= {"programs": len(own), "cost": min((c.cost for c in own), default=None), "hopeless": alternation.hopeless}
        except (InsufficientMemoryError, PlanError) as failure:
            failures.append(kept(failure))
            outcome["error"] = str(failure)
        if mesh.name in alternations and alternations[mesh.name].binds:
            exact = replace(setting, strict=True)
        outcome["search_time"] = time.perf_counter() - began
        counters.search_time += outcome["search_time"]
        counters.views.append(mesh.name)
        counters.tried.append(outcome)
    if not found:
        raise nearest(failures)
    timed = Simulated(counters)
    ranked = _ranked(found, old, timed)
    if ranked[0].time > HOPELESS * setting.beside:
        return ranked
    if not setting.strict and not ranked[0].fits:
        return plan_spmd(replace(setting, strict=True), counters, meshes)
    hiding = _overlapped(setting, alternations, ranked, timed, counters)
    old += hiding
    ranked = _ranked(found, old, timed) if hiding else ranked
    began = time.perf_counter()
    of_best = alternations[ranked[0].mesh.name]
    more = [*of_best.from_even_shares(), *of_best.around()]
    counters.search_time += time.perf_counter() - began
    if more:
        ranked = _ranked([*found, *more], old, timed)
    small = len(setting.graph.nodes) <= FEW_NODES and of_best.free and not setting.within and setting.repeats == 1
    tied = finished(ranked, timed, setting.fixed)[0] if small else ranked[0]
    ranked = _with_segments(exact, ranked, alternations[ranked[0].mesh.name], timed, counters)
    if small:
        ranked = sorted([tied, *finished(ranked, timed, setting.fixed)], key=_by_simplicity)
    if not setting.strict and not ranked[0].fits:
        return plan_spmd(replace(setting, strict=True), counters, meshes)
    counters.search.gap = ranked[0].gap
    for outcome in counters.tried[-len(meshes) :]:
        outcome |= {"time": min((c.time for c in ranked if c.mesh.name == outcome["view"]), default=None)}
    return ranked


def _far_too_large(setting: Setting, failures: Sequence[HapError]) -> bool:
    """Whether a model that is not small needs so much more memory than there is on one view that others, whose searches take long, are left out."""
    return len(setting.graph.nodes) > FEW_STEPS and any(isinstance(f, InsufficientMemoryError) and f.times > MAY_FIT for f in failures)


class Simulated:
    """Candidates with their simulated times; equal programs at equal lengths are simulated once."""

    def __init__(self, counters: Counters):
        self.counters = counters
        self.known: dict[Any, Candidate] = {}  # holds the programs, so that their identity stays their own
        self.exact: dict[Any, CostModel] = {}  # candidates of equal lengths share a cost model

    def __call__(self, candidate: Candidate) -> Candidate:
        at = id(candidate.costs), tuple(candidate.lengths.items())
        key = id(candidate.program), at
        if key not in self.known:
            began = time.perf_counter()
            exact = self.exact[at] = self.exact.get(at) or candidate.costs.at_lengths(candidate.lengths)
            self.known[key] = replace(candidate, time=iteration_time(candidate.program, candidate.theory.graph, exact))
            self.counters.simulation_time += time.perf_counter() - began
        return replace(candidate, time=self.known[key].time)


def _ranked(found: Sequence[Candidate], old: Sequence[Candidate], timed: Simulated) -> list[Candidate]:
    """The best candidates, in the order of their simulated times; the best of every view, those of the best programs and the old ones are among
    them."""
    found = sorted(found, key=lambda c: c.cost)
    of_view = {c.mesh.name: c for c in reversed(found)}
    programs = at_their_best(found)
    chosen = sorted({id(c): c for c in [*of_view.values(), *found[:SIMULATED], *programs[:SIMULATED], *old]}.values(), key=lambda c: c.cost)
    return sorted(map(timed, chosen), key=_by_simplicity)


def _overlapped(
    setting: Setting, alternations: Mapping[str, Alternation], ranked: Sequence[Candidate], timed: Simulated, counters: Counters
) -> list[Candidate]:
    """Candidates whose sums of gradients hide behind backward, which the additive cost cannot see: of the flat view and that of the best one."""
    if setting.given or setting.start is not None or setting.forbidden != NOTHING or setting.key.mode != "train":
        return []
    began = time.perf_counter()
    found: list[Candidate] = []
    for name in dict.fromkeys(("flat", ranked[0].mesh.name)):
        own = [c for c in ranked if c.mesh.name == name]
        if own:
            found += overlapped(alternations[name], min(own, key=lambda c: c.cost), timed, min(c.time for c in ranked))
    counters.search_time += time.perf_counter() - began
    bound = ranked[0].cost * (1 - ranked[0].gap)
    return [c.proven(bound) for c in found]


def _by_simplicity(candidate: Candidate) -> float:
    """Its time, of a needless mesh as if that were longer."""
    return candidate.time * (1 + SIMPLER * needless(candidate.mesh, candidate.costs.cluster))


def _with_segments(setting: Setting, ranked: list[Candidate], alternation: Alternation, timed: Simulated, counters: Counters) -> list[Candidate]:
    """The candidates, and those of the best one's view in which parts of the model have ratios of their own, where the linear program says that this
    pays. Never worse: all are simulated."""
    best, rule = ranked[0], setting.rule
    if rule.most_segments == 1 or setting.given or len(best.costs.kinds) < 2 or best.mesh.uneven is None:
        return ranked
    began = time.perf_counter()
    freed = _free_borders(ranked, rule, alternation)
    counters.segments_time += time.perf_counter() - began
    found = [c for own in freed for c in _in_segments(setting, best, own, counters)]
    return sorted([*ranked, *(_ranked(found, [], timed) if found else ())], key=_by_simplicity)


def _in_segments(setting: Setting, best: Candidate, freed: Freed, counters: Counters) -> list[Candidate]:
    """Candidates with these segments, from their shares on."""
    parts = candidate_segments(setting.graph, setting.rule.segments)
    graph = replace(setting.graph, segment_of=numbered(freed.groups[part] for part in parts))
    start = {row: per_device(own.tolist(), best.costs.kinds) for row, own in freed.shares.items()}
    began = time.perf_counter()
    theory = derive(graph, best.mesh)
    counters.theory_time += time.perf_counter() - began
    began = time.perf_counter()
    found: list[Candidate] = []
    with suppress(InsufficientMemoryError, PlanError):  # what fits with one row is known
        told = Teller(setting.progress, counters.search, best.mesh.name, 1, 1, best.cost)
        with closing(Alternation(replace(setting, graph=graph, start=start, old=None), theory, counters, told)) as own:
            found = own.candidates(best.cost)
            found += own.around() if min((c.cost for c in found), default=inf) < best.cost else []
    counters.search_time += time.perf_counter() - began
    return found


def _free_borders(ranked: Sequence[Candidate], rule: Restriction, alternation: Alternation) -> list[Freed]:
    """The borders that pay, by the linear program, in the best program and, where the problem is small, in others of its view that are nearly as
    fast: what is second with one row for all may be first with several."""
    best = ranked[0]
    parts = candidate_segments(best.theory.graph, rule.segments)
    if len(set(parts)) < 2:
        return []
    near = [c for c in ranked if c.mesh == best.mesh and c.cost <= best.cost * (1 + NEAR)] if alternation.small else []
    programs = {id(c.program): c for c in reversed((best, *near))}  # each at its best lengths
    # on several axes a search costs more
    worth = WORTH if len(best.mesh.axes) == 1 else 4 * WORTH
    found: list[Freed] = []
    for candidate in programs.values():
        untied = Untied(candidate.program, candidate.storage_of, candidate.costs, parts)
        shares = {row: np.array([max(own[c] for c in kind) for kind in candidate.costs.kinds]) for row, own in candidate.shares.items()}
        capacity, consecutive = alternation.limits_of(candidate, untied.memory(candidate.lengths)), list(parts) == sorted(parts)
        known = inf if candidate.program is best.program else best.cost
        own = free_borders(untied, candidate.costs.sizes, capacity, shares, rule.most_segments, consecutive, worth, known)
        found += [own] if own is not None else []
    return sorted(found, key=lambda own: own.time)[:MOST_FREED]


# -- plans -------------------------------------------------------------------------------------------------------------------------------------------


def plan_graphs(
    graphs: Sequence[Graph], cluster: ClusterSpec, *,
    strategy: str | Restriction = "auto", optimizer: str = "adamw", precision: str | None = None,
    keys: Sequence[ProgramKey] | None = None, capture_time: float = 0.0, progress: Watcher | None = None,
    old: Plan | None = None, advise: bool = True,
) -> Plan:  # fmt: skip
    """A plan for the first graph, which chooses mesh and storage, with further programs for the others. progress: is told what is done. old: a plan
    made before, perhaps for another cluster: where the same mesh is tried under the same restriction, it is one of the starts, and a candidate.
    advise: where nothing fits, what would help is tried and said."""
    graphs = list(map(discover, graphs))
    rule = restriction(strategy)
    named = [key_of(g) for g in graphs] if keys is None else list(keys)
    counters = Counters()
    before = old if old is not None and (old.restriction, old.optimizer) == (rule, optimizer) else None
    asked = Setting(graphs[0], named[0], cluster, rule, precision or "fp32", optimizer, progress=progress, old=before)
    try:
        setting, best = at_once(_with_remat(asked, counters))
    except InsufficientMemoryError as error:
        if not advise:
            raise
        raise advised(error, asked, fits_somehow) from None
    plan = _lowered(setting, best, counters, capture_time)
    for graph, key in zip(graphs[1:], named[1:], strict=True):
        plan = extend(plan, graph, key)
    return plan


def _lowered(setting: Setting, best: Candidate, counters: Counters, capture_time: float) -> Plan:
    """The plan of a candidate, with statistics."""
    told = {"capture_time": capture_time, "coverage": coverage(setting.graph).as_dict(), **counters.as_dict()}
    return lower(best, setting.graph, setting.key, setting.cluster, setting.rule, setting.precision, setting.optimizer, told)


def _with_remat(
    setting: Setting, counters: Counters, meshes: Sequence[Mesh] | None = None, quickly: bool = False
) -> Tells[tuple[Setting, Candidate]]:
    """The best candidate, and its setting, with the segments that it has: with blocks computed again in backward where the restriction says so, or
    where memory binds and that is faster. Yields how long the plan takes at least, as `hapx.recompute.fastest` says; quickly: and early where the
    model is large."""
    meshes = views(setting.cluster, setting.rule) if meshes is None else meshes
    if quickly and len(setting.graph.nodes) > LARGE:
        quick = Counters()
        yield at_least(setting, quick, meshes, plan_spmd)
        counters.include(quick)
    remat = setting.rule.remat
    blocks = with_blocks(setting.graph) if remat != "none" and setting.graph.mode == "train" else setting.graph
    if remat == "auto" and blocks is not setting.graph:
        return (yield from fastest(setting, counters, meshes, plan_spmd))
    return as_chosen(setting, plan_spmd(replace(setting, graph=blocks), counters, meshes)[0])


def fits_somehow(setting: Setting) -> InsufficientMemoryError | None:
    """Whether a program of a setting fits on the flat mesh (or the one it names): the error if none was found."""
    mesh, remat = views(setting.cluster, setting.rule)[0], setting.rule.remat
    blocks = with_blocks(setting.graph) if remat != "none" and setting.graph.mode == "train" else setting.graph
    failures: list[InsufficientMemoryError] = []
    for graph in (blocks, setting.graph) if remat == "auto" and blocks is not setting.graph else (blocks,):
        counters = Counters()
        told = Teller(setting.progress, counters.search, mesh.name, 1, 1, inf)
        try:
            with closing(Alternation(replace(setting, graph=graph, old=None), derive(graph, mesh), counters, told)) as own:
                error = own.fits()
        except PlanError as failure:
            error = InsufficientMemoryError(failure.what)
        if error is None:
            return None
        failures.append(error)
    return min(failures, key=attrgetter("times"))


@without_collections()
def plan_module(
    module: nn.Module, cluster: ClusterSpec, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None, strategy: str | Restriction = "auto",
    optimizer: str = "adamw", precision: str | None = None, remat: str = "auto", micro_batches: int | str = "auto", autocast: str | None = None,
    progress: Watcher | None = None, captures: Captures | None = None,
) -> Plan:  # fmt: skip
    """Captures a module and plans it: as one program on all devices, and, where the strategy allows several stages, as a pipeline. micro_batches: of
    a pipeline; 1: no pipeline; "auto": as many as suit, and no pipeline where an operator mixes the samples of a batch (batch norm, a contrastive
    loss), since that would train differently. Where there can be one stage only, a number has no effect, and a warning says so. captures: of the
    same module, where some were begun before. Never reads or changes the module's values."""
    if micro_batches != "auto" and (not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1):
        raise HapError(f"micro_batches={micro_batches!r}", where="plan", allowed='"auto", or a number that divides the batch')
    rule = with_remat(restriction(strategy), remat)  # wrong names are reported before the long part
    from hapx.graph.captures import Captures  # torch is needed only to capture

    captures = captures or Captures(module, example_inputs, loss_fn)
    began = time.perf_counter()
    graph = captures.whole()
    captured = time.perf_counter() - began
    graph = discover(graph)  # here, as it may run kernels: torch's threads do not survive in the copy of the process that may plan this
    if isinstance(micro_batches, int) and graph.batch % micro_batches:
        raise HapError(f"micro_batches={micro_batches}", where="plan", allowed=f"a divisor of the batch of {graph.batch}")

    number, in_parts = micro_batches if isinstance(micro_batches, int) else None, may_have_stages(rule, cluster)
    if number is not None and number > 1 and not in_parts:
        one = "one device" if cluster.num_devices == 1 else f"strategy {rule.name!r}" if rule.max_stages == 1 else "a given mesh or given ratios"
        warn(f"micro_batches={number} has no effect: {one} means one stage, which runs the whole batch at once")
    batches = Batches(captures, graph, number, in_parts=in_parts)
    asked = Setting(graph, key_of(graph, autocast), cluster, rule, precision or "fp32", optimizer, progress=progress)

    def whole(heard: bool) -> Tells[Plan]:
        counters = Counters()
        setting, best = yield from _with_remat(asked, counters, quickly=heard)
        return _lowered(setting, best, counters, captured)

    def timed(plan: Plan) -> Plan:
        return replace(plan, statistics={**plan.statistics, "planning_time": time.perf_counter() - began})

    try:
        if rule.max_stages == 1 or micro_batches == 1 or cluster.num_devices == 1:
            return timed(at_once(whole(False)))
        from hapx.inter_op import plan_with_stages

        plan = plan_with_stages(asked, whole, batches.part, number)
    except InsufficientMemoryError as error:
        raise advised(error, asked, fits_somehow, batches.that_fit) from None
    from hapx.fewer import with_fewer

    if "coverage" not in plan.statistics:  # a pipeline has it from the plan of one stage, if that was waited for
        plan = replace(plan, statistics={"capture_time": captured, "coverage": coverage(graph).as_dict(), **plan.statistics})
    return timed(with_fewer(asked, plan))


def extend(plan: Plan, graph: Graph, key: ProgramKey) -> Plan:
    """The plan with a further program (another batch size, or evaluation): parameters stay where they are, in the lengths they have."""
    assert not plan.schedules, "one program of whole batches"
    graph = discover(graph)
    graph = replace(graph, segment_of=carried(plan.graphs[plan.first], graph))
    stage = plan.stages[0]
    given = {storage.name: storage.copies[0].placement for storage in plan.storage}
    counters = Counters()
    rule = replace(plan.restriction, storage="auto") if plan.restriction.storage == "as-used" else plan.restriction
    if chosen_blocks(plan.graphs[plan.first]):
        rule = replace(rule, remat="blocks")
    asked = Setting(graph, key, plan.cluster, rule, plan.precision, plan.optimizer)
    setting = asked.storing(given, stage.lengths[plan.first], stage.shares)
    setting, best = at_once(_with_remat(setting, counters, [stage.mesh]))
    return extended(plan, best, setting.graph, key, counters.as_dict())


__all__ = ["Candidate", "Counters", "Setting", "extend", "key_of", "plan_graphs", "plan_module", "plan_spmd", "views"]
