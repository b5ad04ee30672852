"""Repeated blocks of a graph, and the hash that identifies a computation. Pure data, no torch.

`find_blocks`: nodes in, for each node (block kind, repetition) or None. A block is a sequence of `p` nodes that occurs r >= 2 times in
a row, each repetition fed by the one before it: the same operators, constants, shapes and dtypes at each place, and the same wiring.
Values come from inside the repetition or from the previous one at the same distance, or are one tensor that all repetitions share;
parameters agree in shape, and each place has either one parameter for all repetitions or a different one for each.

Period p matches at node i when token(i) = token(i + p), where a token is everything about a node but names; so a run of L matches
holds 1 + L // p repetitions. The widest run is taken first, then what lies on either side of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from hapx.ir import Graph, Node, Ref, TensorRef, Value

_MAX_TRIES = 64  # candidates whose wiring is compared, per stretch of nodes


def find_blocks(nodes: Sequence[Node], refs: Mapping[str, TensorRef]) -> tuple[tuple[int, int] | None, ...]:
    """(block kind, repetition) per node, kinds numbered from the front of the graph."""
    finder = _Finder(nodes, refs)
    found: list[_Run] = []
    stretches = [(0, len(nodes))]
    while stretches:
        start, stop = stretches.pop()
        run = finder.widest(start, stop)
        if run is not None:
            found.append(run)
            stretches += [(start, run.start), (run.stop, stop)]
    block_of: list[tuple[int, int] | None] = [None] * len(nodes)
    for kind, run in enumerate(sorted(found, key=lambda r: r.start)):
        for i in range(run.start, run.stop):
            block_of[i] = (kind, (i - run.start) // run.period)
    return tuple(block_of)


@dataclass(frozen=True, slots=True)
class _Run:
    start: int
    period: int
    repetitions: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.repetitions


class _Finder:
    """Tokens and wiring of the nodes."""

    def __init__(self, nodes: Sequence[Node], refs: Mapping[str, TensorRef]):
        numbers: dict[object, int] = {}
        self.tokens: npt.NDArray[np.int64] = np.array([numbers.setdefault(_token(n, refs), len(numbers)) for n in nodes], dtype=np.int64)
        self.producer = {o.name: (i, k) for i, n in enumerate(nodes) for k, o in enumerate(n.outputs)}
        self.uses = [n.call.refs() for n in nodes]
        self.last_use: dict[str, int] = {}
        for i, names in enumerate(self.uses):
            for name in names:
                self.last_use[name] = i
        self.outputs = [[o.name for o in n.outputs] for n in nodes]

    def widest(self, start: int, stop: int) -> _Run | None:
        """The widest run inside [start, stop); of equally wide ones, that with the shortest period."""
        for length, period, first in sorted(self._matches(start, stop), key=lambda m: (-_width(m), m[1], m[2]))[:_MAX_TRIES]:
            repetitions = 1 + length // period
            shifts = range(first, first + length % period + 1)
            best: _Run | None = None
            for shift in sorted(shifts, key=lambda s: (self._crossing(s + period), s)):
                run = self._wired(_Run(shift, period, repetitions))
                if run is not None and (best is None or run.repetitions > best.repetitions):
                    best = run
                    if run.repetitions == repetitions:
                        break
            if best is not None:
                return best
        return None

    def _matches(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(length, period, start) of every maximal run of matches that holds two repetitions or more."""
        tokens = self.tokens[start:stop]
        for period in range(2, len(tokens) // 2 + 1):
            equal = np.concatenate(([False], tokens[:-period] == tokens[period:], [False]))
            edges = np.flatnonzero(equal[1:] != equal[:-1])
            for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                if b - a >= period:
                    yield b - a, period, start + a

    def _crossing(self, border: int) -> int:
        """How many values made just before `border` are used at or after it: fewest at the natural border of a block."""
        window = range(max(0, border - 64), border)
        return sum(self.last_use.get(name, -1) >= border for i in window for name in self.outputs[i])

    def _wired(self, run: _Run) -> _Run | None:
        """The longest part of `run` whose repetitions are wired alike and chained, or None."""
        wiring = [self._wiring(run.start + k * run.period, run.period) for k in range(run.repetitions)]
        best: _Run | None = None
        first = 0
        while first < run.repetitions - 1:
            last = first
            while last + 1 < run.repetitions and _continues(wiring, first, last + 1, run.period):
                last += 1
            if last > first and (best is None or last - first + 1 > best.repetitions):
                best = _Run(run.start + first * run.period, run.period, last - first + 1)
            first = max(last, first + 1)
        return best

    def _wiring(self, begin: int, period: int) -> list[_Wire]:
        """For every tensor argument of the nodes [begin, begin + period): where it comes from."""
        places: dict[str, int] = {}
        wires: list[_Wire] = []
        for i in range(begin, begin + period):
            for name in self.uses[i]:
                made = self.producer.get(name)
                if made is None:
                    wires.append(_Wire("outside", name, places.setdefault(name, len(wires)), 0))
                else:
                    wires.append(_Wire("inside" if made[0] >= begin else "before", name, made[0] - begin, made[1]))
        return wires


@dataclass(frozen=True, slots=True)
class _Wire:
    """Origin of one argument. inside, before: made by output `output` of the node at `offset` from the repetition's first; outside: a
    parameter, buffer, input or constant, used for the first time at place `offset` of the repetition."""

    origin: Literal["inside", "before", "outside"]
    name: str
    offset: int
    output: int


def _continues(wiring: list[list[_Wire]], first: int, k: int, period: int) -> bool:
    """Whether repetition k goes on as the repetitions first .. k - 1 do, and uses something of repetition k - 1."""
    chained = False
    for place, (here, second, entry) in enumerate(zip(wiring[k], wiring[first + 1], wiring[first], strict=True)):
        if here.origin != entry.origin:
            return False
        alike = (here.offset, here.output) == (second.offset, second.output)
        if here.origin == "inside":
            if not alike or (here.offset, here.output) != (entry.offset, entry.output):
                return False
        elif here.origin == "outside":
            names = {wires[place].name for wires in wiring[first : k + 1]}
            if here.offset != entry.offset or len(names) not in (1, k + 1 - first):
                return False
        elif second.name == entry.name:  # one value that all repetitions share
            if here.name != entry.name:
                return False
        elif not alike or here.offset < -period:
            return False
        else:
            chained = True
    return chained


def _width(match: tuple[int, int, int]) -> int:
    """Nodes covered by a match (length, period, start)."""
    return (1 + match[0] // match[1]) * match[1]


def _token(node: Node, refs: Mapping[str, TensorRef]) -> object:
    """Everything about a node but names: operator, constants, and what its tensors are like."""

    def plain(value: Value) -> object:
        if isinstance(value, Ref):
            ref = refs[value.name]
            return ("tensor", ref.kind, ref.shape, ref.dtype, ref.requires_grad)
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return (type(value).__name__, value)  # 1, 1.0 and True are equal, but not alike

    return (
        node.call.target,
        tuple((k, plain(v)) for k, v in node.call.args),
        tuple((o.kind, o.shape, o.dtype, o.requires_grad) for o in node.outputs),
        tuple((node.call.refs().index(name), dtype) for name, dtype in node.casts),
    )


def graph_hash(graph: Graph) -> str:
    """sha256 of the computation: tensors, calls, outputs, regions, constants. Not in it: weights, devices, module paths, source
    lines, what is derived from the calls (segments, blocks, batch dims), boundaries of layers, and checkpoints that the planner has chosen."""
    digest = hashlib.sha256()
    parts: list[object] = [graph.mode, graph.batch, graph.input_names, graph.tied]
    parts += [(r.name, r.shape, r.dtype, r.kind.value, r.requires_grad, r.mutated) for r in sorted(graph.refs.values(), key=lambda r: r.name)]
    parts += [(n.call.target, n.call.args, tuple(o.name for o in n.outputs), n.tags, n.casts) for n in graph.nodes]
    parts += [(o.tensor, o.role, o.target) for o in graph.outputs]
    parts += [(r.kind, r.start, r.stop, r.options) for r in graph.regions if not r.chosen]
    parts += sorted(graph.constants.items())
    if (micro := graph.micro_batches) is not None:
        parts += [micro.number, micro.cut, micro.counts and graph_hash(micro.counts), micro.results]
    for part in parts:
        digest.update(repr(part).encode() + b"\n")
    return digest.hexdigest()
