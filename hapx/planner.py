"""The planner: graph and cluster in, plan out.

For every mesh view: the theory is derived once, then synthesis and balancing alternate (HAP section 3.3),

    Q <- A*(B),   B <- LP(Q),   until the pair repeats or stops improving,

from several starting ratios, and the best pair seen is kept. The best candidates of all views are ranked again by the event-driven simulator, which
sees the overlap of gradient synchronisation with backward that the additive cost cannot see.

Invariant: a candidate's time, memory and program are those of its integer lengths, never of fractional ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hapx.balancer.borders import WORTH, Freed, free_borders
from hapx.balancer.lp import Objective, balance, objective
from hapx.balancer.rounding import Lengths, fit, improve, per_device, round_ratios
from hapx.balancer.untied import Untied
from hapx.cluster.spec import ClusterSpec
from hapx.cost.coverage import coverage
from hapx.cost.model import CostModel
from hapx.cost.remat import chosen_blocks, with_blocks
from hapx.cost.terms import Vector
from hapx.errors import HapError, InsufficientMemoryError, PlanError
from hapx.graph.borders import candidate_segments, carried, numbered
from hapx.ir import Graph
from hapx.lower import Candidate, extended, lower
from hapx.plan import Axis, Mesh, Plan, ProgramKey
from hapx.restriction import Restriction, restriction, with_remat
from hapx.simulate import simulate_program
from hapx.states import Cut, Placement, Row
from hapx.synth.astar import Statistics
from hapx.synth.problem import Problem, build
from hapx.synth.search import attempt, too_small
from hapx.synth.writer import Solution
from hapx.theory.derive import derive
from hapx.theory.discover import discover
from hapx.theory.triple import Theory

if TYPE_CHECKING:
    from torch import nn

MAX_ALTERNATIONS = 8
STALLED = 1e-3  # relative improvement below which the alternation ends
HOPELESS = 1.1  # a view whose first program costs that much more than the best of the others is not balanced further
SIMULATED = 4  # candidates that the simulator ranks


# -- mesh views ------------------------------------------------------------------------------------------------------------------------------------


def views(cluster: ClusterSpec, rule: Restriction) -> tuple[Mesh, ...]:
    """Meshes over the cluster's devices that the restriction (or the cluster file) allows: flat, with uneven ratios, and every a x b whose
    inner groups are equal devices of one machine, uneven over the groups. Raises HapError for a view that the cluster does not have."""
    wanted = rule.mesh if rule.mesh != "auto" else cluster.mesh
    n = cluster.num_devices
    found = {"flat": Mesh("flat", (Axis("devices", n, "devices"),), tuple(range(n)), 0)}
    for inner in range(2, n):
        if _groups_are_equal(cluster, inner):
            machines = all(len(m.devices) == inner for m in cluster.machines)
            outer = Axis("machines" if machines else "groups", n // inner, "machines" if machines else "devices")
            found[f"{n // inner}x{inner}"] = Mesh(f"{n // inner}x{inner}", (outer, Axis("devices", inner, "devices")), tuple(range(n)), 0)
    if wanted == "auto":
        return tuple(found.values())
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


@dataclass
class Counters:
    """What planning cost, for `Plan.statistics`."""

    theory_time: float = 0.0
    search_time: float = 0.0
    segments_time: float = 0.0
    simulation_time: float = 0.0
    alternations: int = 0
    views: list[str] = field(default_factory=list)
    search: Statistics = field(default_factory=Statistics)

    def as_dict(self) -> dict[str, Any]:
        times = {f"{name}_time": getattr(self, f"{name}_time") for name in ("theory", "search", "segments", "simulation")}
        counts = {name: getattr(self.search, name) for name in ("expansions", "generated", "dominated", "bounded", "unproven", "gap")}
        return {**times, **counts, "alternations": self.alternations, "views": tuple(self.views)}


@dataclass(frozen=True)
class Setting:
    """What a program is planned for."""

    graph: Graph
    key: ProgramKey
    cluster: ClusterSpec
    rule: Restriction
    precision: str
    optimizer: str
    given: Mapping[str, Placement] = field(default_factory=dict)
    fixed: Mapping[Cut, tuple[int, ...]] = field(default_factory=dict)
    start: Mapping[Row, tuple[float, ...]] | None = None


def plan_spmd(setting: Setting, counters: Counters, meshes: Sequence[Mesh] | None = None) -> list[Candidate]:
    """Candidates for one graph on all devices, best first, on every allowed view.

    Raises InsufficientMemoryError or PlanError where no view has a program."""
    found: list[Candidate] = []
    failures: list[HapError] = []
    for mesh in views(setting.cluster, setting.rule) if meshes is None else meshes:
        began = time.perf_counter()
        theory = derive(setting.graph, mesh)
        counters.theory_time += time.perf_counter() - began
        began = time.perf_counter()
        try:
            found += _Alternation(setting, theory, counters).candidates(min((c.cost for c in found), default=float("inf")))
        except (InsufficientMemoryError, PlanError) as failure:
            failures.append(failure)
        counters.search_time += time.perf_counter() - began
        counters.views.append(mesh.name)
    if not found:
        raise next((f for f in failures if isinstance(f, InsufficientMemoryError)), failures[0])
    ranked = _with_segments(setting, _ranked(found, counters), counters)
    counters.search.gap = ranked[0].gap
    return ranked


def _ranked(found: list[Candidate], counters: Counters) -> list[Candidate]:
    """The best candidates, each simulated, in the order of their simulated times; the best of every view is among them."""
    began = time.perf_counter()
    found = sorted(found, key=lambda c: c.cost)
    first = {c.mesh.name: c for c in reversed(found)}
    chosen = sorted({id(c): c for c in [*first.values(), *found[:SIMULATED]]}.values(), key=lambda c: c.cost)
    simulated = [replace(c, time=simulate_program(c.program, c.theory.graph, c.costs, c.lengths).total) for c in chosen]
    counters.simulation_time += time.perf_counter() - began
    return sorted(simulated, key=lambda c: c.time)


def _with_segments(setting: Setting, ranked: list[Candidate], counters: Counters) -> list[Candidate]:
    """The candidates, and those of the best one's view in which parts of the model have ratios of their own, where the linear program says that this
    pays. Never worse: all are simulated."""
    best, rule = ranked[0], setting.rule
    if rule.most_segments == 1 or setting.given or len(best.costs.kinds) < 2 or best.mesh.uneven is None:
        return ranked
    began = time.perf_counter()
    freed = _free_borders(best, rule)
    counters.segments_time += time.perf_counter() - began
    if freed is None:
        return ranked
    parts = candidate_segments(setting.graph, rule.segments)
    segments = numbered(freed.groups[part] for part in parts)
    graph = replace(setting.graph, segment_of=segments)
    start = {row: per_device(own.tolist(), best.costs.kinds) for row, own in freed.shares.items()}
    began = time.perf_counter()
    theory = derive(graph, best.mesh)
    counters.theory_time += time.perf_counter() - began
    began = time.perf_counter()
    try:
        found = _Alternation(replace(setting, graph=graph, start=start), theory, counters).candidates(best.cost)
    except (InsufficientMemoryError, PlanError):
        found = []  # what fits with one row is known
    counters.search_time += time.perf_counter() - began
    return sorted([*ranked, *(_ranked(found, counters) if found else ())], key=lambda c: c.time)


def _free_borders(best: Candidate, rule: Restriction) -> Freed | None:
    """The borders of a candidate's program that pay, by the linear program."""
    parts = candidate_segments(best.theory.graph, rule.segments)
    if len(set(parts)) < 2:
        return None
    untied = Untied(best.program, best.storage_of, best.costs, parts)
    shares = {row: np.array([max(own[c] for c in kind) for kind in best.costs.kinds]) for row, own in best.shares.items()}
    # on several axes a search costs more
    worth = WORTH if len(best.mesh.axes) == 1 else 4 * WORTH
    capacity, consecutive = np.asarray(best.costs.capacity), list(parts) == sorted(parts)
    return free_borders(untied, best.costs.sizes, capacity, shares, rule.most_segments, consecutive, worth)


