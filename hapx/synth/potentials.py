"""A sharper bound of the rest of a program: what every live tensor adds to it, by where it is.

The tables of `hapx.synth.relaxation` follow one value at a time: what the others cost is in none of them, and what several parameters that are used
again cost may not be added up. Here all tensors count at once, each with a part of what is known. For every weight w (as there), level k and live
tensor v there is a potential M_k(v, p) by the placement p, and there is a constant, so that

    H_w(rest of k) >= C_k + sum over live v of M_k(v, p_v).

Backward over the steps: with B(c) what a choice c costs and the potentials of its results, and A_i(c, p) what it costs to have operand i where c
needs it and the potential that i has after that,

    min over c of ( B(c) + sum_i A_i(c, p_i) )  >=  sum_i min over c of ( B_i(c) + A_i(c, p_i) )      for any B_i(c) with sum_i B_i(c) = B(c).

The parts B_i are those by which all operands say the same of a choice, given what it costs to come to each placement. That is F, the same recursion
forward over the steps, where results and operands that stay live share what is known. Backward and forward in turns, the bound rises as in min-sum
diffusion (Werner 2007, "A linear programming approach to max-sum problem"; one after the other as in Kolmogorov 2006, "Convergent tree-reweighted
message passing for energy minimization"). Such bounds for best-first search: Ihler et al. 2012, "Join-graph based cost-shifting schemes".

Whatever F is, what is found backward is a bound. So F of the last search, at other shares, is where the next one begins: a round is enough then,
where six are needed from nothing. After phases that a choice of its own ends the weights are the same here as before.

Of equal layers the first and the last ones are computed. Where M_k + C_k >= M_k' + C_k' + D, k' one period after k, the same is a bound one period
before k, and so on: the cheapest way through a layer to what costs D more costs D more. So the layers between have the potentials of the one after
them, plus D.

Invariant: never more than the true cost of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import add
from typing import NamedTuple

import numpy as np

from hapx.cost.edges import Array, Mask, Numbers
from hapx.synth.effect import Vector
from hapx.synth.needs import Groups, Need
from hapx.synth.relaxation import Relaxation
from hapx.synth.tables import TensorTable, bits

ROUNDS = 16  # backward and forward, at most
GAIN = 0.1  # part of what is left to a program that is known by which a round must raise the bound, or it is the last one
SLIGHT = 1e-3  # the same of the bound, where no program is known
ROUNDING = 1e-12  # of the bound: more than rounding adds to sums of potentials
FIRST, LAST = 2, 3  # repetitions that are computed; those between the first and the last are told by them
FAR = 100.0  # times the bound: what stands in parts of costs for what cannot be
MANY = 24  # rows of which the least is found by halves


def least(cost: Array) -> Array:
    """(need, row, weights) -> (need, weights): the least of all rows. Of many by halves, whose numbers lie side by side: four times as fast."""
    while (rows := cost.shape[1]) > MANY:
        half = rows // 2
        halved = np.minimum(cost[:, :half], cost[:, half : 2 * half])
        if rows % 2:
            np.minimum(halved[:, 0], cost[:, -1], out=halved[:, 0])
        cost = halved
    found: Array = cost.min(axis=1)
    return found


class Tracked(NamedTuple):
    """A tensor that is live before a level. wide: it was used before, and the next use is not the last: its rows are the sets of placements of
    `Outline.sets`. Else they are single placements, of which the best one counts."""

    table: TensorTable
    wide: bool


class Read(NamedTuple):
    """An operand of a step. prices: (need, row, weights), of having it where it is needed. Afterwards: `members`, (row, placement), where the next
    use is the last one; `following`, (need, row) -> row, where it is not; neither where there is none."""

    shift: int
    need: Need
    prices: Array
    members: Mask | None = None
    following: Numbers | None = None
    groups: Groups | None = None  # of `following`, or of the placements of each row

    @property
    def live(self) -> bool:
        """Whether there is a next use."""
        return self.members is not None or self.following is not None


class Store(NamedTuple):
    """A parameter that a step is the first to use, and not the last. prices: (choice, way to store it, weights). ways: their placements. following:
    (choice, way) -> row; None where single placements count afterwards."""

    shift: int
    prices: Array
    needs: Numbers
    ways: Numbers
    following: Numbers | None


class Local(NamedTuple):
    """A step. base: (choice, weights), without what stores cost. results: where they have their bits, and per choice the placement."""

    base: Array
    reads: tuple[Read, ...]
    stores: tuple[Store, ...]
    results: tuple[tuple[int, Numbers], ...]


class Potentials:
    """The bound of a problem at the prices and shares of a relaxation, once it is refined."""

    def __init__(self, relaxation: Relaxation):
        self.relaxation, self.problem, self.outline = relaxation, relaxation.problem, relaxation.outline
        self.weights, self.depth = len(relaxation.weights), len(self.problem.steps)
        self._live = self._tracked()
        self._steps: dict[int, Local] = {}
        # by class of steps, slot, and whether rows are sets
        self._groups: dict[tuple[int, int, bool, bool], Groups] = self.problem.groups
        self._period = {level: period for start, stop, period in self._middles() for level in range(start, stop)}
        self._after: list[dict[int, Array]] = [{} for _ in range(self.depth + 1)]  # M, per level by where tensors have their bits
        self._kind = relaxation.moves.capacity is None  # F of seconds says nothing of bytes
        # F; at first nothing is known of it
        self._before = self.problem.forward.get(self._kind) or [
            {at: np.zeros((self._size(*own), self.weights)) for at, own in live.items()} for live in self._live
        ]
        self._made: dict[int, tuple[Array, list[Array]]] = {}  # B, and A of each operand
        self._constants = np.zeros((self.depth + 1, self.weights))  # C
        self._scale = 1.0  # seconds: about the bound
        self._forget()

    def refine(self, start: int, limit: float) -> None:
        """Backward and forward, until that raises the bound at the start by little of what is left to the limit. start: what is available there."""
        for at, (table, wide) in self._live[0].items():
            given = np.full((self._size(table, wide), self.weights), np.inf)
            given[self._chosen(table, wide, start >> at & table.full)] = 0.0
            self._before[0][at] = given
        self._backward()
        known = max(self.rest(0, start))
        for _ in range(ROUNDS if known < np.inf else 0):  # else there is no program
            self._scale = max(known, limit if limit < np.inf else 0.0)
            self._forward()
            self._backward()
            before, known = known, max(self.rest(0, start))
            if known >= limit or known - before <= (GAIN * (limit - known) if limit < np.inf else SLIGHT * known):
                break
        self.problem.forward[self._kind] = self._before

    def rest(self, level: int, place: int) -> Vector:
        """Per weight vector, a lower bound of the cost of steps `level` and later when `place` is available."""
        known = self._at[level]
        if place not in known:
            total = self._least[level]
            for at, (table, wide) in self._live[level].items():
                total = tuple(map(add, total, self._of(level, at, table, wide, place >> at & table.full)))
            known[place] = total
        return known[place]

    def choices(self, level: int, place: int) -> Array:
        """(choice, weights) -> the same of a program that makes a choice of step `level`."""
        step, reads = self._step(level), place & self.problem.steps[level].reads
        own = self._by_choice[level].get(reads)
        if own is None:
            own, used = self._made.get(level) or self._make(level)
            for read, known in zip(step.reads, used, strict=True):
                table, wide = self._live[level][read.shift]
                found = known[:, self._chosen(table, wide, reads >> read.shift & table.full)]
                own = own + (found.max(axis=1) if wide else found.min(axis=1)).take(read.need.of, axis=0)
            self._by_choice[level][reads] = own
        others, read_here = self._least[level + 1], {read.shift for read in step.reads}
        for at, (table, wide) in self._live[level].items():
            if at not in read_here:
                others = tuple(map(add, others, self._of(level + 1, at, table, wide, place >> at & table.full)))
        total: Array = own + np.array(others)
        return total

    # -- looking up -------------------------------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """What was looked up in tables that are no more."""
        self._least: list[Vector] = list(map(tuple, (self._constants - ROUNDING * self._scale).tolist()))
        self._at: list[dict[int, Vector]] = [{} for _ in range(self.depth + 1)]
        self._vectors: list[dict[tuple[int, int], Vector]] = [{} for _ in range(self.depth + 1)]
        self._by_choice: list[dict[int, Array]] = [{} for _ in range(self.depth)]

    def _of(self, level: int, at: int, table: TensorTable, wide: bool, mask: int) -> Vector:
        known = self._vectors[level].get((at, mask))
        if known is None:
            rows = self._after[level][at][self._chosen(table, wide, mask)]
            known = self._vectors[level][at, mask] = tuple((rows.max(axis=0) if wide else rows.min(axis=0)).tolist())
        return known

    def _chosen(self, table: TensorTable, wide: bool, mask: int) -> Numbers:
        """The rows of a mask: of sets those that include it, any of which is a bound; else its placements."""
        return self.outline.including(table, mask, wide)[0] if wide else np.array(list(bits(mask)))

    # -- backward and forward ---------------------------------------------------------------------------------------------------------------------

    def _backward(self) -> None:
        """M and C from F."""
        added: dict[int, Array] = {}
        self._made.clear()
        for level in range(self.depth - 1, -1, -1):
            if level in self._period and self._repeat(level, added):
                continue
            step, before = self._step(level), self._before[level]
            own, used = self._make(level)
            after = {at: self._after[level + 1][at] for at in self._live[level] if at in self._live[level + 1]}
            self._constants[level] = self._constants[level + 1]
            if used:
                parts = [
                    self._finite(least(before[read.shift] + known)).take(read.need.of, axis=0) for read, known in zip(step.reads, used, strict=True)
                ]
                part = (own + sum(parts)) / len(used)
                for read, known, of_read in zip(step.reads, used, parts, strict=True):
                    after[read.shift] = (read.need.least(part - of_read)[:, None] + known).min(axis=0)
            else:
                self._constants[level] += own.min(axis=0)
            self._after[level] = after
        self._forget()

    def _repeat(self, level: int, added: dict[int, Array]) -> bool:
        """M and C of a level from those one period later, if that is possible. added: by level, what its bound is above that of one period later."""
        later, moved = self._one_period_later(level)
        if later not in added:
            after, there = self._one_period_later(later)
            mine, other = self._after[later], self._after[after]
            with np.errstate(invalid="ignore"):
                more = [rows - other[there.get(at, at)] for at, rows in mine.items()]  # not a number where neither can be
            added[later] = self._constants[later] - self._constants[after] + sum([np.where(np.isnan(m), np.inf, m).min(axis=0) for m in more])
        if not np.isfinite(added[later]).all():
            return False
        added[level] = added[later]
        self._after[level] = {at: self._after[later][moved.get(at, at)] for at in self._live[level]}
        self._constants[level] = self._constants[later] + added[level]
        return True

    def _forward(self) -> None:
        """F from M: what it costs to come to each placement, of each of the tensors that a step leaves a part."""
        for level in range(self.depth):
            if level in self._period:  # of repetitions that are not computed as one period before
                _, moved = self._one_period_later(level + 1 - self._period[level])
                known = self._before[level + 1 - self._period[level]]
                self._before[level + 1] = {moved.get(at, at): rows for at, rows in known.items()}
                continue
            step, known, live = self._step(level), self._before[level], self._live[level + 1]
            before = {at: rows for at, rows in known.items() if at in live}
            total, kept, stored = step.base, [], []
            for read, used in zip(step.reads, self._made[level][1], strict=True):
                come = known[read.shift] + read.prices
                of_read = self._finite(least(known[read.shift] + used if read.live else come)).take(read.need.of, axis=0)
                if read.live:
                    kept.append((read, come, of_read))
                total = total + of_read
            for store in step.stores:
                of_store = self._finite(self._storing(level, store).min(axis=1))
                stored.append((store, of_store))
                total = total + of_store
            results = [(at, gives, self._after[level + 1][at].take(gives, axis=0)) for at, gives in step.results]
            part = (total + sum([self._finite(rest) for _, _, rest in results])) / max(1, len(kept) + len(stored) + len(results))
            for at, gives, rest in results:
                before[at] = self._nowhere(level + 1, at)
                np.minimum.at(before[at], gives, part - self._finite(rest))
            for read, come, of_read in kept:
                before[read.shift] = self._moved(level + 1, read, read.need.least(part - of_read)[:, None] + come)
            for store, of_store in stored:
                before[store.shift] = self._placed(level + 1, store, (part - of_store)[:, None] + store.prices)
            self._before[level + 1] = before

    def _make(self, level: int) -> tuple[Array, list[Array]]:
        made = self._made[level] = self._own(level), [self._used(level, read) for read in self._step(level).reads]
        return made

    def _own(self, level: int) -> Array:
        """(choice, weights) -> what a choice costs, and its results' potentials; B."""
        step, after = self._step(level), self._after[level + 1]
        total = step.base
        for at, gives in step.results:
            total = total + after[at].take(gives, axis=0)
        for store in step.stores:
            total = total + self._storing(level, store).min(axis=1)
        return total

    def _used(self, level: int, read: Read) -> Array:
        """(need, row, weights) -> what it costs to have an operand where it is needed, and what is known of it after that; A."""
        if not read.live:
            return read.prices
        after = self._after[level + 1][read.shift]
        if read.following is not None:
            return read.prices + after.take(read.following, axis=0)
        assert read.members is not None and read.groups is not None, "it is live"
        best = read.groups.least(after, np.full((len(read.members), self.weights), np.inf))
        return read.prices + np.minimum(best, after.take(read.need.at, axis=0)[:, None])

    def _storing(self, level: int, store: Store) -> Array:
        """(choice, way to store it, weights), with what is known after that."""
        after = self._after[level + 1][store.shift]
        rest = after.take(store.following, axis=0) if store.following is not None else np.minimum(after[store.ways], after[store.needs][:, None])
        return store.prices + rest

    def _moved(self, level: int, read: Read, cost: Array) -> Array:
        """(row, weights) of an operand before the next level, by need and row before."""
        found = self._nowhere(level, read.shift)
        if read.following is not None and read.groups is not None:
            return read.groups.least(cost, found)
        assert read.members is not None, "it is live"
        np.minimum.at(found, read.need.at, cost.min(axis=1))
        return np.minimum(found, np.where(read.members[:, :, None], cost.min(axis=0)[:, None], np.inf).min(axis=0))  # type: ignore[no-any-return]

    def _placed(self, level: int, store: Store, cost: Array) -> Array:
        """As `_moved`, of a parameter."""
        found = self._nowhere(level, store.shift)
        if store.following is not None:
            np.minimum.at(found, store.following, cost)
            return found
        np.minimum.at(found, store.ways, cost.min(axis=0))
        np.minimum.at(found, store.needs, cost.min(axis=1))
        closed = self.outline.inside(self._live[level][store.shift].table)[: len(found), :, None]
        return np.where(closed, found[:, None], np.inf).min(axis=0)  # type: ignore[no-any-return]

    def _nowhere(self, level: int, at: int) -> Array:
        return np.full((self._size(*self._live[level][at]), self.weights), np.inf)

    def _finite(self, cost: Array) -> Array:
        """Parts of costs may be any number; what cannot be is far."""
        return np.where(np.isfinite(cost), cost, FAR * self._scale)

    def _size(self, table: TensorTable, wide: bool) -> int:
        return len(self.outline.sets(table)) if wide else len(table.placements)

    # -- what does not change ---------------------------------------------------------------------------------------------------------------------

    def _middles(self) -> Iterator[tuple[int, int, int]]:
        """Start and end of levels whose potentials are those of a period later, and that period."""
        start = free = 0
        for period, run in groupby(map(self._alike, range(self.depth))):
            stop = start + len(list(run))
            if period:
                begin = max(start + FIRST * period, free)
                end = begin + (stop - (LAST - 1) * period - begin) // period * period
                if begin < end:
                    yield begin, end, period
                    free = stop + period
            start = stop

    def _alike(self, level: int) -> int:
        """The period of a step that does what the one a period later does, with tensors that are used alike; else 0."""
        if not self.outline.later(self.relaxation.repetition, self.depth)[level].taken:
            return 0
        later, moved = self._one_period_later(level)
        live, there = self._live[level], self._live[later]
        same = len(live) == len(there) and all((o := there.get(moved.get(at, at))) and o.table is t and o.wide == w for at, (t, w) in live.items())
        return later - level if same else 0

    def _one_period_later(self, level: int) -> tuple[int, Mapping[int, int]]:
        """That level, and where what is live has its bits there, where that is elsewhere."""
        found = self.outline.later(self.relaxation.repetition, self.depth)[level]
        return found.level, found.moved or {}

    def _step(self, level: int) -> Local:
        if level not in self._steps:
            self._steps[level] = self._local(level)
        return self._steps[level]

    def _tracked(self) -> list[dict[int, Tracked]]:
        """Per level, what is live before it and read again, by where it has its bits."""
        found: list[dict[int, Tracked]] = [{}]
        following: dict[str, tuple[int, int]] = {}
        for level in range(self.depth - 1, -1, -1):
            step = self.problem.steps[level]
            following |= {name: (level, slot) for slot, name in enumerate(step.tensors)}
            live = {}
            for name, table, at in step.live:
                more = self.outline.again[following[name]] is not None
                live[at] = Tracked(table, more if table.stored else self.outline.values[level][at].several)
            found.append(live)
        return found[::-1]

    def _local(self, level: int) -> Local:
        step, first = self.problem.steps[level], self.outline.first[level]
        priced = self.relaxation.priced
        weighted = priced.weighted(step.kind, first)
        base = weighted.base if weighted.cuts is None else weighted.base + weighted.cuts.after
        live, later = self._live[level], self._live[level + 1]
        reads, stores = [], []
        for k, (slot, at, needs) in enumerate(zip(step.kind.slots, step.slot_shifts, weighted.needs, strict=True)):
            if slot.fixed is not None:
                continue
            table, after = slot.table, later[at] if slot.live else None
            if first[k]:
                if after is not None:
                    prices = priced.first(table, needs)
                    least = prices.min(axis=0)
                    base = base - np.where(np.isfinite(least), least, 0.0)
                    ways = np.array([kept.placement for kept in table.stored])
                    following = self.outline.afterwards(table)[ways].T[needs] if after.wide else None
                    stores.append(Store(at, np.ascontiguousarray(prices.transpose(1, 0, 2)), needs, ways, following))
                continue
            wide = live[at].wide
            rows = self._size(table, wide)
            several = after is not None and after.wide
            need = self.outline.need(step.kind, k)
            prices = priced.reached(table, slice(rows), need.at)
            if after is None:
                reads.append(Read(at, need, prices))
                continue
            key = id(step.kind), k, wide, several
            if several:
                following = self.outline.following(step.kind, k)[need.first, :rows]
                self._groups[key] = self._groups.get(key) or Groups.of(following)
                reads.append(Read(at, need, prices, following=following, groups=self._groups[key]))
            else:
                members = self.outline.inside(table)[:rows] if wide else np.eye(rows, dtype=bool)
                self._groups[key] = self._groups.get(key) or Groups.inside(members)
                reads.append(Read(at, need, prices, members, groups=self._groups[key]))
        results = tuple([(at, g) for r, at, g in zip(step.kind.results, step.result_shifts, weighted.gives, strict=True) if r.live])
        return Local(base, tuple(reads), tuple(stores), results)
