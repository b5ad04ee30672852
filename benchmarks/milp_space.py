"""The space of programs as data for a mixed integer program: choices of nodes, and a network of availability per tensor.

In: a theory, its cost model, shares. Out: a `Space`. It is made from the theory's triples, the legal conversions and the cost terms alone, not from
anything of the search.

A tensor is read at *events*, in program order, one per operand occurrence. What it is available in is a set of placements, closed under free
conversions; such a set after so many reads is a vertex of its network. An arc reads it in a placement: nothing happens where the placement is in the
set, else one conversion from a placement in the set adds what is free from its target. The first arc of a parameter also says how it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hapx.cost.model import CommunicationCost, CostModel, StepCost
from hapx.cost.terms import Shares, Term
from hapx.ir import Kind
from hapx.states import REPLICATED, Placement
from hapx.synth.exhaustive import ALL_FORMS, routes
from hapx.theory.conversion import free, storages
from hapx.theory.factors import form_allowed
from hapx.theory.triple import Theory

Vector = tuple[float, ...]
Vertex = tuple[int, frozenset[Placement] | None]  # reads so far, placements (None: a parameter that is not stored yet)
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Direction:
    """What happens to the pending compute of a direction: `post` is added; with `pre`, that is added first and the phase ends in between."""

    pre: Vector | None
    post: Vector

    def below(self, other: Direction) -> bool:
        if (self.pre is None) != (other.pre is None):
            return False
        pairs = [*zip(self.post, other.post, strict=True), *zip(self.pre or (), other.pre or (), strict=True)]
        return all(a <= b for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds, and bytes per kind. `const`: collectives that end phases, phases inside of a step, synchronisation, updates."""

    const: float
    forward: Direction
    backward: Direction
    memory: Vector

    def below(self, other: Price) -> bool:
        fits = all(a <= b for a, b in zip(self.memory, other.memory, strict=True))
        return fits and self.const <= other.const and self.forward.below(other.forward) and self.backward.below(other.backward)

    def stored(self, seconds: float, memory: Vector) -> Price:
        """With the update of a parameter and the bytes that it takes."""
        return replace(self, const=self.const + seconds, memory=_plus(self.memory, memory))


@dataclass(frozen=True, slots=True)
class Choice:
    """What a step may do: the placement of every operand occurrence and of every output."""

    needs: tuple[Placement, ...]
    gives: tuple[Placement, ...]
    price: Price


@dataclass(frozen=True, slots=True)
class Step:
    """A node, or an output of the graph. reads, makes: names of tensors."""

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Arc:
    """A read in `target` that leads from one vertex to another."""

    source: Vertex
    target: Placement
    to: Vertex
    price: Price | None  # None: nothing happens


@dataclass(frozen=True, slots=True)
class Network:
    """Of one tensor. `start`: the vertex that a placement leads to when a node makes the tensor in it; `first`: the vertex of one that no node makes.
    `events`: (step, occurrence) of every read. `arcs`: those of every read."""

    start: Mapping[Placement, Vertex]
    first: Vertex | None
    events: tuple[tuple[int, int], ...]
    arcs: tuple[tuple[Arc, ...], ...]


@dataclass(frozen=True, slots=True)
class Space:
    """unread: of the parameters that no step reads."""

    kinds: int
    steps: tuple[Step, ...]
    networks: Mapping[str, Network]
    unread: Price


def space(theory: Theory, costs: CostModel, shares: Shares, forms: frozenset[str] = ALL_FORMS, memory: bool = False) -> Space:
    """The whole space of a theory at given shares. memory: count bytes (they are 0 otherwise, and more of the space can be left out)."""
    return _Builder(theory, costs, shares, forms, memory).space()


