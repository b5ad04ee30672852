"""The inter-operator program: layers to stages, stages to submeshes, with the number of micro-batches and the schedule.

In: classes of layers, a `Space` of submeshes, `Prices` per number of micro-batches, disciplines. Out: the cheapest `Pipeline`s in the sense of
`hapx.stages.costs`, proven to be within `epsilon` of the best, and the bound that proves it.

Asking the planner is what takes time, so pairs of layers and submesh are asked only when a pipeline needs them: search with bounds in place of
answers that are not known; if the cheapest pipeline has such a stage, ask for it and search again; if not, no pipeline is cheaper, since bounds only
understate. So every pair that is asked belongs to a pipeline that might be the best. First the same is done with estimates in place of bounds
(`hapx.stages.book`): that finds a good pipeline with few asks, and then only what might be better than it by more than `epsilon` is looked at.

    Alpa (OSDI'22, 5.2)                              here
    F(s, k, d; t_max), one t_max after the other     `hapx.stages.frontier`: all at once, as a bound
    its optimum, with what crosses and Pareto sets   `hapx.stages.search`
    n t_max >= best: stop                            t_max is at most limit / n; likewise widths of stages
    gap between candidates of t_max                  `epsilon`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from hapx.stages.book import Book, Floats
from hapx.stages.costs import ONE_F_ONE_B, Assigned, Discipline, Pipeline, Prices, latency
from hapx.stages.frontier import POSITIONS, Frontier
from hapx.stages.search import Choice, Label, Searcher
from hapx.stages.space import Space

EPSILON = 0.005  # what the simulator sees differently is more than that
GUIDED = 0.02  # while estimates lead, which are no better than that
PATIENCE = 2_000  # suffixes that are looked at with a bound that knows few positions
MARGIN = 0.1  # further pipelines that are returned are at most so much slower


@dataclass(frozen=True)
class Solution:
    """pipelines: best first; empty where nothing fits. bound: no pipeline is faster (seconds). asked: calls of `ask`, of `pairs` that there are.
    searches, labels: how often the layers were searched, and suffixes of pipelines that were looked at."""

    pipelines: tuple[Pipeline, ...]
    bound: float
    asked: int
    pairs: int
    searches: int
    labels: int

    @property
    def gap(self) -> float:
        """What was proven of the best pipeline: it is at most this much slower than the fastest, as a share of its time."""
        return 1 - self.bound / self.pipelines[0].time if self.pipelines else 0.0


def solve(
    layers: Sequence[Hashable],
    space: Space,
    prices: Sequence[Prices],
    disciplines: Sequence[Discipline] = (ONE_F_ONE_B,),
    *,
    epsilon: float = EPSILON,
    prove: bool = True,
    most_asks: int | None = None,
    below: float = math.inf,
    keep: int = 5,
    watch: Callable[[int, float, float], None] | None = None,
) -> Solution:
    """The cheapest pipelines.

    Args:
        layers: class of each layer; runs of equal classes cost the same.
        prices: one per number of micro-batches that is considered.
        epsilon: nothing is looked at that could be better by a smaller share than that. 0: the optimum.
        prove: whether to ask until the best pipeline is proven; else asking ends where estimates lead to nothing better by `GUIDED`, and
            `Solution.gap` says what is known. (`python -m benchmarks.interop --prove` shows how many asks it takes and what it finds.)
        most_asks: with as many asks nothing more is asked, unless no pipeline was found yet (None: no such end).
        below: seconds; slower pipelines are of no interest.
        keep: pipelines to return: the best, and of each (micro-batches, discipline, number of stages) the best of what was asked.
        watch: called after every ask with (asks, seconds of the best pipeline or inf, lower bound or 0).
    """
    return _Solver(layers, space, prices, disciplines, epsilon, prove, most_asks, below, watch).solve(keep)


@dataclass(eq=False)
class _Run:
    """One number of micro-batches and one discipline. best: of the last search, made at version `seen` of the book, with its seconds."""

    book: Book
    discipline: Discipline
    best: Label | None = None
    seen: int = -1
    seconds: float = 0.0


class _Solver:
    def __init__(
        self,
        layers: Sequence[Hashable],
        space: Space,
        prices: Sequence[Prices],
        disciplines: Sequence[Discipline],
        epsilon: float,
        prove: bool,
        most_asks: int | None,
        below: float,
        watch: Callable[[int, float, float], None] | None,
    ):
        self.space, self.epsilon, self.prove, self.most_asks, self.watch = space, epsilon, prove, most_asks, watch
        self.books = [Book(layers, space, p) for p in prices]
        for book in self.books:
            book.others = tuple(b for b in self.books if b is not book)
        self.runs = [_Run(book, d) for book in self.books for d in disciplines]
        self.best: Pipeline | None = None
        self.below = below
        self.searches = self.labels = 0

    def solve(self, keep: int) -> Solution:
        self._explore(estimates=True)
        self._combine(1)
        unexplored = self._explore(estimates=False)
        found = self._combine(keep)
        bound = min(unexplored, self._limit())
        pairs = sum(b.num_pairs for b in self.books)
        return Solution(found, bound if found else math.inf, self._asks(), pairs, self.searches, self.labels)

    def _asks(self) -> int:
        return sum(b.version for b in self.books)

    def _limit(self, estimates: bool = False) -> float:
        """Seconds that a pipeline must stay below to be of interest."""
        share = max(self.epsilon, GUIDED) if estimates else self.epsilon
        return min(self.best.time if self.best is not None else math.inf, self.below) / (1 + share)

    def _explore(self, estimates: bool) -> float:
        """Asks until the cheapest pipeline has answers only. Returns a lower bound of what was not explored: inf where everything was."""
        heap = [(value, i) for i, run in enumerate(self.runs) if (value := self._search(run, estimates)) < self._limit(estimates)]
        heapify(heap)
        while heap:
            value, i = heappop(heap)
            run = self.runs[i]
            if value >= self._limit(estimates):
                return math.inf
            if run.seen != run.book.version:  # asked meanwhile for another discipline
                value = self._search(run, estimates)
            else:
                assert run.best is not None
                unknown = [c for c in run.best.choices() if not run.book.real[c.move.shape, c.start, c.stop]]
                if unknown and self._is_enough(estimates):
                    return value
                run.book.prices.prepare([self.space.shapes[c.move.shape] for c in unknown])
                for c in unknown:
                    if run.book.ask(c.move.shape, c.start, c.stop) and self.watch is not None:
                        self.watch(self._asks(), self.best.time if self.best is not None else math.inf, 0.0 if estimates else value)
                self._offer(run, run.best.choices(), exact=not unknown)
                if not unknown:
                    continue
                value = self._search(run, estimates)
            if value < self._limit(estimates):
                heappush(heap, (value, i))
        return math.inf

    def _is_enough(self, estimates: bool) -> bool:
        """Whether no more is to be asked; never before there is a pipeline."""
        spent = self.most_asks is not None and self._asks() >= self.most_asks
        return self.best is not None and (spent or not (estimates or self.prove))

    def _search(self, run: _Run, estimates: bool) -> float:
        """The least time of a run's pipelines that are of interest, with bounds (or estimates) for what is not known; inf if there is none."""
        found = self._cheapest(run, run.book.arrays(estimates), self._limit(estimates))
        run.seen = run.book.version
        run.best = found[0][1] if found else None
        run.seconds = found[0][0] if found else run.seconds
        return found[0][0] if found else math.inf

    def _cheapest(self, run: _Run, arrays: tuple[Floats, Floats], limit: float, keep: int = 1) -> list[tuple[float, Label]]:
        """The cheapest pipeline of a run; with `keep` > 1, of several numbers of stages."""
        for positions, patience in ((POSITIONS, PATIENCE), (len(run.book.alike), math.inf)):
            frontier = Frontier(run.book, run.discipline, *arrays, limit, positions)
            searcher = Searcher(frontier)
            found = searcher.cheapest(keep > 1, keep, patience if len(frontier.positions) == positions else math.inf, run.seconds)
            self.searches, self.labels = self.searches + 1, self.labels + searcher.labels
            if found is not None:
                return found
        raise AssertionError("a search without end")

    def _offer(self, run: _Run, choices: Sequence[Choice], exact: bool) -> None:
        """Keeps a pipeline if it is the best so far; unless `exact`, with the quickest answers that fit in place of the options chosen."""
        made = self._pipeline(run, choices, exact)
        if made is not None and (self.best is None or made.time < self.best.time):
            self.best = made

    def _pipeline(self, run: _Run, choices: Sequence[Choice], exact: bool) -> Pipeline | None:
        """From the front; None where answers do not fit."""
        n, stages = run.book.prices.micro_batches, []
        devices = self.space.lay([c.move for c in reversed(choices)])[::-1]
        for i, c in enumerate(choices):
            flight = run.discipline.in_flight(n, len(choices) - i)
            answers = run.book.answers[c.move.shape, c.start, c.stop]
            fitting = [answers[c.option]] if exact else [a for a in answers if a.most_in_flight >= flight]
            if not fitting:
                return None
            answer = min(fitting, key=lambda a: (a.micro, a.iteration))
            stages.append(Assigned(c.start, c.stop, self.space.shapes[c.move.shape], devices[i], answer, flight, c.crossing))
        time = latency(n, run.discipline, [(s.answer.micro, s.crossing, s.answer.iteration) for s in stages])
        return Pipeline(time, n, run.discipline, tuple(stages))

    def _combine(self, keep: int) -> tuple[Pipeline, ...]:
        """The best pipeline, then the best of every run and number of stages, out of what was asked (which may be better than what led to asking)."""
        if self.best is None:
            return ()
        found, limit = [self.best], self.best.time * (1 + (MARGIN if keep > 1 else 0))
        for run in self.runs:
            made = [self._pipeline(run, label.choices(), exact=True) for _, label in self._cheapest(run, run.book.asked_only(), limit, keep)]
            found += [p for p in made if p is not None]
        best = sorted(dict.fromkeys(found), key=lambda p: p.time)[:keep]
        self.best = best[0]
        return tuple(best)
