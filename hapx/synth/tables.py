"""Tables behind the integer-coded problem: terms by number, and per kind of tensor its placements and conversions by number.

In: a cost model and the placements that the theory knows for a tensor. Out: numbers and bit sets, computed when first asked for and shared by all
tensors that are alike (shape, dtype, gradient, placements), so that twelve equal layers cost as much as one.

Which placements follow from which does not depend on costs: `hapx.theory.reach`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, permutations, product

from hapx.cost.exposed import ALL, Exposed
from hapx.cost.model import CommunicationCost, CostModel, StepCost
from hapx.cost.table import Matrix, TermTable
from hapx.cost.terms import Shares, Term
from hapx.ir import Kind, TensorRef
from hapx.plan import Communication, Form, Mesh
from hapx.restriction import Restriction
from hapx.states import Invariant, Placement, Replicated, Sharded, State
from hapx.synth.effect import Effect, Event, Vector, effect
from hapx.synth.forbidden import Change
from hapx.theory.conversion import direct_paths, shared_paths
from hapx.theory.reach import reach
from hapx.transposes import forward_collective


@dataclass(frozen=True, slots=True)
class StepTerms:
    """A StepCost whose terms are numbers of a `TermTable` (-1: nothing)."""

    forward: int
    backward: int
    communication: tuple[tuple[str, int, bool], ...]
    memory: int


def numbered(table: TermTable, cost: StepCost) -> StepTerms:
    """A step's terms as numbers of the table."""
    communication = tuple((c.direction, table.number(c.term), c.cuts) for c in cost.communication)
    return StepTerms(table.number(cost.forward), table.number(cost.backward), communication, table.number(cost.memory))


class Values:
    """Terms at given shares, as tuples; terms that the table learns later are evaluated one by one."""

    def __init__(self, table: TermTable, shares: Shares):
        self.table, self.shares = table, shares
        self.zero: Vector = (0.0,) * table.kinds
        self._matrix = table.values(shares)
        self._values: list[Vector] = list(map(tuple, self._matrix.tolist()))

    @property
    def matrix(self) -> Matrix:
        """All terms that the table knows by now x kinds."""
        if len(self._matrix) < len(self.table.terms):
            self._matrix = self.table.values(self.shares)
        return self._matrix

    def __getitem__(self, number: int) -> Vector:
        if number < 0:
            return self.zero
        while number >= len(self._values):
            term = self.table.terms[len(self._values)]
            self._values.append(tuple(term.at(self.shares).tolist()))
        return self._values[number]

    def events(self, step: StepTerms, exposed: Exposed = ALL) -> list[Event]:
        """The communications of a step. exposed: how much of what is synchronised counts."""
        events: list[Event] = [(d, self[n], cuts) for d, n, cuts in step.communication]  # type: ignore[misc]
        if exposed != ALL:
            events = [(d, tuple([exposed.of(cuts) * x for x in own]) if d == "synchronise" else own, cuts) for d, own, cuts in events]
        return events

    def effect(self, step: StepTerms, exposed: Exposed = ALL) -> Effect:
        """Of a step (see `events`)."""
        return effect(self.events(step, exposed), self[step.forward], self[step.backward], self[step.memory])


@dataclass(frozen=True, slots=True)
class Edge:
    """One communication along one axis, between two placements of a table (numbers; -1: one of them has none there; `cost` is given). gathers: it is
    an all_gather of a parameter; those of one path are all freed or all kept."""

    step: Communication
    gathers: bool
    source: int
    target: int
    cost: StepTerms | None = None


Path = tuple[Edge, ...]


@dataclass(frozen=True, eq=False)
class Conversion:
    """A path of a tensor `ref` between two placements (numbers) of its table, the second one being `placement`; what all of it costs (memory is not
    the sum over its edges), once that is asked for. It does not know its table, which keeps it: what knows each other is not freed while a plan is
    made (`hapx.processes.without_collections`)."""

    source: int
    target: int
    path: tuple[Communication, ...]
    ref: TensorRef = field(repr=False)
    placement: Placement = field(repr=False)
    costs: CostModel = field(repr=False)
    terms: TermTable = field(repr=False)

    @cached_property
    def cost(self) -> StepCost:
        return self.costs.conversion(self.ref, self.path, self.placement)

    @cached_property
    def step(self) -> StepTerms:
        return numbered(self.terms, self.cost)


