"""What the inter-operator program asks: some layers of a model on a submesh, at one number of micro-batches.

In: the graph of a micro-batch, its layers, the cluster. Out: `Prices` for `hapx.stages.dp`: answers of the planner, bounds, what crosses.

The whole model is planned once on every shape that is asked for, as if memory were no matter (and a second time, with parameters in shards and blocks
recomputed, where its parts leave little room): one view, one start. What such a program does for some layers is a program for these layers, so its
seconds and bytes are an answer. Stages of the best pipelines are planned each for itself (`Asker.piece`, `hapx.inter_op`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal, cast

import numpy as np

from hapx.carried import again, carried
from hapx.cluster.spec import Link
from hapx.cost.liveness import peak, while_running
from hapx.cost.memory import states_of, usable
from hapx.cost.model import OWN_SPEED, CostModel
from hapx.cost.remat import with_blocks
from hapx.cost.terms import Vector
from hapx.errors import InsufficientMemoryError, PlanError
from hapx.ir import CONTINUOUS, Graph, Kind, TensorRef
from hapx.lower import Candidate
from hapx.parts import crossing, part
from hapx.pipelines import Piece, piece_of
from hapx.plan import Mesh
from hapx.planner import plan_spmd, views
from hapx.processes import at_the_same_time
from hapx.recompute import roomy
from hapx.setting import Counters, Setting
from hapx.simulate import run_times
from hapx.stages.clustering import node_flops
from hapx.stages.costs import ONE_F_ONE_B, UNLIMITED, Answer, Assigned, Pipeline, Prices, latency, most_in_flight
from hapx.stages.submeshes import Shape, ordered, shape_of
from hapx.states import Invariant, Placement, Replicated
from hapx.theory.derive import derive
from hapx.theory.triple import Theory

PART = 1e-4  # of the seconds that the synchronisation of gradients would take, in bounds
FEW = 8  # micro-batches for which an answer should have room, if there are as many
ROUGH = 0.03  # how far from the optimum programs of the whole model may be
FAR_TOO_MUCH = 2.0
NEIGHBOURS = 3  # layers at most from one that makes a tensor to one that reads it, if it is told by where it comes from
STORED = (Kind.PARAMETER, Kind.BUFFER)


@dataclass(frozen=True, slots=True)
class Level:
    """How thrifty a program is. storage: of parameters, as in `Restriction`; again: blocks are computed again in backward."""

    storage: Literal["auto", "sharded-inside", "sharded"]
    again: bool


LEVELS = tuple(Level(storage, again) for storage in ("auto", "sharded-inside", "sharded") for again in (False, True))
PLAIN = 0


@dataclass(frozen=True)
class Planned:
    """What came of planning a stage. room: the micro-batches for which there is memory. cost: of planning it."""

    piece: Piece | None
    room: int
    cost: Counters


@dataclass
class Asker:
    """See the module. asked: the setting of the whole graph of a micro-batch; `repeats` is the number of micro-batches. layers: node ranges.
    counters: what all planning cost that it asked for, in copies of the process, too."""

    asked: Setting
    layers: Sequence[tuple[int, int]]
    counters: Counters = field(default_factory=Counters)
    calls: int = 0
    known: dict[Hashable, tuple[Answer, ...]] = field(default_factory=dict)
    others: Sequence[Asker] = ()  # for other numbers of micro-batches
    wholes: dict[tuple[Shape, int], WholeModel | None] = field(default_factory=dict)
    library: dict[Hashable, Candidate] = field(default_factory=dict)  # by group of shapes
    shares: dict[Hashable, float] = field(default_factory=dict)  # by group of shapes; see `WholeModel.really_kept`
    least: dict[Shape, int] = field(default_factory=dict)  # the first level of thrift of which there are answers
    theories: dict[int, Theory] = field(default_factory=dict)  # by number of axes
    pieces: dict[Hashable, Planned] = field(default_factory=dict)

    def prices(self) -> Prices:
        return Prices(self.asked.repeats, self.ask, self.bound, self.crossing, self.least_crossing, together=True, prepare=self.prepare)

    def corrected(self) -> Prices:
        """Prices by what is known of stages that were planned for themselves (`piece`): they take what they take. Answers for other layers on a
        shape are off by as much as theirs were, on the average; on other shapes by as much as all were."""
        off: dict[Hashable, list[float]] = {}
        for key, planned in self.pieces.items():
            piece = planned.piece
            run, shape, level = cast(tuple[Hashable, Shape, int], key)
            answer = next((a for a in self.known.get((run, shape), ()) if a.plan == level), None)
            if piece is not None and answer is not None and answer.micro > 0:
                for where in ((shape, level), None):
                    off.setdefault(where, []).append(piece.times.micro / answer.micro)
        ratio = {where: sum(found) / len(found) for where, found in off.items()}

        def exact(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
            return tuple(corrected(start, stop, shape, answer) for answer in self.ask(start, stop, shape))

        def corrected(start: int, stop: int, shape: Shape, answer: Answer) -> Answer:
            planned = self.pieces.get((self.classes[start:stop], shape, answer.plan))
            if planned is not None and (piece := planned.piece) is not None:
                return replace(answer, micro=piece.times.micro, iteration=piece.times.iteration, most_in_flight=planned.room)
            return replace(answer, micro=answer.micro * ratio.get((shape, answer.plan), ratio.get(None, 1.0)))

        return replace(self.prices(), ask=exact)

    # ---- classes of layers --------------------------------------------------------------------------------------------

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Numbers, equal for layers that cost the same wherever they are."""
        numbers: dict[Hashable, int] = {}
        return tuple(numbers.setdefault(self._class(layer), len(numbers)) for layer in range(len(self.layers)))

    def _class(self, layer: int) -> Hashable:
        """What the layer computes, by operators and shapes; which of its operands come from outside, and which of those: layers one after another
        that are alike one by one are alike together."""
        graph, (start, stop) = self.asked.graph, self.layers[layer]
        made = {o.name for n in graph.nodes[start:stop] for o in n.outputs}
        given = {o.tensor for o in graph.outputs}
        numbers: dict[str, int] = {}
        found = []
        for i in range(start, stop):
            node = graph.nodes[i]
            operands = tuple(
                (graph.refs[name].kind, numbers.setdefault(name, len(numbers)), name in made or self._outside(name, layer))
                for name in node.call.refs()
            )
            found.append((graph.alike[i], operands, tuple((self._readers[o.name] <= {layer}, o.name in given) for o in node.outputs)))
        return tuple(found)

    def _outside(self, name: str, layer: int) -> Hashable:
        """Which tensor an operand is that its layer does not make: nothing needs to be said where only this layer reads it; of what is made and read
        by neighbours, how many layers before, and which of those; of others the name."""
        if name in self._homes:
            home, place = self._homes[name]
            return layer - home, place
        return name if name in self.asked.graph.producer or len(self._readers[name]) > 1 else None

    @cached_property
    def _readers(self) -> Mapping[str, set[int]]:
        """The layers that read a tensor."""
        of_node = [k for k, (a, b) in enumerate(self.layers) for _ in range(a, b)]
        return {name: {of_node[i] for i in nodes} for name, nodes in self.asked.graph.consumers.items()}

    @cached_property
    def _homes(self) -> Mapping[str, tuple[int, int]]:
        """Of what is made for neighbours only: the layer that makes it, and which of those it is."""
        found: dict[str, tuple[int, int]] = {}
        for layer, (start, stop) in enumerate(self.layers):
            names = (o.name for node in self.asked.graph.nodes[start:stop] for o in node.outputs)
            near = (name for name in names if self._readers[name] - {layer} and max(self._readers[name]) - layer <= NEIGHBOURS)
            found |= {name: (layer, place) for place, name in enumerate(near)}
        return found

    @cached_property
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
        own = [OWN_SPEED.get(n.outputs[0].dtype, asked.precision) for n in graph.nodes]
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
        room = sum(map(usable, kinds))
        links = [self.asked.cluster.inter] if len(shape.parts) > 1 else [p.intra for p in shape.parts if p.intra is not None]
        synchronised = (held[b] - held[a]) / max(len(p.types) for p in shape.parts) / links[0].bandwidth if links else 0.0
        return Answer(seconds, PART * float(synchronised), UNLIMITED if held[b] - held[a] <= room else 0)

    # ---- what crosses -------------------------------------------------------------------------------------------------

    @cached_property
    def _received(self) -> list[tuple[TensorRef, ...]]:
        """Per boundary, the tensors that cross."""
        return [crossing(self.asked.graph, start) for start, _ in self.layers]

    @cached_property
    def _crossing(self) -> list[tuple[float, float]]:
        """Per boundary, bytes forward and backward."""
        found = []
        for refs in self._received:
            back = sum(r.bytes for r in refs if r.requires_grad and r.dtype in CONTINUOUS) if self.asked.graph.mode == "train" else 0
            found.append((float(sum(r.bytes for r in refs)), float(back)))
        return found

    def crossing(self, boundary: int, front: Shape, back: Shape, link: Link) -> float:
        inside = len(front.parts) == len(back.parts) == 1 and link in (front.parts[0].intra, back.parts[0].intra)
        ways = min(front.num_devices, back.num_devices) if inside else min(len(front.parts), len(back.parts))
        there, again = self._crossing[boundary]
        all_of_it = there * self._copies(boundary, back) + again * self._copies(boundary, front)
        return all_of_it / link.bandwidth / ways + link.latency * (2 if again else 1)

    def _copies(self, boundary: int, shape: Shape) -> float:
        """On how many machines of a shape the same of what crosses is, by the least thrifty program that answered; one where there is none yet."""
        whole = self.wholes.get((shape, self.least[shape])) if shape in self.least else None
        return whole.copies[boundary] if whole is not None else 1.0

    def least_crossing(self, boundary: int, front: Shape, link: Link) -> float:
        inside = len(front.parts) == 1 and any(link == m.intra for m in self.asked.cluster.machines)
        there, again = self._crossing[boundary]
        return (there + again) / link.bandwidth / (front.num_devices if inside else len(front.parts)) + link.latency * (2 if again else 1)

    # ---- answers ------------------------------------------------------------------------------------------------------

    def ask(self, start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        key = self.classes[start:stop], shape
        if key not in self.known:
            self.known[key] = self._asked(start, stop, shape)
        return self.known[key]

    def _asked(self, start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        """By programs of the whole model on the shape: what they do for these layers is a program for these layers."""
        low, wanted = self.bound(start, stop, shape), min(self.asked.repeats, FEW)
        found: list[Answer] = []
        useless = ""  # a way to store parameters with which they alone do not fit
        for level in self.levels(shape):
            if found and found[-1].most_in_flight >= wanted:
                break
            whole = self._whole(shape, level) if LEVELS[level].storage != useless else None
            if whole is not None:
                found.append(replace(whole.answer(start, stop, low), plan=level))
                useless = LEVELS[level].storage if not whole.stores(start, stop) else useless
        kept = tuple(a for k, a in enumerate(found) if a.most_in_flight > max((b.most_in_flight for b in found[:k]), default=0))
        if kept:
            self.least[shape] = min(self.least.get(shape, kept[0].plan), kept[0].plan)
        return kept

    def accumulated(self) -> Pipeline | None:
        """All layers as one stage on all devices, which runs micro-batches one after another: the least thrifty program that fits."""
        cluster = self.asked.cluster
        devices = ordered(cluster, range(cluster.num_devices))
        shape, last = shape_of(cluster, devices), len(self.layers)
        for level in self.levels(shape):
            whole = self._whole(shape, level)
            answer = whole.answer(0, last, Answer(0.0, 0.0, UNLIMITED)) if whole is not None else None
            if answer is not None and answer.most_in_flight:
                stage = Assigned(0, last, shape, devices, replace(answer, plan=level), 1, 0.0)
                time = latency(self.asked.repeats, ONE_F_ONE_B, [(answer.micro, 0.0, answer.iteration)])
                return Pipeline(time, self.asked.repeats, ONE_F_ONE_B, (stage,))
        return None

    def refuse(self, start: int, stop: int, shape: Shape, in_flight: int) -> None:
        """So many micro-batches do not fit after all; fewer do where a program that was planned for these layers has room for them."""
        key = self.classes[start:stop], shape
        most = min(in_flight - 1, max((self.pieces[*key, level].room for level in self.levels(shape) if (*key, level) in self.pieces), default=0))
        for level in self.levels(shape):
            self._at_most(key, level, most)

    def _at_most(self, key: Hashable, level: int, most: int) -> None:
        """Corrects the answers for a run of layers that are programs at a level of thrift."""
        if key in self.known:
            fewer = [replace(a, most_in_flight=min(a.most_in_flight, most)) if a.plan == level else a for a in self.known[key]]
            self.known[key] = tuple(a for a in fewer if a.most_in_flight > 0)

    def refused(self, pipeline: Pipeline) -> bool:
        """Whether it needs an answer that turned out to fit fewer micro-batches."""
        if pipeline.micro_batches != self.asked.repeats or len(pipeline.stages) == 1:
            return False
        answers = [(s, [a for a in self.ask(s.start, s.stop, s.shape) if a.plan == s.answer.plan]) for s in pipeline.stages]
        return any(all(a.most_in_flight < s.in_flight for a in own) for s, own in answers)

    def _whole(self, shape: Shape, level: int) -> WholeModel | None:
        """A program of the whole model on a shape, made as if memory were no matter, at a level of thrift."""
        if (shape, level) not in self.wholes:
            best = self._found(shape, level) or self._carried(shape, level) or self._again(shape, level)
            if best is None and (like := _round(shape)) != shape:
                self._whole(like, level)
                best = self._carried(shape, level)
            if best is None:
                self._note(shape, level, *self._search(shape, level))
            else:
                self.wholes[shape, level] = self._read(best, _group(shape, level))
        return self.wholes[shape, level]

    def prepare(self, shapes: Sequence[Shape]) -> None:
        """Searches at the same time for the programs that asking about these shapes will take."""
        wanted: dict[Hashable, tuple[Shape, int]] = {}
        for shape in shapes:
            level = self.levels(shape)[0]
            own, group = (_round(shape), level), _group(shape, level)
            known = (shape, level) in self.wholes or own in self.wholes or any(group in a.library for a in (self, *self.others))
            if not known and not LEVELS[level].again:
                wanted.setdefault(group, own)
        if len(wanted) < 2:
            return
        graph = self.asked.graph
        for own in wanted.values():
            self._theory(graph, view_of(self._setting(*own)))  # here, so that all share what is derived
        shared = [graph, *graph.nodes, *graph.refs.values(), *(t.triples for t in self.theories.values())]
        found = at_the_same_time([partial(self._search, *own) for own in wanted.values()], shared)
        for own, (best, cost) in zip(wanted.values(), found, strict=True):
            self._note(*own, best, cost)

    def _read(self, best: Candidate, group: Hashable) -> WholeModel:
        """A program read layer by layer. What share of the sum over steps is really kept is found once for a group of shapes: that takes long."""
        whole = WholeModel(best, self.layers, self._received)
        known = next((asker.shares[group] for asker in (self, *self.others) if group in asker.shares), None)
        if known is None:
            known = self.shares[group] = whole.really_kept()
        whole.kept *= known
        return whole

    def levels(self, shape: Shape) -> tuple[int, ...]:
        """Levels of thrift that are tried on a shape: no plain one where a part of the parameters that suits its part of the devices is far too much
        for each of them, so that they must be in shards."""
        if shape.num_devices == 1:
            return tuple(k for k, level in enumerate(LEVELS) if level.storage == "auto")
        cluster = self.asked.cluster
        least = min(cluster.device_types[t].memory for t in shape.types)
        own = float(self._work[1][-1]) * shape.num_devices / cluster.num_devices
        useless = {*(["auto"] if own > FAR_TOO_MUCH * least else []), *(["sharded-inside"] if len(shape.parts) == 1 else [])}
        return tuple(k for k, level in enumerate(LEVELS) if level.storage not in useless)

    def _setting(self, shape: Shape, level: int, graph: Graph | None = None) -> Setting:
        """For the planner, of the whole graph or a part of it."""
        cluster, rule = shape.spec(self.asked.cluster), self.asked.rule
        rule = replace(rule, storage=LEVELS[level].storage) if LEVELS[level].storage != "auto" and cluster.num_devices > 1 else rule
        own = self.asked.graph if graph is None else graph
        if LEVELS[level].again:
            own = self.lean if graph is None else with_blocks(graph)
        return replace(self.asked, graph=own, rule=rule, cluster=cluster, in_flight=1, start={}, within=ROUGH)

    @cached_property
    def lean(self) -> Graph:
        """The graph with blocks that are computed again in backward."""
        return with_blocks(self.asked.graph)

    def _found(self, shape: Shape, level: int) -> Candidate | None:
        """The program of one who asks about other layers of this graph."""
        known = (a.wholes.get((shape, level)) for a in self.others if a.asked.graph is self.asked.graph)
        return next((whole.best for whole in known if whole is not None), None)

    def _carried(self, shape: Shape, level: int) -> Candidate | None:
        """A program that was searched on a shape like this one, or for another number of micro-batches."""
        for asker in (self, *self.others):
            known = asker.library.get(_group(shape, level))
            if known is None:
                continue
            setting = self._setting(shape, level)
            mesh = view_of(setting)
            if known.theory.graph is setting.graph:
                return carried(known, replace(known.theory, mesh=mesh), setting.cluster)
            theory = self._theory(setting.graph, mesh)
            costs = CostModel(theory, setting.cluster, setting.precision, setting.optimizer, setting.key.mode)
            found = carried(known, theory, setting.cluster, costs)
            if found is not None:
                self.library[_group(shape, level)] = found
                return found
        return None

    def _again(self, shape: Shape, level: int) -> Candidate | None:
        """The program of the level before, with its blocks computed again: the best one for that is hardly another one."""
        if not LEVELS[level].again or (plain := self._whole(shape, level - 1)) is None:
            return None
        found = self.library[_group(shape, level)] = again(plain.best, self._setting(shape, level).graph)
        return found

    def _theory(self, graph: Graph, mesh: Mesh) -> Theory:
        """Of the graph of this asker, perhaps with blocks that are computed again: on meshes with as many axes it is the same one."""
        key = len(mesh.axes)
        if key not in self.theories:
            self.theories[key] = derive(self.asked.graph, mesh)
        return replace(self.theories[key], graph=graph, mesh=mesh)

    def _search(self, shape: Shape, level: int) -> tuple[Candidate | None, Counters]:
        """A program of the whole model that is searched for, and what that cost; nothing is noted."""
        setting, cost = self._setting(shape, level), Counters()
        mesh = view_of(setting)
        return roomy_or_none(setting, cost, [mesh], {mesh.name: self._theory(setting.graph, mesh)}), cost

    def _note(self, shape: Shape, level: int, found: Candidate | None, cost: Counters) -> None:
        """What a search has found, for this shape and those like it."""
        self.calls += 1
        self.counters.include(cost)
        group = _group(shape, level)
        self.wholes[shape, level] = self._read(found, group) if found is not None else None
        if found is not None:
            self.library[group] = found

    def piece(self, start: int, stop: int, shape: Shape, in_flight: int, level: int = PLAIN) -> Piece | None:
        """Layers planned on a shape for so many micro-batches in flight: a program that has room for them, at this level of thrift or the next."""
        for thrift in self._from(shape, level):
            key = self.classes[start:stop], shape, thrift
            if key not in self.pieces:
                self.settle(key, self._planned(start, stop, shape, thrift))
            found = self.pieces[key]
            self._at_most(key[:2], thrift, found.room)
            if found.piece is not None and found.room >= in_flight:
                return found.piece
        return None

    def settle(self, key: Hashable, planned: Planned) -> None:
        """Takes what was planned for a key of `missing`."""
        self.pieces[key] = planned
        self.counters.include(planned.cost)

    def finer(self, layers: Sequence[tuple[int, int]], pipelines: Iterable[Pipeline]) -> tuple[Asker, list[Pipeline]]:
        """Asks about parts of these layers, and knows what this one knows of the whole model and of the stages of these pipelines, which come back as
        pipelines of the parts."""
        own = replace(self, layers=layers, known={}, wholes={}, least={}, pieces={}, others=(self, *self.others))
        first = {node: k for k, (node, _) in enumerate(layers)} | {layers[-1][1]: len(layers)}
        found = []
        for pipeline in pipelines:
            stages = [replace(s, start=first[self.layers[s.start][0]], stop=first[self.layers[s.stop - 1][1]]) for s in pipeline.stages]
            for old, new in zip(pipeline.stages, stages, strict=True):
                own.ask(new.start, new.stop, new.shape)
                for thrift in self._from(old.shape, old.answer.plan):
                    planned = self.pieces.get((self.classes[old.start : old.stop], old.shape, thrift))
                    if planned is not None:
                        key = own.classes[new.start : new.stop], new.shape
                        own.pieces[*key, thrift] = planned
                        own._at_most(key, thrift, planned.room)
            found.append(replace(pipeline, stages=tuple(stages)))
        return own, found

    def missing(self, start: int, stop: int, shape: Shape, level: int) -> Mapping[Hashable, Callable[[], Planned]]:
        """What `piece` would plan first, and would then find under that key of `pieces`."""
        keys = [(self.classes[start:stop], shape, thrift) for thrift in self._from(shape, level)[:1]]
        return {key: partial(self._planned, start, stop, *key[1:]) for key in keys if key not in self.pieces}

    def _from(self, shape: Shape, level: int) -> list[int]:
        """Levels of thrift, from one on."""
        return [k for k in self.levels(shape) if k >= level]

    def _planned(self, start: int, stop: int, shape: Shape, thrift: int) -> Planned:
        """Layers planned on a shape as if memory were no matter, and the micro-batches for which there is room."""
        nodes = (self.layers[start][0], self.layers[stop - 1][1])
        setting = self._setting(shape, thrift, part(self.asked.graph, *nodes))
        cost = Counters()
        best = roomy_or_none(setting, cost, [view_of(setting)])
        made = piece_of(best, nodes, tuple(range(shape.num_devices))) if best is not None else None
        return Planned(made, self.fits(made) if made is not None else 0, cost)

    def fits(self, piece: Piece) -> int:
        """Micro-batches for which a program has room."""
        best = piece.candidate
        exact = best.costs.changed(lengths=best.lengths, repeats=self.asked.repeats, in_flight=1)
        found = peak(best.program, best.theory.graph, exact, best.storage_of)
        if (found.total > exact.capacity).any():
            return 0
        temporary = while_running(found, exact) - found.kept
        return most_in_flight(tuple(exact.capacity), tuple(temporary), tuple(found.kept), (0.0,) * len(exact.kinds))


def roomy_or_none(
    setting: Setting, counters: Counters, meshes: Sequence[Mesh] | None, theories: Mapping[str, Theory] | None = None
) -> Candidate | None:
    """The planner's program if memory were no matter, at the costs of the actual devices; None where there is none."""
    with suppress(InsufficientMemoryError, PlanError):
        return roomy(setting, counters, meshes, partial(plan_spmd, theories=theories))
    return None


class WholeModel:
    """A program of the whole model on a shape, read layer by layer. Per layer: seconds of a micro-batch, of the synchronisation of its gradients and
    of its update, and bytes that are always there and that a micro-batch keeps, per kind of devices."""

    def __init__(self, best: Candidate, layers: Sequence[tuple[int, int]], received: Sequence[Sequence[TensorRef]]):
        """received: what crosses to each layer from those before it."""
        self.best, self.graph = best, best.theory.graph
        self.exact = best.costs.changed(lengths=best.lengths, repeats=1, in_flight=1)
        after = {-1: 0} | {i.triple.node: k + 1 for k, i in enumerate(best.program.instructions) if i.triple.node is not None}
        runs = [best.program.instructions[after[a - 1] : after[b - 1]] for a, b in layers]
        refs = self.graph.refs
        used = [{p.tensor for i in run for p in i.triple.pre} for run in runs]
        needed = [[p for p in best.program.needs if p.tensor in names and refs[p.tensor].kind in STORED] for names in used]
        self.times = [run_times(run, ps, self.graph, self.exact) for run, ps in zip(runs, needed, strict=True)]
        # a parameter that several layers use is synchronised where the program converts it: for each of them, where they are apart
        homes: dict[str, list[int]] = {}
        for k, ps in enumerate(needed):
            for name in dict.fromkeys(p.tensor for p in ps):
                homes.setdefault(name, []).append(k)
        own: list[list[tuple[str, float]]] = [[(i.triple.post[0].tensor, self.exact.step(i.triple).synchronisation({})) for i in run] for run in runs]
        self.synchronise = [sum(s for name, s in run if len(homes.get(name, ())) < 2) for run in own]
        self.shared = [(s, homes[name]) for run in own for name, s in run if s and len(homes.get(name, ())) > 1]
        placed = {p.tensor: p.placement for i in best.program.instructions if i.triple.node is not None for p in i.triple.post}
        self.copies = [self._copies([(ref.bytes, placed[ref.name]) for ref in refs]) for refs in received]
        zero = np.zeros(len(self.exact.kinds))
        steps = [[(i.triple.post[0].tensor in self.exact.again, self.exact.step(i.triple).memory) for i in run] for run in runs]
        kept = [[term for again, term in run if not again] for run in steps]
        self.again = sum((term.at({}) for run in steps for again, term in run if again and term is not None), zero)  # by any block
        stored = [[self.exact.storage(refs[p.tensor], p.placement) for p in ps] for ps in needed]
        gradients = [[self.exact.gradient(refs[p.tensor], p.placement) for p in ps] for ps in needed]
        self.kept, self.static, self.gradients = (
            np.cumsum([zero, *(sum((t.at({}) for t in terms if t is not None), zero) for terms in found)], axis=0)
            for found in (kept, stored, gradients)
        )
        types = self.exact.cluster.device_types
        self.memory = self.exact.view.worst(lambda d: usable(types[self.exact.cluster.devices[d].type]), min)

    def _copies(self, received: Sequence[tuple[int, Placement]]) -> float:
        """Machines that have the same of what crosses, by bytes and placement; on the average."""
        mesh = self.best.theory.mesh
        axis = next((a for a, own in enumerate(mesh.axes) if own.kind == "machines"), 0)
        machines = len({self.exact.cluster.devices[d].machine for d in mesh.devices})
        whole = sum(size for size, p in received if isinstance(p.states[axis], (Replicated, Invariant)))
        return 1.0 + (machines - 1.0) * whole / max(1, sum(size for size, _ in received))

    def really_kept(self) -> float:
        """What backward waits for, as a share of the sum over all steps: tensors that several steps keep are there once."""
        real = peak(self.best.program, self.graph, self.exact, self.best.storage_of).kept
        return min(1.0, float((real / np.maximum(self.kept[-1], 1.0)).max()))

    def stores(self, start: int, stop: int) -> bool:
        """Whether there is room for parameters, what belongs to them, and a second set of gradients."""
        return bool((self.static[stop] - self.static[start] + self.gradients[stop] - self.gradients[start] <= self.memory).all())

    def answer(self, start: int, stop: int, low: Answer) -> Answer:
        """For layers [start, stop). Gradients are synchronised behind backward as far as there is any; memory is counted by sums: what is stored, and
        what backward waits for. low: what no answer is below."""
        now = wire = 0.0
        for layer in reversed(range(start, stop)):
            now += self.times[layer].micro_backward
            late = sum(seconds for seconds, users in self.shared if layer == min((u for u in users if start <= u < stop), default=-1))
            wire = max(wire, now) + self.synchronise[layer] + late
        micro = now + sum(t.micro_forward for t in self.times[start:stop])
        iteration = max(wire - now, 0.0) + sum(t.update for t in self.times[start:stop])
        static, each, gradients = (a[stop] - a[start] for a in (self.static, self.kept, self.gradients))
        # when backward ends, gradients of its micro-batch are there beside those of all before it, and its activations are not; and what the update
        # needs for a moment is as much as the gradients
        at_end = self.again + np.maximum(gradients - each, 0.0)
        fits = most_in_flight(self.memory, tuple(static), tuple(each), tuple(at_end)) if self.stores(start, stop) else 0
        return Answer(max(micro, low.micro), max(iteration, low.iteration), min(fits, low.most_in_flight))


def _group(shape: Shape, level: int) -> Hashable:
    """Shapes that share a program: machines of the same types, however many of them; slices of a machine only of the same size."""
    machines = frozenset(p.types for p in shape.parts)
    return (len(shape.parts) > 1, machines, len(machines) > 1 and len({len(p.types) for p in shape.parts}) > 1, level)


def _round(shape: Shape) -> Shape:
    """Of equal machines a power of two: what is best for so many is good for other numbers, too, more often than the other way round."""
    parts = shape.parts
    return Shape(parts[: 1 << (len(parts).bit_length() - 1)]) if len(set(parts)) == 1 else shape


def view_of(setting: Setting) -> Mesh:
    """The view on which answers are planned: machines x devices where there are several machines with equally many equal devices, else flat."""
    found = views(setting.cluster, setting.rule)
    return next((m for m in found if len(setting.cluster.machines) > 1 and m.axes[0].kind == "machines" and len(m.axes) > 1), found[0])
