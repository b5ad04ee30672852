"""The planner: graph and cluster in, plan out.

For every mesh view: the theory is derived once, then synthesis and balancing alternate (HAP section 3.3),

    Q <- A*(B),   B <- LP(Q),   until the pair repeats or stops improving,

from several starting ratios, and the best pair seen is kept. The best candidates of all views are ranked again by the event-driven simulator, which
sees the overlap of gradient synchronisation with backward that the additive cost cannot see.

Invariant: a candidate's time, memory and program are those of its integer lengths, never of fractional ratios.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hapx.balancer.lp import Objective, balance, objective
from hapx.balancer.rounding import Lengths, fit, improve, per_device, round_ratios
from hapx.cluster.spec import ClusterSpec
from hapx.cost.coverage import coverage
from hapx.cost.model import CostModel
from hapx.cost.remat import chosen_blocks, with_blocks
from hapx.cost.terms import Vector
from hapx.errors import HapError, InsufficientMemoryError, PlanError
from hapx.ir import Graph
from hapx.lower import Candidate, extended, lower
from hapx.plan import Axis, Mesh, Plan, ProgramKey
from hapx.restriction import Restriction, restriction, with_remat
from hapx.simulate import simulate_program
from hapx.starts import carried, further
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
FEW_STEPS = 100  # nodes and outputs of a problem that is searched from further starts
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
    simulation_time: float = 0.0
    alternations: int = 0
    kept: list[tuple[float, ...]] = field(default_factory=list)  # per start, the least cost seen after every step of the alternation
    ended: Counter[str] = field(default_factory=Counter)  # why alternations ended
    views: list[str] = field(default_factory=list)
    search: Statistics = field(default_factory=Statistics)

    def as_dict(self) -> dict[str, Any]:
        times = {"theory_time": self.theory_time, "search_time": self.search_time, "simulation_time": self.simulation_time}
        counts = {name: getattr(self.search, name) for name in ("expansions", "generated", "dominated", "bounded", "unproven", "gap")}
        ended = {f"ended_{why}": n for why, n in sorted(self.ended.items())}
        return {**times, **counts, "alternations": self.alternations, **ended, "views": tuple(self.views)}


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
    old: Plan | None = None  # of the same restriction: where its mesh is tried again, it is a start and a candidate


def plan_spmd(setting: Setting, counters: Counters, meshes: Sequence[Mesh] | None = None) -> list[Candidate]:
    """Candidates for one graph on all devices, best first, on every allowed view.

    Raises InsufficientMemoryError or PlanError where no view has a program."""
    found: list[Candidate] = []
    old: list[Candidate] = []
    failures: list[HapError] = []
    for mesh in views(setting.cluster, setting.rule) if meshes is None else meshes:
        began = time.perf_counter()
        theory = derive(setting.graph, mesh)
        counters.theory_time += time.perf_counter() - began
        began = time.perf_counter()
        try:
            alternation = _Alternation(setting, theory, counters)
            found += alternation.candidates(min((c.cost for c in found), default=float("inf")))
            old += [alternation.old] if alternation.old is not None else []
        except (InsufficientMemoryError, PlanError) as failure:
            failures.append(failure)
        counters.search_time += time.perf_counter() - began
        counters.views.append(mesh.name)
    if not found:
        raise next((f for f in failures if isinstance(f, InsufficientMemoryError)), failures[0])
    ranked = _ranked(setting, found, old, counters)
    counters.search.gap = ranked[0].gap
    return ranked


def _ranked(setting: Setting, found: list[Candidate], old: list[Candidate], counters: Counters) -> list[Candidate]:
    """The best candidates, each simulated, in the order of their simulated times; the best of every view and the old plan are among them."""
    began = time.perf_counter()
    found = sorted(found, key=lambda c: c.cost)
    first = {c.mesh.name: c for c in reversed(found)}
    chosen = sorted({id(c): c for c in [*first.values(), *found[:SIMULATED], *old]}.values(), key=lambda c: c.cost)
    simulated = [replace(c, time=simulate_program(c.program, setting.graph, c.costs, c.lengths).total) for c in chosen]
    counters.simulation_time += time.perf_counter() - began
    return sorted(simulated, key=lambda c: c.time)


_Balanced = tuple[float, Solution, Objective, dict[Row, Vector]]  # seconds, a program, its costs, its best ratios


class _Alternation:
    """Q <- A*(B), B <- LP(Q) on one mesh."""

    def __init__(self, setting: Setting, theory: Theory, counters: Counters):
        self.setting, self.theory, self.counters = setting, theory, counters
        self.costs = CostModel(theory, setting.cluster, setting.precision, setting.optimizer, setting.key.mode)
        self.problem: Problem = build(theory, self.costs, setting.rule, setting.given)
        self.capacity: Vector = np.asarray(self.costs.capacity)
        self.limits = tuple(self.capacity.tolist())
        self.kinds, self.sizes = self.costs.kinds, self.costs.sizes
        self.rows = tuple(theory.mesh.row(theory.mesh.uneven, kind) for kind in _ROW_KINDS) if theory.mesh.uneven is not None else ()
        self.fixed = {cut: own for cut, own in setting.fixed.items() if cut.row in self.rows}
        self.cuts = sorted(self.problem.cuts, key=str)  # sets of them have another order in every process
        self.found: dict[tuple[Any, ...], Candidate] = {}
        self.searched: set[tuple[tuple[int, ...], ...]] = set()  # lengths, in the order of `cuts`: the same lengths have the same program
        self.prices: tuple[float, ...] | None = None  # of memory, once it binds
        self.old = carried(setting.old, setting.key, theory, self.costs, self.capacity) if setting.old is not None else None

    def candidates(self, known: float) -> list[Candidate]:
        """All pairs of program and lengths that were met and fit. known: cost of the best candidate of other views."""
        failure: InsufficientMemoryError | None = None
        if self.old is not None:
            self._alternate(self._by_kind(self.old.shares), known, self.old.lengths)
        for ratios in self._starts():
            try:
                self._alternate(ratios, known)
            except InsufficientMemoryError as error:
                failure = failure or error
        if not self.found:
            assert failure is not None
            raise failure
        if self.setting.rule.ratios == "balanced" and self.setting.start is None and self.rows and len(self.problem.steps) <= FEW_STEPS:
            self._further(known)
        return [*self.found.values(), *([self.old] if self.old is not None else [])]

    def _further(self, known: float) -> None:
        """From more starts, as far as they lead somewhere."""
        best = self._best()
        if best.cost > HOPELESS * known:
            return
        row, _ = self.rows
        for start in further(np.asarray(self.costs.speeds), self.sizes, lambda: self._by_kind(self._best().shares)[row]):
            with suppress(InsufficientMemoryError):  # something else fits
                self._alternate(dict(zip(self.rows, start, strict=True)), min(known, self._best().cost))

    def _best(self) -> Candidate:
        return min(self.found.values(), key=attrgetter("cost"))

    def _by_kind(self, shares: Mapping[Row, tuple[float, ...]]) -> dict[Row, Vector]:
        """Shares per coordinate as shares per kind; of a row without shares, proportional to speed."""
        own = {row: np.array([max(shares[row][c] for c in kind) for kind in self.kinds]) for row in self.rows if row in shares}
        return dict.fromkeys(self.rows, np.asarray(self.costs.speeds)) | own

    def _starts(self) -> list[dict[Row, Vector]]:
        n = sum(self.sizes)
        even, speed = np.full(len(self.sizes), 1.0 / n), np.asarray(self.costs.speeds)
        ratios = self.setting.rule.ratios
        if isinstance(ratios, tuple):
            return [self._explicit(ratios)]
        if self.setting.start is not None:
            return [self._by_kind(self.setting.start)]
        # on several axes a search costs more, and ratios that differ only between machines start nearer to the best
        single = np.allclose(even, speed) or (len(self.theory.mesh.axes) > 1 and len(self.problem.steps) > FEW_STEPS)
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
        return {**round_ratios(per, self.cuts), **{c: own for c, own in self.fixed.items() if c in self.problem.cuts}}

    def _alternate(self, ratios: dict[Row, Vector], known: float, given: Mapping[Cut, tuple[int, ...]] | None = None) -> None:
        """Adds what it meets to `found`. given: lengths that are not rounded from the ratios. Raises InsufficientMemoryError if no program fits at
        any ratios that were tried."""
        lengths = self._lengths(ratios) | {c: own for c, own in (given or {}).items() if c in self.problem.cuts}
        kept: list[float] = []
        try:
            self.counters.ended[self._run(ratios, lengths, known, kept)] += 1
        finally:
            self.counters.kept.append(tuple(kept))

    def _run(self, ratios: dict[Row, Vector], lengths: Lengths, known: float, kept: list[float]) -> str:
        """One alternation; why it ended. kept: gets the least cost after every step."""
        free = self.setting.rule.ratios == "balanced" and bool(self.rows)
        best = float("inf")
        for _ in range(MAX_ALTERNATIONS):
            at = tuple([lengths[c] for c in self.cuts])
            if at in self.searched:
                return "repeated"
            self.searched.add(at)
            self.counters.alternations += 1
            solution, others = self._solutions(lengths)
            if solution is not None:
                self._keep(solution, objective(solution.steps, solution.storage, len(self.sizes)), lengths, ratios)
                best = min(best, solution.cost)
                kept.append(best)
                if not free or solution.cost > HOPELESS * known:
                    return "hopeless" if free else "given"
            balanced = self._balanced([solution, *others] if solution is not None else others, ratios) if free else []
            if not balanced and best == float("inf"):
                raise too_small(self.problem, others[-1], self.limits)
            candidate = None
            for _, solution, goal, ratios in balanced:
                lengths = self._rounded(goal, self._lengths(ratios))
                candidate = self._keep(solution, goal, lengths, ratios)
                if candidate is not None:
                    break
            stalled = candidate is None or candidate.cost >= best * (1 - STALLED)
            best = min(best, candidate.cost) if candidate is not None else best
            kept.append(best)
            if stalled and best < float("inf"):
                return "stalled"
        if best == float("inf"):
            raise too_small(self.problem, others[-1], self.limits)
        return "limit"

    def _balanced(self, solutions: Sequence[Solution], ratios: Mapping[Row, Vector]) -> list[_Balanced]:
        """The programs that fit at some ratios, each at its best, the fastest first."""
        fixed, found = self.costs.lengths_to_shares(self.fixed), []
        for solution in solutions:
            goal = objective(solution.steps, solution.storage, len(self.sizes))
            best = balance(goal, self.sizes, self.capacity, ratios, fixed)
            if best is not None:
                time = goal.time({cut: fixed[cut] if cut in fixed else best[cut.row] for cut in goal.cuts})
                found.append((time, solution, goal, best))
        return sorted(found, key=itemgetter(0))

    def _solutions(self, lengths: Lengths) -> tuple[Solution | None, tuple[Solution, ...]]:
        """The best program at these lengths that fits, if any does; and what other ratios may make fit: the cheapest program without limits, then,
        where none fits, the one of least memory."""
        found, others = attempt(self.problem, self.costs.lengths_to_shares(lengths), self.limits, self.setting.key, self.prices)
        for solution in (found,) if found is not None else others:
            self.counters.search.add(solution.statistics)
        if found is not None:
            self.prices = found.prices or self.prices
        return found, others

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
    keys: Sequence[ProgramKey] | None = None, capture_time: float = 0.0, old: Plan | None = None,
) -> Plan:  # fmt: skip
    """A plan for the first graph, which chooses mesh and storage, with further programs for the others. old: a plan made before, perhaps for another
    cluster: where the same mesh is tried under the same restriction, it is one of the starts, and a candidate."""
    graphs = list(map(discover, graphs))
    rule = restriction(strategy)
    named = [key_of(g) for g in graphs] if keys is None else list(keys)
    counters = Counters()
    before = old if old is not None and (old.restriction, old.optimizer) == (rule, optimizer) else None
    setting, best = _with_remat(Setting(graphs[0], named[0], cluster, rule, precision or "fp32", optimizer, old=before), counters)
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
            return setting, plan_spmd(setting, counters, meshes)[0]
        except InsufficientMemoryError:
            if blocks.graph is setting.graph:
                raise
    return blocks, plan_spmd(blocks, counters, meshes)[0]


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
