"""Alpa's F(s, k, d; t_max) for all s, k, d and a grid of t_max at once: a lower bound of what the layers before k cost.

    F(s, k, d; t_max) = min over submeshes that lead from d to d' and starts a < k, with periods of at most t_max, of
                        t(a, k, submesh; in flight at position s + 1) + least crossing + F(s + 1, a, d'; t_max);      F(s, 0, end) = 0

s stages lie behind layer k, on the devices that d has not; so s tells how many micro-batches each stage before keeps in flight (OSDI'22, equation 3,
from the other end: what is left are devices and layers at the front). Relaxed: what crosses to the stage behind is the least for any of its
shapes, so F needs no shape in its state; positions beyond the last that matters (or a limit) count as that one. `top` and `rest` are the least
largest period and the least largest seconds per iteration, each for itself.

A pipeline with n micro-batches whose front is not chosen yet, with sum c, largest period m and largest iteration u, ends at no less than

    c + max(u, rest) + min over the grid of F(.; t_j) + (n - 1) max(m, top, t_{j-1})

because a front whose largest period lies in (t_{j-1}, t_j] costs at least F(.; t_j). A coarse grid loosens the bound and loses no pipeline: unlike
Alpa's gap between candidates of t_max.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hapx.stages.book import Book, Floats, Ints
from hapx.stages.costs import ONE_WAY, Discipline

POSITIONS = 8  # where a search on them takes long it is made again on all
GRID = 8


class Frontier:
    """F, top and rest over the arrays `micro`, `iteration` of a book. Indices [state, position, t_max, layer]. limit: pipelines that take as long are
    of no interest. infinite: there is none of interest."""

    def __init__(self, book: Book, discipline: Discipline, micro: Floats, iteration: Floats, limit: float, positions: int = POSITIONS):
        self.book, self.space, self.n, self.discipline = book, book.space, book.prices.micro_batches, discipline
        self.micro, self.iteration, self.limit = micro, iteration, limit
        self.num_layers = book.num_layers
        self.crossing = book.least_crossing
        self.positions = self._positions(positions)
        self.least, self.update = self._least()
        self._trim(limit)
        self._first_pass()
        self.least_top = float(self.top[self.space.start, 0, -1])
        self.infinite = not np.isfinite(self.least_top) or self.n * self.least_top >= limit

    def below(self, limit: float) -> None:
        """Makes F for pipelines that take less than `limit`, which is at most the frontier's and may be lowered or raised again."""
        self.limit = limit
        self._trim(limit)
        self.bands = self._bands()
        self.grid, self.before = self._grid()
        self._second_pass()

    def position(self, behind: int) -> int:
        """Index of the position with `behind` stages behind it."""
        return min(behind, len(self.positions) - 1)

    def _positions(self, limit: int) -> Ints:
        """Micro-batches in flight per position, up to the last position whose stages may use other options than the one before, at most `limit`."""
        most = min(self.num_layers, self.space.cluster.num_devices)
        flights = np.array([self.discipline.in_flight(self.n, p + 1) for p in range(most)])
        limits = np.unique(self.book.fits[np.isfinite(self.micro)])
        classes = np.searchsorted(limits, flights)
        last = int(np.argmax(classes == classes[-1]))
        return flights[: min(last, limit - 1) + 1]

    def _least(self) -> tuple[Floats, Floats]:
        """The least seconds per micro-batch [shape, start + layers - stop, position, stop] and per iteration [shape, start + layers - stop, stop]
        of what fits. What minima are taken over comes first, as that is fastest."""
        layers, fits = self.num_layers, self.book.fits
        stops = np.arange(layers + 1)[None, :]
        starts = stops - layers + np.arange(layers)[:, None]
        valid, clipped = starts >= 0, np.maximum(starts, 0)
        size = (len(fits), len(self.positions), layers, layers + 1)
        seconds, updates = np.full(size, np.inf), np.full(self.micro.shape[:-1], np.inf)
        for option in range(fits.shape[-1]):  # few: quicker than to reduce over the last dim
            mine, fit = self.micro[..., option], fits[..., option]
            for p, flight in enumerate(self.positions.tolist()):
                np.minimum(seconds[:, p], np.where(fit >= flight, mine, np.inf), out=seconds[:, p])
            np.minimum(updates, np.where(fit >= self.positions[0], self.iteration[..., option], np.inf), out=updates)
        seconds = np.where(valid, seconds[:, :, clipped, stops], np.inf)
        return np.ascontiguousarray(seconds.swapaxes(1, 2)), np.where(valid, updates[:, clipped, stops], np.inf)

    def _trim(self, limit: float) -> None:
        """Per shape: seconds [start + width - stop, position, stop], where width is the longest run that may matter below the limit."""
        layers = self.num_layers
        useful = [np.nonzero((least[:, 0] < limit / self.n).any(axis=-1))[0] for least in self.least]
        self.width = [layers - int(u[0]) if len(u) else 0 for u in useful]
        self.seconds = [least[layers - w :] for least, w in zip(self.least, self.width, strict=True)]
        self.updates = [update[layers - w :] for update, w in zip(self.update, self.width, strict=True)]

    def _views(self, table: Floats) -> list[Floats]:
        """Per shape, of a table [state, ..., layers of padding + layers + 1]: [state, start, ..., stop] over the shape's window."""
        layers, (states, *inner, _), (first, *strides, last) = self.num_layers, table.shape, table.strides
        shapes, steps = [(states, w, *inner, layers + 1) for w in self.width], (first, last, *strides, last)
        return [as_strided(table[..., layers - w :], shape, steps, writeable=False) for w, shape in zip(self.width, shapes, strict=True)]

    def _first_pass(self) -> None:
        """top [state, position, layer] and rest [state, layer]: the same recursion with the largest in place of the sum."""
        layers, p = self.num_layers, len(self.positions)
        # positions, the last of them again, which is what comes after it, and the iteration
        table = np.full((len(self.space.states), p + 2, 2 * layers + 1), np.inf)
        views = self._views(table[:, 1:])
        self.periods: dict[tuple[int, int], Floats] = {}
        for state, moves in enumerate(self.space.moves):
            link, mine = self.space.links[state], np.full((p + 1, layers + 1), np.inf)
            if self.space.ends[state]:
                mine[:, 0] = 0.0
            for move in moves:
                if not self.width[move.shape]:
                    continue
                if (move.shape, link) not in self.periods:
                    period = self._period(move.shape, link)
                    self.periods[move.shape, link] = np.concatenate([period, self.updates[move.shape][:, None]], axis=1)
                longest = np.maximum(self.periods[move.shape, link], views[move.shape][move.target])
                np.minimum(mine, np.minimum.reduce(longest), out=mine)
            own = table[state, :, layers:]
            own[:p], own[p], own[p + 1] = mine[:p], mine[p - 1], mine[p]
        self.top, self.rest = table[:, :p, layers:], table[:, -1, layers:]

    def _bands(self) -> list[tuple[int, int]]:
        """Per state, the layers [first, last) before which a pipeline of interest may have a boundary there."""
        layers = self.num_layers
        reached = np.zeros((len(self.space.states), layers + 1), dtype=np.bool_)
        reached[self.space.start, layers] = True
        within = {key: self._period(*key)[:, 0].T * self.n < self.limit for key in self.periods}
        bands = [(0, 0)] * len(reached)
        for state in reversed(range(len(reached))):
            useful = np.nonzero(reached[state] & (self.top[state, 0] * self.n < self.limit))[0]
            if not len(useful):
                continue
            bands[state] = first, last = int(useful[0]), int(useful[-1]) + 1
            for move in self.space.moves[state]:
                width = self.width[move.shape]
                if width:
                    found = within[move.shape, self.space.links[state]][first:last]
                    for stop in useful.tolist():
                        low = max(0, stop - width)
                        reached[move.target, low:stop] |= found[stop - first, low - stop + width :]
        return bands

    def _period(self, shape: int, link: int) -> Floats:
        crossing = self.crossing[shape, link]
        period: Floats = np.maximum(self.seconds[shape], ONE_WAY * crossing) if self.discipline.hides else self.seconds[shape] + crossing
        return period

    def _grid(self) -> tuple[Floats, Floats]:
        """Values of t_max, densest at the least one, and the lower end of each interval."""
        if self.n == 1:
            return np.array([np.inf]), np.zeros(1)
        known = np.isfinite(self.limit)
        most = self.limit / self.n if known else 4 * self.least_top
        grid = self.least_top + (most - self.least_top) * (np.arange(GRID) / (GRID - 1)) ** 2
        grid = grid if known else np.append(grid, np.inf)
        return grid, np.concatenate([[self.least_top], grid[:-1]])

    def _second_pass(self) -> None:
        """F [state, position, t_max, layer]."""
        layers, p = self.num_layers, len(self.positions)
        table = np.full((len(self.space.states), p + 1, len(self.grid), 2 * layers + 1), np.inf)  # the last position twice, as in the first pass
        views = self._views(table[:, 1:])
        costs: dict[tuple[int, int], Floats] = {}
        for state, moves in enumerate(self.space.moves):
            first, last = self.bands[state]
            link, mine = self.space.links[state], table[state, :p, :, layers + first : layers + last]
            if self.space.ends[state]:
                table[state, :, :, layers] = 0.0
            for move in moves:
                if not self.width[move.shape] or first == last:
                    continue
                if (move.shape, link) not in costs:
                    seconds = (self.seconds[move.shape] + self.crossing[move.shape, link])[:, :, None]
                    within = self._period(move.shape, link)[:, :, None] <= self.grid[:, None]
                    costs[move.shape, link] = np.where(within, seconds, np.inf)
                whole = costs[move.shape, link][..., first:last] + views[move.shape][move.target][..., first:last]
                np.minimum(mine, np.minimum.reduce(whole), out=mine)
            table[state, p] = table[state, p - 1]
        self.sums = table[:, :p, :, layers:]
