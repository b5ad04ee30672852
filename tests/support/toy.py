"""Small random theories with random costs, for tests of the search and the balancer: not models, only their combinatorics."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hapx.cost.edges import Bundle, Edge
from hapx.cost.exposed import ALL, Exposed
from hapx.cost.model import CommunicationCost, Direction, StepCost
from hapx.cost.terms import Piece, Shares, Term
from hapx.ir import Graph, Kind, Node, OpCall, Output, Ref, TensorRef
from hapx.layout import compatible
from hapx.plan import Axis, Communication, Form, Mesh, Triple
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Cut, Placement, Property, Sharded, State
from hapx.theory.conversion import direct_paths
from hapx.theory.triple import Theory
from hapx.transposes import backward_collective, forward_collective

FLAT = Mesh("flat", (Axis("devices", 4, "devices"),), (0, 1, 2, 3), 0)
SQUARE = Mesh("2x2", (Axis("machines", 2, "machines"), Axis("devices", 2, "devices")), (0, 1, 2, 3), 0)
UNITS = (8, 6)

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def sharded(mesh: Mesh, axis: int, dim: int, kind: str = "compute") -> Sharded:
    return Sharded(dim, 1, 1, Cut(mesh.row(axis, kind), UNITS[dim]))  # type: ignore[arg-type]


def placements(mesh: Mesh, gradient: bool, states_per_axis: int, rng: random.Random) -> tuple[Placement, ...]:
    """A few placements, at random."""
    per_axis: list[list[State]] = []
    for axis in range(len(mesh.axes)):
        states: list[State] = [REPLICATED, sharded(mesh, axis, 0), sharded(mesh, axis, 1), PARTIAL] + ([INVARIANT] if gradient else [])
        per_axis.append(rng.sample(states, states_per_axis))
    found = [Placement(())]
    for states in per_axis:
        found = [Placement((*p.states, s)) for p in found for s in states]
    return tuple(p for p in found if compatible(p.states))


@dataclass
class ToyCosts:
    """Costs that are a random function of what a step is (never of names, so that alike steps cost alike)."""

    mesh: Mesh
    seed: int
    kinds: tuple[tuple[int, ...], ...]
    roofline: bool = True
    memory: bool = True
    graph: Graph | None = None
    sizes: tuple[int, ...] = field(init=False)
    capacity: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = tuple(map(len, self.kinds))
        self.capacity = np.full(len(self.kinds), 1e9)

    def term(self, what: str, scale: float, cuts: tuple[Cut, ...] = ()) -> Term:
        rng = random.Random(f"{self.seed} {what}")
        pieces = []
        for _ in range(2 if self.roofline and cuts else 1):
            slopes = tuple((c, tuple(scale * rng.uniform(0.5, 4) for _ in self.kinds)) for c in cuts)
            pieces.append(Piece(tuple(scale * rng.uniform(0.0 if cuts else 0.5, 1.0) for _ in self.kinds), slopes))
        return Term(tuple(pieces))

    def instruction(self, triple: Triple) -> StepCost:
        assert isinstance(triple.body, OpCall)
        what = f"{triple.body.target} {[str(p.placement) for p in (*triple.pre, *triple.post)]}"
        cuts = tuple(dict.fromkeys(c for c in triple.work if c is not None and c.row.kind != "even"))
        kept = self.term(what + "m", 1.0, cuts) if self.memory else None
        return StepCost(self.term(what + "f", 1.0, cuts), self.term(what + "b", 2.0, cuts), (), kept)

    def has_form_of(self, triple: Triple, like: Triple) -> None:
        """These have no forms."""

    def conversion(self, ref: TensorRef, path: tuple[Communication, ...], target: Placement) -> StepCost:
        costs = []
        kept = None
        for c in path:
            what = f"{ref.shape}{ref.kind}{c.form}{c}{c.free}"
            cuts = tuple(s.cut for s in (c.source, c.target) if isinstance(s, Sharded) and s.cut.row.kind != "even")
            cutting = c.axis == 0
            if forward_collective(c.source, c.target):
                costs.append(CommunicationCost("forward", self.term(what + "f", 0.4, cuts), cutting))
                if ref.kind is Kind.PARAMETER and self.memory and not any(d.free for d in path):
                    kept = self.term(f"{ref.shape}{target}m", 2.0)
            if c.gradient and backward_collective(c.source, c.target):
                direction = "synchronise" if ref.kind is Kind.PARAMETER and not forward_collective(c.source, c.target) else "backward"
                costs.append(CommunicationCost(direction, self.term(what + "b", 0.4, cuts), cutting))  # type: ignore[arg-type]
            if c.free:
                costs.append(CommunicationCost("backward", self.term(what + "again", 0.4, cuts), cutting))
        return StepCost(None, None, tuple(costs), kept)

    def edge_prices(self, bundles: Sequence[Bundle], forms: frozenset[str]) -> ToyPrices:
        return ToyPrices(self, [edge for bundle in bundles for edge in edges_of(bundle)], forms)

    def held(self, ref: TensorRef, target: Placement) -> Term | None:
        """Only parameters are kept by conversions here."""
        return self.term(f"{ref.shape}{target}m", 2.0) if ref.kind is Kind.PARAMETER and self.memory else None

    def storage(self, ref: TensorRef, placement: Placement) -> Term:
        cuts = tuple(s.cut for s in placement.states if isinstance(s, Sharded) and s.cut.row.kind != "even")
        even = sum(isinstance(s, Sharded) for s in placement.states) - len(cuts)
        return Term((Piece((0.0 if cuts else 3.0 / 2**even,) * len(self.kinds), tuple((c, (3.0 / 2**even,) * len(self.kinds)) for c in cuts[:1])),))

    def update(self, ref: TensorRef, placement: Placement) -> Term:
        return Term(tuple(p.scaled([0.1] * len(self.kinds)) for p in self.storage(ref, placement).pieces))


def edges_of(bundle: Bundle) -> Iterator[tuple[Edge, tuple[bool, ...]]]:
    """Its edges, with the variants that are allowed."""
    every = bundle.placements
    for p, q, kept, freed in zip(bundle.sources.tolist(), bundle.targets.tolist(), bundle.kept, bundle.freed, strict=True):
        yield Edge(bundle.ref, bundle.axis, every[p], every[q]), tuple(free for free, allowed in ((False, kept), (True, freed)) if allowed)


@dataclass(frozen=True)
class ToyPrices:
    """What `hapx.cost.edges.EdgePrices` does, one edge after another."""

    costs: ToyCosts
    edges: Sequence[tuple[Edge, tuple[bool, ...]]]
    forms: frozenset[str]

    @property
    def price_of(self) -> np.ndarray:
        """Every edge has its own."""
        return np.arange(len(self.edges))

    def at(self, shares: Shares, exposed: Exposed = ALL) -> ToyPriced:
        return ToyPriced(self, shares, exposed)

    def ends_phases(self) -> np.ndarray:
        return np.array([self._ends(edge, free) for edge, free in self.edges], dtype=bool).reshape(len(self.edges), 2)

    def _ends(self, edge: Edge, variants: tuple[bool, ...]) -> list[bool]:
        steps = [path[0] for path in direct_paths(edge.ref, self.costs.mesh, edge.before, edge.after, self.forms)]
        ways = [self.costs.conversion(edge.ref, (replace(c, free=free),), edge.after).communication for c in steps for free in variants]
        return [all(any(c.cuts and c.direction == way for c in costs) for costs in ways) for way in DIRECTIONS]


@dataclass(frozen=True)
class ToyPriced:
    """What `hapx.cost.edges.EdgesPriced` does, but that every edge is to be priced by its terms."""

    prices: ToyPrices
    shares: Shares
    exposed: Exposed

    def moved(self, number: int, form: Form, free: bool) -> None:
        return None

    def weighted(self, forward: np.ndarray, backward: np.ndarray, alone: bool = True) -> np.ndarray:
        edges = self.prices.edges
        return np.array([self._least(edge, free, forward, backward, alone) for edge, free in edges]).reshape(len(edges), len(forward))

    def _least(self, edge: Edge, variants: tuple[bool, ...], forward: np.ndarray, backward: np.ndarray, alone: bool) -> np.ndarray:
        costs_of, shares = self.prices.costs, self.shares
        steps = [path[0] for path in direct_paths(edge.ref, costs_of.mesh, edge.before, edge.after, self.prices.forms)]
        found = []
        for step in (replace(c, free=free) for c in steps for free in variants):
            costs = costs_of.conversion(edge.ref, (step,), edge.after).communication
            total = np.zeros(len(forward))
            for c in costs:
                value = c.term.at(shares) * (self.exposed.of(c.cuts) if c.direction == "synchronise" else 1.0)
                joins = c.cuts or c.direction == "synchronise"
                total += value.max() if joins else (forward if c.direction == "forward" else backward) @ value * alone
            found.append(total)
        return np.min(found, axis=0)


def random_theory(
    seed: int, mesh: Mesh, *, nodes: int = 6, triples: int = 3, parameters: int = 2, states: int = 2, twice: int = 1, times: int = 2,
    often: bool = False, branches: int = 0,
) -> Theory:  # fmt: skip
    """A random graph: unary and binary nodes over earlier values, an input, and parameters (the first `twice` of them used so many `times`), with
    random triples. often: the first value is used again and again. branches: so many nodes read the input (and parameters), and the next one all of
    them."""
    rng = random.Random(seed)
    refs: dict[str, TensorRef] = {"x": TensorRef("x", UNITS, "float32", Kind.INPUT, False)}
    for i in range(parameters):
        refs[f"w{i}"] = TensorRef(f"w{i}", UNITS, "float32", Kind.PARAMETER, True)
    values, made, tables = ["x"], [], []
    unread: list[str] = []
    weights = [f"w{i}" for i in range(parameters)] + [f"w{i}" for i in range(min(twice, parameters))] * (times - 1)
    for i in range(nodes):
        operands = ["x"] if i < branches else [unread.pop() if unread and rng.random() < 0.9 else rng.choice(values)]
        if branches and i == branches:
            operands += unread
            unread.clear()
        elif weights and rng.random() < 0.5:
            operands.append(weights.pop(0))
        elif often and len(values) > 1:
            operands.append(values[1])
        elif i >= branches and rng.random() < 0.5:
            operands.append(rng.choice(values))
        out = TensorRef(f"v{i}", UNITS, "float32", Kind.VALUE, any(refs[n].requires_grad for n in operands))
        refs[out.name] = out
        call = OpCall(f"toy.op{rng.randrange(4)}.default", tuple((f"a{k}", Ref(n)) for k, n in enumerate(operands)))
        made.append(Node(call, (out,), "", "", (None,)))
        values.append(out.name)
        unread.append(out.name)
        tables.append(_triples(i, call, operands, out, refs, mesh, triples, states, rng))
    outputs = [Output(values[-1], "loss")] + ([Output(unread[0], "result")] if len(unread) > 1 else [])
    graph = Graph(refs, tuple(made), tuple(outputs), (), (), (0,) * nodes, (None,) * nodes, ("x",), UNITS[0], "train", {}, f"toy{seed}")
    stored = {f"w{i}": _stored(mesh) for i in range(parameters)}
    allowed = {o.tensor: placements(mesh, refs[o.tensor].requires_grad, 1, rng) for o in outputs}
    return Theory(graph, mesh, tuple(tables), stored, allowed, frozenset())


def _stored(mesh: Mesh) -> tuple[Placement, ...]:
    whole = Placement((INVARIANT,) * len(mesh.axes))
    return (whole, whole.with_state(0, sharded(mesh, 0, 0, "storage")), whole.with_state(len(mesh.axes) - 1, sharded(mesh, len(mesh.axes) - 1, 1)))


def _triples(index: int, call: OpCall, operands: list[str], out: TensorRef, refs: Mapping[str, TensorRef], mesh: Mesh, count: int, states: int,
             rng: random.Random) -> tuple[Triple, ...]:  # fmt: skip
    found: dict[tuple[Placement, ...], Triple] = {}
    options = {n: placements(mesh, refs[n].requires_grad, states, rng) for n in (*operands, out.name)}
    for _ in range(20):
        chosen = tuple(rng.choice(options[n]) for n in (*operands, out.name))
        work = tuple(next((p.states[a].cut for p in chosen if isinstance(p.states[a], Sharded)), None) for a in range(len(mesh.axes)))
        pre = tuple(Property(n, p) for n, p in zip(operands, chosen, strict=False))
        found.setdefault(chosen, Triple(index, pre, (Property(out.name, chosen[-1]),), call, work))
        if len(found) == count:
            break
    return tuple(found.values())


def shares(theory: Theory, kinds: int, seed: int) -> dict[Cut, np.ndarray]:
    """Random shares per kind for every cut of the uneven axis."""
    rng = np.random.default_rng(seed)
    rows = [theory.mesh.row(0, kind) for kind in ("compute", "storage")]  # type: ignore[arg-type]
    return {Cut(row, u): rng.dirichlet(np.ones(kinds)) for row in rows for u in UNITS}


class SumsOverLevels(ToyCosts):
    """Every instruction is a composite that communicates: all devices wait for a collective, and then one runs inside of the machines."""

    def instruction(self, triple: Triple) -> StepCost:
        step, what = super().instruction(triple), f"{triple.body}{triple.post[0].placement}"
        terms = {cuts: self.term(f"{what} {cuts}", 0.5 if cuts else 6.0) for cuts in (True, False)}
        events = [CommunicationCost(way, term, cuts) for way in DIRECTIONS for cuts, term in terms.items()]
        return replace(step, communication=tuple(events))
