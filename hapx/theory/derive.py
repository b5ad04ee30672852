"""Derivation of the background theory: all Hoare triples of a graph on a mesh (HAP section 4.1, lifted to several axes).

In: a Graph and a Mesh. Out: a Theory. For one axis the triples of a node are its entry's rules with every site given its cut, in the
ratio row of the node's segment (a tensor that another segment uses is cut again for it, by a conversion); they hold on each axis
independently, so the triples on a mesh are the combinations whose placements exist (splits of one dim nest). Free conversions and
communications are not listed: see `hapx.theory.conversion`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from hapx.ir import Graph, Kind, TensorRef
from hapx.layout import compatible
from hapx.plan import Mesh, Triple
from hapx.states import INVARIANT, REPLICATED, Cut, Invariant, Placement, Row, Sharded, State
from hapx.theory.discover import refuse
from hapx.theory.factors import in_all_forms
from hapx.theory.grains import Grains, find_grains, operands
from hapx.theory.registry import Rule, Site, lookup
from hapx.theory.triple import Theory
from hapx.theory.triples import Names, NodeTriples, Shape, Shapes, body
from hapx.warnings import HapWarning, warn

# what is there, in a placement that is chosen, before a program begins
STORED = (Kind.PARAMETER, Kind.BUFFER, Kind.RECEIVED)


class ReplicatedOperatorWarning(HapWarning):
    """An operator without an entry runs whole on every device."""


@dataclass(frozen=True, slots=True)
class AxisRule:
    """A rule with its states on one axis."""

    pre: tuple[State, ...]
    post: tuple[State, ...]
    variant: str
    work: Cut | None


def derive(graph: Graph, mesh: Mesh, grains: Grains | None = None, like: Theory | None = None) -> Theory:
    """The theory of `graph` on `mesh`. like: one of the same graph on a mesh with as many axes: triples do not depend on how long axes
    are, only where parameters may be kept does.

    Raises UnsupportedOperatorError for an operator without an entry that is random, in place or data-dependent; warns
    (ReplicatedOperatorWarning) for any other operator without an entry.
    """
    grains = grains or find_grains(graph)
    if like is None:
        check_operators(graph)
        derivation = _Derivation(graph, mesh, grains)
        alike = tuple(derivation.number(i) for i in range(len(graph.nodes)))
        triples: Sequence[Sequence[Triple]] = tuple(map(derivation.triples, range(len(graph.nodes)), alike))
        batch, names = batch_cuts(graph, mesh, grains), derivation.names
    else:
        assert like.graph is graph and (len(like.mesh.axes), like.mesh.uneven) == (len(mesh.axes), mesh.uneven), "a theory of another kind of mesh"
        triples, alike, batch, names = like.triples, like.alike, like.batch, like.names
    stored = _all_stored(graph, mesh, grains)
    outputs = {
        o.tensor: _stored(graph.refs[o.tensor], mesh, grains, graph.segments_of[o.tensor])
        if o.role == "boundary"
        else _allowed(graph, mesh, batch, o.tensor, o.role)
        for o in graph.outputs
    }
    return Theory(graph, mesh, triples, stored, outputs, batch, alike, names)


def check_operators(graph: Graph) -> None:
    """Refuse operators about which nothing can be said; name the ones that are only replicated."""
    refuse(graph)
    notes = {i: p.note for p in graph.probed for i in p.nodes}
    replicated: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        if lookup(node.call) is None and not graph.probed_rules.get(i):
            replicated.setdefault(node.call.target, i)
    for target, i in replicated.items():
        node = graph.nodes[i]
        why = f" ({notes[i]})" if notes.get(i) else ""
        warn(
            f"{target} has no rule{why}: it runs whole on every device (in {node.module or 'model'}, {node.source})",
            ReplicatedOperatorWarning,
        )


class _Derivation:
    """The triples of all nodes of a graph; nodes that are alike share their shapes. Equal placements are one object."""

    def __init__(self, graph: Graph, mesh: Mesh, grains: Grains):
        self.graph, self.mesh, self.grains = graph, mesh, grains
        self.numbers: dict[object, int] = {}
        self.shapes: list[Shapes] = []
        self.placements: dict[tuple[State, ...], Placement | None] = {}
        self.names = Names()

    def number(self, index: int) -> int:
        """A number that alike nodes share: that of their shapes."""
        tensors = operands(self.graph, self.graph.nodes[index])
        number = self.numbers.setdefault(self._key(index, tensors), len(self.shapes))
        if number == len(self.shapes):
            self.shapes.append(Shapes.of(self._shapes(index, tensors)))
        return number

    def triples(self, index: int, number: int) -> NodeTriples:
        """Of a node with this number."""
        node = self.graph.nodes[index]
        return NodeTriples(node, index, self.graph.first, operands(self.graph, node), self.shapes[number], self.names)

    def _key(self, index: int, tensors: tuple[TensorRef, ...]) -> object:
        """Equal for nodes with equal shapes: the same rules, cut into the same units of one segment's rows."""
        node, rules = self.graph.nodes[index], self.grains.rules[index]
        units = tuple([_units(self.grains, (*tensors, *node.outputs), rule) for rule in rules])
        return self.graph.alike[index], self.graph.segment_of[index], rules, units

    def _shapes(self, index: int, tensors: tuple[TensorRef, ...]) -> Iterable[tuple[Shape, int]]:
        """With the number of forms of their bodies, of which alike nodes have the same."""
        node = self.graph.nodes[index]
        per_axis = [_axis_rules(self.graph, self.mesh, self.grains, index, axis) for axis in range(len(self.mesh.axes))]
        found: dict[tuple[int, ...], tuple[Shape, int]] = {}
        for combination in product(*per_axis):
            pre = tuple(map(self._placement, zip(*(r.pre for r in combination), strict=True))) if tensors else ()
            post = tuple(map(self._placement, zip(*(r.post for r in combination), strict=True)))
            if any(p is None for p in (*pre, *post)):
                continue
            shape = Shape(pre, post, tuple(r.variant for r in combination), tuple(r.work for r in combination))  # type: ignore[arg-type]
            call = body(node, index, tensors, shape)
            if call is not None:
                found.setdefault(tuple(map(id, (*pre, *post))), (shape, len(in_all_forms(call))))
        return found.values()

    def _placement(self, states: tuple[State, ...]) -> Placement | None:
        """The one object for these states, None if they do not nest."""
        if states not in self.placements:
            self.placements[states] = Placement(states) if compatible(states) else None
        return self.placements[states]


