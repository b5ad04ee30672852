"""Moves with their seconds and with what they take of memory, one thing after the other.

`hapx.synth.moments` adds up what the conversions and the call of a step take, so that moves can be put together from parts. Here a move is looked at
as it runs: forward its conversions, one by one, each of whose results stays, then its call; backward its call, then its conversions from the last to
the first, each of which turns a cotangent into another one.

In: a problem, a cost model at exact lengths; a move and what is available before it. Out: a `Moment`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hapx.cost.footprints import Hop, call_of
from hapx.cost.memory import allocates
from hapx.cost.model import CostModel
from hapx.cost.terms import Vector as Bytes
from hapx.ir import OpCall
from hapx.layout import Lengths
from hapx.synth.effect import Effect, Vector
from hapx.synth.moments import Moments, partial
from hapx.synth.moves import Move, Use
from hapx.synth.problem import Choice, Problem, StepClass
from hapx.synth.tables import Conversion, Kept, TensorTable


class Moment(NamedTuple):
    """Bytes per kind. parameters: with optimizer state; saved: what stays for backward; forward: the most that is made, beside what was there before;
    backward: the most beside what was saved before the step and the cotangents of what is live after it."""

    parameters: Vector
    gradients: Vector
    saved: Vector
    forward: Vector
    backward: Vector


class _Operand(NamedTuple):
    """How an operand becomes available, and its size there. last: nothing else of its tensor is read, here or later."""

    use: Use
    table: TensorTable
    mask: int
    hops: tuple[Hop, ...]
    size: Bytes
    last: bool


class _Called(NamedTuple):
    """What a call takes. made: its results, and what it keeps inside; temporaries: of forward; keeps: what its backward reads of all that; later:
    results that only later steps keep; cotangents: those that backward makes; back: its temporaries; arrived: cotangents of the results; passed:
    whether one of these is handed on; reached: whether there is a backward."""

    made: Bytes
    temporaries: Bytes
    keeps: Bytes
    later: Bytes
    cotangents: Bytes
    back: Bytes
    arrived: Bytes
    passed: bool
    reached: bool


Gone = Callable[[int, int], Bytes]  # slot and mask of an operand -> bytes that are freed when it was converted and nothing else reads it


class Timed(Moments):
    """See the module."""

    def __init__(self, problem: Problem, exact: CostModel, lengths: Lengths, levels: dict[int, int], within: bool):
        super().__init__(problem, exact, lengths, levels, within)
        self._calls: dict[tuple[int, int], _Called] = {}

    def effect(self, kind: StepClass, choice: int) -> Effect:
        key = id(kind), choice
        if key not in self._effects:
            self._effects[key] = self.values.effect(kind.choices[choice].step)._replace(memory=super().effect(kind, choice).memory)
        return self._effects[key]

    def of_kept(self, table: TensorTable, kept: Kept) -> Effect:
        return self.values.effect(kept.step)._replace(memory=super().of_kept(table, kept).memory)

    def _paths(self, table: TensorTable, source: int, target: int) -> tuple[tuple[Effect, Conversion], ...]:
        key = id(table), source, target
        if key not in self._between:
            known = [(path, self._path(table, source, target, path).memory) for path in self.conversions.between(table, source, target)]
            self._between[key] = tuple([(path.effect._replace(memory=memory), path.conversion) for path, memory in known])
        return self._between[key]

    def moment(self, level: int, masks: Sequence[int], move: Move, live: frozenset[str], reaching: frozenset[str], gone: Gone) -> Moment:
        """Of a move outside of checkpoint regions. masks: of the step's slots, before it; live: names of what is read later; reaching: of what has a
        cotangent."""
        kind, n = self.problem.steps[level].kind, len(self.exact.kinds)
        kept = [self.of_kept(kind.slots[use.slot].table, use.kept).memory[: 2 * n] for use in move.uses if use.kept is not None]
        stored = np.sum(kept, axis=0) if kept else np.zeros(2 * n)
        operands = self._operands_of(level, masks, move, live)
        made = most = saved = again = freed = self.none
        for own in operands:
            before = self.none
            for hop in own.hops:
                if hop.forward != "none":
                    most, before = np.maximum(most, made + before + hop.made + hop.buffers), hop.made
            made = made + before
            if any(hop.freed for hop in own.hops):
                again = again + before
            elif own.table.ref.name in self.kept and not partial(own.table.placements[own.use.target]):
                saved = saved + before
            if own.last and before.any():
                freed = freed + gone(own.use.slot, own.mask)
        if level >= self.problem.num_nodes:  # an output: a cotangent arrives where backward begins
            back = there = sum((own.size for own in operands if self._has_cotangent(own.table.ref)), self.none)
            return self._moment(stored, saved, most, self._converted_back(operands, back, there))
        call = self._call(level, move.choice, reaching)
        most = np.maximum(most, made - freed + call.made + call.temporaries)
        back = self.none
        if call.reached:
            back = saved + call.keeps + again + call.cotangents + call.back
            there = call.cotangents - (self.none if call.passed else call.arrived)
            back = self._converted_back(operands, back, there)
        return self._moment(stored, saved + call.keeps + call.later, most, back)

    def _moment(self, stored: Bytes, saved: Bytes, most: Bytes, back: Bytes) -> Moment:
        n = len(self.exact.kinds)
        parameters, gradients, *rest = (tuple(own.tolist()) for own in (stored[:n], stored[n:], saved, most, back))
        return Moment(parameters, gradients, *rest)

    def _operands_of(self, level: int, masks: Sequence[int], move: Move, live: frozenset[str]) -> list[_Operand]:
        step, now, found = self.problem.steps[level], list(masks), list[_Operand]()
        slots = [use.slot for use in move.uses]
        for use in move.uses:
            table, mask = step.kind.slots[use.slot].table, now[use.slot]
            if use.kept is not None:
                mask = table.closure(use.kept.placement)
            last = use.conversion is not None and step.tensors[use.slot] not in live and slots.count(use.slot) == 1
            size = self.local.part(table.placements[use.target], float(table.ref.bytes))
            found.append(_Operand(use, table, mask, self.hops_of(table, mask, use), size, last))
            now[use.slot] = mask | table.closure(use.target) | (table.closure(use.conversion.source) if use.conversion is not None else 0)
        return found

    def _converted_back(self, operands: Sequence[_Operand], most: Bytes, there: Bytes) -> Bytes:
        """The most while cotangents are converted. there: those that the call has made, without those of its results."""
        for own in reversed(operands):
            if self._has_cotangent(own.table.ref):
                current = own.size
                for hop in reversed(own.hops):
                    if hop.backward != "none":
                        most = np.maximum(most, there + hop.made_back + hop.buffers_back)
                        there, current = there + hop.made_back - current, hop.made_back
        return most

    def _call(self, level: int, choice: Choice, reaching: frozenset[str]) -> _Called:
        kind = self.problem.steps[level].kind
        key = id(kind), choice.index
        if key not in self._calls:
            self._calls[key] = self._called(level, choice, reaching)
        return self._calls[key]

    def _called(self, level: int, choice: Choice, reaching: frozenset[str]) -> _Called:
        kind, graph, none, n = self.problem.steps[level].kind, self.exact.graph, self.none, len(self.exact.kinds)
        triple, node = self.problem.triples[level][choice.index], graph.nodes[level]
        assert isinstance(triple.body, OpCall)
        does, places, outputs = call_of(triple, triple.body, node, self.local), triple.placements, len(triple.post)
        sizes = self.local.local((*triple.post, *triple.pre))
        made = none if does.view else sum(sizes[:outputs], none) if does.result is None else sum(sizes[1:outputs], does.result)
        own = {i for i in does.keeps or () if i < outputs}  # results that its backward reads
        kept = [allocates(graph, o.name, self.kept) and not partial(places[o.name]) for o in node.outputs]
        later = sum((size for i, size in enumerate(sizes[:outputs]) if kept[i] and i not in own), none)
        keeps = np.array(self.effect(kind, choice.index).memory[2 * n : 3 * n]) - later
        reached = self.training and does.keeps is not None and any(o.name in reaching for o in node.outputs)
        cotangents = sum((sizes[outputs + i] for i in does.wanted if not does.hands_on[i]), none)
        arrived = sum((size for size, o in zip(sizes[:outputs], node.outputs, strict=True) if o.requires_grad and o.name in reaching), none)
        passed = any(does.hands_on[i] for i in does.wanted)
        made = made if does.inside is None else made + does.inside
        forward, back = (none if own is None else own for own in (does.forward, does.backward))
        return _Called(made, forward, keeps, later, cotangents, back, arrived, passed, reached)
