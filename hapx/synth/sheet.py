"""Where every price of the relaxed problem is, in a few long arrays: at given shares a few array operations make them all.

In: the placements, sets and paths of a problem's tables, the choices of its classes. Out: a `Sheet` of index arrays, made once per problem, and what
is `Priced` at one set of shares, as views per table and class. An array of prices is (entry, weights); a table's conversions are its rows (see
`Outline.sets`) times its placements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from hapx.cost.edges import Array, Mask, Numbers, mixed
from hapx.synth.alike import Alike, Block, numbered
from hapx.synth.effect import ROUNDING, Effect, at_most
from hapx.synth.grid import NONE, Grid, Prices, layout
from hapx.synth.outline import Outline
from hapx.synth.problem import Problem, StepClass
from hapx.synth.tables import TensorTable, bits
from hapx.theory.conversion import storages
from hapx.transposes import forward_collective

MANY = 2048  # choices times rows, from which on it is worth while to look for choices that can be left out
FEW = 32  # of the cheapest choices, with which others are compared to find those
EVERY = slice(None)
Chosen = slice | list[int] | Numbers
View = tuple[slice, tuple[int, ...]]  # entries, and their shape


@dataclass(frozen=True, slots=True)
class Cuts:
    """Choices with communication of their own that ends a phase (forward, backward, in both: their numbers), and what they do after it (choices x
    weights). pairs: kinds, where every pair of them has a weight; else 0. times: how many times all weights follow each other."""

    forward: Numbers
    backward: Numbers
    both: Numbers
    after: Array
    pairs: int
    times: int = 1

    @staticmethod
    def of(forward: Mask, backward: Mask, after: Array, pairs: int) -> Cuts:
        """Those of the choices of a class; forward, backward: whether each ends a phase there."""
        both = forward & backward
        one_way = ~both if pairs else np.zeros_like(both)
        return Cuts(np.flatnonzero(forward & one_way), np.flatnonzero(backward & one_way), np.flatnonzero(both), after, pairs)

    def part(self, chosen: Numbers) -> Cuts:
        """Those of some of the choices."""
        forward, backward, both = (np.flatnonzero(np.isin(chosen, numbers)) for numbers in (self.forward, self.backward, self.both))
        return Cuts(forward, backward, both, self.after[chosen], self.pairs, self.times)

    def repeated(self, times: int) -> Cuts:
        """With all weights so many times."""
        return Cuts(self.forward, self.backward, self.both, np.tile(self.after, times), self.pairs, times)

    def ends(self, count: int) -> Numbers:
        """Which phases each of `count` choices ends, as a number (0: none)."""
        found = np.zeros(count, dtype=np.int64)
        for number, own in enumerate((self.forward, self.backward, self.both), 1):
            found[own] = number
        return found

    def freed(self, rest: Array) -> Array:
        """(choice, ..., weights) -> that and what follows it: in a new phase another kind may be the slowest, so any weight of that direction is a
        bound."""
        total: Array = (self.after if rest.ndim == 2 else self.after[:, None]) + rest
        self.free(np.moveaxis(total, -1, 0))
        return total

    def free(self, total: Array) -> None:
        """The same in place, of (weights, choice, ...)."""
        every = total.reshape(self.times, -1, *total.shape[1:])  # views, as only the first dim is split
        grid = every[:, : self.pairs**2].reshape(self.times, self.pairs, self.pairs, *total.shape[1:])
        for own, axis in ((self.forward, 1), (self.backward, 2)):
            if len(own):
                grid[:, :, :, own] = np.maximum.reduce(grid[:, :, :, own], axis=axis, keepdims=True)
        if len(self.both):
            every[:, :, self.both] = np.maximum.reduce(every[:, :, self.both], axis=1, keepdims=True)


@dataclass(frozen=True, slots=True)
class Weighted:
    """A step class: weighted cost per choice (choices x weights), without `cuts.after`; the placement that each choice needs of a slot, and gives of
    a result."""

    base: Array
    needs: tuple[Numbers, ...]
    gives: tuple[Numbers, ...]
    cuts: Cuts | None

    def total(self, rest: Array) -> Array:
        """(choice, ..., weights) -> the bound before the step, conversions left out, by the bound after it."""
        return (self.base if rest.ndim == 2 else self.base[:, None]) + (rest if self.cuts is None else self.cuts.freed(rest))

    def least(self, then: Array, after: Array, offset: Array) -> Array:
        """(row, weights) -> the least over choices of `total`, where at least `then` of the choice and `after` of the row follow; `offset` is to be
        added to all three."""
        if len(self.base) * len(after) <= MANY:
            return self._least(then, after, offset)
        chosen = self._undominated(then)
        part = Weighted(self.base[chosen], (), (), None if self.cuts is None else self.cuts.part(chosen))
        return part._least(then[chosen] if len(then) > 1 else then, after, offset)

    def _least(self, then: Array, after: Array, offset: Array) -> Array:
        """Dims are turned, as loops over many rows are quicker than over few weights."""
        rest = np.maximum(then.T[:, :, None], np.ascontiguousarray(after.T)[:, None])
        if self.cuts is not None:
            rest = rest + (self.cuts.after + offset).T[:, :, None]
            self.cuts.free(rest)
        rest = np.add(rest, self.base.T[:, :, None], out=rest if rest.shape[1] == len(self.base) else None)
        found = np.minimum.reduce(rest, axis=1)
        return np.ascontiguousarray((found if self.cuts is None else found - offset[:, None]).T)

    def _undominated(self, then: Array) -> Numbers:
        """Choices among which the least is after every row: hardly any that costs no less than another one, before and after it, and ends the same
        phases. Most of them cost no less than the first few, from the cheapest on."""
        known = [self.base, np.broadcast_to(then, self.base.shape), *([] if self.cuts is None else [self.cuts.after])]
        costs = np.concatenate(known, axis=1)
        left = np.argsort(costs.sum(axis=1), kind="stable")  # of equal ones the first stays
        ends = self.cuts.ends(len(costs)) if self.cuts is not None else None
        found: list[int] = []
        while len(left) and len(found) < FEW:
            one = left[0]
            found.append(one)
            dearer: Mask = np.logical_and.reduce(costs[left] >= costs[one], axis=1)
            left = left[~dearer if ends is None else ~(dearer & (ends[left] == ends[one]))]
        return np.sort(np.concatenate([np.array(found, dtype=np.int64), left]))


class Sheet:
    """The index arrays of a problem."""

    def __init__(self, problem: Problem, grid: Grid, outline: Outline):
        self.outline, self.grid = outline, grid
        tables = {id(t): t for t in problem.tables.values()}.values()
        self.tables = sorted(tables, key=lambda t: len(t.placements))  # those of as many placements lie side by side
        self.classes = problem.classes
        steps = [c.step for kind in problem.classes for c in kind.choices]
        self.own = _views([(id(k), (len(k.choices),)) for k in problem.classes])  # per class and choice
        self.stored = _views([(id(t), (len(t.stored),)) for t in self.tables], len(steps))  # per table and placement in which it may be stored
        self.layout = layout([*steps, *(k.step for t in self.tables for k in t.stored)])
        # choices with communication of their own that ends a phase, in classes in which one does so in forward. (Gathers of sufficient factors run
        # backward; nearly every product may have them, and they matter too little to pay for.)
        self.freed: Mask = self.layout.cuts_forward | self.layout.cuts_backward
        for entries, _ in self.own.values():
            self.freed[entries] &= self.layout.cuts_forward[entries].any()
        classes = {key for key, (entries, _) in self.own.items() if self.freed[entries].any()}
        self.cutting = frozenset(level for level, step in enumerate(problem.steps) if id(step.kind) in classes)  # levels with such a class
        self._paths()
        self._conversions()
        self._first_uses(problem)
        self._choices(problem)
        self._needs(problem)
        self._held: tuple[Numbers, Numbers] | None = None
        self._ends: Mask | None = None

    # -- between placements -----------------------------------------------------------------------------------------------------------------------

    def _paths(self) -> None:
        """`between`: (source, target) of every table, of which most cost the same as another. `unlike`: of those that do not, the prices of edges for
        each order of the axes, which of them lead through shards of the inner axis, and the prices of those edges; `alike`: which one every entry
        is like."""
        paths = [self.grid.paths[id(t)] for t in self.tables]
        self.between = _views([(id(t), (len(t.placements),) * 2) for t in self.tables])
        orders = np.concatenate([p.orders for p in paths], axis=2)
        at = np.concatenate([self.between[id(t)][0].start + p.at(len(t.placements)) for t, p in zip(self.tables, paths, strict=True)])
        through = np.concatenate([p.shared[2:] for p in paths], axis=1)
        passed = np.zeros(orders.shape[2], dtype=np.int64)
        passed[at] = mixed(*through) + 1
        # two edges cost the same in either order
        ends = np.sort(orders, axis=1) if orders.shape[1] == 2 else orders
        one, self.alike = numbered(mixed(*(ends - NONE).reshape(-1, orders.shape[2]), passed))
        place = np.full(orders.shape[2], -1)
        place[at] = range(len(at))
        shared = np.flatnonzero(place[one] >= 0)
        self.unlike: tuple[Numbers, Numbers, Numbers] = orders[:, :, one], shared, through[:, place[one[shared]]]

    def held(self) -> tuple[Numbers, Numbers]:
        """Terms of what conversions leave in memory (-1: nothing; a gathered parameter may be freed), and per entry of `between` which of them."""
        if self._held is None:
            found = np.full(len(self.alike), -1)
            for table in self.tables:
                if not table.parameter:
                    states, (own, shape) = [p.states for p in table.placements], self.between[id(table)]
                    moves = [
                        [any(s != t and forward_collective(s, t) is not None for s, t in zip(p, q, strict=True)) for q in states] for p in states
                    ]
                    of_target = np.array([table.held(q) for q in table.placements])
                    found[own] = np.where(np.array(moves).reshape(shape), of_target[None], -1).ravel()
            self._held = np.unique(found, return_inverse=True)
        return self._held

    @cached_property
    def without(self) -> Alike:
        """Where it costs nothing to hold what conversions leave in memory."""
        return Alike(self.alike, self.blocks, self.length)

    @cached_property
    def holding(self) -> tuple[Alike, Numbers, Numbers]:
        """Where it does; of every price of conversions, its number without that, and the number of what is held (see `held`)."""
        _, which = self.held()
        one, number = numbered(mixed(self.alike, which))
        return Alike(number, self.blocks, self.length), self.alike[one], which[one]

    def _conversions(self) -> None:
        """`rows`: (row, target) of every table; `blocks`: of those of as many placements, which entries of `between` make them."""
        self.rows = _views([(id(t), (len(self.outline.sets(t)), len(t.placements))) for t in self.tables])
        self.blocks = [self._block(n, list(tables)) for n, tables in groupby(self.tables, key=lambda t: len(t.placements))]
        self.length = sum(s.stop - s.start for s, _ in self.rows.values())

    def _block(self, n: int, tables: list[TensorTable]) -> Block:
        sources, ones, twos, counts, first = [], [], [], [], 0
        for k, table in enumerate(tables):
            row, source = np.nonzero(self.outline.inside(table)[:n])
            sources.append(source + k * n)
            counts.append(np.bincount(row, minlength=n))
            pairs = np.array(self.outline.pairs(table), dtype=np.int64).reshape(-1, 2)
            ones.append(first + np.arange(n))
            twos.append(np.stack([*(pairs.T + first), first + n + 1 + np.arange(len(pairs))]))
            first += self.rows[id(table)][1][0]
        starts = np.cumsum(np.concatenate(counts))
        between, rows = ([own[id(t)][0] for t in tables] for own in (self.between, self.rows))
        return Block(
            n, slice(between[0].start, between[-1].stop), slice(rows[0].start, rows[-1].stop), np.concatenate(sources), np.append(0, starts[:-1]),
            np.concatenate(ones), *np.concatenate(twos, axis=1),
        )  # fmt: skip

    def along(self, table: TensorTable, rows: slice | list[int], columns: slice | int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Of some pairs of placements of a table, from `rows` to `columns`: which entries of `between` they are; as in `grid.Paths`, the edges for
        each order of the axes; paths through shards: of which pair, and their edges."""
        paths, n, entries = self.grid.paths[id(table)], len(table.placements), self.between[id(table)][0]
        pairs = np.arange(n * n).reshape(n, n)[rows, columns].ravel()
        place = np.full(n * n, -1)
        place[pairs] = range(len(pairs))
        at = place[paths.at(n)]
        return entries.start + pairs, paths.orders[:, :, pairs], at[at >= 0], paths.shared[2:, at >= 0]

    def ends_phases(self, table: TensorTable, rows: slice | list[int], columns: slice | int) -> Mask:
        """(pair, direction) -> whether every conversion ends a phase, forward and backward. rows, columns: see `along`."""
        if self._ends is None:
            self._ends = np.vstack([self.grid.edges.ends_phases(), [[True, True], [False, False]]])  # with `NONE` and `STAYS`
        _, orders, at, through = self.along(table, rows, columns)
        found: Mask = np.logical_and.reduce(np.logical_or.reduce(self._ends[orders], axis=1), axis=0)
        np.logical_and.at(found, at, np.logical_or.reduce(self._ends[through], axis=0))
        return found

    # -- parameters -------------------------------------------------------------------------------------------------------------------------------

    def _first_uses(self, problem: Problem) -> None:
        """`firsts`: per table whose first use is in a step, and whether that is the only one, the targets; for each, ways to store it."""
        uses: dict[tuple[int, bool], TensorTable] = {}
        for step, first in zip(problem.steps, self.outline.first, strict=True):
            uses |= {(id(s.table), s.fixed == 0): s.table for s, own in zip(step.kind.slots, first, strict=True) if s.fixed == 0 or own}
        self.firsts = _views([(key, (len(t.placements),)) for key, t in uses.items()])
        kept, converted, counts = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], [0]
        for (_, once), table in uses.items():
            n, number, own = len(table.placements), np.array([k.placement for k in table.stored]), self.stored[id(table)][0]
            of_kept = np.repeat(np.arange(own.start, own.stop)[None], n, axis=0)  # target x kept
            kept.append((np.where(_allowed(table), of_kept, -1) if once else of_kept).ravel())
            converted.append((self.rows[id(table)][0].start + number * n + np.arange(n)[:, None]).ravel())
            counts += [len(number)] * n
        self.first_kept, self.first_converted, self.first_starts = np.concatenate(kept), np.concatenate(converted), np.cumsum(counts[:-1])

    # -- choices ----------------------------------------------------------------------------------------------------------------------------------

    def _choices(self, problem: Problem) -> None:
        """`weighted`: per class, and which of its slots are parameters used for the first time, the choices; for each, its own entry and those of
        `firsts` (-1: none)."""
        found: dict[tuple[int, tuple[bool, ...]], StepClass] = {}
        for step, first in zip(problem.steps, self.outline.first, strict=True):
            found.setdefault((id(step.kind), first), step.kind)
        self.weighted = _views([(key, (len(kind.choices),)) for key, kind in found.items()])
        own, firsts = [], []
        for (_, first), kind in found.items():
            begin = self.own[id(kind)][0]
            own.append(np.arange(begin.start, begin.stop))
            needs = zip(kind.slots, self.outline.ends(kind)[0], first, strict=True)
            firsts.append([self.firsts[id(s.table), s.fixed == 0][0].start + of_slot for s, of_slot, here in needs if s.fixed == 0 or here])
        most = max(map(len, firsts), default=0)
        self.of_choice = np.concatenate(own)
        none = [[np.full(len(o), -1)] * (most - len(f)) for o, f in zip(own, firsts, strict=True)]
        self.firsts_of_choice = [np.concatenate([[*f, *n][k] for f, n in zip(firsts, none, strict=True)]) for k in range(most)]

    def _needs(self, problem: Problem) -> None:
        """`needs`: per class and slot that keeps its placements, (need, row): what it costs to have it where it is needed."""
        slots: dict[tuple[int, int], StepClass] = {}
        for kind in problem.classes:
            slots |= {(id(kind), k): kind for k, slot in enumerate(kind.slots) if slot.fixed is None and not slot.table.stored}
        shapes, numbers = [], [np.zeros(0, dtype=np.int64)]
        for (key, k), kind in slots.items():
            (entries, (rows, n)), at = self.rows[id(kind.slots[k].table)], self.outline.need(kind, k).at
            rows = rows if (key, k) in self.outline.wide else n
            shapes.append(((key, k), (len(at), rows)))
            numbers.append((entries.start + at[:, None] + np.arange(rows) * n).ravel())
        self.needs, self.needed = _views(shapes), np.concatenate(numbers)


