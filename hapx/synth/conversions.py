"""What conversions take at given shares, whatever memory costs: searches at several prices of memory ask for the same.

In: a Problem and shares. Out: the paths between two placements of a table that may be the best ones, with their effects. Computed when first asked
for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from hapx.cost.terms import Shares
from hapx.synth.effect import Effect, Event, Vector, cheaper, compose, nothing, plus
from hapx.synth.effect import effect as of_events
from hapx.synth.grid import Grid
from hapx.synth.problem import Problem
from hapx.synth.tables import Conversion, Edge, Path, TensorTable, Values

Ran = tuple[list[Event], Vector, Vector]  # what a communication runs between devices, and seconds of copies forward and backward


class Converted(NamedTuple):
    """A path, and what it takes. holds: what its communication makes stays; held: the number of the term of its bytes (-1: none)."""

    effect: Effect
    holds: bool
    held: int
    edges: Path
    conversion: Conversion


class Conversions:
    """Of a problem at given shares, with the part of the sums of gradients that counts in it now; and what else is known there."""

    def __init__(self, problem: Problem, shares: Shares):
        problem.grid = problem.grid or Grid(problem)
        self.grid: Grid = problem.grid
        self.shares, self.exposed = shares, problem.exposed
        self.values = Values(problem.terms, shares)
        self.edges = self.grid.edges.at(shares, self.exposed)
        self._nothing = nothing(problem.terms.kinds)
        self._edges: dict[int, Effect] = {}
        self._ran: dict[int, Ran] = {}
        self._between: dict[tuple[int, int, int], tuple[Converted, ...]] = {}
        self.priced: dict[Any, Any] = {}  # what searches found at prices of memory, see `hapx.synth.search`

    def between(self, table: TensorTable, source: int, target: int) -> tuple[Converted, ...]:
        """The paths between two placements that no other path covers. Paths that communicate and free alike keep the same bytes, so only the fastest
        of those are priced in full."""
        key = id(table), source, target
        if key not in self._between:
            found: list[Converted] = []
            for holds, paths in table.paths(source, target):
                candidates = [(reduce(compose, [self._edge(table, e) for e in path]), path, conversion) for path, conversion in paths]
                held = table.held(table.placements[target]) if holds else -1
                for effect, path, conversion in _fastest(candidates):
                    whole = self._whole(table, path, effect)._replace(memory=self.values[held])
                    found.append(Converted(whole, holds, held, path, conversion))
            self._between[key] = tuple(found)
        return self._between[key]

    def keeping(self, table: TensorTable, source: int, target: int) -> tuple[Converted, ...]:
        """A path for every way to keep bytes, where seconds do not count: without them."""
        found = []
        for holds, paths in table.paths(source, target):
            held = table.held(table.placements[target]) if holds else -1
            found.append(Converted(self._nothing._replace(memory=self.values[held]), holds, held, *paths[0]))
        return tuple(found)

    def _whole(self, table: TensorTable, edges: Path, effect: Effect) -> Effect:
        """Of a path; effect: of its edges, which of more than one is not quite that of all, as all copies come last."""
        if len(edges) == 1:
            return effect
        ran = [self._run(table, edge) for edge in edges]
        events = [event for own, _, _ in ran for event in own]
        return of_events(events, reduce(plus, [ahead for _, ahead, _ in ran]), reduce(plus, [back for _, _, back in ran]), self.values.zero)

    def _edge(self, table: TensorTable, edge: Edge) -> Effect:
        """The effect of one communication, without what it keeps in memory."""
        key = id(edge)
        if key not in self._edges:
            self._edges[key] = of_events(*self._run(table, edge), self.values.zero)
        return self._edges[key]

    def _run(self, table: TensorTable, edge: Edge) -> Ran:
        key = id(edge)
        if key not in self._ran:
            self._ran[key] = self._communication(table, edge)
        return self._ran[key]

    def _communication(self, table: TensorTable, edge: Edge) -> Ran:
        number = self.grid.number(table, edge.step.axis, edge.source, edge.target)
        moved = self.edges.moved(number, edge.step.form, edge.step.free) if number is not None else None
        if moved is None:
            terms = table.terms_of(edge)
            return self.values.events(terms, self.exposed), self.values[terms.forward], self.values[terms.backward]
        seconds, forward, backward, sums, cuts, copied = moved
        events: list[Event] = [("forward", seconds, cuts)] * forward
        events += [("synchronise" if sums else "backward", seconds, cuts)] * backward
        return events, *copied


def conversions(problem: Problem, shares: Shares) -> Conversions:
    """Those of the last question, if it was asked at the same shares."""
    known: Conversions | None = problem.conversions
    if known is None or known.exposed != problem.exposed or not _same(known.shares, shares):
        problem.forget()
        known = problem.conversions = Conversions(problem, shares)
    return known


def _same(a: Shares, b: Shares) -> bool:
    """Whether shares are equal."""
    return a.keys() == b.keys() and all(np.array_equal(own, b[cut]) for cut, own in a.items())


def _fastest(candidates: list[tuple[Effect, Path, Conversion]]) -> Iterator[tuple[Effect, Path, Conversion]]:
    """The paths whose time no other one covers."""
    if len(candidates) == 1:
        yield candidates[0]
        return
    kept: list[Effect] = []
    for candidate in sorted(candidates, key=lambda c: c[0].weight):
        if not any(cheaper(other, candidate[0], False) for other in kept):
            kept.append(candidate[0])
            yield candidate