class _Alternation:
    """Q <- A*(B), B <- LP(Q) on one mesh."""

    def __init__(self, setting: Setting, theory: Theory, counters: Counters):
        self.setting, self.theory, self.counters = setting, theory, counters
        self.costs = CostModel(theory, setting.cluster, setting.precision, setting.optimizer, setting.key.mode)
        self.problem: Problem = build(theory, self.costs, setting.rule, setting.given)
        self.capacity: Vector = np.asarray(self.costs.capacity)
        self.limits = tuple(self.capacity.tolist())
        self.kinds, self.sizes = self.costs.kinds, self.costs.sizes
        axis, segments = theory.mesh.uneven, range(setting.graph.segments)
        self.rows = tuple(theory.mesh.row(axis, kind, s) for s in segments for kind in _ROW_KINDS) if axis is not None else ()
        self.fixed = {cut: own for cut, own in setting.fixed.items() if cut.row in self.rows}
        self.found: dict[tuple[Any, ...], Candidate] = {}
        self.prices: tuple[float, ...] | None = None  # of memory, once it binds

    def candidates(self, known: float) -> list[Candidate]:
        """All pairs of program and lengths that were met and fit. known: cost of the best candidate of other views."""
        failure: InsufficientMemoryError | None = None
        for ratios in self._starts():
            try:
                self._alternate(ratios, known)
            except InsufficientMemoryError as error:
                failure = failure or error
        if not self.found:
            assert failure is not None
            raise failure
        return list(self.found.values())

    def _starts(self) -> list[dict[Row, Vector]]:
        n = sum(self.sizes)
        even, speed = np.full(len(self.sizes), 1.0 / n), np.asarray(self.costs.speeds)
        ratios = self.setting.rule.ratios
        if isinstance(ratios, tuple):
            return [self._explicit(ratios)]
        if self.setting.start is not None:
            start = {row: own for row, own in self.setting.start.items() if row in self.rows}
            given = {row: np.array([max(own[c] for c in kind) for kind in self.kinds]) for row, own in start.items()}
            return [dict.fromkeys(self.rows, speed) | given]
        # on several axes a search costs more, and ratios that differ only between machines start nearer to the best
        single = np.allclose(even, speed) or len(self.theory.mesh.axes) > 1
        both: list[Vector] = [speed] if single else [speed, even]
        chosen = [even] if ratios == "even" else [speed] if ratios == "speed" else both
        return [dict.fromkeys(self.rows, shares) for shares in chosen]

    def _explicit(self, shares: tuple[float, ...]) -> dict[Row, Vector]:
        n = sum(self.sizes)
        if len(shares) != n or min(shares) < 0 or sum(shares) <= 0:
            raise HapError(f"ratios {shares}", where="restriction", allowed=f"{n} numbers >= 0, one per coordinate of the uneven axis, not all 0")
        total = sum(shares)
        return dict.fromkeys(self.rows, np.array([max(shares[c] for c in kind) / total for kind in self.kinds]))

    def _lengths(self, ratios: Mapping[Row, Vector]) -> Lengths:
        explicit = self.setting.rule.ratios
        per = {row: explicit if isinstance(explicit, tuple) else per_device(shares.tolist(), self.kinds) for row, shares in ratios.items()}
        return {**round_ratios(per, self.problem.cuts), **{c: own for c, own in self.fixed.items() if c in self.problem.cuts}}

    def _alternate(self, ratios: dict[Row, Vector], known: float) -> None:
        """Adds what it meets to `found`. Raises InsufficientMemoryError if no program fits at any ratios that were tried."""
        free = self.setting.rule.ratios == "balanced" and bool(self.rows)
        lengths, best = self._lengths(ratios), float("inf")
        for _ in range(MAX_ALTERNATIONS):
            self.counters.alternations += 1
            solution, goal, balanced = None, None, None
            for solution, fits in self._solutions(lengths, free):
                goal = objective(solution.steps, solution.storage, len(self.sizes))
                if fits:
                    self._keep(solution, goal, lengths, ratios)
                    best = min(best, solution.cost)
                if not free or (fits and solution.cost > HOPELESS * known):
                    return
                balanced = balance(goal, self.sizes, self.capacity, ratios, self.costs.lengths_to_shares(self.fixed))
                if balanced is not None:
                    break
            if balanced is None or goal is None or solution is None:
                return
            ratios = balanced
            lengths = self._rounded(goal, self._lengths(ratios))
            candidate = self._keep(solution, goal, lengths, ratios)
            if candidate is None or candidate.cost >= best * (1 - STALLED):
                return
            best = candidate.cost

    def _solutions(self, lengths: Lengths, free: bool) -> Iterator[tuple[Solution, bool]]:
        """The best program at these lengths that fits. If none does but ratios may change: the cheapest one (other ratios may make it fit), then the
        one of least memory; then InsufficientMemoryError is raised, naming the device and what it lacks."""
        found, nearest = attempt(self.problem, self.costs.lengths_to_shares(lengths), self.limits, self.setting.key, self.prices)
        for solution in (found,) if found is not None else nearest:
            self.counters.search.add(solution.statistics)
        if found is not None:
            self.prices = found.prices or self.prices
            yield found, True
            return
        if free:
            yield from ((solution, False) for solution in nearest)
        raise too_small(self.problem, nearest[-1], self.limits)

    def _rounded(self, goal: Objective, lengths: Lengths) -> Lengths:
        """Lengths after rounding, made to fit, then improved where units are few."""
        used = goal.cuts
        movable = [c for c in used if c not in self.fixed]

        def excess(trial: Lengths) -> float:
            return float((goal.memory(self._shares(trial, used)) / self.capacity).max()) - 1.0

        def cost(trial: Lengths) -> float:
            shares = self._shares(trial, used)
            return goal.time(shares) if (goal.memory(shares) <= self.capacity).all() else float("inf")

        if excess(lengths) > 0:
            lengths = fit(lengths, self.kinds, excess, movable)
        return improve(lengths, self.kinds, cost, movable)

    def _shares(self, lengths: Lengths, cuts: Iterable[Cut]) -> Mapping[Cut, Vector]:
        return self.costs.lengths_to_shares({c: lengths[c] for c in cuts})

    def _keep(self, solution: Solution, goal: Objective, lengths: Lengths, ratios: Mapping[Row, Vector]) -> Candidate | None:
        shares = self._shares(lengths, goal.cuts)
        if not (goal.memory(shares) <= self.capacity * (1 + 1e-9)).all():
            return None
        used = set(goal.cuts)
        key = (solution.program.instructions, tuple(sorted(((c, n) for c, n in lengths.items() if c in used), key=str)))
        if key not in self.found:
            per = {row: per_device(own.tolist(), self.kinds) for row, own in ratios.items()}
            if isinstance(self.setting.rule.ratios, tuple):
                total = sum(self.setting.rule.ratios)
                per = {row: tuple(s / total for s in self.setting.rule.ratios) for row in per}
            cost = goal.time(shares)
            self.found[key] = Candidate(
                self.theory, self.costs, solution.program, solution.storage_of, lengths, per, cost, cost, solution.statistics.gap
            )
        return self.found[key]