class To(NamedTuple):
    """Of conversions to a placement, by the one before: the least price of all kinds alike; per pair of kinds, and without copies, what all wait for
    (see `Priced.waited`); whether they all end a phase, forward and backward."""

    seconds: list[float]
    waited: list[list[float]]
    ends: list[list[bool]]


class Priced:
    """The prices at one set of shares."""

    def __init__(self, sheet: Sheet, edges: Array, prices: Prices, pairs: int, held: Array | None, waited: Callable[[], Array]):
        """edges: as `grid.padded`; waited: gives the same of what `waited` counts. pairs: see `Cuts`. held: of what conversions leave in memory, the
        prices (see `Sheet.held`)."""
        self.sheet, self.pairs, self._held, self._waited_for = sheet, pairs, held, waited
        self._targets: dict[tuple[int, int], To] = {}
        self._alike, self._direct = sheet.without, _cheapest(edges, *sheet.unlike)
        if held is not None:
            self._alike, unlike, of_held = sheet.holding
            self._direct = self._direct.take(unlike, axis=0) + held[of_held, None]
        self._rows = self._alike.of_rows(self._direct)
        self._needed = self._rows.take(self._alike.rows.take(sheet.needed), axis=0)
        self._own = own = prices.steps(sheet.layout)
        self.cuts = prices.capacity is None and bool(sheet.freed.any())
        if self.cuts:
            self._after = np.where(sheet.freed[:, None], prices.after(sheet.layout), 0.0)
            own = own - self._after
        base: Array = own.take(sheet.of_choice, axis=0)
        if len(sheet.first_starts):
            ways = np.vstack([own, np.full((1, own.shape[1]), np.inf)]).take(sheet.first_kept, axis=0)
            ways += self._rows.take(self._alike.rows.take(sheet.first_converted), axis=0)
            firsts = np.vstack([np.minimum.reduceat(ways, sheet.first_starts), np.zeros((1, own.shape[1]))])
            for numbers in sheet.firsts_of_choice:
                base += firsts.take(numbers, axis=0)
        self._base = base

    def direct(self, table: TensorTable, sources: Chosen = EVERY, targets: Chosen = EVERY) -> Array:
        """(source, target, weights): the least price over all paths between two placements, every order of the axes, the cheapest edge on each."""
        return _chosen(self._direct, self._alike.direct, self.sheet.between[id(table)], sources, targets)

    def conversions(self, table: TensorTable, rows: Chosen = EVERY, targets: Chosen = EVERY) -> Array:
        """(row, target, weights): the least price of a conversion from anything that is available in the row; nothing for "anything"."""
        return _chosen(self._rows, self._alike.rows, self.sheet.rows[id(table)], rows, targets)

    def reached(self, table: TensorTable, rows: Chosen, targets: Chosen) -> Array:
        """(target, row, weights): as `conversions`, by target."""
        entries, shape = self.sheet.rows[id(table)]
        prices: Array = self._rows.take(self._alike.rows[entries].reshape(shape)[rows][:, targets].T, axis=0)
        return prices

    def first(self, table: TensorTable, needs: Numbers) -> Array:
        """(way to store it, choice, weights): the price of a parameter that is used for the first time, in what each choice needs."""
        kept = [k.placement for k in table.stored]
        ways: Array = _at(self._own, self.sheet.stored[id(table)])[:, None] + self.conversions(table, kept, needs)
        return ways

    def available(self, table: TensorTable, mask: int) -> Array:
        """(target, weights): the same from anything in a set of placements."""
        found: Array = self.conversions(table, list(bits(mask))).min(axis=0)
        return found

    def waited(self, table: TensorTable, rows: slice | list[int], columns: slice | int) -> Array:
        """(pair, pairs of kinds and one more): as `direct`, of what all kinds wait for and what is copied, which comes last in a conversion; with the
        last weight, without copies. rows, columns: see `Sheet.along`."""
        entries, orders, at, through = self.sheet.along(table, rows, columns)
        found = _cheapest(self._edges_waited, orders, at, through)
        return found if self._held is None else found + self._held[self.sheet.held()[1][entries], None]

    def in_order(self, table: TensorTable, sources: Sequence[int], target: int) -> list[int]:
        """See `hapx.synth.moves.Least`."""
        return sorted(sources, key=self._to(table, target).seconds.__getitem__)

    def covered(self, table: TensorTable, source: int, target: int, effect: Effect, ties: bool) -> bool:
        """See `hapx.synth.moves.Least`. For every pair of kinds what comes before the communication that ends a phase counts in full on the one side,
        and not at all on the other; an effect that ends one is only compared with conversions that do, too."""
        const, forward_pre, forward, backward_pre, backward, _ = effect
        known = self._to(table, target)
        ahead, back = known.ends[source]
        if (forward_pre is not None and not ahead) or (backward_pre is not None and not back):
            return False
        const += (max(forward_pre) if forward_pre is not None else 0.0) + (max(backward_pre) if backward_pre is not None else 0.0)
        return at_most(const * (1 - ROUNDING if ties else 1 + ROUNDING), forward, backward, known.waited[source])

    def _to(self, table: TensorTable, target: int) -> To:
        key = id(table), target
        if key not in self._targets:
            waited, ends = self.waited(table, EVERY, target), self.sheet.ends_phases(table, EVERY, target)
            self._targets[key] = To(self.direct(table, EVERY, [target])[:, 0, -1].tolist(), waited.tolist(), ends.tolist())
        return self._targets[key]

    @cached_property
    def _edges_waited(self) -> Array:
        return self._waited_for()

    def needed(self, kind: StepClass, slot: int) -> Array:
        """(need, row, weights): as `conversions`, to where choices need a slot."""
        return _at(self._needed, self.sheet.needs[id(kind), slot])

    def weighted(self, kind: StepClass, first: tuple[bool, ...]) -> Weighted:
        """The choices of a class. first: slots that are parameters used for the first time here: each choice pays the least price of storing them and
        having them where it needs them."""
        return Weighted(_at(self._base, self.sheet.weighted[id(kind), first]), *self.sheet.outline.ends(kind), self._cuts(kind))

    def _cuts(self, kind: StepClass) -> Cuts | None:
        own = self.sheet.own[id(kind)][0]
        if not self.cuts or not self.sheet.freed[own].any():
            return None
        return Cuts.of(self.sheet.layout.cuts_forward[own], self.sheet.layout.cuts_backward[own], self._after[own], self.pairs)


