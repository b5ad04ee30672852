"""Which borders between parts of a program are free: each side with ratios of its own, tensors cut again in between.

In: the best program with one row per kind of row, its shares, the parts that may have ratios of their own. Out: the parts grouped into segments
and the best ratios of each, or None where that gains too little. Three questions, each asked only if the one before it said yes:

1. On a few compute rows around the present one, is the cheapest sequence of rows over the parts, with re-cuts where they differ, less than
   the best single row by half of what is WORTH it? (`_Sequence`, a shortest path over rows; some milliseconds.) Parts that are not consecutive
   skip this question.
2. Of the borders of that sequence, which may be tied again at next to no cost? By the linear program with a row for each segment, re-cuts priced.
3. Is that linear program worth less than the one with one row?

Invariant: what is returned has a lower cost, for the same program and at fractional ratios, than the best single rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from hapx.balancer.lp import balance
from hapx.balancer.untied import Event, Untied
from hapx.cost.model import StepCost
from hapx.cost.table import TermTable
from hapx.cost.terms import Term, Vector
from hapx.graph.borders import numbered
from hapx.states import Row

WORTH = 5e-3  # least relative gain for which segments are tried
TIED = 1e-3  # a border that gains less is tied again
MANY = 4  # groups of which every two are compared by the linear program
FULL = 0.98  # part of the capacity from which on memory has a price
AWAY = (0.02, 0.05, 0.1, 0.16, 0.24, 0.35, 0.5, 0.7, 1.0)  # steps from the present row, as parts of the way to where one kind has everything
Array = npt.NDArray[np.float64]
State = tuple[Array, Array, Array]  # per row: cost, and per kind the pending compute forward and backward


@dataclass(frozen=True, slots=True)
class Freed:
    """`groups`: the segment of each part. `shares`: per row and kind. By the linear program, time: seconds; gain: relative, over one row."""

    groups: tuple[int, ...]
    shares: Mapping[Row, Vector]
    time: float
    gain: float


def free_borders(
    untied: Untied, sizes: Sequence[int], capacity: Vector, shares: Mapping[Row, Vector], most: int, consecutive: bool, worth: float = WORTH,
    known: float = inf,
) -> Freed | None:  # fmt: skip
    """Segments of the program that pay. shares: of the tied rows, per kind. most: segments at most. consecutive: parts follow each other. worth: the
    least relative gain, over one row and over `known` seconds of another program."""
    choice = _Choice(untied, tuple(sizes), capacity, shares)
    groups = tuple(range(untied.parts))
    if consecutive:
        cheaper = _Sequence(untied, sizes, shares, choice.prices()).cheapest(known)
        if cheaper is None:
            return None
        groups = cheaper
    freed = choice.best(groups, most, consecutive, worth, known)
    return freed if freed is not None and freed.gain >= worth and freed.time <= known * (1 - worth) else None


class _Choice:
    """Linear programs of groupings."""

    def __init__(self, untied: Untied, sizes: tuple[int, ...], capacity: Vector, shares: Mapping[Row, Vector]):
        self.untied, self.sizes, self.capacity, self.shares = untied, sizes, capacity, shares
        self.one = (0,) * untied.parts

    def solved(self, groups: tuple[int, ...], capacity: Vector) -> tuple[float, Mapping[Row, Vector]]:
        """Seconds and shares; infinite where nothing fits."""
        goal = self.untied.objective(groups)
        start = {Row(row.kind, g, row.axis): own for row, own in self.shares.items() for g in range(1 + max(groups))}
        found = balance(goal, self.sizes, capacity, start)
        return (inf, start) if found is None else (goal.time({c: found[c.row] for c in goal.cuts}), found)

    def prices(self) -> Vector | None:
        """Seconds per byte of memory on each kind, where it binds: what one per cent more of it would save."""
        goal = self.untied.objective(self.one)
        full = goal.memory({c: self.shares[c.row] for c in goal.cuts}) > FULL * self.capacity
        if not full.any():
            return None
        now, prices = self.solved(self.one, self.capacity)[0], np.zeros(len(self.sizes))
        if now == inf:  # limits that were corrected since do not admit it: no price is known
            return None
        for kind in np.flatnonzero(full):
            more = self.capacity.copy()
            more[kind] *= 1.01
            prices[kind] = max(0.0, now - self.solved(self.one, more)[0]) / (more[kind] - self.capacity[kind])
        return prices

    def best(self, groups: tuple[int, ...], most: int, consecutive: bool, worth: float, known: float) -> Freed | None:
        """From all borders of `groups` free, borders are tied again as long as that costs nothing. None where even all of them free are not worth it:
        tying one never makes a program faster."""
        alone, _ = self.solved(self.one, self.capacity)
        time, shares = self.solved(groups, self.capacity)
        if time > min(alone, known) * (1 - worth):
            return None
        if 1 + max(groups) > MANY:
            groups = self._alike_tied(groups, shares, consecutive)
            time, shares = self.solved(groups, self.capacity)
        while (count := 1 + max(groups)) > 1:
            trials = {_tied(groups, *pair) for pair in _pairs(count, consecutive)}
            solved = {trial: self.solved(trial, self.capacity) for trial in sorted(trials)}
            tied = min(solved, key=lambda g: solved[g][0])
            if count <= most and solved[tied][0] > time * (1 + TIED):
                break
            groups, (time, shares) = tied, solved[tied]
        return Freed(groups, shares, time, 1 - time / alone) if max(groups) else None

    def _alike_tied(self, groups: tuple[int, ...], shares: Mapping[Row, Vector], consecutive: bool) -> tuple[int, ...]:
        """MANY groups: those whose compute rows differ least are tied without asking the linear program about each."""
        rows = {row.segment: own * self.sizes for row, own in shares.items() if row.kind == "compute"}
        before = groups
        while (count := 1 + max(groups)) > MANY:
            first = {g: rows[before[groups.index(g)]] for g in range(count)}  # the row of a group: that of the first part in it
            one, other = min(_pairs(count, consecutive), key=lambda pair: float(np.abs(first[pair[0]] - first[pair[1]]).max()))
            groups = _tied(groups, one, other)
        return groups


def _pairs(count: int, consecutive: bool) -> list[tuple[int, int]]:
    """Groups that may be tied."""
    return [(g, g + 1) for g in range(count - 1)] if consecutive else list(combinations(range(count), 2))


def _tied(groups: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    return numbered(one if g == other else g for g in groups)


class _Sequence:
    """The cheapest rows, one per part, among a few: for every row the cheapest way to have it in the present part, with the pending compute that
    this way has left. (Of two ways to the same row the one that is cheaper so far is kept: a heuristic, the linear program has the last word.)"""

    def __init__(self, untied: Untied, sizes: Sequence[int], shares: Mapping[Row, Vector], prices: Vector | None):
        self.untied, self.prices = untied, prices
        compute = next(row for row in shares if row.kind == "compute")
        self.rows = _around(shares[compute], np.asarray(sizes))
        self.table = TermTable(len(sizes))
        self.by_part: list[list[Event]] = [[] for _ in range(untied.parts)]
        for event in untied.events:
            self.by_part[event.part].append(event)
        for step in {id(event.step): event.step for event in untied.events}.values():
            for term in (step.forward, step.backward, step.memory, *(c.term for c in step.communication)):
                self.table.number(term)
        if prices is not None:  # bytes of parameters, which no step has
            for kept, part in untied.kept:
                self.table.number(kept)
                self.by_part[part].append(Event(StepCost(None, None, (), kept), part))
        cuts = dict.fromkeys(cut for term in self.table.terms for cut in term.cuts)
        each = [self.table.values({c: row if c.row.kind == "compute" else shares[c.row] for c in cuts}) for row in self.rows]
        self.values = np.stack([*each, *each], axis=1)  # terms x rows x kinds; each row twice, see `cheapest`
        self.top = self.values.max(axis=2)

    def cheapest(self, known: float = inf) -> tuple[int, ...] | None:
        """Segments, or None if one row for all, or what takes `known` seconds, is nearly as cheap."""
        number = len(self.rows)
        # the first half may change its row from part to part, the second keeps it
        state: State = (np.zeros(2 * number), np.zeros((2 * number, self.rows.shape[1])), np.zeros((2 * number, self.rows.shape[1])))
        came: list[npt.NDArray[np.int64]] = []
        for part, events in enumerate(self.by_part):
            if part:
                state, source = self._over(part, state)
                came.append(source)
            state = self._run(events, *state)
        end = _flushed(*state)
        if end[:number].min() >= min(end[number:].min(), known) * (1 - WORTH / 2):
            return None
        path = [int(end[:number].argmin())]
        for source in reversed(came):
            path.append(int(source[path[-1]]))
        path.reverse()
        return numbered(np.cumsum([0, *(a != b for a, b in pairwise(path))]).tolist())

    def _run(self, events: list[Event], cost: Array, forward: Array, backward: Array) -> State:
        number, values, top = self.table.number, self.values, self.top
        ahead: list[int] = []  # terms that are still to be added to the pending compute
        back: list[int] = []
        for event in events:
            step = event.step
            for c in step.communication:
                term = number(c.term)
                if c.cuts or c.direction == "synchronise":
                    cost = cost + top[term]
                if c.direction == "forward" and c.cuts:
                    cost = cost + (forward + values[ahead].sum(axis=0)).max(axis=1)
                    forward, ahead = np.zeros_like(forward), []
                elif c.direction == "backward" and c.cuts:
                    cost = cost + (backward + values[back].sum(axis=0)).max(axis=1)
                    backward, back = np.zeros_like(backward), []
                elif c.direction != "synchronise":
                    (ahead if c.direction == "forward" else back).append(term)
            if step.forward is not None:
                ahead.append(number(step.forward))
            if step.backward is not None:
                back.append(number(step.backward))
            if step.memory is not None and self.prices is not None:
                cost = cost + values[number(step.memory)] @ self.prices
        return cost, forward + values[ahead].sum(axis=0), backward + values[back].sum(axis=0)

    def _over(self, part: int, state: State) -> tuple[State, npt.NDArray[np.int64]]:
        """Into a part: with the same row, or from another one over the border before it. Where each row comes from, too."""
        cost, forward, backward = (values.copy() for values in state)
        here = np.arange(len(self.rows))
        stay = _flushed(*state)[: len(here)]
        over = stay[:, None] + self._recuts(part)
        source = over.argmin(axis=0)
        changed = np.flatnonzero((source != here) & (over[source, here] < stay))
        cost[changed] = over[source[changed], changed]
        forward[changed], backward[changed] = 0.0, 0.0
        here[changed] = source[changed]
        return (cost, forward, backward), here

    def _recuts(self, part: int) -> Array:
        """Rows x rows: seconds to cut again what crosses the border before a part."""
        crossing = {c.what: None for events in self.by_part[part:] for e in events for c in e.before if c.made < part}
        terms = [c.term for what in crossing for c in self.untied.recut(what, 0, 1).communication]
        total = np.zeros((len(self.rows), len(self.rows)))
        for term in terms:
            total += self._between(term)
        return total

    def _between(self, term: Term) -> Array:
        total = np.zeros((len(self.rows), len(self.rows)))
        for piece in term.pieces:
            value = np.zeros((*total.shape, self.rows.shape[1])) + np.asarray(piece.const)
            for cut, slope in piece.slopes:
                part = self.rows * np.asarray(slope)
                value += part[None, :] if cut.row.segment else part[:, None]
            total = np.maximum(total, value.max(axis=2))
        return total


def _flushed(cost: Array, forward: Array, backward: Array) -> Array:
    total: Array = cost + forward.max(axis=1) + backward.max(axis=1)
    return total


def _around(row: Vector, sizes: Vector) -> Array:
    """The row, and steps from it towards and away from all work on one kind."""
    found = [row]
    for kind in range(len(sizes) - (len(sizes) == 2)):  # of two kinds, one gets what the other loses
        everything = np.where(np.arange(len(sizes)) == kind, 1.0 / sizes, 0.0)
        for away in (*AWAY, *(-a for a in AWAY)):
            moved = row + away * (everything - row)
            if (moved > -1e-12).all():
                found.append(np.clip(moved, 0.0, None))
    return np.array(found)