_ROW_KINDS: tuple[Literal["compute", "storage"], ...] = ("compute", "storage")


# -- plans -------------------------------------------------------------------------------------------------------------------------------------------


def plan_graphs(
    graphs: Sequence[Graph], cluster: ClusterSpec, *,
    strategy: str | Restriction = "auto", optimizer: str = "adamw", precision: str | None = None,
    keys: Sequence[ProgramKey] | None = None, capture_time: float = 0.0,
) -> Plan:  # fmt: skip
    """A plan for the first graph, which chooses mesh and storage, with further programs for the others."""
    graphs = list(map(discover, graphs))
    rule = restriction(strategy)
    named = [key_of(g) for g in graphs] if keys is None else list(keys)
    counters = Counters()
    setting, best = _with_remat(Setting(graphs[0], named[0], cluster, rule, precision or "fp32", optimizer), counters)
    told = {"capture_time": capture_time, "coverage": coverage(setting.graph).as_dict(), **counters.as_dict()}
    plan = lower(best, setting.graph, setting.key, cluster, rule, setting.precision, optimizer, told)
    for graph, key in zip(graphs[1:], named[1:], strict=True):
        plan = extend(plan, graph, key)
    return plan


def _with_remat(setting: Setting, counters: Counters, meshes: Sequence[Mesh] | None = None) -> tuple[Setting, Candidate]:
    """The best candidate, and its setting: with blocks computed again in backward where the restriction says so, or nothing fits otherwise."""
    remat = setting.rule.remat
    blocks = replace(setting, graph=with_blocks(setting.graph)) if remat != "none" and setting.graph.mode == "train" else setting
    if remat != "blocks" or blocks.graph is setting.graph:
        try:
            return _chosen(setting, counters, meshes)
        except InsufficientMemoryError:
            if blocks.graph is setting.graph:
                raise
    return _chosen(blocks, counters, meshes)


