"""The synthesis problem of a theory, coded in integers.

In: a Theory, its CostModel, a Restriction, and the placements in which parameters are stored already, if any. Out: a `Problem`: one step per node
of the graph, in order, then one step per output. A step reads *slots* (distinct tensors) and makes *outputs*; its *choices* are the triples of the
node (or the allowed placements of the output). Steps that are alike share one `StepClass`, and tensors that are alike one `TensorTable`.

What a partial program has is one int: every value that is live has a fixed range of bits, bit p saying that it is (or is, for free) in its
placement p. A parameter that is used once, an input and a constant need no bits: the first is placed where it is used, the others are whole
everywhere, from which every placement is free.

Invariant: the choices of a step are exactly the triples of the theory that the restriction allows; nothing depends on ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hapx.cost.compute import lies, work
from hapx.cost.exposed import ALL, Exposed
from hapx.cost.memory import converted_again, forgotten, kept
from hapx.cost.model import CostModel, StepCost
from hapx.cost.table import TermTable
from hapx.errors import PlanError
from hapx.ir import Graph, Kind, OpCall
from hapx.plan import Instruction, Triple
from hapx.restriction import Restriction
from hapx.states import REPLICATED, Cut, Placement, Property, Sharded
from hapx.synth.forbidden import NOTHING, Forbidden
from hapx.synth.tables import StepTerms, TensorTable, numbered, shards
from hapx.synth.tables import bits as members
from hapx.theory.factors import form_allowed, gathered
from hapx.theory.triple import Theory
from hapx.theory.triples import Triples


class Slot(NamedTuple):
    """A tensor that a step reads. fixed: it is not tracked (mask known: 0 for a parameter's only use, everything for inputs and for numbers that
    are whole everywhere); live: it is tracked and used again later."""

    table: TensorTable
    fixed: int | None
    live: bool


class Result(NamedTuple):
    """A tensor that a step makes; live: it is tracked and used later."""

    table: TensorTable
    live: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """A triple: (slot, placement) per operand, placement per output, cost."""

    index: int
    needs: tuple[tuple[int, int], ...]
    gives: tuple[int, ...]
    cost: StepCost | None
    step: StepTerms


@dataclass(slots=True)
class StepClass:
    """Steps that are alike in everything but names. Tracked parts (live slots, then live results) are laid out in `offsets`."""

    slots: tuple[Slot, ...]
    results: tuple[Result, ...]
    choices: tuple[Choice, ...]
    slot_offsets: tuple[int, ...] = ()
    result_offsets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        at, offsets = 0, []
        parts: list[Slot | Result] = [*self.slots, *self.results]
        for part in parts:
            offsets.append(at if part.live else -1)
            at += len(part.table.placements) if part.live else 0
        self.slot_offsets, self.result_offsets = tuple(offsets[: len(self.slots)]), tuple(offsets[len(self.slots) :])


@dataclass(slots=True)
class Step:
    """A node (or output) of the graph: its class, names, and where its tensors have their bits in a partial program (-1: nowhere)."""

    kind: StepClass
    tensors: tuple[str, ...]
    outputs: tuple[str, ...]
    slot_shifts: tuple[int, ...]
    result_shifts: tuple[int, ...]
    keep: int = -1  # bits that survive the step
    reads: int = 0  # bits of its slots
    live: tuple[tuple[str, TensorTable, int], ...] = ()  # values that are live before it


@dataclass(slots=True)
class Problem:
    """`steps[:num_nodes]` are the nodes, the others those of the graph's outputs that may leave in several ways, by their numbers `outputs`.
    `start`: bits before the first step. `unused`: parameters that no step reads, with the placement they are stored in."""

    theory: Theory
    costs: CostModel
    restriction: Restriction
    tables: dict[str, TensorTable]
    terms: TermTable
    steps: tuple[Step, ...]
    num_nodes: int
    outputs: tuple[int, ...]
    start: int
    unused: dict[str, Placement]
    cuts: frozenset[Cut]
    triples: list[Sequence[Triple]]
    classes: list[StepClass] = field(default_factory=list)
    seeds: list[Mapping[int, Any]] | None = None  # see `hapx.synth.seeds`; made when first searched
    watch: Callable[[int, float, float | None], None] | None = None  # see `hapx.synth.astar.Watch`
    within: float = 0.0  # relative distance from the optimum that is good enough; see `hapx.synth.search`
    rough: float = 0.0  # the same, where searches are as long as ever
    exposed: Exposed = ALL  # how much of the sums of gradients counts
    brief: bool = False  # whether searches that cannot be short are to end soon
    programs: list[Any] = field(default_factory=list)  # last states of searches at other shares, the latest first
    at_prices: dict[Any, Any] = field(default_factory=dict)  # last states of searches where memory has a price, by what they do, the latest last
    written: dict[Any, Any] = field(default_factory=dict)  # by choices, what `hapx.synth.writer` made of them
    instructions: dict[Any, Instruction] = field(default_factory=dict)  # of its programs; see `hapx.synth.writer`
    firsts: dict[Any, Instruction] = field(default_factory=dict)  # of those, one of each kind
    repetition: Any = None  # see `hapx.synth.periods`; made when first searched
    grid: Any = None  # see `hapx.synth.grid`; made when first searched
    conversions: Any = None  # see `hapx.synth.conversions`; at the shares that were searched last
    outline: Any = None  # see `hapx.synth.outline`; made when first searched
    sheet: Any = None  # see `hapx.synth.sheet`; made when first searched
    forward: dict[bool, Any] = field(default_factory=dict)  # see `hapx.synth.potentials`; of the last search by seconds (True), and by bytes
    groups: dict[Any, Any] = field(default_factory=dict)  # see `hapx.synth.potentials`; of the operands of a class
    blunt: set[bool] = field(default_factory=set)  # of which of the two potentials made the bound no sharper
    asked: Any = None  # see `hapx.synth.search.least`
    widened: dict[Any, Any] = field(default_factory=dict)  # see `hapx.synth.search._found_by_wider`

    def forget(self) -> None:
        """Drops what was found out at the shares that were searched last. Searches there know the problem: what knows each other is not freed while a
        plan is made (`hapx.processes.without_collections`)."""
        if self.conversions is not None:
            self.conversions.priced.clear()
        self.conversions = self.asked = None


def build(
    theory: Theory, costs: CostModel, restriction: Restriction, given: Mapping[str, Placement] | None = None, forbidden: Forbidden = NOTHING
) -> Problem:
    """The problem of a theory. Raises PlanError where the restriction, or what is forbidden, leaves a node without a triple."""
    return _Builder(theory, costs, restriction, given or {}, forbidden).problem()


class _Builder:
    def __init__(self, theory: Theory, costs: CostModel, restriction: Restriction, given: Mapping[str, Placement], forbidden: Forbidden):
        self.theory, self.costs, self.rule, self.given, self.forbidden = theory, costs, restriction, given, forbidden
        self.graph: Graph = theory.graph
        self.saved = kept(self.graph) if self.graph.mode == "train" else frozenset()
        self.again = converted_again(self.graph) if self.graph.mode == "train" else frozenset()
        self.terms = TermTable(len(costs.kinds))
        self.ids: dict[Placement, int] = {}
        self.by_object: dict[int, int] = {}
        self.by_tuple: dict[int, tuple[tuple[Placement, ...], tuple[int, ...]]] = {}
        self.placements: list[Placement] = []
        self.wanted: dict[tuple[str, int], bool] = {}
        # alike nodes keep the same triples where what is left does not depend on names
        self.nameless = bool(theory.alike) and restriction.split == "auto" and forbidden == NOTHING
        self.triples = self._filtered()
        self.alike: Sequence[int] = theory.alike if self.nameless else self._alike()
        self.forgotten = forgotten(self.graph) if theory.alike and self.graph.mode == "train" else frozenset()
        self.known: dict[Any, StepClass] = {}
        self.stored = {name: self._stored(name) for name in theory.stored}
        # what nodes read, one name per occurrence, as every triple of them says
        self.reads = [node.call.refs() for node in self.graph.nodes]
        self.classes: dict[Any, StepClass] = {}

    def problem(self) -> Problem:
        self.last, self.first = self._uses()
        self.tables = self._tables()
        outputs = tuple([i for i, o in enumerate(self.graph.outputs) if not self._only_whole(o.tensor)])
        steps, start = self._steps(outputs)
        unused = {n: stored[0] for n, stored in self.stored.items() if n not in self.first}
        cuts = frozenset(s.cut for p in self.placements for s in p.states if isinstance(s, Sharded) and s.cut.row.kind != "even")
        return Problem(self.theory, self.costs, self.rule, self.tables, self.terms, steps, len(self.graph.nodes), outputs, start, unused,
                       cuts, self.triples, list(self.classes.values()))  # fmt: skip

    def _alike(self) -> list[int]:
        """A number per node, equal where the theory says that nodes are alike and the same triples are left (equal placements are one object)."""
        numbers: dict[Any, int] = {}
        found = []
        for k, triples in enumerate(self.triples):
            left = tuple([id(p.placement) for t in triples for p in (*t.pre, *t.post)]), tuple([_form(t.body) for t in triples])
            key = (self.theory.alike[k], left) if self.theory.alike else (-1, k)
            found.append(numbers.setdefault(key, len(numbers)))
        return found

    # -- what the restriction leaves -------------------------------------------------------------------------------------------------------------

    def _filtered(self) -> list[Sequence[Triple]]:
        if not self.nameless:
            return [self._filter(i, ts) for i, ts in enumerate(self.theory.triples)]
        left: dict[int, list[int]] = {}  # by alike nodes
        for i, (number, ts) in enumerate(zip(self.theory.alike, self.theory.triples, strict=True)):
            if number not in left:
                kept = set(map(id, self._filter(i, ts)))
                left[number] = [k for k, t in enumerate(ts) if id(t) in kept]
        return [
            ts if len(left[number]) == len(ts) else _Left(ts, left[number]) for number, ts in zip(self.theory.alike, self.theory.triples, strict=True)
        ]

    def _filter(self, node: int, triples: Sequence[Triple]) -> list[Triple]:
        allowed = [t for t in triples if self._split_allowed(t) and form_allowed(t.body, self.rule.forms) and not self.forbidden.triple(t)]
        kept = self._forced(node, allowed)
        sfb = [t for t in kept if gathered(t.body) is not None]
        if self.rule.sfb == "never":
            kept = [t for t in kept if gathered(t.body) is None]
        elif self.rule.sfb == "always" and sfb:
            kept = sfb
        if not kept:
            raise PlanError(f"restriction {self.rule.name!r} leaves no way to run {self.graph.nodes[node]}", where=f"node {node}")
        return kept

    def _forced(self, node: int, triples: list[Triple]) -> list[Triple]:
        """A strategy by name does what its name says, also where doing everything everywhere would be cheaper: "batch" splits whatever
        has a batch, "model" splits every operator that multiplies."""
        if self.rule.split == "batch":
            return [t for t in triples if any(isinstance(s, Sharded) for p in (*t.pre, *t.post) for s in p.placement.states)] or triples
        if self.rule.split == "model" and work(self.graph, self.graph.nodes[node]).forward > 0:
            return [t for t in triples if any(t.work)] or triples
        return triples

    def _split_allowed(self, triple: Triple) -> bool:
        if self.rule.split == "auto":
            return True
        return all(map(self._as_wanted, (*triple.pre, *triple.post)))

    def _as_wanted(self, p: Property) -> bool:
        """Whether a property splits only what is to be split; most are asked for by many triples."""
        key = p.tensor, id(p.placement)  # placements are the theory's own objects
        if key not in self.wanted:
            shards = [s for s in p.placement.states if isinstance(s, Sharded)]
            self.wanted[key] = all(((p.tensor, s) in self.theory.batch) == (self.rule.split == "batch") for s in shards)
        return self.wanted[key]

    def _stored(self, name: str) -> tuple[Placement, ...]:
        """Placements in which a parameter may be stored; "sharded": only those in the most shards, each with a unit for every device;
        "sharded-inside": the same of those that are whole on every machine."""
        if name in self.given:
            return (self.given[name],)
        options = self.theory.stored[name]  # one object for all parameters that may be stored alike
        if not self.rule.storage.startswith("sharded") or self.graph.refs[name].kind is not Kind.PARAMETER:
            return options
        sizes, axes = self.theory.mesh.sizes, self.theory.mesh.axes
        if self.rule.storage == "sharded-inside" and len(axes) > 1:
            machines = [a for a, axis in enumerate(axes) if axis.kind == "machines"]
            options = tuple(p for p in options if not any(isinstance(p.states[a], Sharded) for a in machines))
        fitting = [p for p in options if all(not isinstance(s, Sharded) or s.cut.units >= sizes[a] for a, s in enumerate(p.states))] or list(options)
        most = max(map(shards, fitting))
        return tuple(p for p in fitting if shards(p) == most)

    # -- tensors -------------------------------------------------------------------------------------------------------------------------------

    def _uses(self) -> tuple[dict[str, int], dict[str, int]]:
        """Per tensor the last and the first step that reads it."""
        last: dict[str, int] = {}
        first: dict[str, int] = {}
        for k, names in enumerate([*self.reads, *((o.tensor,) for o in self.graph.outputs)]):
            for name in names:
                first.setdefault(name, k)
                last[name] = k
        return last, first

    def _id(self, placement: Placement) -> int:
        number = self.by_object.get(id(placement))
        if number is None:
            number = self.ids.setdefault(placement, len(self.placements))
            if number == len(self.placements):
                self.placements.append(placement)
            self.by_object[id(placement)] = number
        return number

    def _ids(self, placements: tuple[Placement, ...]) -> tuple[int, ...]:
        known = self.by_tuple.get(id(placements))
        if known is None:  # held, so that its identity stays its own
            known = self.by_tuple[id(placements)] = placements, tuple([self._id(p) for p in placements])
        return known[1]

    def _tables(self) -> dict[str, TensorTable]:
        whole = Placement((REPLICATED,) * len(self.theory.mesh.axes))
        found: dict[str, int] = {}  # bit sets of placements
        seen: dict[int, list[int]] = {}  # by alike nodes, the placements at each place of a triple
        for k, triples in enumerate(self.triples):
            number = self.alike[k]
            if number not in seen:
                places = zip(*([self._id(p.placement) for p in t.pre + t.post] for t in triples), strict=True)
                seen[number] = list(map(_set, places))
            names = (*self.reads[k], *(o.name for o in self.graph.nodes[k].outputs))
            for name, ids in zip(names, seen[number], strict=True):
                found[name] = found.get(name, 0) | ids
        extra = [*self.stored.items(), *self.theory.outputs.items()]
        extra += [(r.name, (whole,)) for r in self.graph.sources]
        sets: dict[int, int] = {}  # by the identity of placements, which most have in common
        for name, placements in extra:
            own = sets.get(id(placements))
            if own is None:
                own = sets[id(placements)] = _set(self._ids(placements))
            found[name] = found.get(name, 0) | own
        shared: dict[Any, TensorTable] = {}
        return {name: self._table(name, ids, shared) for name, ids in found.items()}

    def _table(self, name: str, ids: int, shared: dict[Any, TensorTable]) -> TensorTable:
        """ids: the bit set of its placements."""
        ref = self.graph.refs[name]
        stored = self._ids(self.stored[name]) if name in self.stored else ()
        forbidden = self.forbidden.of(name) if self.forbidden.changes else frozenset()
        key = (ref.shape, ref.dtype, ref.kind, ref.requires_grad, name in self.saved, name in self.again, ids, stored, forbidden)
        if key not in shared:
            placements = [self.placements[i] for i in members(ids)]
            shared[key] = TensorTable(ref, placements, self.stored.get(name, ()), self.costs, self.terms, self.theory.mesh, self.rule,
                                      self.graph.mode == "train", forbidden)  # fmt: skip
        return shared[key]

    # -- steps -----------------------------------------------------------------------------------------------------------------------------------

    def _steps(self, outputs: tuple[int, ...]) -> tuple[tuple[Step, ...], int]:
        bits = _Registers()
        start = 0
        for ref in self.graph.sources:
            if ref.name in self.last and self._fixed(ref.name) is None:
                table = self.tables[ref.name]
                start |= table.closure(self._whole(table)) << bits.take(ref.name, table)
        steps = [self._node(i, bits) for i in range(len(self.graph.nodes))]
        steps += [self._output(len(self.graph.nodes) + i, bits) for i in outputs]
        return tuple(steps), start

    def _whole(self, table: TensorTable) -> int:
        return table.number[Placement((REPLICATED,) * len(self.theory.mesh.axes))]

    def _only_whole(self, name: str) -> bool:
        """Whether a tensor is a number that is whole everywhere."""
        return name in self.graph.producer and len(self.tables[name].placements) == 1 and self.tables[name].ref.size == 1

    def _fixed(self, name: str) -> int | None:
        """The mask of a tensor that needs no bits in partial programs, else None. (Counters of batch norms are live up to the end: hundreds of
        numbers that are whole everywhere.)"""
        table = self.tables[name]
        if name in self.stored:
            return 0 if self.first[name] == self.last[name] else None
        if self._only_whole(name):
            return table.full
        if name not in self.graph.producer and table.closure(self._whole(table)) == table.full:
            return table.full
        return None

    def _node(self, k: int, bits: _Registers) -> Step:
        node = self.graph.nodes[k]
        read = self.reads[k]
        tensors = tuple(dict.fromkeys(read))
        outputs = tuple([o.name for o in node.outputs])
        slots = self._slots(k, tensors)
        results = tuple([Result(self.tables[name], name in self.last and self._fixed(name) is None) for name in outputs])
        occurrences = tuple([tensors.index(name) for name in read])
        quick = (self.alike[k], occurrences, _keys(slots), _keys(results), *self._circumstances(k))
        if quick not in self.known:
            self.known[quick] = self._class(k, tensors, occurrences, slots, results)
        return self._step(k, self.known[quick], tensors, outputs, bits)

    def _circumstances(self, k: int) -> tuple[Any, ...]:
        """What, beside its triples and the tensors that it reads and makes, the cost of a node depends on."""
        node, first = self.graph.nodes[k], self.graph.nodes[k].outputs[0].name
        again = first in self.graph.recomputed, first in self.forgotten
        return lies(self.graph, node), again, tuple([dtype for _, dtype in node.casts]), self._regions(k)

    def _class(
        self, k: int, tensors: tuple[str, ...], occurrences: tuple[int, ...], slots: tuple[Slot, ...], results: tuple[Result, ...]
    ) -> StepClass:
        node, triples = self.graph.nodes[k], self.triples[k]
        coded = tuple(self._signature(t) for t in triples)
        # the cost model gives one cost object to alike nodes: its identity tells apart what only it can see
        call = (node.call.constants, self._regions(k), occurrences)
        key = (id(self.costs.instruction(triples[0])), call, _keys(slots), _keys(results), coded)
        if key not in self.classes:
            self.classes[key] = StepClass(slots, results, tuple(self._choice(i, t, tensors) for i, t in enumerate(triples)))
        return self.classes[key]

    def _signature(self, triple: Triple) -> tuple[Any, ...]:
        """Placements before and after, and what is called."""
        pre, post = (tuple(self._id(p.placement) for p in properties) for properties in (triple.pre, triple.post))
        return pre, post, triple.body.target if isinstance(triple.body, OpCall) else ""

    def _choice(self, index: int, triple: Triple, tensors: tuple[str, ...]) -> Choice:
        needs = tuple(dict.fromkeys((tensors.index(p.tensor), self.tables[p.tensor].number[p.placement]) for p in triple.pre))
        gives = tuple(self.tables[p.tensor].number[p.placement] for p in triple.post)
        cost = self.costs.instruction(triple)
        return Choice(index, needs, gives, cost, numbered(self.terms, cost))

    def _output(self, k: int, bits: _Registers) -> Step:
        name = self.graph.outputs[k - len(self.graph.nodes)].tensor
        slots, table = self._slots(k, (name,)), self.tables[name]
        allowed = tuple(table.number[p] for p in self.theory.outputs[name])
        key = ("output", _keys(slots), allowed)
        if key not in self.classes:
            none = StepTerms(-1, -1, (), -1)
            self.classes[key] = StepClass(slots, (), tuple(Choice(i, ((0, p),), (), None, none) for i, p in enumerate(allowed)))
        return self._step(k, self.classes[key], (name,), (), bits)

    def _slots(self, k: int, tensors: tuple[str, ...]) -> tuple[Slot, ...]:
        return tuple([Slot(self.tables[n], fixed := self._fixed(n), fixed is None and self.last[n] > k) for n in tensors])

    def _regions(self, k: int) -> tuple[Any, ...]:
        return tuple([(r.kind, r.options) for r in self.graph.regions if r.start <= k < r.stop])

    def _step(self, k: int, kind: StepClass, tensors: tuple[str, ...], outputs: tuple[str, ...], bits: _Registers) -> Step:
        live = bits.live()
        reads, keep = 0, -1
        shifts: list[int] = []
        for name, slot in zip(tensors, kind.slots, strict=True):
            if slot.fixed is not None:
                shifts.append(-1)
                continue
            shift = bits.take(name, slot.table)
            shifts.append(shift)
            reads |= slot.table.full << shift
            if not slot.live:
                keep &= ~(slot.table.full << shift)
        for name, slot in zip(tensors, kind.slots, strict=True):  # only now: a tensor read here must not share bits with one that appears here
            if slot.fixed is None and not slot.live:
                bits.release(name)
        made = tuple([bits.take(name, r.table) if r.live else -1 for name, r in zip(outputs, kind.results, strict=True)])
        return Step(kind, tensors, outputs, tuple(shifts), made, keep, reads, live)


class _Left(Triples):
    """Some of the triples of a node."""

    def __init__(self, triples: Sequence[Triple], numbers: Sequence[int]):
        self._triples, self._numbers = triples, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def _one(self, number: int) -> Triple:
        return self._triples[self._numbers[number]]


class _Registers:
    """Ranges of bits for live tensors, lowest free range first."""

    def __init__(self) -> None:
        self._taken: dict[str, tuple[str, TensorTable, int]] = {}
        self._ranges: list[tuple[int, int]] = []  # (first, behind the last), ascending

    def take(self, name: str, table: TensorTable) -> int:
        if name in self._taken:
            return self._taken[name][2]
        at, place, size = 0, 0, len(table.placements)
        for start, stop in self._ranges:
            if start - at >= size:
                break
            at, place = stop, place + 1
        self._ranges.insert(place, (at, at + size))
        self._taken[name] = name, table, at
        return at

    def release(self, name: str) -> None:
        _, table, at = self._taken.pop(name)
        self._ranges.remove((at, at + len(table.placements)))

    def live(self) -> tuple[tuple[str, TensorTable, int], ...]:
        return tuple(self._taken.values())


def _set(ids: Iterable[int]) -> int:
    """The bit set of numbers."""
    return sum(1 << i for i in set(ids))


def _form(body: Any) -> Any:
    """The form of the gathers of sufficient factors, of which there is a triple for each."""
    return body["form"] if gathered(body) is not None else None


def _keys(parts: Sequence[Slot] | Sequence[Result]) -> tuple[Any, ...]:
    """With the identities of their tables."""
    return tuple([(id(table), *rest) for table, *rest in parts])
