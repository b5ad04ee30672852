"""The oracle of the search: every legal program of a small graph, one by one, without tables, masks, dominance or bounds.

In: a Theory, its CostModel, shares, memory limits. Out: cost and memory of every legal program; the least cost, and how many there are. Shares only
the theory, the cost terms and the conversions with the search.

A program is legal when every node runs by one of its triples and every operand is read from a placement that is available, that is free from an
available one, or that one conversion makes from such a placement; the first use of a parameter also chooses how it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hapx.cost.exposed import ALL, Exposed
from hapx.cost.model import CostModel, StepCost
from hapx.cost.terms import Shares, Term
from hapx.ir import Kind, TensorRef
from hapx.plan import Communication, Form
from hapx.states import REPLICATED, Placement, Property
from hapx.theory.conversion import free, paths, storages
from hapx.theory.factors import form_allowed
from hapx.theory.triple import Theory
from hapx.transposes import forward_collective

Array = tuple[float, ...]
Available = Mapping[str, frozenset[Placement]]
ALL_FORMS = frozenset(f.value for f in Form)


@dataclass(frozen=True, slots=True)
class Running:
    """Cost of a program so far: finished phases, the running phase of each direction, memory; per kind except `cost`."""

    cost: float
    forward: Array
    backward: Array
    memory: Array

    @property
    def total(self) -> float:
        return self.cost + max(self.forward) + max(self.backward)


@dataclass(frozen=True, slots=True)
class Count:
    """cost: of the cheapest program that fits (inf: none does); programs: how many are legal; fitting: how many of them fit; complete: whether
    these are all."""

    cost: float
    programs: int
    fitting: int
    complete: bool = True


class _TooMany(Exception):
    """There are more programs than wanted."""


class Enumeration:
    """All programs of a theory. most: end where there are more, or eight times as many operands were tried. exposed: see `Problem`.
    `found`: (seconds, bytes per kind) of each."""

    def __init__(self, theory: Theory, costs: CostModel, shares: Shares, limits: Array | None = None, forms: frozenset[str] = ALL_FORMS,
                 most: int | None = None, exposed: Exposed = ALL):  # fmt: skip
        self.theory, self.costs, self.shares, self.limits, self.forms, self.most = theory, costs, shares, limits, forms, most
        self.exposed = exposed
        self.graph = theory.graph
        self.whole = Placement((REPLICATED,) * len(theory.mesh.axes))
        self.found: list[tuple[float, Array]] = []
        self.tried = 0
        self.zero: Array = (0.0,) * len(costs.kinds)
        # prices are looked up many times; they are computed once, each from its own triple or path
        self._terms: dict[int, tuple[Term, Array]] = {}
        self._instructions = [[(t, costs.instruction(t)) for t in ts if form_allowed(t.body, forms)] for ts in theory.triples]
        self._storages: dict[tuple[str, Placement], tuple[Array, float]] = {}
        self._ways: dict[tuple[str, frozenset[Placement], Placement], list[tuple[frozenset[Placement], StepCost | None]]] = {}

    def run(self) -> Count:
        have = {r.name: frozenset({self.whole}) for r in self.graph.refs.values() if self._source(r)}
        used = {p.tensor for ts in self.theory.triples for p in ts[0].pre} | {o.tensor for o in self.graph.outputs}
        memory = self.zero
        for name, stored in self.theory.stored.items():
            if name not in used:
                memory = _plus(memory, self._storage(name, stored[0])[0])
        self.found.clear()
        try:
            self._node(0, have, Running(0.0, self.zero, self.zero, memory))
        except _TooMany:
            return replace(self.within(self.limits), complete=False)
        return self.within(self.limits)

    def within(self, limits: Array | None) -> Count:
        """What was found, with other limits."""
        fitting = [cost for cost, memory in self.found if limits is None or all(m <= limit for m, limit in zip(memory, limits, strict=True))]
        return Count(min(fitting, default=float("inf")), len(self.found), len(fitting))

    def _source(self, ref: TensorRef) -> bool:
        return ref.kind in (Kind.INPUT, Kind.CONSTANT) and ref.name not in self.graph.producer

    def _node(self, k: int, have: Available, running: Running) -> None:
        if k == len(self.graph.nodes):
            self._output(0, have, running)
            return
        for triple, after in self._instructions[k]:
            for available, now in self._operands(triple.pre, have, running):
                made = {p.tensor: frozenset({p.placement}) for p in triple.post}
                self._node(k + 1, {**available, **made}, self._add(now, after))

    def _output(self, k: int, have: Available, running: Running) -> None:
        if k == len(self.graph.outputs):
            self.found.append((running.total, running.memory))
            return
        tensor = self.graph.outputs[k].tensor
        for placement in self.theory.outputs[tensor]:
            for available, now in self._operands((Property(tensor, placement),), have, running):
                self._output(k + 1, available, now)

    def _operands(self, needed: tuple[Property, ...], have: Available, running: Running) -> Iterator[tuple[Available, Running]]:
        if not needed:
            yield have, running
            return
        for available, now in self._operand(needed[0], have, running):
            yield from self._operands(needed[1:], available, now)

    def _operand(self, needed: Property, have: Available, running: Running) -> Iterator[tuple[Available, Running]]:
        name = needed.tensor
        self.tried += 1
        if self.most is not None and max(len(self.found), self.tried / 8) > self.most:
            raise _TooMany
        if name not in have:
            once = sum(t.tensor == name for ts in self.theory.triples for t in ts[0].pre) == 1
            options = self.theory.stored[name]
            for stored in storages(options, needed.placement) if once else options:
                memory, update = self._storage(name, stored)
                kept = Running(running.cost + update, running.forward, running.backward, _plus(running.memory, memory))
                yield from self._operand(needed, {**have, name: frozenset({stored})}, kept)
            return
        key = name, have[name], needed.placement
        if key not in self._ways:
            self._ways[key] = list(self._conversions(*key))
        for after, cost in self._ways[key]:
            yield {**have, name: after}, running if cost is None else self._add(running, cost)

    def _storage(self, name: str, stored: Placement) -> tuple[Array, float]:
        """Bytes per kind of a parameter as it is stored, and the seconds of its update."""
        if (name, stored) not in self._storages:
            ref = self.graph.refs[name]
            update = max(self._at(self.costs.update(ref, stored))) if self.graph.mode == "train" else 0.0
            self._storages[name, stored] = self._at(self.costs.storage(ref, stored)), update
        return self._storages[name, stored]

    def _conversions(self, name: str, placements: frozenset[Placement], target: Placement) -> Iterator[tuple[frozenset[Placement], StepCost | None]]:
        """Ways to have a tensor in `target`: the placements that it has afterwards, and what that costs."""
        ref = self.graph.refs[name]
        if any(free(ref, p, target) for p in placements):
            yield placements | {target}, None
            return
        reach = {q for p in placements for q in self._known(name) if free(ref, p, q)}
        for source in sorted(reach, key=str):
            for path in routes(self.theory, ref, source, target, self.forms):
                yield placements | {source, target}, self.costs.conversion(ref, path, target)

    def _known(self, tensor: str) -> set[Placement]:
        """Every placement that an allowed triple, storage or output mentions for a tensor."""
        known = {p.placement for ts in self._instructions for t, _ in ts for p in (*t.pre, *t.post) if p.tensor == tensor}
        known |= {*self.theory.stored.get(tensor, ()), *self.theory.outputs.get(tensor, ())}
        return known | ({self.whole} if self._source(self.graph.refs[tensor]) else set())

    def _at(self, term: Term | None) -> Array:
        if term is None:
            return self.zero
        if id(term) not in self._terms:
            self._terms[id(term)] = term, tuple(term.at(self.shares).tolist())
        return self._terms[id(term)][1]

    def _add(self, running: Running, step: StepCost) -> Running:
        """Communications in order, then compute: a collective that cuts ends the running phase of its direction."""
        cost, forward, backward = running.cost, running.forward, running.backward
        for c in step.communication:
            value = self._at(c.term)
            if c.direction == "synchronise":
                cost += self.exposed.of(c.cuts) * max(value)
            elif c.direction == "forward":
                cost, forward = (cost + max(forward) + max(value), self.zero) if c.cuts else (cost, _plus(forward, value))
            else:
                cost, backward = (cost + max(backward) + max(value), self.zero) if c.cuts else (cost, _plus(backward, value))
        forward, backward = _plus(forward, self._at(step.forward)), _plus(backward, self._at(step.backward))
        return Running(cost, forward, backward, _plus(running.memory, self._at(step.memory)))


def routes(theory: Theory, ref: TensorRef, source: Placement, target: Placement, forms: frozenset[str]) -> Iterator[tuple[Communication, ...]]:
    """All ways from one placement to another: the theory's paths, and those on which a parameter that is gathered for use is freed in between. The
    search has its own (`hapx.synth.tables`), so that the oracles do not share its mistakes."""
    for path in paths(ref, theory.mesh, source, target, forms):
        yield path
        gathers = [forward_collective(c.source, c.target) == "all_gather" for c in path]
        if ref.kind is Kind.PARAMETER and theory.graph.mode == "train" and any(gathers):
            yield tuple(replace(c, free=g) for c, g in zip(path, gathers, strict=True))


def _plus(a: Array, b: Array) -> Array:
    return tuple(x + y for x, y in zip(a, b, strict=True))
