"""The systems that hapx is compared with, written by hand and timed by hapx's simulator.

In: a model's graph, a cluster. Out: per system its fastest way that fits into memory. A system is a set of *ways*: tables of cuts on a mesh view, and
how shares are dealt out. No program here comes from the search (`benchmarks.handwritten` writes them), and none is timed by the planner's
additive cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.cuts import BATCH, EXPERTS, INSIDE, MEGATRON, WEIRD_TRICK, ZERO_FREE, ZERO_KEEP, CutTable
from benchmarks.gradients import cheapest
from benchmarks.handwritten import write
from hapx.balancer.rounding import per_device, round_ratios
from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.cost.remat import with_blocks
from hapx.ir import Graph, Kind
from hapx.layout import Lengths
from hapx.lower import Candidate, lower, memory
from hapx.plan import Mesh, Plan, Program
from hapx.planner import key_of, views
from hapx.restriction import AUTO, Restriction
from hapx.simulate import simulate_program
from hapx.states import Placement, Row
from hapx.theory.derive import derive
from hapx.theory.triple import Theory
from hapx.verify import cuts_of

PRECISION, OPTIMIZER = "fp32", "adamw"
Shares = Literal["even", "speed"]


@dataclass(frozen=True, slots=True)
class Way:
    """Tables of cuts, one per axis of the views that it fits; how shares are dealt out on the uneven axis; whether every gradient is
    synchronised in the way that is cheapest for it."""

    tables: tuple[CutTable, ...]
    shares: tuple[Shares, ...]
    per_gradient: bool = False


@dataclass(frozen=True)
class Timed:
    """A program of a system. time: seconds by the simulator; memory: the fullest device's bytes; fits: into every device."""

    candidate: Candidate
    time: float
    memory: int
    fits: bool
    graph: Graph

    def plan(self, cluster: ClusterSpec) -> Plan:
        """As data that can be verified and run (gradients of parameter servers are all-reduced in it)."""
        rule = Restriction(name="by hand")
        return lower(self.candidate, self.graph, key_of(self.graph), cluster, rule, PRECISION, OPTIMIZER, {})


DP_EVEN, DP_PROPORTIONAL, ZERO, TWO_LEVEL = "dp-even", "dp-proportional", "ZeRO, even", "dp, two-level all-reduce"
PER_GRADIENT, BY_HAND, EXPERT = "dp, PS / all-reduce / SFB", "tensor parallel by hand", "experts by hand"
EITHER: tuple[Shares, ...] = ("even", "speed")


def systems(graph: Graph) -> Mapping[str, tuple[Way, ...]]:
    """The systems that make sense for a model, by name. Which cuts of tensor parallelism, follows from the names of its parameters."""
    names = [r.name for r in graph.of_kind(Kind.PARAMETER)]
    inner = MEGATRON if any(map(MEGATRON.part, names)) else WEIRD_TRICK
    found = {
        DP_EVEN: (Way((BATCH,), ("even",)),),
        DP_PROPORTIONAL: (Way((BATCH,), ("speed",)),),
        TWO_LEVEL: (Way((BATCH, INSIDE), EITHER),),
        ZERO: (Way((ZERO_KEEP,), ("even",)), Way((ZERO_FREE,), ("even",))),
        PER_GRADIENT: (Way((BATCH,), EITHER, per_gradient=True),),
        BY_HAND: (Way((inner,), EITHER), Way((BATCH, inner), EITHER)),
    }
    if any(map(EXPERTS.part, names)):
        found[EXPERT] = (Way((EXPERTS,), EITHER),)
    return found


@dataclass
class Bench:
    """Times ways on one cluster; theories and cost models of the views are made once."""

    graph: Graph
    cluster: ClusterSpec
    _known: dict[str, tuple[Theory, CostModel]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.views = views(self.cluster, AUTO)

    def best(self, ways: Sequence[Way]) -> Timed | None:
        """The fastest that fits; if none does, the same ways with repeated blocks computed again in backward; if none of those fits, the fastest
        that does not. None: no view of the cluster has as many axes as the ways."""
        found = [t for way in ways for t in self.timed(way)]
        if found and not any(t.fits for t in found) and (blocks := with_blocks(self.graph)) is not self.graph:
            again = Bench(blocks, self.cluster)
            found += [t for way in ways for t in again.timed(way)]
        return min(found, key=lambda t: (not t.fits, t.time), default=None)

    def timed(self, way: Way) -> Iterator[Timed]:
        """A way on every view that has as many axes, at all its shares."""
        for mesh in (m for m in self.views if m.axes[0].kind != "devices" or len(m.axes) == 1):
            if len(mesh.axes) == len(way.tables):
                yield from (self._timed(way, mesh, shares) for shares in dict.fromkeys(way.shares))

    def _timed(self, way: Way, mesh: Mesh, shares: Shares) -> Timed:
        theory, costs = self._costs(mesh)
        program, storage = write(theory, way.tables, key_of(self.graph))
        rows, lengths = self._lengths(program, storage, costs, shares)
        servers: Mapping[str, float] = {}
        if way.per_gradient:
            choice = cheapest(program, theory, costs.at_lengths(lengths), self.cluster)
            servers = choice.servers
            if choice.factors:
                program, storage = write(theory, tuple(t.with_factors(choice.factors) for t in way.tables), key_of(self.graph))
                rows, lengths = self._lengths(program, storage, costs, shares)
        reduced = simulate_program(program, self.graph, costs, lengths).total
        time = simulate_program(program, self.graph, costs, lengths, servers).total if servers else reduced
        candidate = Candidate(theory, costs, program, storage, lengths, rows, reduced, reduced)
        used = memory(candidate)
        capacity = costs.capacity.tolist()
        fits = all(used[d] <= c for devices, c in zip(costs.view.devices, capacity, strict=True) for d in devices)
        return Timed(candidate, time, max(used), fits, self.graph)

    def _costs(self, mesh: Mesh) -> tuple[Theory, CostModel]:
        if mesh.name not in self._known:
            theory = derive(self.graph, mesh)
            self._known[mesh.name] = theory, CostModel(theory, self.cluster, PRECISION, OPTIMIZER, self.graph.mode)
        return self._known[mesh.name]

    def _lengths(
        self, program: Program, storage: Mapping[str, Placement], costs: CostModel, shares: Shares
    ) -> tuple[dict[Row, tuple[float, ...]], Lengths]:
        """Shares of every row and lengths of every cut. What is only kept in shards is dealt out evenly."""
        size = sum(costs.sizes)
        even = (1 / size,) * size
        chosen = even if shares == "even" else per_device(costs.speeds.tolist(), costs.kinds)
        cuts = [c for c in cuts_of(program, storage) if c.row.kind != "even"]
        rows = {c.row: chosen if c.row.kind == "compute" else even for c in cuts}
        return rows, round_ratios(rows, cuts)