def _chosen(setting: Setting, counters: Counters, meshes: Sequence[Mesh] | None) -> tuple[Setting, Candidate]:
    """The best candidate, and its setting: with the segments that it has."""
    best = plan_spmd(setting, counters, meshes)[0]
    return replace(setting, graph=best.theory.graph), best


def plan_module(
    module: nn.Module, cluster: ClusterSpec, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None, strategy: str | Restriction = "auto",
    optimizer: str = "adamw", precision: str | None = None, remat: str = "auto", micro_batches: int | str = "auto", autocast: str | None = None,
) -> Plan:  # fmt: skip
    """Captures a module and plans it. Never reads or changes its values."""
    if micro_batches not in ("auto", 1):
        raise HapError(f"micro_batches={micro_batches!r}", where="plan", allowed='"auto" or 1')
    rule = with_remat(restriction(strategy), remat)  # wrong names are reported before the long part
    from hapx.graph.capture import capture  # torch is needed only to capture

    began = time.perf_counter()
    graph = capture(module, example_inputs, loss_fn=loss_fn)
    captured = time.perf_counter() - began
    return plan_graphs(
        [graph], cluster, strategy=rule, optimizer=optimizer, precision=precision, keys=[key_of(graph, autocast)], capture_time=captured
    )  # fmt: skip


