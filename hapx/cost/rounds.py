"""What of a program need not be looked at, because it does the same as what is before and after it: rounds of repeated layers.

In: a program, and a number per instruction, equal for instructions that are alike in everything but names. Out: a `Folded` program: two rounds at the
beginning of a run and two at its end stand for all of them. Whatever goes through the program in order, and does with a round what it does with the
next one, does with every round that is left out what it does with the second one, and with the last but one.

Invariant: instructions of neighbouring rounds read and make, place by place, properties that correspond one to one. A round reads what it makes
itself or the one before it made, what is there from the start, and what all rounds read. What is made in a round that is not the last is read in the
run only; the program gives it if it gives what corresponds to it in every round, and backward does not begin there. Checkpoint regions lie inside of
rounds. So the second round is followed by the last but one as by the third.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hapx.cost.model import CostModel
from hapx.ir import Graph, OpCall, Region
from hapx.numbering import Numbered, Numbering
from hapx.plan import Program
from hapx.repeats import Run, runs

KEPT = 4  # rounds: two at either end
FEWEST = 2  # rounds that are worth leaving out

Numbers = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Folded:
    """A program of the kept instructions (their indices), which read and make these properties. spans: of their positions, those that may be gone
    through one after the other; with rounds left out: everything before the second round, the second, the last but one, the rest. left_out: how many
    rounds between the second and the last but one. later: per property what it is one round later, -1 where it is no part of a run."""

    instructions: Sequence[int]
    read: Numbers
    made: Numbers
    spans: tuple[tuple[int, int], ...]
    left_out: int
    later: NDArray[np.int64]

    def chain(self, number: int, rounds: int) -> list[int]:
        """A property, and what is in its place up to so many rounds later."""
        found = [number]
        for _ in range(rounds):
            found.append(int(self.later[found[-1]]))
        return found


def whole(program: Program) -> Folded:
    """Nothing is left out."""
    numbered, size = program.numbered, len(program.instructions)
    return Folded(range(size), numbered.read, numbered.made, ((0, size),), 0, np.full(len(numbered.properties), -1))


def short(program: Program, costs: CostModel) -> Folded | None:
    """The program with most of its longest run left out, None where no run is long and regular enough. Found once for a program and what of it is
    computed again."""
    known: dict[tuple[tuple[int, int], ...], Folded | None] = program.__dict__.setdefault("hapx.cost.rounds.short", {})
    regions = tuple((r.start, r.stop) for r in _regions(costs.graph)) if costs.mode == "train" else ()
    if regions not in known:
        known[regions] = folded(program, costs)
    return known[regions]


def folded(program: Program, costs: CostModel) -> Folded | None:
    """As `short`."""
    graph, size = costs.graph, len(program.instructions)
    inside = [False] * size  # whether a border before it would cut a region
    if costs.mode == "train":
        for start, stop in computed_again(program, graph).items():
            inside[start + 1 : stop] = [True] * (stop - start - 1)
    codes = _codes(program, costs, inside)
    found = max(runs(codes, size // (KEPT + FEWEST)), key=lambda run: run.stop - run.start - (KEPT - 1) * run.period, default=None)
    begin = next((k for k in range(found.start, found.start + found.period) if not inside[k]), None) if found is not None else None
    if found is None or begin is None:
        return None
    run = found._replace(start=begin)
    return _Run(program.numbered, run, graph.roots).fold() if _rounds(run) >= KEPT + FEWEST else None


def _codes(program: Program, costs: CostModel, inside: Sequence[bool]) -> list[int]:
    """Equal for instructions that cost the same, and do the same to memory. inside: whether they lie in a region that begins before them."""
    triples, refs = [i.triple for i in program.instructions], costs.graph.refs
    shapes = [None if isinstance(t.body, OpCall) else refs[t.pre[0].tensor].shape for t in triples]
    return list(map(Numbering().of_value, zip(costs.forms(program.instructions), shapes, inside, strict=True)))


def _regions(graph: Graph) -> list[Region]:
    return [r for r in graph.regions if r.kind == "checkpoint" and r.start < r.stop]


def computed_again(program: Program, graph: Graph) -> dict[int, int]:
    """Where every checkpoint region begins, and ends, among the instructions: it has its nodes, and the conversions just before each of them."""
    regions = _regions(graph)
    if not regions:
        return {}
    after = {-1: 0} | {i.triple.node: k + 1 for k, i in enumerate(program.instructions) if i.triple.node is not None}
    return {after[r.start - 1]: after[r.stop - 1] for r in regions}


def _rounds(run: Run) -> int:
    return 1 + (run.stop - run.start) // run.period


class _Run:
    """read, made: per round, what its instructions read and make, in order; round_of: per property the round that makes it, or -1."""

    def __init__(self, numbered: Numbered, run: Run, roots: Collection[str]):
        self.numbered, self.run, self.rounds, self.roots = numbered, run, _rounds(run), roots
        self.stop = run.start + self.rounds * run.period
        inside = range(run.start, self.stop)
        self.read = np.array([x for k in inside for x in numbered.read[k]]).reshape(self.rounds, -1)
        self.made = np.array([x for k in inside for x in numbered.made[k]]).reshape(self.rounds, -1)
        self.round_of = np.full(len(numbered.properties), -1)
        self.round_of[self.made] = np.arange(self.rounds)[:, None]

    def fold(self) -> Folded | None:
        later = self._later()
        if later is None or not self._closed():
            return None
        numbered, period, left_out = self.numbered, self.run.period, self.rounds - KEPT
        second, seam = self.run.start + period, self.run.start + 2 * period
        kept = [*range(seam), *range(seam + left_out * period, len(numbered.read))]
        # the last but one reads of the round before it: of the second one, here
        earlier = dict(zip(self.made[-3].tolist(), self.made[1].tolist(), strict=True))
        read = [numbered.read[k] for k in kept]
        for k in range(seam, seam + period):
            read[k] = tuple([earlier.get(x, x) for x in read[k]])
        spans = ((0, second), (second, seam), (seam, seam + period), (seam + period, len(kept)))
        return Folded(kept, tuple(read), tuple([numbered.made[k] for k in kept]), spans, left_out, later)

    def _later(self) -> NDArray[np.int64] | None:
        """Per property the one that corresponds one round later; None if there is not one for each."""
        later, earlier = np.full(len(self.round_of), -1), np.full(len(self.round_of), -1)
        tokens = np.concatenate([self.read, self.made], axis=1)
        later[tokens[:-1]] = tokens[1:]
        earlier[tokens[1:]] = tokens[:-1]
        return later if (later[tokens[:-1]] == tokens[1:]).all() and (earlier[tokens[1:]] == tokens[:-1]).all() else None

    def _closed(self) -> bool:
        """Whether rounds take and give as the invariant says."""
        return self._made_once() and self._read_near() and self._read_inside() and self._given_alike()

    def _made_once(self) -> bool:
        elsewhere = [x for part in self._outside() for k in part for x in self.numbered.made[k]]
        return len(np.unique(self.made)) == self.made.size and not (self.round_of[elsewhere] >= 0).any()

    def _read_near(self) -> bool:
        """Rounds but the first read of themselves and the one before, of what is there from the start, and what all of them read."""
        there = self._among(self.numbered.needs)
        read, own = self.read[1:], np.arange(1, self.rounds)[:, None]
        made = self.round_of[read]
        allowed = (made == own) | (made == own - 1) | ((made < 0) & (there[read] | (read == self.read[1])))
        return bool(allowed.all() and (there[read] == there[self.read[1]]).all())

    def _read_inside(self) -> bool:
        """What is before the run reads nothing of it, and what is behind it only of the last round; so does backward, where it begins."""
        before, behind = ([x for k in part for x in self.numbered.read[k]] for part in self._outside())
        behind += [x for x in self.numbered.gives if self.numbered.properties[x].tensor in self.roots]
        return bool((self.round_of[before] < 0).all() and np.isin(self.round_of[behind], (-1, self.rounds - 1)).all())

    def _given_alike(self) -> bool:
        """Rounds but the last give the same, and the last one at least that."""
        gives = self._among(self.numbered.gives)[self.made]
        return bool((gives[:-1] == gives[1]).all() and (gives[-1] >= gives[1]).all())

    def _outside(self) -> tuple[range, range]:
        """The instructions before the run, and behind it."""
        return range(self.run.start), range(self.stop, len(self.numbered.read))

    def _among(self, properties: Sequence[int]) -> NDArray[np.bool_]:
        """Per property, whether it is one of these."""
        found = np.zeros(len(self.round_of), dtype=bool)
        found[list(properties)] = True
        return found
