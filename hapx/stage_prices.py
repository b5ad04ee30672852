"""What the inter-operator program asks: some layers of a model on a submesh, at one number of micro-batches.

In: the graph of a micro-batch, its layers, the cluster. Out: `Prices` for `hapx.stages.dp`: answers of the planner, bounds, what crosses.

The whole model is planned once on every shape that is asked for, as if memory were no matter (and a second time, with parameters in shards and blocks
recomputed, where its parts leave little room): one view, one start. What such a program does for some layers is a program for these layers, so its
seconds and bytes are an answer. Stages of the best pipelines are planned each for itself (`Asker.piece`, `hapx.inter_op`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hapx.alternation import Counters, Setting
from hapx.cluster.spec import ClusterSpec, Link
from hapx.cost.liveness import peak
from hapx.cost.memory import RESERVE, states_of
from hapx.cost.model import OWN_SPEED
from hapx.cost.remat import with_blocks
from hapx.cost.terms import Vector
from hapx.errors import InsufficientMemoryError, PlanError
from hapx.ir import FLOATING, Kind
from hapx.lower import Candidate
from hapx.parts import crossing, part
from hapx.pipelines import Piece, piece_of, replaced
from hapx.plan import Mesh, Program
from hapx.planner import plan_spmd, views
from hapx.simulate import StageTimes, stage_times, step_cost
from hapx.stages.clustering import node_flops
from hapx.stages.costs import UNLIMITED, Answer, Prices, most_in_flight
from hapx.stages.submeshes import Shape

PART = 1e-4  # of the seconds that the synchronisation of gradients would take, in bounds
FEW = 8  # micro-batches for which an answer should have room, if there are as many
ROUGH = 0.03  # how far from the optimum programs of the whole model may be
ROOM = 1000  # times the memory that there is
STORED = (Kind.PARAMETER, Kind.BUFFER)


@dataclass
class Asker:
    """See the module. asked: the setting of the whole graph of a micro-batch; `repeats` is the number of micro-batches. layers: node ranges."""

    asked: Setting
    layers: Sequence[tuple[int, int]]
    counters: Counters = field(default_factory=Counters)
    calls: int = 0
    known: dict[Hashable, tuple[Answer, ...]] = field(default_factory=dict)
    wholes: dict[tuple[Shape, bool], WholeModel | None] = field(default_factory=dict)
    pieces: dict[Hashable, Piece | None] = field(default_factory=dict)

    def prices(self) -> Prices:
        return Prices(self.asked.repeats, self.ask, self.bound, self.crossing, self.least_crossing)

    # ---- classes of layers --------------------------------------------------------------------------------------------

    @cached_property
    def classes(self) -> tuple[Hashable, ...]:
        """Equal for layers that cost the same wherever they are."""
        return tuple(self._class(a, b) for a, b in self.layers)

    def _class(self, start: int, stop: int) -> Hashable:
        """What the layer computes, by operators and shapes; which of its operands come from outside, and which are shared by other layers."""
        graph = self.asked.graph
        made = {o.name for n in graph.nodes[start:stop] for o in n.outputs}
        numbers: dict[str, int] = {}
        found = []
        for node in graph.nodes[start:stop]:
            refs = [graph.refs[name] for name in node.call.refs()]
            operands = tuple((r.shape, r.dtype, r.kind, r.requires_grad, r.name in made, numbers.setdefault(r.name, len(numbers))) for r in refs)
            later = tuple(any(not start <= i < stop for i in graph.consumers[o.name]) for o in node.outputs)
            found.append((node.call.target, operands, tuple((o.shape, o.dtype) for o in node.outputs), later))
        return tuple(found)

    @property
    def work(self) -> list[float]:
        """FLOPs of each layer."""
        flops = node_flops(self.asked.graph)
        return [float(flops[a:b].sum()) for a, b in self.layers]

    # ---- bounds -------------------------------------------------------------------------------------------------------

    @cached_property
    def _work(self) -> tuple[dict[str, Vector], Vector]:
        """Up to every node, FLOPs by the precision in which they run; and bytes of parameters with what belongs to them, by first use."""
        graph, asked = self.asked.graph, self.asked
        flops = node_flops(graph)
        own = [d if (d := n.outputs[0].dtype) in OWN_SPEED else asked.precision for n in graph.nodes]
        by = {p: np.concatenate([[0.0], np.cumsum(np.where([q == p for q in own], flops, 0.0))]) for p in dict.fromkeys(own)}
        held = np.zeros(len(graph.nodes) + 1)
        for ref in graph.of_kind(Kind.PARAMETER):
            used = graph.consumers[ref.name]
            if used:
                held[used[0] + 1] += ref.bytes + (4.0 * states_of(asked.optimizer) * ref.size + ref.bytes if ref.requires_grad else 0.0)
        return by, np.cumsum(held)

    def bound(self, start: int, stop: int, shape: Shape) -> Answer:
        """At full speed, all devices busy; memory: parameters in shards. Of the gradients' synchronisation a small part: it may be avoided, but where
        it is not, it is in proportion to this (see `hapx.stages.book`)."""
        if shape.num_devices == self.asked.cluster.num_devices:  # a single stage is no pipeline
            return Answer(0.0, 0.0, 0)
        (a, _), (_, b) = self.layers[start], self.layers[stop - 1]
        flops, held = self._work
        kinds = [self.asked.cluster.device_types[t] for t in shape.types]
        seconds = sum(float(own[b] - own[a]) / sum(k.speed(p) for k in kinds) for p, own in flops.items())
        room = sum(k.memory for k in kinds) * (1.0 - RESERVE)
        links = [self.asked.cluster.inter] if len(shape.parts) > 1 else [p.intra for p in shape.parts if p.intra is not None]
        synchronised = (held[b] - held[a]) / max(len(p.types) for p in shape.parts) / links[0].bandwidth if links else 0.0
        return Answer(seconds, PART * float(synchronised), UNLIMITED if held[b] - held[a] <= room else 0)

    # ---- what crosses -------------------------------------------------------------------------------------------------

    @cached_property
    def _crossing(self) -> list[tuple[float, float]]:
        """Per boundary, bytes forward and backward."""
        graph, found = self.asked.graph, []
        for start, _ in self.layers:
            refs = crossing(graph, start)
            back = sum(r.bytes for r in refs if r.requires_grad and r.dtype in FLOATING) if graph.mode == "train" else 0
            found.append((float(sum(r.bytes for r in refs)), float(back)))
        return found

    def crossing(self, boundary: int, front: Shape, back: Shape, link: Link) -> float:
        inside = len(front.parts) == len(back.parts) == 1 and link in (front.parts[0].intra, back.parts[0].intra)
        ways = min(front.num_devices, back.num_devices) if inside else min(len(front.parts), len(back.parts))
        there, again = self._crossing[boundary]
        return (there + again) / link.bandwidth / ways + link.latency * (2 if again else 1)

    def least_crossing(self, boundary: int, link: Link) -> float:
        there, again = self._crossing[boundary]
        return (there + again) / link.bandwidth / self.asked.cluster.num_devices + link.latency

    # ---- answers ------------------------------------------------------------------------------------------------------

    def ask(self, start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        key = self.classes[start:stop], shape
        if key not in self.known:
            self.known[key] = self._asked(start, stop, shape)
        return self.known[key]

    def _asked(self, start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        """By programs of the whole model on the shape: what they do for these layers is a program for these layers."""
        low = self.bound(start, stop, shape)
        nodes, wanted = (self.layers[start][0], self.layers[stop - 1][1]), min(self.asked.repeats, FEW)
        found: list[Answer] = []
        for lean in (False, True):
            if found and found[-1].most_in_flight >= wanted:
                break
            whole = self._whole(shape, lean)
            if whole is None:
                continue
            seconds = whole.times(*nodes)
            fits = whole.most_in_flight(*nodes, self.asked.cluster)
            found.append(Answer(max(seconds.micro, low.micro), max(seconds.iteration, low.iteration), fits))
        return tuple(a for k, a in enumerate(found) if a.most_in_flight > 0 and (k == 0 or a.most_in_flight > found[0].most_in_flight))

    def _whole(self, shape: Shape, lean: bool) -> WholeModel | None:
        """The model planned on a shape as if memory were no matter; lean: its parameters in shards, its blocks recomputed."""
        if (shape, lean) not in self.wholes:
            self.calls += 1
            cluster = shape.spec(self.asked.cluster)
            types = {name: replace(kind, memory=kind.memory * ROOM) for name, kind in cluster.device_types.items()}
            graph = with_blocks(self.asked.graph) if lean else self.asked.graph
            rule = replace(self.asked.rule, storage="sharded") if lean and cluster.num_devices > 1 else self.asked.rule
            setting = replace(self.asked, graph=graph, rule=rule, cluster=replace(cluster, device_types=types), in_flight=1, start={}, within=ROUGH)
            self.wholes[shape, lean] = None
            with suppress(InsufficientMemoryError, PlanError):
                self.wholes[shape, lean] = WholeModel(plan_spmd(setting, self.counters, [view_of(setting)])[0])
        return self.wholes[shape, lean]

    def piece(self, start: int, stop: int, shape: Shape, in_flight: int) -> Piece | None:
        """Layers planned on a shape for so many micro-batches in flight: the fastest program that has room for them."""
        key = self.classes[start:stop], shape, in_flight
        if key not in self.pieces:
            fitting = [p for p in self._pieces(start, stop, shape, in_flight) if self._fits(p) >= in_flight]
            self.pieces[key] = min(fitting, key=lambda p: p.times.micro + p.times.iteration / self.asked.repeats, default=None)
        return self.pieces[key]

    def _pieces(self, start: int, stop: int, shape: Shape, wanted: int) -> list[Piece]:
        nodes = (self.layers[start][0], self.layers[stop - 1][1])
        graph = part(self.asked.graph, *nodes)
        cluster = shape.spec(self.asked.cluster)
        setting = replace(self.asked, graph=graph, cluster=cluster, in_flight=1, start={})
        mesh = view_of(setting)
        found: list[Piece] = []
        for blocks, kept in ((False, 1), (False, wanted), (True, wanted)):
            if found and self._fits(found[-1]) >= wanted:
                break
            own = with_blocks(graph) if blocks else graph
            if (blocks and own is graph) or (kept > 1 and not found and not blocks):
                continue
            with suppress(InsufficientMemoryError, PlanError):
                best = plan_spmd(replace(setting, graph=own, in_flight=kept), self.counters, [mesh])[0]
                found.append(piece_of(best, nodes, tuple(range(cluster.num_devices))))
        return found

    def _fits(self, piece: Piece) -> int:
        """Micro-batches for which a program has room."""
        best = piece.candidate
        exact = replaced(best.costs.at_lengths(best.lengths), repeats=1, in_flight=1)
        found = peak(best.program, best.theory.graph, exact, best.storage_of)
        earlier = found.left if self.asked.repeats > 1 else 0.0 * found.left
        return most_in_flight(tuple(exact.capacity), tuple(found.total + earlier - found.kept), tuple(found.kept), (0.0,) * len(exact.kinds))


class WholeModel:
    """A program of the whole model on a shape, read layer by layer."""

    def __init__(self, best: Candidate):
        self.best, self.graph = best, best.theory.graph
        self.exact = replaced(best.costs.at_lengths(best.lengths), repeats=1, in_flight=1)
        self.after = {-1: 0} | {i.triple.node: k + 1 for k, i in enumerate(best.program.instructions) if i.triple.node is not None}

    def _part(self, start: int, stop: int) -> Program:
        """The instructions of nodes [start, stop), with the conversions before each, and the parameters that they use."""
        instructions = self.best.program.instructions[self.after[start - 1] : self.after[stop - 1]]
        used = {p.tensor for i in instructions for p in i.triple.pre}
        return replace(self.best.program, instructions=instructions, needs=tuple(p for p in self.best.program.needs if p.tensor in used))

    def times(self, start: int, stop: int) -> StageTimes:
        return stage_times(self._part(start, stop), self.graph, self.exact)

    def most_in_flight(self, start: int, stop: int, cluster: ClusterSpec) -> int:
        """By sums: what is stored, and what backward waits for."""
        part = self._part(start, stop)
        zero = np.zeros(len(self.exact.kinds))
        kept = [step_cost(i, self.graph, self.exact).memory for i in part.instructions]
        stored = [self.exact.storage(self.graph.refs[p.tensor], p.placement) for p in part.needs if self.graph.refs[p.tensor].kind in STORED]
        each, static = (sum((t.at({}) for t in terms if t is not None), zero) for terms in (kept, stored))
        own = self.exact.cluster
        memory = self.exact.view.worst(lambda d: cluster.device_types[own.devices[d].type].memory * (1.0 - RESERVE), min)
        return most_in_flight(memory, tuple(static), tuple(each), (0.0,) * len(memory))


def view_of(setting: Setting) -> Mesh:
    """The view on which answers are planned: machines x devices where there are several machines with equally many equal devices, else flat."""
    found = views(setting.cluster, setting.rule)
    return next((m for m in found if len(setting.cluster.machines) > 1 and m.axes[0].kind == "machines" and len(m.axes) > 1), found[0])
