"""The peak of memory of one training iteration: which tensors are alive when, on every kind of devices.

In: a program, its graph, a cost model at its exact lengths, how parameters are stored. Out: a `Peak`. The program is walked as the runtime runs it:
instructions forward, each tensor freed after its last use unless autograd keeps it; then in reverse order backward, where cotangents are made,
summed and freed, what was kept is released, gradients are copied into their buckets; then the optimizer's update. The peak is

    parameters + optimizer state + buffers + inputs + max over moments of (alive + temporaries of the moment)

Gradients are taken to be None when the iteration begins, as `zero_grad` leaves them. Of repeated layers only the first two and the last two are
walked (see `hapx.cost.rounds`): those between them do what the second one does.

Invariant: it counts storages. A view holds its base; a cotangent that is handed on is one storage; what is kept twice is counted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hapx.cost.buckets import Buckets, Key, Use
from hapx.cost.footprints import Call, Route, call_of, route_of
from hapx.cost.heap import Heap, Levels, Place, Record, Repeat, Storage, Stretch, moved
from hapx.cost.local_sizes import LocalSizes
from hapx.cost.model import CostModel
from hapx.cost.rounds import Folded, computed_again, short, whole
from hapx.cost.terms import Vector
from hapx.ir import CONTINUOUS, Graph, Kind, Node, OpCall
from hapx.plan import Communication, Program, Triple
from hapx.states import Placement


@dataclass(frozen=True)
class Peak:
    """Bytes per kind. stored: there all the time (parameters, optimizer state, buffers, inputs); total: at the worst moment; running: at the worst
    one before the optimizer's update; left: what the iteration leaves (gradients and results); kept: what backward waits for when forward ends,
    with what was received for it; moments: which moment is the worst, per kind."""

    stored: Vector
    total: Vector
    running: Vector
    left: Vector
    kept: Vector
    moments: tuple[str, ...]


Variables = dict[int, Storage | None]  # by the number of a property; None: a parameter, buffer or input, which stays


def peak(program: Program, graph: Graph, exact: CostModel, stored: Mapping[str, Placement]) -> Peak:
    """The peak of an iteration of `program`. exact: a cost model at its lengths (see `at_lengths`); stored: where parameters and buffers are."""
    assert exact.graph is graph, "the cost model is of another graph"
    less = short(program, exact)
    found = _Walk(program, graph, exact, stored, less).run() if less is not None else None
    if found is None:
        found = _Walk(program, graph, exact, stored, whole(program)).run()
    assert found is not None
    return found


def moments(program: Program, graph: Graph, exact: CostModel, stored: Mapping[str, Placement]) -> Vector:
    """(moment, kind): bytes at rest, and at every moment of an iteration; the largest is the peak. Which moments there are, lengths do not change."""
    walked = _Walk(program, graph, exact, stored, whole(program)).walked()
    assert walked is not None, "nothing is left out"
    return np.concatenate([walked.levels.after[:1], walked.levels.noted])


def all_in_flight(found: Peak, exact: CostModel) -> Vector:
    """The peak with all micro-batches that are kept at once; gradients of those before are there while others run. At the update none is kept, and
    there is one set of gradients."""
    return np.maximum(found.total, while_running(found, exact) + (exact.in_flight - 1) * found.kept)


def while_running(found: Peak, exact: CostModel) -> Vector:
    """The peak before the update with one micro-batch at once, gradients of those before it included."""
    return found.running + found.left if exact.repeats > 1 else found.running


class _Walked(NamedTuple):
    """What was there; where forward ended, and backward; what happened again and again."""

    levels: Levels
    ahead: Place
    before: Place
    repeats: list[Repeat]


class _Walk:
    """Properties are numbered: everything is asked for by them, instruction after instruction. What alike instructions do is found once."""

    def __init__(self, program: Program, graph: Graph, exact: CostModel, stored: Mapping[str, Placement], short: Folded):
        self.program, self.graph, self.exact, self.stored, self.short = program, graph, exact, stored, short
        self.sizes = LocalSizes(program.mesh, graph, exact, stored)
        self.training = exact.mode == "train"
        self.triples = [program.instructions[k].triple for k in short.instructions]
        numbered = program.numbered
        self.properties, self.pre, self.post = numbered.properties, short.read, short.made
        self.needs, self.gives = frozenset(numbered.needs), numbered.gives
        used = list({p for own in (*self.pre, *self.post, self.gives) for p in own})
        self.refs = {p: graph.refs[self.properties[p].tensor] for p in used}
        self.local = dict(zip(used, self.sizes.local([self.properties[p] for p in used]), strict=True))
        self.last = {p: k for k, pre in enumerate(self.pre) for p in pre} | dict.fromkeys(self.gives, len(self.triples))
        self.ends = [[p for p in post if p not in self.last] for post in self.post]  # what nobody reads
        for p, k in self.last.items():
            if k < len(self.triples):
                self.ends[k].append(p)
        self.static = self.sizes.stored_bytes()
        self.heap = Heap(self.static)
        self.cotangents: dict[int | Key, Storage] = {}
        self.records: dict[int, Record] = {}
        self.tokens: Counter[int] = Counter()  # by storage: how often backward still asks for what it gathers again
        self.regathered: dict[int, Storage] = {}
        self.enters: dict[Key, int] = {}  # a stored parameter, and axes along which it enters the synchroniser -> its first instruction
        self.calls: dict[int, Call] = {}  # by form, as those of conversions
        self.routes: dict[tuple[int, bool, tuple[int, ...]], Route] = {}
        self.regions = self._regions()
        self.spans = [_between(self.regions, start, stop) for start, stop in short.spans]
        self.taken: dict[int, list[Storage]] = {}

    # ---- the iteration -------------------------------------------------------------------------------------------------------

    def run(self) -> Peak | None:
        """None: rounds that are left out would not be like the one that stands for them."""
        walked = self.walked()
        if walked is None:
            return None
        heap, (levels, ahead, before, repeats) = self.heap, walked
        (total, worst), (running, _) = levels.highest(), levels.highest(moved(before, repeats).notes)
        kept = levels.after[moved(ahead, repeats).changes - 1] - self.static + self.sizes.received()
        moments = tuple("at rest" if k < 0 else self._called(heap.moments[levels.notes[k]], int(levels.rounds[k])) for k in worst.tolist())
        return Peak(self.static, total, running, levels.after[-1] - self.static, kept, moments)

    def walked(self) -> _Walked | None:
        """All that happens, as `run`."""
        heap = self.heap
        ahead = self._ahead()
        back = self._back() if self.training else []
        before = heap.place
        if self.training:
            heap.note(("the optimizer's update", -1), self.sizes.update())
        repeats = self._repeats(ahead, back)
        if repeats is None:
            return None
        return _Walked(heap.levels(repeats, self._arrivals()), ahead[-1], before, repeats)

    def _ahead(self) -> list[Place]:
        """Forward. Out: where it came to after every span of the program."""
        variables: Variables = dict.fromkeys(self.needs)
        places = []
        for spans in self.spans:
            for start, stop in spans:
                again = start in self.regions
                if again:
                    self.taken[start] = self._take(variables, start, stop)
                self._forward(variables, start, stop, keeps=self.training and not again)
            places.append(self.heap.place)
        return places

    def _back(self) -> list[Place]:
        """Backward. Out: where it came to after every span, the last of which is the first one here."""
        roots = [p for p in self.gives if self.properties[p].tensor in self.graph.roots]
        self.cotangents.update((root, self.heap.new(self.local[root])) for root in dict.fromkeys(roots))
        places = []
        for spans in reversed(self.spans):
            for start, stop in reversed(spans):
                if start in self.regions:
                    self._region_again(start, stop)
                else:
                    for k in reversed(range(start, stop)):
                        self._backward(k)
            places.append(self.heap.place)
        return places

    def _repeats(self, ahead: list[Place], back: list[Place]) -> list[Repeat] | None:
        """What the rounds that are left out do: forward and backward what the second one does, where the last but one does the same; else None."""
        left_out = self.short.left_out
        if not left_out:
            return []
        second, seam, last = ahead[:3]
        pairs = [(Stretch(second, seam), Stretch(seam, last), range(left_out + 1))]
        if back:
            last, seam, second = back[:3]
            pairs.append((Stretch(seam, second), Stretch(last, seam), range(left_out, -1, -1)))
        return [Repeat(own, rounds) for own, _, rounds in pairs] if all(self.heap.alike(own, like) for own, like, _ in pairs) else None

    def _arrivals(self) -> Callable[[Key, int], Vector]:
        """What is there beside a gradient that arrives, in a round. Buckets are of all parameters, those of rounds that are left out among them."""
        left_out = self.short.left_out
        start, stop = self.short.spans[1] if left_out else (0, 0)
        rounds = {key: [(p, key[1]) for p in self.short.chain(key[0], left_out)] for key, k in self.enters.items() if start <= k < stop}
        first, rest = ([key for key, k in self.enters.items() if key not in rounds and (k < start) is before] for before in (True, False))
        keys = [*first, *(own[r] for r in range(left_out + 1) for own in rounds.values()), *rest]
        names = [self.properties[key[0]].tensor for key in keys]
        buckets = Buckets([Use(key, self.stored[name], self.graph.refs[name]) for key, name in zip(keys, names, strict=True)], self.sizes.part)
        return lambda key, number: buckets.fill(rounds[key][number] if key in rounds else key)

    def _called(self, moment: tuple[str, int], number: int) -> str:
        """A moment in a round: what was done, and with which property (-1: with none)."""
        text, what = moment
        return text.format(self.properties[self.short.chain(what, number)[-1]].tensor) if what >= 0 else text

    # ---- forward -------------------------------------------------------------------------------------------------------------

    def _forward(self, variables: Variables, start: int, stop: int, keeps: bool) -> None:
        """Instructions [start, stop); keeps: autograd records them."""
        heap, needs = self.heap, self.needs
        for k in range(start, stop):
            triple = self.triples[k]
            if all(p in variables for p in self.post[k]):
                continue
            if isinstance(triple.body, OpCall):
                self._call(variables, k, triple, triple.body, keeps)
            else:
                self._convert(variables, k, triple.body)
            for p in self.ends[k]:
                if p in variables:
                    heap.release(variables[p])
                    if p not in needs:
                        variables[p] = None

    def _call(self, variables: Variables, k: int, triple: Triple, body: OpCall, keeps: bool) -> None:
        assert triple.node is not None
        node, does = self.graph.nodes[triple.node], self._does(triple, body)
        if does.view:
            base = variables[self.pre[k][0]]
            for p in self.post[k]:
                variables[p] = self._hold(base)
        else:
            for place, p in enumerate(self.post[k]):
                variables[p] = self.heap.new(self.local[p] if place or does.result is None else does.result)
        if keeps and does.keeps is not None:
            record, own = Record(), self.post[k] + self.pre[k]
            self.records[k] = record
            for place in does.keeps:
                self._keep(record, variables[own[place]])
            if does.inside is not None:
                record.kept.append(self.heap.new(does.inside))
        self.heap.note((f"forward of {node.call.op} {{}}", self.post[k][0]), does.forward)

    def _does(self, triple: Triple, body: OpCall) -> Call:
        form = self.exact.form(triple)
        if form not in self.calls:
            assert triple.node is not None
            self.calls[form] = call_of(triple, body, self.graph.nodes[triple.node], self.sizes)
        return self.calls[form]

    def _keep(self, record: Record, storage: Storage | None) -> None:
        if storage is None:
            return
        if storage.freed:
            self.tokens[id(storage)] += 1
            record.again.append(storage)
        else:
            record.kept.append(storage)
            storage.holders += 1

    def _hold(self, storage: Storage | None) -> Storage | None:
        if storage is not None:
            storage.holders += 1
        return storage

    def _convert(self, variables: Variables, k: int, path: tuple[Communication, ...]) -> None:
        (source,), (target,) = self.pre[k], self.post[k]
        route = self._route(k, source, path)
        if route.axes and self.training:
            self.enters.setdefault((source, route.axes), k)
        current = self._hold(variables[source])
        for hop in route.hops:
            if hop.forward != "none":
                made = self.heap.new(hop.made)
                made.buffers, made.freed = hop.buffers, hop.freed
                self.heap.note((f"{hop.forward} of {{}}", source), hop.buffers)
                self.heap.release(current)
                current = made
        variables[target] = current

    def _route(self, k: int, source: int, path: tuple[Communication, ...]) -> Route:
        ref = self.refs[source]
        stored = source in self.needs and ref.kind is Kind.PARAMETER
        key = self.exact.form(self.triples[k]), stored, ref.shape
        if key not in self.routes:
            self.routes[key] = route_of(ref, self.properties[source].placement, path, self.sizes, enters=stored)
        return self.routes[key]

    # ---- backward ------------------------------------------------------------------------------------------------------------

    def _backward(self, k: int) -> None:
        triple = self.triples[k]
        if isinstance(triple.body, OpCall):
            self._call_back(k, triple, triple.body)
        else:
            self._convert_back(k, triple.body)

    def _call_back(self, k: int, triple: Triple, body: OpCall) -> None:
        record = self.records.pop(k, None)
        assert triple.node is not None
        node, does, pre = self.graph.nodes[triple.node], self._does(triple, body), self.pre[k]
        arrived = [c for p in self.post[k] if (c := self.cotangents.pop(p, None)) is not None]
        made: list[tuple[int, Storage]] = []
        if record is not None and arrived:
            self._gather_again(record, node, self.post[k][0])
            for place in does.wanted:
                cotangent = arrived[0] if does.hands_on[place] else self.heap.new(self.local[pre[place]])
                cotangent.holders += does.hands_on[place]
                made.append((pre[place], cotangent))
            self.heap.note((f"backward of {node.call.op} {{}}", self.post[k][0]), does.backward)
        if record is not None:
            self._forget(record)
        for c in arrived:
            self.heap.release(c)
        for p, cotangent in made:
            self._accumulate(p, cotangent)

    def _gather_again(self, record: Record, node: Node, made: int) -> None:
        for storage in record.again:
            if id(storage) not in self.regathered:
                self.regathered[id(storage)] = self.heap.new(storage.size)
                self.heap.note((f"gathering again for {node.call.op} {{}}", made), storage.buffers)

    def _forget(self, record: Record) -> None:
        for storage in record.kept:
            self.heap.release(storage)
        for storage in record.again:
            self.tokens[id(storage)] -= 1
            if not self.tokens[id(storage)] and id(storage) in self.regathered:
                self.heap.release(self.regathered.pop(id(storage)))

    def _accumulate(self, p: int, cotangent: Storage, at: Key | None = None) -> None:
        """Autograd adds in place where it alone holds the first part. at: where a parameter enters the synchroniser, if it does."""
        key = p if at is None else at
        old = self.cotangents.get(key)
        if old is None:
            self.cotangents[key] = cotangent
            return
        if old.holders > 1:
            self.cotangents[key] = self.heap.new(self.local[p])
            self.heap.note(("summing cotangents of {}", p))
            self.heap.release(old)
        self.heap.release(cotangent)

    def _convert_back(self, k: int, path: tuple[Communication, ...]) -> None:
        (source,), (target,) = self.pre[k], self.post[k]
        ref, route = self.refs[source], self._route(k, source, path)
        current = self.cotangents.pop(target, None)
        if not ref.requires_grad or ref.dtype not in CONTINUOUS or any(not c.gradient for c in path):
            self.heap.release(current)
            return
        for hop in reversed(route.hops):
            if hop.backward == "none" or current is None:
                continue
            made = self.heap.new(hop.made_back)
            self.heap.note((f"{hop.backward} of the cotangent of {{}}", source), hop.buffers_back)
            self.heap.release(current)
            current = made
        self._arrive(k, source, route.axes, current)

    def _arrive(self, k: int, source: int, axes: tuple[int, ...], current: Storage | None) -> None:
        """A cotangent at the beginning of a conversion: it goes on to its source, or, of a parameter that enters the synchroniser, into a bucket
        once all parts of it are there."""
        key = (source, axes) if axes else None
        if current is not None:
            self._accumulate(source, current, key)
        if key is not None and self.enters[key] == k and (whole := self.cotangents.pop(key, None)) is not None:
            self.heap.release(whole)
            self.heap.add(self.local[source])
            self.heap.note_unknown(("gradient of {} into its bucket", source), key)

    # ---- regions that are computed again -------------------------------------------------------------------------------------

    def _regions(self) -> dict[int, int]:
        """Where every checkpoint region begins, and ends, among the instructions that are walked."""
        regions = computed_again(self.program, self.graph) if self.training else {}
        place = {k: at for at, k in enumerate(self.short.instructions)} if regions else {}
        return {place[start]: place[stop - 1] + 1 for start, stop in regions.items() if start in place}

    def _take(self, variables: Variables, start: int, stop: int) -> list[Storage]:
        """What a region reads from outside: it is kept until the region's backward."""
        made = {p for post in self.post[start:stop] for p in post}
        read = dict.fromkeys(p for pre in self.pre[start:stop] for p in pre if p not in made)
        found = [s for p in read if (s := variables[p]) is not None]
        for storage in found:
            storage.holders += 1
        return found

    def _region_again(self, start: int, stop: int) -> None:
        """Its forward once more, now recorded, then its backward. Its results and their cotangents stay until its end."""
        made = dict.fromkeys(p for post in self.post[start:stop] for p in post)
        inside: Variables = dict.fromkeys(p for pre in self.pre[start:stop] for p in pre if p not in made)
        arrived = [self.cotangents[p] for p in made if p in self.cotangents]
        for cotangent in arrived:
            cotangent.holders += 1
        self._forward(inside, start, stop, keeps=True)
        for k in reversed(range(start, stop)):
            self._backward(k)
        for storage in (*arrived, *(inside[p] for p in made if self.last.get(p, -1) >= stop), *self.taken.pop(start)):
            self.heap.release(storage)


def _between(regions: Mapping[int, int], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Spans of the instructions [start, stop): the regions, and what is between them. A region inside of another one is a part of it."""
    borders = [start]
    while borders[-1] < stop:
        at = borders[-1]
        borders.append(regions.get(at) or min((first for first in regions if at < first < stop), default=stop))
    return tuple(pairwise(borders))