class _Builder:
    def __init__(self, theory: Theory, costs: CostModel, shares: Shares, forms: frozenset[str], memory: bool):
        self.theory, self.costs, self.shares, self.forms, self.graph, self.memory = theory, costs, shares, forms, theory.graph, memory
        self.zero: Vector = (0.0,) * len(costs.kinds)
        self.nothing = Price(0.0, Direction(None, self.zero), Direction(None, self.zero), self.zero)
        self.values: dict[int, tuple[Term, Vector]] = {}
        self.closures: dict[tuple[str, Placement], frozenset[Placement]] = {}
        self.ways: dict[tuple[str, frozenset[Placement], Placement], list[Price]] = {}
        self.between: dict[tuple[str, Placement, Placement], list[Price]] = {}
        self.whole = Placement((REPLICATED,) * len(theory.mesh.axes))
        self.known: dict[str, dict[Placement, None]] = {}
        for p in (p for ts in theory.triples for t in ts for p in (*t.pre, *t.post)):
            self.known.setdefault(p.tensor, {})[p.placement] = None
        for name, placements in (*theory.stored.items(), *theory.outputs.items()):
            self.known.setdefault(name, {}).update(dict.fromkeys(placements))
        for ref in self.graph.refs.values():
            if self._source(ref.name):
                self.known.setdefault(ref.name, {})[self.whole] = None

    def space(self) -> Space:
        steps = [self._node(i) for i in range(len(self.graph.nodes))] + [self._output(o.tensor) for o in self.graph.outputs]
        events: dict[str, list[tuple[int, int]]] = {}
        for k, step in enumerate(steps):
            for i, name in enumerate(step.reads):
                events.setdefault(name, []).append((k, i))
        networks = {name: self._network(name, steps, tuple(own)) for name, own in events.items()}
        unread = self.nothing
        for name, stored in self.theory.stored.items():
            if name not in events:
                unread = unread.stored(0.0, self._bytes(name, stored[0]))  # the search, too, leaves its update out: it is the same in every program
        return Space(len(self.zero), tuple(steps), networks, unread)

    def _source(self, name: str) -> bool:
        return self.graph.refs[name].kind in (Kind.INPUT, Kind.CONSTANT) and name not in self.graph.producer

    def _node(self, i: int) -> Step:
        triples = [t for t in self.theory.triples[i] if form_allowed(t.body, self.forms)]
        choices = []
        for t in triples:
            price = self._price(self.costs.instruction(t))
            choices.append(Choice(tuple(p.placement for p in t.pre), tuple(p.placement for p in t.post), price))
        return Step(tuple(p.tensor for p in triples[0].pre), tuple(p.tensor for p in triples[0].post), _undominated(choices))

    def _output(self, tensor: str) -> Step:
        return Step((tensor,), (), tuple(Choice((p,), (), self.nothing) for p in self.theory.outputs[tensor]))

    # -- networks --------------------------------------------------------------------------------------------------------------------------------

    def _network(self, name: str, steps: list[Step], events: tuple[tuple[int, int], ...]) -> Network:
        start: dict[Placement, Vertex] = {}
        first: Vertex | None = None
        if name in self.graph.producer:
            maker = steps[self.graph.producer[name]]
            place = maker.makes.index(name)
            start = {p: (0, self._closure(name, p)) for p in dict.fromkeys(c.gives[place] for c in maker.choices)}
            vertices = dict.fromkeys(start.values())
        else:
            first = (0, self._closure(name, self.whole) if self._source(name) else None)
            vertices = {first: None}
        arcs = []
        for k, i in events:
            targets = dict.fromkeys(c.needs[i] for c in steps[k].choices)
            own = [arc for v in vertices for t in targets for arc in self._arcs(name, v, t, len(events) == 1)]
            vertices = dict.fromkeys(arc.to for arc in own)
            arcs.append(tuple(own))
        return Network(start, first, events, tuple(arcs))

    def _arcs(self, name: str, vertex: Vertex, target: Placement, once: bool) -> Iterator[Arc]:
        count, have = vertex
        if have is None:
            options = self.theory.stored[name]
            for stored in storages(options, target) if once else options:
                update, kept = self._update(name, stored), self._bytes(name, stored)
                for arc in self._arcs(name, (count, self._closure(name, stored)), target, once):
                    yield replace(arc, source=vertex, price=(arc.price or self.nothing).stored(update, kept))
        elif target in have:
            yield Arc(vertex, target, (count + 1, have), None)
        else:
            after = count + 1, have | self._closure(name, target)
            for price in self._conversions(name, have, target):
                yield Arc(vertex, target, after, price)

    def _closure(self, name: str, placement: Placement) -> frozenset[Placement]:
        if (name, placement) not in self.closures:
            ref = self.graph.refs[name]
            self.closures[name, placement] = frozenset(q for q in self.known[name] if free(ref, placement, q))
        return self.closures[name, placement]

    def _conversions(self, name: str, have: frozenset[Placement], target: Placement) -> list[Price]:
        """Prices of one conversion from any of the placements, those left out that another one is below in every number."""
        key = name, have, target
        if key not in self.ways:
            found = [price for source in have for price in self._between(name, source, target)]
            self.ways[key] = _least(list(dict.fromkeys(found)))
        return self.ways[key]

    def _between(self, name: str, source: Placement, target: Placement) -> list[Price]:
        """Prices of the paths from one placement to another."""
        key = name, source, target
        if key not in self.between:
            ref = self.graph.refs[name]
            costs = [self.costs.conversion(ref, path, target) for path in routes(self.theory, ref, source, target, self.forms)]
            found = {id(cost): cost for cost in costs}
            self.between[key] = _least([self._price(cost) for cost in found.values()])
        return self.between[key]

    # -- prices ----------------------------------------------------------------------------------------------------------------------------------

    def _update(self, name: str, stored: Placement) -> float:
        training = self.graph.mode == "train" and self.graph.refs[name].requires_grad
        return max(self._at(self.costs.update(self.graph.refs[name], stored))) if training else 0.0

    def _bytes(self, name: str, stored: Placement) -> Vector:
        return self._at(self.costs.storage(self.graph.refs[name], stored)) if self.memory else self.zero

    def _at(self, term: Term | None) -> Vector:
        if term is None:
            return self.zero
        if id(term) not in self.values:  # the term is held, so that its identity stays its own
            self.values[id(term)] = term, tuple(term.at(self.shares).tolist())
        return self.values[id(term)][1]

    def _price(self, cost: StepCost) -> Price:
        const = sum(max(self._at(c.term)) for c in cost.communication if c.direction == "synchronise")
        directions = []
        for direction, compute in zip(DIRECTIONS, (cost.forward, cost.backward), strict=True):
            more, own = self._direction([c for c in cost.communication if c.direction == direction], self._at(compute))
            const += more
            directions.append(own)
        return Price(const, *directions, self._at(cost.memory) if self.memory else self.zero)

    def _direction(self, communication: list[CommunicationCost], compute: Vector) -> tuple[float, Direction]:
        const, pre, pending = 0.0, None, self.zero
        for c in communication:
            value = self._at(c.term)
            if not c.cuts:
                pending = _plus(pending, value)
                continue
            const += max(value)
            if pre is None:
                pre = pending
            else:
                const += max(pending)
            pending = self.zero
        return const, Direction(pre, _plus(pending, compute))


def _undominated(choices: list[Choice]) -> tuple[Choice, ...]:
    """Of the choices with equal placements, those of which no other is below."""
    alike: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], list[Price]] = {}
    for c in choices:
        alike.setdefault((c.needs, c.gives), []).append(c.price)
    return tuple(Choice(needs, gives, price) for (needs, gives), prices in alike.items() for price in _least(prices))


def _least(prices: list[Price]) -> list[Price]:
    kept: list[Price] = []
    for price in sorted(prices, key=lambda p: p.const + sum(map(sum, (p.forward.post, p.backward.post, p.forward.pre or (), p.backward.pre or ())))):
        if not any(other.below(price) for other in kept):
            kept.append(price)
    return kept


def _plus(a: Vector, b: Vector) -> Vector:
    return tuple(x + y for x, y in zip(a, b, strict=True))