def extend(plan: Plan, graph: Graph, key: ProgramKey) -> Plan:
    """The plan with a further program (another batch size, or evaluation): parameters stay where they are, in the lengths they have."""
    assert len(plan.stages) == 1, "one stage"
    graph = discover(graph)
    graph = replace(graph, segment_of=carried(plan.graphs[plan.first], graph))
    stage = plan.stages[0]
    given = {name: storage.copies[0].placement for storage in plan.storage for name in (storage.name,)}
    kept = {s.cut for p in given.values() for s in p.states if hasattr(s, "cut")}
    fixed = {cut: own for cut, own in stage.lengths[plan.first].items() if cut in kept}
    counters = Counters()
    rule = replace(plan.restriction, storage="auto") if plan.restriction.storage == "as-used" else plan.restriction
    if chosen_blocks(plan.graphs[plan.first]):
        rule = replace(rule, remat="blocks")
    setting = Setting(graph, key, plan.cluster, rule, plan.precision, plan.optimizer, given, fixed, stage.shares)
    setting, best = _with_remat(setting, counters, [stage.mesh])
    return extended(plan, best, setting.graph, key, counters.as_dict())


def key_of(graph: Graph, autocast: str | None = None) -> ProgramKey:
    """The key of a graph's program."""
    return ProgramKey(graph.mode, tuple(graph.refs[n].shape for n in graph.input_names), autocast)


__all__ = ["Candidate", "Counters", "Setting", "extend", "key_of", "plan_graphs", "plan_module", "plan_spmd", "views"]