def _cheapest(edges: Array, orders: Numbers, at: Numbers, through: Numbers) -> Array:
    """(pair, weights) -> the least price over the paths between two placements: the edges for each order of the axes, and those through shards."""
    found: Array = np.minimum.reduce(np.add.reduce(edges.take(orders, axis=0), axis=1), axis=0)
    if len(at):  # one path at most between two placements
        found[at] = np.minimum(found[at], np.add.reduce(edges.take(through, axis=0), axis=0))
    return found


def _chosen(prices: Array, numbers: Numbers, view: View, first: Chosen, second: Chosen) -> Array:
    return prices.take(numbers[view[0]].reshape(view[1])[first][:, second], axis=0)


def _at(values: Array, view: View) -> Array:
    return values[view[0]].reshape(*view[1], -1)


def _views(shapes: Sequence[tuple[Any, tuple[int, ...]]], at: int = 0) -> dict[Any, View]:
    """Consecutive entries, from `at` on."""
    found = {}
    for key, shape in shapes:
        length = int(np.prod(shape, dtype=np.int64))
        found[key] = slice(at, at + length), shape
        at += length
    return found


def _allowed(table: TensorTable) -> Mask:
    """(target, kept) -> whether a parameter whose only use is in `target` may be stored like that."""
    options = tuple(table.placements[k.placement] for k in table.stored)
    fitting = [storages(options, target) for target in table.placements]
    return np.array([[option in allowed for option in options] for allowed in fitting]).reshape(-1, len(options))
