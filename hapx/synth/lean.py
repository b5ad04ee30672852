"""The program whose peak of memory is least, by a beam: peaks of partial programs are known, as what later steps add to each moment is.

Of a partial program there are, in bytes per kind of devices at exact lengths,

    K  parameters and optimizer state     G  gradients     S  what is kept for backward
    R  what is there while the checkpoint region is computed again that the partial program ends in
    F  the largest moment of forward so far     B  the largest moment of the backward of the steps so far

A step that adds k, g, s, r, and takes f and b at its own two moments (`hapx.synth.moments`), beside what is live and its cotangents, leads to

    K + k,   G + g,   S + s,   R + r,   max(F + k, K' + S' + live + f),   max(B + k + g, K' + S' + R' + cotangents + b)

since parameters are there all the time, and backward comes to a step when the gradients of all later ones are there. Where micro-batches add up, G is
there beside F and B, of those before. All of these grow with all of these, so a partial program that has no more of any of them dominates.

Taken to be simpler than they are: storages that several tensors or cotangents share count for each of them. `hapx.cost.liveness` knows better, once
a program is complete.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from math import inf
from operator import add, le, truediv

import numpy as np

from hapx.cost.memory import base_of, checkpoints
from hapx.cost.model import CostModel
from hapx.cost.once import once
from hapx.cost.terms import Vector as Bytes
from hapx.cost.transients import UPDATE_TEMPORARIES
from hapx.ir import Graph, Kind, TensorRef
from hapx.layout import Lengths
from hapx.plan import ProgramKey
from hapx.states import Invariant, Placement
from hapx.synth.astar import Front, Statistics, Width, beam
from hapx.synth.domain import Following, State, round_before
from hapx.synth.effect import Vector
from hapx.synth.moments import Moments, made, partial
from hapx.synth.moves import Move
from hapx.synth.periods import Jump, Repetition
from hapx.synth.problem import Problem
from hapx.synth.seeds import Mask
from hapx.synth.tables import TensorTable
from hapx.synth.writer import Solution, solution

WIDTHS = Width(16), Width(6)  # of the beam, on meshes of one axis and of several
SETTLED = 2  # rounds after which it follows what repeats itself only: what is lean hardly changes from layer to layer

Sizes = tuple[Vector, Vector]  # of live values that nothing keeps, and of cotangents


def leanest(problem: Problem, exact: CostModel, lengths: Lengths, key: ProgramKey, only: Mapping[int, Mask] | None = None) -> Solution | None:
    """A program whose peak is a small part of what may be used of the fullest device; that part, by what is known here, is its `cost`. exact: the
    costs at these lengths. only: by id of a step class, the choices that are looked at. None if they lead nowhere, or what the beam kept of them.
    Raises Crowded where a step has too many moves (see `hapx.synth.moves`)."""
    statistics = Statistics()
    last = beam(Lean(problem, exact, lengths, only), WIDTHS[len(problem.theory.mesh.axes) > 1], statistics)
    return solution(problem, last, last.estimate, key, statistics) if last is not None else None


class Lean:
    """The domain of the beam. Estimates are the part that the peak so far is of what may be used; `spent`: the same of all that stays."""

    moments: type[Moments] = Moments
    sharp, eager = False, False

    def __init__(self, problem: Problem, exact: CostModel, lengths: Lengths, only: Mapping[int, Mask] | None = None):
        self.problem, self.exact, self.kinds, self.only = problem, exact, len(exact.kinds), only
        self.capacity: Vector = tuple(exact.capacity.tolist())
        self.depth = len(problem.steps)
        training = exact.mode == "train"
        self.region = [-1] * self.depth
        for number, own in enumerate(checkpoints(exact.graph) if training else ()):
            self.region[own.start : own.stop] = [number] * (own.stop - own.start)
        self.moves = [self.moments(problem, exact, lengths, self._levels(within), within) for within in (False, True)]
        self.following = [Following(problem, moves, arrays=False) for moves in self.moves]
        self.accumulates = exact.repeats > 1
        self.training, self.local, self.kept, self.none = training, self.moves[0].local, self.moves[0].kept, self.moves[0].none
        on_cpu, at_once = self.local.cpu, UPDATE_TEMPORARIES[exact.optimizer.lower()][1] if training else 0.0
        self.update: Vector = tuple(np.where(on_cpu, 0.0, at_once).tolist())  # what it takes, per byte of gradients
        problem.repetition = problem.repetition or Repetition(problem.steps)
        self.repetition: Repetition = problem.repetition
        self._others = list(accumulate(map(self._differs, range(self.depth)), initial=0))  # steps so far that differ so from those they repeat
        self._jumps: dict[int, Jump | None] = {}
        self.reaching = reaching(exact.graph)
        self._sizes: dict[tuple[str, int], tuple[Bytes, Bytes]] = {}
        self._live: list[dict[int, Sizes]] = [{} for _ in range(self.depth + 1)]

    def _differs(self, level: int) -> bool:
        """Whether a step lies otherwise in checkpoint regions than the one that it repeats."""
        before = level - self.repetition.before(level)
        ends = [self.region[at] >= 0 and (at == 0 or self.region[at] != self.region[at - 1]) for at in (before, level)]
        return (self.region[level] >= 0) is not (self.region[before] >= 0) or ends[0] is not ends[1]

    def _levels(self, within: bool) -> dict[int, int]:
        """By class, the first step of it that is in a checkpoint region, or is not."""
        found: dict[int, int] = {}
        for level, step in enumerate(self.problem.steps):
            if (self.region[level] >= 0) is within:
                found.setdefault(id(step.kind), level)
        return found

    # -- what the beam asks for --------------------------------------------------------------------------------------------------------------------

    def start(self) -> State:
        unused = [self.local.part(p, float(self.exact.graph.refs[name].bytes)) for name, p in self.problem.unused.items()]
        there = tuple((sum(unused, self.none) + float(sum(r.bytes for r in self.exact.graph.sources))).tolist())
        nothing = (0.0,) * self.kinds
        return self._state(0, self.problem.start, (*there, *nothing, *nothing, *nothing, *there, *there), None, None)

    def successors(
        self, state: State, limit: float, most: int | None = None, front: Front[State] | None = None, hasty: bool = False
    ) -> Iterator[State]:
        step, following = self.problem.steps[state.level], self.following[self.region[state.level] >= 0]
        reads = state.place & step.reads
        allowed = self.only.get(id(step.kind)) if self.only is not None else None
        for choice in range(len(step.kind.choices)) if allowed is None else np.flatnonzero(allowed).tolist():
            yield from self._follow(state, following(state.level, reads, choice).moves, limit)

    def estimated(self, state: State) -> float:
        return state.estimate

    def again(self, state: State, limit: float) -> list[State] | None:
        """One period after a partial program in which every value was available as its counterpart is here, and checkpoint regions are alike: the
        move that was made there, or all rounds that are left and are alike."""
        level = state.level
        made = round_before(self.repetition, state) if not self._others[level + 1] - self._others[level] else None
        if made is None:
            return None
        if (jump := self._jump(level)) is not None:
            return self._leap(state, made, jump, limit)
        move = made[0].move
        assert move is not None, "a round of moves"
        moves = self.following[self.region[level] >= 0](level, state.place & self.problem.steps[level].reads, move.choice.index).moves
        return list(self._follow(state, [m for m in moves if m[0] is move], limit)) or None

    def leaps(self, state: State, limit: float) -> list[State]:
        jump = self._jump(state.level)
        made = round_before(self.repetition, state) if jump is not None else None
        return self._leap(state, made, jump, limit) if made is not None and jump is not None else []

    def settled(self, level: int) -> bool:
        """Whether so many rounds that are alike, in checkpoint regions too, are before a level, and some after it, that what is lean repeats
        itself."""
        period, done = self.repetition.before(level), self.repetition.done(level)
        last = bisect_left(self._others, self._others[level]) - 1  # the last step before it that is not as the one a period before, if there is one
        done = min(done, (level - (last + 1 - period)) // period) if period and last >= 0 else done
        return done >= SETTLED and self._jump(level) is not None

    def _jump(self, level: int) -> Jump | None:
        """Over all rounds that are left from a level on and are alike."""
        if level not in self._jumps:
            period = self.repetition.before(level)
            first = bisect_right(self._others, self._others[level]) - 1  # the first step from it on that is not as the one a period before
            self._jumps[level] = self.repetition.jump(level, (first - level) // period) if period else None
        return self._jumps[level]

    def _leap(self, state: State, made: list[State], jump: Jump, limit: float) -> list[State]:
        """After all rounds of a jump, each as the last one. What parameters, gradients and activations take grows by the same in every round, so of
        the largest moments only those of the first or of the last round count."""
        n, times, old = self.kinds, jump.times, state.memory
        memory = (*old[: 4 * n], *(-inf,) * (2 * n))
        for after in made:  # a round; its own moments alone
            assert after.parent is not None and after.move is not None, "a round of moves"
            memory = self._grown(after.parent, after.move.effect.memory, after.place, memory)
        parameters, gradients, saved = ([memory[i] - old[i] for i in range(at * n, (at + 1) * n)] for at in range(3))
        stays = [own + times * (memory[i] - own) for i, own in enumerate(old[: 3 * n])]
        forward, backward = [], []
        for i, (k, g, s) in enumerate(zip(parameters, gradients, saved, strict=True)):
            forward.append(max(old[4 * n + i] + times * k, memory[4 * n + i] + (times - 1) * (k + s)))
            most = max(old[5 * n + i] + times * (k + g), memory[5 * n + i] + (times - 1) * (k + max(g, s)))
            backward.append(most if self.training else 0.0)
        place = sum((state.place >> before & full) << now for now, before, full in jump.pairs)
        grown = (*stays, *memory[3 * n : 4 * n], *forward, *backward)
        found = self._state(state.level + times * len(made), place, grown, state, None, (len(made), times))
        return [found] if found.estimate < limit else []

    def dominates(self, a: State, b: State) -> bool:
        return all(map(le, a.memory, b.memory))

    def likely(self, state: State) -> float:
        return state.estimate + state.spent

    def kin(self, state: State) -> int:
        return state.place

    # -- peaks -------------------------------------------------------------------------------------------------------------------------------------

    def _follow(self, state: State, moves: list[tuple[Move, int]], limit: float) -> Iterator[State]:
        stays = state.place & self.problem.steps[state.level].keep
        for move, bits in moves:
            place = stays | bits
            after = self._state(state.level + 1, place, self._grown(state, move.effect.memory, place), state, move)
            if after.estimate < limit:
                yield after

    def _state(
        self, level: int, place: int, memory: Vector, parent: State | None, move: Move | None, rounds: tuple[int, int] = (0, 0)
    ) -> State:  # fmt: skip
        n = self.kinds
        k, g, f, b = memory[:n], memory[n : 2 * n], memory[4 * n : 5 * n], memory[5 * n :]
        update = [x + (1.0 + u) * y for x, y, u in zip(k, g, self.update, strict=True)]
        running = map(max, f, b)
        peak = max(map(truediv, map(max, map(add, running, g) if self.accumulates else running, update), self.capacity))
        stays = max(map(truediv, self._staying(memory), self.capacity))
        return State(level, place, peak, (), (), memory, peak, stays, parent, move, rounds)

    def _staying(self, memory: Vector) -> Vector:
        """Parameters, gradients and what is kept for backward, of the memory of a partial program."""
        n = self.kinds
        return tuple(map(add, map(add, memory[:n], memory[n : 2 * n]), memory[2 * n : 3 * n]))

    def _grown(self, state: State, effect: Vector, place: int, instead: Vector | None = None) -> Vector:
        """The memory of what follows a state by a move that has this effect. instead: of the state's own memory."""
        level, n, old = state.level, self.kinds, instead or state.memory
        live, cotangents = self._there(level, state.place)[0], self._there(level + 1, place)[1]
        region = self.region[level]
        goes_on, again = region >= 0 and level > 0 and self.region[level - 1] == region, region >= 0
        stays = tuple(map(add, old[: 3 * n], effect[: 3 * n]))
        inside, forward, backward = [], [], []
        for i in range(n):
            k, g, f, b = effect[i], effect[n + i], effect[4 * n + i], effect[5 * n + i]
            r = effect[3 * n + i] + (old[3 * n + i] if goes_on else 0.0)
            kept = stays[i] + stays[2 * n + i]
            inside.append(r if again else 0.0)
            forward.append(max(old[4 * n + i] + k, kept + live[i] + f))
            backward.append(max(old[5 * n + i] + k + g, kept + r + cotangents[i] + (max(b, f) if again else b)) if self.training else 0.0)
        return (*stays, *inside, *forward, *backward)

    def _there(self, level: int, place: int) -> Sizes:
        """What is live before a step."""
        known = self._live[level]
        if place not in known:
            values, cotangents = self.none, self.none
            for name, table, at in self.problem.steps[level].live if level < self.depth else ():
                value, cotangent = self._size(name, table, place >> at & table.full)
                values, cotangents = values + value, cotangents + cotangent
            known[place] = tuple(values.tolist()), tuple(cotangents.tolist())
        return known[place]

    def _size(self, name: str, table: TensorTable, mask: int) -> tuple[Bytes, Bytes]:
        """Of a live tensor: what nothing keeps of it (of a parameter what was gathered), and its cotangent."""
        key = name, mask
        if key not in self._sizes:
            ref, graph = self.exact.graph.refs[name], self.exact.graph
            places = [table.placements[p] for p in made(table, mask)]
            if ref.kind is Kind.PARAMETER:
                places = [p for p in places if not any(isinstance(s, Invariant) for s in p.states)]
            size, alone = self._all_of(ref, places), self.none
            if ref.kind is Kind.PARAMETER or (ref.kind is Kind.VALUE and name not in self.kept and base_of(graph, name) is None):
                alone = size
            elif ref.kind is Kind.VALUE and name not in self.moves[0].twice and base_of(graph, name) is None:  # Partial ones are not kept
                alone = self._all_of(ref, list(filter(partial, places)))
            has_cotangent = ref.kind is not Kind.PARAMETER and ref.requires_grad and name in self.reaching
            self._sizes[key] = alone, size if has_cotangent else self.none
        return self._sizes[key]

    def _all_of(self, ref: TensorRef, places: Iterable[Placement]) -> Bytes:
        return sum((self.local.part(p, float(ref.bytes)) for p in places), self.none)


@once
def reaching(graph: Graph) -> frozenset[str]:
    """Names of what the roots of backward are computed from: nothing else has a cotangent."""
    found, waiting = set(graph.roots), list(graph.roots)
    while waiting:
        producer = graph.producer.get(waiting.pop())
        more = [n for n in graph.nodes[producer].call.refs() if n not in found] if producer is not None else []
        found.update(more)
        waiting += more
    return frozenset(found)