def _axis_rules(graph: Graph, mesh: Mesh, grains: Grains, index: int, axis: int) -> tuple[AxisRule, ...]:
    node = graph.nodes[index]
    tensors = operands(graph, node)
    everything = (*tensors, *node.outputs)
    found = {}
    for rule in grains.rules[index]:
        cut = _cut(mesh.row(axis, segment=graph.segment_of[index]), grains, everything, rule)
        if cut is not None and cut.units == 1:
            continue
        states = tuple(_state(s, r, cut) for s, r in zip((*rule.operands, *rule.outputs), everything, strict=True))
        found[states, rule.variant] = AxisRule(states[: len(tensors)], states[len(tensors) :], rule.variant, cut if rule.divides else None)
    return tuple(found.values())


def _cut(row: Row, grains: Grains, tensors: tuple[TensorRef, ...], rule: Rule) -> Cut | None:
    units = _units(grains, tensors, rule)
    return Cut(row, units) if units else None


def _units(grains: Grains, tensors: tuple[TensorRef, ...], rule: Rule) -> int:
    """Units of what a rule splits, 0 if it splits nothing. (Its sites are one class.)"""
    for ref, slot in zip(tensors, (*rule.operands, *rule.outputs), strict=True):
        if isinstance(slot, Site):
            return grains.units[ref.name, slot]
    return 0


