"""What the moves of a search do to the peak of memory: bytes that stay, and bytes of the two moments of a step, forward and backward.

In: a problem, a cost model at exact lengths. Out: moves whose memory is `PARTS`, each per kind of devices, one after the other:

    k  parameters and optimizer state             s  what is kept for backward
    g  gradients                                  r  what is kept while a checkpoint region is computed again
    f  what only forward of the step takes        b  what only backward of it takes

f and b of a move are sums of those of its call and of its conversions, though these come one after the other. They are whole multiples of a small
part of what may be used (`GRAIN`), so that moves do not differ by less. `hapx.synth.lean` makes peaks of partial programs of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hapx.cost.compute import hidden
from hapx.cost.footprints import Hop, call_of, route_of
from hapx.cost.local_sizes import LocalSizes
from hapx.cost.memory import allocates, converted_again, kept_between_regions, kept_without_regions, saved, states_of
from hapx.cost.model import CostModel
from hapx.cost.terms import Vector as Bytes
from hapx.ir import CONTINUOUS, Kind, Node, OpCall, TensorRef
from hapx.layout import Lengths
from hapx.plan import Communication
from hapx.states import Partial, Placement
from hapx.synth.conversions import Converted
from hapx.synth.effect import Effect
from hapx.synth.moves import Moves, Option, Use
from hapx.synth.problem import Problem, StepClass
from hapx.synth.tables import Edge, Kept, TensorTable, bits

PARTS = "kgsrfb"
GRAIN = 1 / 64  # of what may be used: f and b are whole multiples of that


class Moments(Moves):
    """See the module. within: of steps inside of checkpoint regions. levels: a step of every class; exact: the costs at these lengths."""

    def __init__(self, problem: Problem, exact: CostModel, lengths: Lengths, levels: dict[int, int], within: bool):
        super().__init__(problem, problem.costs.lengths_to_shares(lengths), memory=True, capacity=(1.0,) * problem.terms.kinds)
        graph = exact.graph
        self.exact, self.levels, self.within, self.training = exact, levels, within, exact.mode == "train"
        self.local = LocalSizes(problem.theory.mesh, graph, exact, {})
        self.none: Bytes = np.zeros(len(exact.kinds))
        self.grain = GRAIN * exact.capacity
        self.states = states_of(exact.optimizer) if self.training else 0
        # names of what is kept for backward all the time, and while regions are computed again; of what only regions convert
        self.kept, self.inside, self.twice = frozenset[str](), frozenset[str](), frozenset[str]()
        if self.training:
            self.kept, self.inside, self.twice = kept_between_regions(graph), kept_without_regions(graph), converted_again(graph)
        self.nothing = self.nothing._replace(memory=(0.0,) * (len(PARTS) * len(exact.kinds)))
        self._free: dict[tuple[int, int, int], Effect] = {}
        self._hop_of: dict[int, Hop] = {}
        self._free_hops: dict[tuple[int, int, int], tuple[Hop, ...]] = {}
        self._conversion_hops: dict[tuple[int, int], tuple[Hop, ...]] = {}

    def effect(self, kind: StepClass, choice: int) -> Effect:
        key = id(kind), choice
        if key not in self._effects:
            level = self.levels[id(kind)]
            self._effects[key] = self._of_call(level, choice) if level < self.problem.num_nodes else self.nothing
        return self._effects[key]

    def of_kept(self, table: TensorTable, kept: Kept) -> Effect:
        ref, part = table.ref, self.local.part(table.placements[kept.placement], 1.0)
        trained = self.training and ref.requires_grad and ref.kind is Kind.PARAMETER
        return self._effect_of(k=part * (ref.bytes + 4.0 * self.states * ref.size * trained), g=part * ref.bytes * trained)

    def _effect_of(self, **own: Bytes) -> Effect:
        for moment in "fb":
            if moment in own:
                own[moment] = self.grain * np.rint(own[moment] / self.grain)
        return self.nothing._replace(memory=tuple(np.concatenate([own.get(part, self.none) for part in PARTS]).tolist()))

    # -- calls -------------------------------------------------------------------------------------------------------------------------------------

    def _of_call(self, level: int, choice: int) -> Effect:
        triple, node = self.problem.triples[level][choice], self.exact.graph.nodes[level]
        assert isinstance(triple.body, OpCall)
        does, places = call_of(triple, triple.body, node, self.local), triple.placements
        s, r = self._saved(node, places, self.kept, forgets=self.within), self.none
        if self.within:
            r = np.maximum(self._saved(node, places, self.inside, forgets=False) - s, 0.0)
        f = does.forward if does.forward is not None else self.none
        if not does.view:
            f = f + sum(size for p, size in zip(triple.post, self.local.local(triple.post), strict=True) if p.tensor not in self.kept)
        b = self.none
        if self.training and does.keeps is not None:
            sizes = self.local.local(triple.pre)
            b = sum((sizes[i] for i in does.wanted if not does.hands_on[i]), does.backward if does.backward is not None else self.none)
        return self._effect_of(s=s, r=r, f=f, b=b)

    def _saved(self, node: Node, places: dict[str, Placement], kept: frozenset[str], *, forgets: bool) -> Bytes:
        """Outputs that are kept, and what the operator keeps of its own, as `CostModel` counts them; but Partial outputs count where only regions
        convert them."""
        if not self.training:
            return self.none
        graph = self.exact.graph
        made = [o for o in node.outputs if allocates(graph, o.name, kept)]
        sizes = [(o.name, float(o.bytes)) for o in made if not partial(places[o.name]) or (kept is self.kept and o.name in self.twice)]
        if not forgets:
            reads = [name for name in dict.fromkeys(saved(node, graph)) if graph.refs[name].kind is Kind.VALUE and partial(places[name])]
            sizes += [*hidden(graph, node), *((name, float(graph.refs[name].bytes)) for name in reads)]
        return self.exact.in_flight * self.local.sum(tuple(sizes), places)

    # -- conversions -------------------------------------------------------------------------------------------------------------------------------

    def used(self, kind: StepClass, masks: tuple[int, ...], choice: int) -> tuple[int, ...]:
        """All of it: what is free takes memory, by what it is made from."""
        return masks

    def _converted(self, table: TensorTable, mask: int, target: int) -> Iterator[Option]:
        """What is free takes memory nevertheless where it is not what was made."""
        if not mask >> target & 1:
            yield from super()._converted(table, mask, target)
            return
        source = next(p for p in made(table, mask) if table.closure(p) >> target & 1)
        yield Option(self._freely(table, source, target), mask | table.closure(target), None, None)

    def _freely(self, table: TensorTable, source: int, target: int) -> Effect:
        key = id(table), source, target
        if key not in self._free:
            hops = self._hops(table, source, table.free_path(source, target)) if source != target else ()
            size = sum((h.made for h in hops if h.forward != "none"), self.none)
            self._free[key] = self._effect_of(f=size) if size.any() else self.nothing
        return self._free[key]

    def _path(self, table: TensorTable, source: int, target: int, path: Converted) -> Effect:
        ref, at = table.ref, table.placements[target]
        size, hops = self.local.part(at, float(ref.bytes)), self._along(table, source, path.edges)
        s = r = self.none
        if path.holds and not partial(at):
            s = self.exact.in_flight * size if ref.name in self.kept and ref.name not in self.twice else self.none
            r = size if self.within and not s.any() and ref.name in self.inside else self.none
        f = b = before = self.none
        for hop in hops:
            if hop.forward != "none":
                f, before = np.maximum(f, before + hop.made + hop.buffers), hop.made
        if self._has_cotangent(ref):
            b = self._backwards(size, hops)
        return self._effect_of(s=s, r=r, f=np.maximum(f - s - r, 0.0), b=b)

    def _backwards(self, size: Bytes, hops: tuple[Hop, ...]) -> Bytes:
        """What converting a cotangent back takes beside it. size: its own."""
        current, most = size, self.none
        for hop in reversed(hops):
            if hop.backward != "none":
                most, current = np.maximum(most, current - size + hop.made_back + hop.buffers_back), hop.made_back
        return most + size if any(hop.freed for hop in hops) else most

    def _along(self, table: TensorTable, source: int, edges: tuple[Edge, ...]) -> tuple[Hop, ...]:
        if table.parameter or any(e.source < 0 for e in edges):
            return self._hops(table, source, tuple(e.step for e in edges))
        for edge in edges:
            if id(edge) not in self._hop_of:  # edges are the table's own
                (self._hop_of[id(edge)],) = route_of(table.ref, table.all_placements[edge.source], (edge.step,), self.local, enters=False).hops
        return tuple(self._hop_of[id(e)] for e in edges)

    def _hops(self, table: TensorTable, source: int, path: tuple[Communication, ...]) -> tuple[Hop, ...]:
        return route_of(table.ref, table.placements[source], path, self.local, enters=table.ref.kind is Kind.PARAMETER).hops

    def hops_of(self, table: TensorTable, mask: int, use: Use) -> tuple[Hop, ...]:
        """The steps that make an operand available, of what is."""
        first = use.target if use.conversion is None else use.conversion.source
        hops: tuple[Hop, ...] = ()
        there = made(table, mask)
        if first not in there:
            source = next(p for p in there if table.closure(p) >> first & 1)
            key = id(table), source, first
            if key not in self._free_hops:
                self._free_hops[key] = self._hops(table, source, table.free_path(source, first))
            hops = self._free_hops[key]
        if use.conversion is not None and not mask >> use.target & 1:
            own = id(table), id(use.conversion)  # which its table keeps
            if own not in self._conversion_hops:
                self._conversion_hops[own] = self._hops(table, first, use.conversion.path)
            hops += self._conversion_hops[own]
        return hops

    def _has_cotangent(self, ref: TensorRef) -> bool:
        return self.training and ref.requires_grad and ref.dtype in CONTINUOUS


def made(table: TensorTable, mask: int) -> list[int]:
    """Of what is available, the placements that are not free from others."""
    found: dict[int, int] = {}
    for p in bits(mask):
        found.setdefault(table.closure(p), p)
    return [p for own, p in found.items() if not any(own != other and own & other == own for other in found)]


def partial(placement: Placement) -> bool:
    """Whether it is summed along some axis."""
    return any(isinstance(s, Partial) for s in placement.states)
