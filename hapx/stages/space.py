"""Every way to deal a cluster's devices out to the stages of a pipeline, as an acyclic graph.

In: a cluster. Out: a `Space`. A state is what is left: machines of each class (alike in devices and link), and a machine of which a part is taken, if
there is one. A move takes one submesh. States are numbered so that moves lead to smaller numbers. A path from `start` to an end is a pipeline's
submeshes from the *last* stage to the first; `lay` puts it on actual devices, which always succeeds: the lemma of `hapx.stages.slices` inside a
machine, and whole machines of a class are interchangeable.

Runs of whole machines take any number of each class, so machine types come in every order, also mixed within a stage. Where this would make more than
`MOST_RUNS` runs, the machines stand in a few orders of their classes (all of up to three classes; else by speed and by memory, also backwards) and
runs are consecutive; of a single class they take up to 8 machines, numbers with three leading bits, or all; of several powers of two, or all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import prod
from typing import NamedTuple

from hapx.cluster.spec import ClusterSpec, Link
from hapx.stages.slices import Types, full, key, same_take, takes
from hapx.stages.submeshes import Shape, ordered, shape_of_parts

MOST_RUNS = 5_000


@dataclass(frozen=True, slots=True)
class MachineClass:
    """Machines that are alike: types of their devices in their own order, the link inside, their numbers in the cluster."""

    types: Types
    intra: Link
    machines: tuple[int, ...]


class State(NamedTuple):
    """What is left: whole machines per class; (class, free devices) of the machine that is being sliced."""

    counts: tuple[int, ...]
    opened: tuple[int, int] | None


class Move(NamedTuple):
    """A submesh is taken. slice: (class, types) of a slice; None for a run of whole machines."""

    shape: int
    target: int
    slice: tuple[int, Types] | None


@dataclass(frozen=True)
class Space:
    """links[state]: the link to the submesh that was taken before, as a number of `kinds_of_link`. ends[state]: a pipeline may end (begin) here."""

    cluster: ClusterSpec
    classes: tuple[MachineClass, ...]
    shapes: tuple[Shape, ...]
    states: tuple[State, ...]
    moves: tuple[tuple[Move, ...], ...]
    ends: tuple[bool, ...]
    links: tuple[int, ...]
    kinds_of_link: tuple[Link, ...]

    @property
    def start(self) -> int:
        return len(self.states) - 1

    def lay(self, path: Sequence[Move]) -> tuple[tuple[int, ...], ...]:
        """Devices of each submesh of a path from `start`, in the path's order, each in its shape's order; no device is in two of them."""
        pools = [list(c.machines) for c in self.classes]
        first = [sum(len(m.devices) for m in self.cluster.machines[:i]) for i in range(len(self.cluster.machines))]
        laid: list[tuple[int, ...]] = []
        state, machine, free = self.states[self.start], -1, 0
        for move in path:
            target = self.states[move.target]
            if move.slice is None:
                chosen = [pools[c].pop() for c, (a, b) in enumerate(zip(state.counts, target.counts, strict=True)) for _ in range(a - b)]
                devices = [d.index for d in self.cluster.devices if d.machine in chosen]
            else:
                number, types = move.slice
                whole = self.classes[number].types
                if state.opened is None:
                    machine, free = pools[number].pop(), full(whole)
                left = key(whole, target.opened[1]) if target.opened else None
                take = same_take(whole, free, types, left)
                devices = [first[machine] + i for i in range(len(whole)) if take.devices >> i & 1]
                free = take.rest
            laid.append(ordered(self.cluster, devices))
            state = target
        return tuple(laid)


def space(cluster: ClusterSpec, idle: bool = False) -> Space:
    """The space of a cluster. idle: devices may be left out (whole machines, and what is left of a machine that is sliced)."""
    return _Builder(cluster, idle).space()


def classes_of(cluster: ClusterSpec) -> tuple[MachineClass, ...]:
    """Machines that are alike, by first appearance. Where a machine has one device its link is never used."""
    found: dict[tuple[Types, Link | None], list[int]] = {}
    for i, m in enumerate(cluster.machines):
        found.setdefault((m.devices, m.intra if len(m.devices) > 1 else None), []).append(i)
    return tuple(MachineClass(types, cluster.machines[ms[0]].intra, tuple(ms)) for (types, _), ms in found.items())


Raw = tuple[Shape, State, tuple[int, Types] | None]


class _Builder:
    def __init__(self, cluster: ClusterSpec, idle: bool):
        self.cluster, self.idle, self.classes = cluster, idle, classes_of(cluster)
        self.canonical: dict[tuple[int, str], int] = {}
        self.shapes: dict[Shape, int] = {}
        self.made: dict[tuple[int, ...], Shape] = {}
        counts = tuple(len(c.machines) for c in self.classes)
        self.all = State(counts, None)
        runs = prod((n + 1) * (n + 2) // 2 for n in counts)
        self.orders = _orders(cluster, self.classes) if runs > MOST_RUNS else None

    def space(self) -> Space:
        moves: dict[State, tuple[Raw, ...]] = {}
        todo = [self.all]
        while todo:
            state = todo.pop()
            if state not in moves:
                moves[state] = tuple(dict.fromkeys(self._moves(state)))
                todo += [target for _, target, _ in moves[state]]
        states = sorted(moves, key=lambda s: (self._left(s), s.counts, s.opened or (-1, -1)))
        index = {s: i for i, s in enumerate(states)}
        numbered = tuple(tuple(Move(self._number(shape), index[target], cut) for shape, target, cut in moves[s]) for s in states)
        kinds = tuple(dict.fromkeys([self.cluster.inter, *(c.intra for c in self.classes)]))
        links = tuple(kinds.index(self.classes[s.opened[0]].intra if s.opened else self.cluster.inter) for s in states)
        ends = tuple(self.idle or self._left(s) == 0 for s in states)
        return Space(self.cluster, self.classes, tuple(self.shapes), tuple(states), numbered, ends, links, kinds)

    def _left(self, state: State) -> int:
        whole = sum(n * len(c.types) for n, c in zip(state.counts, self.classes, strict=True))
        return whole + (state.opened[1].bit_count() if state.opened else 0)

    def _number(self, shape: Shape) -> int:
        return self.shapes.setdefault(shape, len(self.shapes))

    def _moves(self, state: State) -> Iterator[Raw]:
        if state.opened is not None:
            yield from self._slices(state.counts, *state.opened)
            return
        for run in self._runs(state.counts):
            left = _minus(state.counts, run)
            if sum(run) == 1:
                number = run.index(1)
                yield from self._slices(left, number, full(self.classes[number].types))
            yield self._run_shape(run), State(left, None), None

    def _slices(self, counts: tuple[int, ...], number: int, free: int) -> Iterator[Raw]:
        whole = self.classes[number].types
        for take in takes(whole, free):
            shape = shape_of_parts(self.cluster, [(take.types, self.classes[number].intra)])
            rest = self.canonical.setdefault((number, key(whole, take.rest)), take.rest)
            yield shape, State(counts, (number, rest) if rest else None), (number, take.types)
            if self.idle and rest:
                yield shape, State(counts, None), (number, take.types)

    def _run_shape(self, run: tuple[int, ...]) -> Shape:
        if run not in self.made:
            parts = [(c.types, c.intra) for c, n in zip(self.classes, run, strict=True) for _ in range(n)]
            self.made[run] = shape_of_parts(self.cluster, parts)
        return self.made[run]

    def _runs(self, counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Whole machines per class that one stage may take."""
        if self.orders is None:
            yield from (run for run in product(*(range(n + 1) for n in counts)) if any(run))
            return
        for order in self.orders:
            line = [c for c in order for _ in range(self.all.counts[c])]
            left = line[: sum(counts)]
            if all(left.count(c) == n for c, n in enumerate(counts)):
                taken = [0] * len(counts)
                for c in reversed(left):
                    taken[c] += 1
                    if _is_round(taken, self.all.counts):
                        yield tuple(taken)


def _minus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _is_round(run: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether a large cluster has this run as a submesh: see above."""
    bits = 3 if sum(map(bool, run)) == 1 else 1
    return all(n % (1 << max(0, n.bit_length() - bits)) == 0 or n == most for n, most in zip(run, counts, strict=True))


def _orders(cluster: ClusterSpec, classes: Sequence[MachineClass]) -> tuple[tuple[int, ...], ...]:
    """Orders of classes in which a pipeline may pass over many machines."""
    numbers = range(len(classes))
    if len(classes) <= 3:
        return tuple(permutations(numbers))
    kinds = [[cluster.device_types[t] for t in c.types] for c in classes]
    by_speed = sorted(numbers, key=lambda c: sum(k.speed("fp32") for k in kinds[c]))
    by_memory = sorted(numbers, key=lambda c: min(k.memory for k in kinds[c]))
    lines = [tuple(by_speed), tuple(by_memory)]
    return tuple(dict.fromkeys([*lines, *(line[::-1] for line in lines)]))