@dataclass(frozen=True, slots=True)
class Kept:
    """A placement (number) in which a parameter or buffer may be stored: its bytes, and per iteration the seconds of its update."""

    placement: int
    memory: Term
    cost: StepCost
    step: StepTerms


class TensorTable:
    """Placements and conversions of all tensors like `ref`."""

    def __init__(self, ref: TensorRef, placements: Sequence[Placement], stored: Iterable[Placement], cost: CostModel, terms: TermTable, mesh: Mesh,
                 rule: Restriction, training: bool, forbidden: frozenset[Change] = frozenset()):  # fmt: skip
        self.ref, self.placements, self.cost, self.terms, self.mesh = ref, tuple(placements), cost, terms, mesh
        self.rule, self.training, self.forbidden = rule, training, forbidden
        self.reach = reach(ref, self.placements)
        self.number, self.closure = self.reach.number, self.reach.closure
        self.codes, self.all_placements = self.reach.codes, self.reach.all_placements
        self.full = (1 << len(self.placements)) - 1
        self.parameter = ref.kind is Kind.PARAMETER
        self.stored: list[Kept] = []
        for p in stored:
            memory = cost.storage(ref, p)
            update = (CommunicationCost("synchronise", cost.update(ref, p), False),) if training and ref.requires_grad and self.parameter else ()
            both = numbered(terms, StepCost(None, None, update, memory))
            self.stored.append(Kept(self.number[p], memory, StepCost(None, None, update, None), both))
        self._held: dict[Placement, int] = {}
        self._edges: dict[tuple[int, int], tuple[Edge, ...]] = {}
        self._paths: dict[tuple[int, int], tuple[tuple[bool, tuple[tuple[Path, Conversion], ...]], ...]] = {}
        self._shared: dict[tuple[int, int], tuple[Path, ...]] = {}
        self._shared_edges: dict[tuple[int, int, int, int, Form], tuple[StepCost, Edge]] = {}
        self._conversions: dict[tuple[int, int, tuple[Communication, ...]], Conversion] = {}

    def apart(self, mask: int) -> list[int]:
        """The bit sets that single placements of a set give, without those that others include."""
        found = list(dict.fromkeys([self.closure(p) for p in bits(mask)]))
        return [one for one in found if not any(one != other and one & other == one for other in found)]

    def paths(self, source: int, target: int) -> tuple[tuple[bool, tuple[tuple[Path, Conversion], ...]], ...]:
        """The paths from source to target, in groups of those that communicate and free alike: these keep the same bytes. The first of each group:
        whether what its communication makes stays."""
        key = source, target
        if key not in self._paths:
            groups: dict[tuple[bool, bool], list[tuple[Path, Conversion]]] = {}
            for path in self.between(source, target):
                makes, frees = any(forward_collective(e.step.source, e.step.target) for e in path), any(e.step.free for e in path)
                conversion = self.conversion(source, target, tuple([e.step for e in path]))
                groups.setdefault((makes, frees), []).append((path, conversion))
            self._paths[key] = tuple([(makes and not frees, tuple(found)) for (makes, frees), found in groups.items()])
        return self._paths[key]

    def between(self, source: int, target: int) -> Iterator[Path]:
        """The paths from source to target that the restriction allows: each axis that differs changes once, in any legal order; or through shards of
        the inner axis."""
        one, other = self.codes[source], self.codes[target]
        changed = [a for a, (x, y) in enumerate(zip(one, other, strict=True)) if x != y]
        for order in permutations(changed):
            choices, at = [], source
            for axis in order:
                code = self.codes[at]
                after = self.reach.at_code.get(code[:axis] + (other[axis],) + code[axis + 1 :])
                found = self.edges(at, after) if after is not None else ()
                if not found or after is None:
                    break
                choices.append(found)
                at = after
            else:
                yield from (path for path in product(*choices) if len({e.step.free for e in path if e.gathers}) < 2)
        yield from self.shared(source, target)

    def shared(self, source: int, target: int) -> tuple[Path, ...]:
        """The paths through shards of the inner axis (see `hapx.theory.conversion.shared_paths`)."""
        key = source, target
        if key not in self._shared:
            begin, end = self.placements[source], self.placements[target]
            found = shared_paths(self.ref, self.mesh, begin, end, self.rule.forms) if self.passed(source, target) else ()
            self._shared[key] = tuple(tuple(self._steps(path, begin)) for path in found)
        return self._shared[key]

    def passed(self, source: int, target: int) -> tuple[Placement, ...]:
        """The placements on a path through shards of the inner axis; none if there is no such path, or it is forbidden."""
        return self.all_passed.get((source, target), ())

    @cached_property
    def all_passed(self) -> dict[tuple[int, int], tuple[Placement, ...]]:
        """By source and target."""
        found = self.reach.shared(self.ref, self.mesh)
        return {at: passed for at, passed in found.items() if all(self._allowed(p, q) for p, q in pairwise(passed))}

    def _allowed(self, before: Placement, after: Placement) -> bool:
        """Whether conversions of the axes on which placements differ are allowed."""
        return all(s == t or self.variants(a, s, t) for a, (s, t) in enumerate(zip(before.states, after.states, strict=True)))

    def _steps(self, path: tuple[Communication, ...], at: Placement) -> Iterator[Edge]:
        """The steps of a path; equal ones with equal costs are one edge."""
        for step in path:
            at = at.with_state(step.axis, step.target)
            cost = self.cost.conversion(self.ref, (step,), at)
            key = id(cost), step.axis, id(step.source), id(step.target), step.form
            if key not in self._shared_edges:
                self._shared_edges[key] = cost, Edge(step, False, -1, -1, numbered(self.terms, cost))
            yield self._shared_edges[key][1]

    def edges(self, source: int, target: int) -> tuple[Edge, ...]:
        """Ways to change the one axis on which two placements differ."""
        key = source, target
        if key not in self._edges:
            before, after = self.all_placements[source], self.all_placements[target]
            steps = [path[0] for path in direct_paths(self.ref, self.mesh, before, after, self.rule.forms)]
            found = [replace(c, free=True) if free else c for c in steps for free in self.variants(c.axis, c.source, c.target)]
            self._edges[key] = tuple([Edge(c, self._gathers(c.source, c.target), source, target) for c in found])
        return self._edges[key]

    def terms_of(self, edge: Edge) -> StepTerms:
        """What one communication costs."""
        return edge.cost or numbered(self.terms, self.cost.conversion(self.ref, (edge.step,), self.all_placements[edge.target]))

    def conversion(self, source: int, target: int, path: tuple[Communication, ...]) -> Conversion:
        """A path, one object for all who ask for it."""
        key = source, target, path
        if key not in self._conversions:
            self._conversions[key] = Conversion(source, target, path, self.ref, self.placements[target], self.cost, self.terms)
        return self._conversions[key]

    def held(self, target: Placement) -> int:
        """Number of the term of what stays allocated where communication makes the tensor in `target`."""
        if target not in self._held:
            self._held[target] = self.terms.number(self.cost.held(self.ref, target))
        return self._held[target]

    def free_path(self, source: int, target: int) -> tuple[Communication, ...]:
        """The path of a free conversion; any of them, none communicates."""
        return direct_paths(self.ref, self.mesh, self.placements[source], self.placements[target], self.rule.forms)[0]

    def variants(self, axis: int, source: State, target: State) -> tuple[bool, ...]:
        """Whether what is gathered is freed: the allowed choices, none where there is no such conversion. A parameter gathered for use is kept for
        backward, or freed and gathered again. "as-used": a parameter is never gathered, and never stored whole for a use in shards; only gradients
        are synchronised."""
        if (axis, type(source), type(target)) in self.forbidden:
            return ()
        if self.parameter and self.rule.storage == "as-used":
            return (False,) if isinstance(source, Invariant) and isinstance(target, Replicated) else ()
        if not self.parameter or not self.training or forward_collective(source, target) != "all_gather" or self.rule.storage == "sharded-keep":
            return (False,)
        return (True,) if self.rule.storage == "sharded-free" else (False, True)

    def _gathers(self, source: State, target: State) -> bool:
        """Whether a conversion gathers a parameter."""
        free_to_choose = self.parameter and self.training and self.rule.storage != "as-used"
        return free_to_choose and forward_collective(source, target) == "all_gather"


def shards(placement: Placement) -> int:
    """On how many axes a placement is Sharded."""
    return sum(isinstance(s, Sharded) for s in placement.states)


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