def _state(slot: object, ref: TensorRef, cut: Cut | None) -> State:
    if isinstance(slot, Site):
        assert cut is not None
        return Sharded(slot.dim, slot.outer, ref.shape[slot.dim] // (slot.outer * cut.units), cut)
    if isinstance(slot, Invariant) and not ref.requires_grad:
        return REPLICATED
    return slot  # type: ignore[return-value]


def _all_stored(graph: Graph, mesh: Mesh, grains: Grains) -> dict[str, tuple[Placement, ...]]:
    """Per parameter and buffer, where it may be kept: one object for those that are alike."""
    known: dict[object, tuple[Placement, ...]] = {}
    found: dict[str, tuple[Placement, ...]] = {}
    for ref in (r for kind in STORED for r in graph.of_kind(kind)):
        if ref.name in graph.written:  # by what is given whole (`_allowed`)
            found[ref.name] = (Placement((REPLICATED,) * len(mesh.axes)),)
            continue
        segments = graph.segments_of[ref.name]
        key = ref.shape, ref.kind, ref.requires_grad, grains.sites_of.get(ref.name), segments
        if key not in known:
            known[key] = _stored(ref, mesh, grains, segments)
        found[ref.name] = known[key]
    return found


def _stored(ref: TensorRef, mesh: Mesh, grains: Grains, segments: tuple[int, ...]) -> tuple[Placement, ...]:
    """Placements in which a parameter or buffer may be kept, or a tensor cross between stages: whole, or in shards of any of its sites, on each axis.

    A shard is either cut as a computation uses it (compute rows of the `segments` that use it) or only for keeping (the storage row of
    the first of them; dim 0 or the first dim with enough units)."""
    keep: State = INVARIANT if ref.requires_grad else REPLICATED
    per_axis: list[list[State]] = []
    for axis, size in enumerate(mesh.sizes):
        options: dict[State, None] = {keep: None}
        for site, units in grains.sites_of.get(ref.name, ()):
            if units > 1:
                for row in _rows(mesh, axis, segments):
                    options[Sharded(site.dim, site.outer, ref.shape[site.dim] // (site.outer * units), Cut(row, units))] = None
        for dim, extent in enumerate(ref.shape):
            if extent >= size > 1 and ref.kind is Kind.PARAMETER:
                options[Sharded(dim, 1, 1, Cut(mesh.row(axis, "storage", segments[0]), extent))] = None
                break
        per_axis.append(list(options))
    return tuple(p for p in (Placement(states) for states in product(*per_axis)) if compatible(p.states))


def batch_cuts(graph: Graph, mesh: Mesh, grains: Grains) -> frozenset[tuple[str, Sharded]]:
    """(tensor, state) pairs that split the batch."""
    found: set[tuple[str, Sharded]] = set()
    for (name, site), number in grains.classes.items():
        units = grains.units[name, site]
        if number in grains.batch and units > 1:
            ref = graph.refs[name]
            inner = ref.shape[site.dim] // (site.outer * units)
            rows = [row for axis in range(len(mesh.axes)) for row in _rows(mesh, axis, graph.segments_of[name])]
            found |= {(name, Sharded(site.dim, site.outer, inner, Cut(row, units))) for row in rows}
    return frozenset(found)


def _rows(mesh: Mesh, axis: int, segments: tuple[int, ...]) -> tuple[Row, ...]:
    """The compute rows of an axis in some segments."""
    return tuple(dict.fromkeys(mesh.row(axis, segment=s) for s in segments))


def _allowed(graph: Graph, mesh: Mesh, batch: frozenset[tuple[str, Sharded]], tensor: str, role: str) -> tuple[Placement, ...]:
    """Placements in which an output may be given: the loss Invariant, buffers whole, results as batch shares or whole."""
    ref = graph.refs[tensor]
    whole: State = INVARIANT if ref.requires_grad else REPLICATED
    if role in ("loss", "buffer"):
        return (Placement((whole,) * len(mesh.axes)),)
    options: Mapping[int, list[State]] = {
        axis: [whole, *(s for n, s in batch if n == tensor and s.cut.row.axis == axis)] for axis in range(len(mesh.axes))
    }
    return tuple(p for p in (Placement(states) for states in product(*options.values())) if compatible(p.states))
