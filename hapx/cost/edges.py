"""The price of many communications at once, for bounds.

In: *edges*: a tensor, one axis, the placements before and after; those of one tensor along one axis are a *bundle*. Out: at given shares and weights
over device kinds, weighted seconds of each. What does not depend on shares (which collective runs, on how many bytes) is laid out in arrays once; at
given shares a few array operations price all. Edges that cost the same at any shares (of equal tensors; whatever the other axis, if it holds as large
a part) have one price: most do.

A weighted price replaces the maximum over kinds by a weighted sum, but for what synchronises all kinds whatever is pending, which stays a maximum.
Invariant: the price of an edge is that of the cheapest allowed form and variant, as `CostModel.conversion` prices each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hapx.cost.copies import AFTER, BEFORE, WHOLE, Copies, copied, sort
from hapx.cost.exposed import ALL, Exposed
from hapx.cost.network import SCALAR_BYTES
from hapx.cost.table import TermTable
from hapx.cost.terms import Piece, Shares
from hapx.ir import TensorRef
from hapx.numbering import Numbering
from hapx.plan import Communication, Form
from hapx.states import REPLICATED, Placement, Sharded, State, is_recut

if TYPE_CHECKING:
    from hapx.cost.model import CostModel

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

FORMS = (Form.PADDED, Form.GROUPED, Form.POINT_TO_POINT)
MOST = 2**62  # numbers that are told apart without counting them


class Edge(NamedTuple):
    """A tensor whose placements `before` and `after` differ on `axis` only."""

    ref: TensorRef
    axis: int
    before: Placement
    after: Placement


@dataclass(frozen=True, eq=False)
class Bundle:
    """Edges of a tensor along an axis. placements: those before and after are `sources` and `targets` among them. kept, freed: whether the variant is
    allowed that keeps what it gathers, or frees it (see `Communication.free`)."""

    ref: TensorRef
    axis: int
    placements: Sequence[Placement]
    sources: Numbers
    targets: Numbers
    kept: Mask
    freed: Mask

    def __len__(self) -> int:
        return len(self.sources)


class Run(NamedTuple):
    """What edges have in common that lead along an axis between the same two states: the collective; of what fractions of the tensor it depends (see
    `AxisLinks.pieces`); on how many devices a gradient's sum is shared out (0: no gradient is summed); how often it runs forward and backward;
    whether all kinds wait for it; whether every form is alike; what devices copy for it (by form and direction), of which tensors."""

    axis: int
    collective: str
    first: int
    second: int
    shorter: int
    longer: int
    sharers: int
    forward: float
    backward: float
    joins: bool
    even: bool
    copied: tuple[tuple[Copies, ...], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Unlike edges along one axis that run one collective. Of each, what its `Run` says, with the numbers of fractions; bytes that are sent, and of
    the tensor; part of a message's latency that counts; whether it is the sum of a gradient."""

    axis: int
    collective: str
    first: Numbers
    second: Numbers
    shorter: Numbers
    longer: Numbers
    bytes: Array
    whole: Array
    latency: Array
    sums: Mask
    forward: Array
    backward: Array
    joins: Mask
    even: Mask
    copied: Array

    def __len__(self) -> int:
        return len(self.first)


class Moved(NamedTuple):
    """An edge in one form: seconds per kind of its collective, how often that runs forward and backward, whether it is the sum of a gradient, whether
    it ends phases; seconds of copies, forward and backward."""

    seconds: tuple[float, ...]
    forward: int
    backward: int
    sums: bool
    cuts: bool
    copied: tuple[tuple[float, ...], tuple[float, ...]]


class _Along:
    """All edges of bundles along one axis, in their order. Per edge: its number among the edges of all axes, the place of its tensor in `refs`, those
    of the placements before and after in `placements`, whether it may be kept and freed; whether it is a re-cut. states: of the placements."""

    def __init__(self, axis: int, bundles: Sequence[Bundle]):
        first = np.cumsum([0, *map(len, bundles)])
        places = [k for k, bundle in enumerate(bundles) if bundle.axis == axis and len(bundle)]
        chosen = [bundles[k] for k in places]
        self.axis, self.refs = axis, [bundle.ref for bundle in chosen]
        self.tensor = np.repeat(np.arange(len(chosen)), list(map(len, chosen)))
        self.numbers = np.concatenate([np.arange(first[k], first[k + 1]) for k in places])
        # placements are the theory's own objects, held by the bundles
        lists = {id(bundle.placements): bundle.placements for bundle in chosen}
        unique = {id(p): p for placements in lists.values() for p in placements}
        place = {key: k for k, key in enumerate(unique)}
        of = {key: np.array([place[id(p)] for p in placements]) for key, placements in lists.items()}
        self.placements = list(unique.values())
        self.states = [p.states[axis] for p in self.placements]
        self.sources = np.concatenate([of[id(bundle.placements)][bundle.sources] for bundle in chosen])
        self.targets = np.concatenate([of[id(bundle.placements)][bundle.targets] for bundle in chosen])
        self.allowed = np.concatenate([bundle.kept for bundle in chosen]), np.concatenate([bundle.freed for bundle in chosen])
        self.again = _cut_again(self.states, self.sources, self.targets)

    def edge(self, k: int) -> Edge:
        before, after = self.placements[self.sources[k]], self.placements[self.targets[k]]
        return Edge(self.refs[self.tensor[k]], self.axis, before, after)


class EdgePrices:
    """Prices by a cost model of all edges of `bundles`, numbered in their order. forms: those that are allowed. `price_of`: of every edge, the number
    of its price."""

    def __init__(self, costs: CostModel, bundles: Sequence[Bundle], forms: frozenset[str]):
        self.costs, count = costs, sum(map(len, bundles))
        self.forms = [f for f in FORMS if f.value in forms] or [Form.PADDED]
        self._fractions = Numbering()  # of tensors that are held: equal ones are one
        self.terms = TermTable(len(costs.kinds))
        alongs = [_Along(axis, bundles) for axis in sorted({bundle.axis for bundle in bundles if len(bundle)})]
        again, recuts = np.full(count, -1), Numbering()  # of edges that are cut again, the number of their terms
        for edges in alongs:
            for k in np.flatnonzero(edges.again).tolist():
                again[edges.numbers[k]] = recuts.of_value(tuple(self._recut(edges.edge(k))))
        self.parts: list[Part] = []
        # kept and freed: of every edge its part and its row there (-1: nothing moves, or it is a re-cut)
        self.rows = np.full((2, count, 2), -1)
        for edges in alongs:
            self._lay_out(edges)
        begin = np.cumsum([0, *map(len, self.parts)])
        ways = np.where(self.rows[:, :, 0] < 0, -1, begin[self.rows[:, :, 0]] + self.rows[:, :, 1])
        _, one, self.price_of = np.unique(mixed(*ways + 1, again + 1), return_index=True, return_inverse=True)
        # of every price, where it is kept and freed among the rows of all parts, one after the other (-1: nowhere); of those of re-cuts, which move
        # by the difference of two shares, the terms: price, term, whether all kinds wait for it, and whether it runs forward
        self.ways, of_recut = ways[:, one], again[one]
        terms = recuts.values()
        rows = [(price, *term) for price, number in enumerate(of_recut.tolist()) if number >= 0 for term in terms[number]]
        self.recuts = np.array(rows, dtype=np.int64).reshape(-1, 4)
        self._affine()

    def _lay_out(self, edges: _Along) -> None:
        """The parts of an axis."""
        every, axis, sources, targets = edges.placements, edges.axis, edges.sources, edges.targets
        # what edges with one `Run` have in common
        sorts, whole_on, flags = _coded(map(sort, edges.states)), _coded(map(_replicated, every)), _coded(map(self._flags, edges.refs))
        alike = mixed(sorts[sources], sorts[targets], whole_on[targets], flags[edges.tensor])
        fractions, gathered = np.array([self._fraction(p) for p in every]), np.zeros(len(every), dtype=np.int64)
        reached = np.unique(targets)
        gathered[reached] = [self._fraction(every[p].gathered((axis,))) for p in reached.tolist()]
        runs, sizes = Numbering(), Numbering()
        sized = np.array([sizes.of_value((float(r.bytes), self.costs.part_of_bucket(r))) for r in edges.refs])[edges.tensor]
        rows = np.stack([edges.numbers, np.zeros_like(targets), sized, fractions[sources], fractions[targets], gathered[targets]], axis=1)
        found: dict[str, list[tuple[int, Numbers]]] = {}  # by collective
        for free, allowed in enumerate(edges.allowed):
            chosen = np.flatnonzero(allowed & ~edges.again)
            _, one, which = np.unique(alike[chosen], return_index=True, return_inverse=True)
            made = [self._run(edges.edge(k), bool(free)) for k in chosen[one].tolist()]
            rows[chosen, 1] = np.array([runs.of_value(run) if run is not None else -1 for run in made], dtype=np.int64)[which]
            for name in dict.fromkeys(run.collective for run in made if run is not None):
                own = np.array([run is not None and run.collective == name for run in made])[which]
                found.setdefault(name, []).append((free, rows[chosen[own]]))
        for pieces in found.values():
            ways = np.repeat([free for free, _ in pieces], [len(own) for _, own in pieces])
            chosen = np.concatenate([own for _, own in pieces])
            part, row = self._part(chosen[:, 1:], runs.values(), sizes.values())
            self.rows[ways, chosen[:, 0]] = np.stack([np.full(len(chosen), len(self.parts)), row], axis=1)
            self.parts.append(part)

    def at(self, shares: Shares, exposed: Exposed = ALL) -> EdgesPriced:
        """At the given shares. exposed: how much of the sums of gradients counts."""
        at = np.zeros((len(self._cuts) + 1, self._const.shape[1]))
        for i, cut in enumerate(self._cuts):
            at[i] = shares[cut]
        return EdgesPriced(self, shares, self._const + self._slope * at[self._cut], exposed)

    def ends_phases(self) -> Mask:
        """(price, direction) -> whether its edges end a phase forward, and one backward, in whatever variant."""
        every = np.ones((sum(map(len, self.parts)) + 1, 2), dtype=bool)  # with one that is nowhere
        at = 0
        for part in self.parts:
            cuts = ~part.sums & self.costs.links[part.axis].cuts
            every[at : at + len(part)] = np.stack([cuts & (part.forward > 0), cuts & (part.backward > 0)], axis=1)
            at += len(part)
        found: Mask = np.logical_and.reduce(every[self.ways], axis=0) & np.logical_or.reduce(self.ways >= 0, axis=0)[:, None]
        for price, _, waited, ahead in self.recuts.tolist():
            found[price, 0 if ahead else 1] |= bool(waited)
        return found

    def _recut(self, edge: Edge) -> Iterator[tuple[int, bool, bool]]:
        """The terms of one that is cut again, as in `recuts`."""
        ref, axis, before, after = edge
        step = Communication(axis, before.states[axis], after.states[axis], Form.NONE, ref.requires_grad)
        cost = self.costs.conversion(ref, (step,), after)
        yield from ((self.terms.number(c.term), c.cuts, c.direction == "forward") for c in cost.communication)
        copies = (cost.forward, True), (cost.backward, False)
        yield from ((self.terms.number(term), False, ahead) for term, ahead in copies if term is not None)

    def _fraction(self, placement: Placement) -> int:
        return self._fractions.of_value(self.costs.view.fraction(placement))

    def _flags(self, ref: TensorRef) -> tuple[Any, ...]:
        """What of a tensor, beside its size, its communication depends on."""
        return ref.kind, ref.requires_grad, ref.bytes <= SCALAR_BYTES, self.costs.computed_again(ref)

    def _run(self, edge: Edge, free: bool) -> Run | None:
        """None where nothing moves."""
        ref, axis, before, after = edge
        source, target = before.states[axis], after.states[axis]
        runs = self.costs.collectives(ref, source, target, free)
        if not runs or self.costs.links[axis].size == 1:
            return None
        synchronises, name = runs[0][0] == "synchronise", runs[0][1]
        if name == "all_reduce" and not synchronises and ref.bytes <= SCALAR_BYTES:
            name = "sum_of_numbers"
        first, second = WHOLE, WHOLE
        if name == "all_gather":
            first = BEFORE if isinstance(source, Sharded) else AFTER
        elif name == "all_to_all":
            first, second = BEFORE, AFTER
        even = all(s.cut.row.kind == "even" for s in (source, target) if isinstance(s, Sharded))
        ahead = float(sum(direction == "forward" for direction, _ in runs))
        cuts = synchronises or self.costs.links[axis].cuts
        sharers = self.costs.sharers(axis, after) if synchronises else 0
        passes = tuple([self.costs.copies(ref, axis, before, after, form, free) for form in self.forms])
        return Run(axis, name, first, second, *copied(source, target), sharers, ahead, len(runs) - ahead, cuts, even, passes)

    def _part(self, rows: Numbers, runs: Sequence[Run], sizes: Sequence[tuple[float, float]]) -> tuple[Part, Numbers]:
        """The unlike ones of edges, and which of them each is. rows: run; size; fractions before, after, whole. sizes: bytes of tensors, and parts of
        a bucket of gradients."""
        known, at = np.unique(rows[:, 0], return_inverse=True)
        columns = [np.array(column) for column in zip(*(runs[i][2:] for i in known.tolist()), strict=True)]
        fractions = [rows[np.arange(len(rows)), 2 + column[at]] for column in columns[:4]]
        _, one, which = np.unique(mixed(at, rows[:, 1], *fractions), return_index=True, return_inverse=True)
        sharers, forward, backward, joins, even, passes = (column[at[one]] for column in columns[4:])
        first, second, shorter, longer = (own[one] for own in fractions)
        whole, share = np.array(sizes)[rows[one, 1]].T
        summed = sharers > 0
        sent = np.where(summed, whole / np.maximum(sharers, 1) / self.costs.repeats, whole)
        latency = np.where(summed, share / self.costs.repeats, 1.0)
        axis, collective = runs[int(known[0])][:2]
        part = Part(axis, collective, first, second, shorter, longer, sent, whole, latency, summed, forward, backward, joins, even, passes)
        return part, which

    def _affine(self) -> None:
        """The fractions as affine functions of the shares."""
        pieces: list[Piece] = self._fractions.values()
        assert all(len(piece.slopes) < 2 for piece in pieces), "a fraction depends on one cut"
        self._cuts = list(dict.fromkeys(cut for piece in pieces for cut, _ in piece.slopes))
        place, kinds = {cut: i for i, cut in enumerate(self._cuts)}, len(self.costs.kinds)
        self._const = np.array([piece.const for piece in pieces]).reshape(-1, kinds)
        self._slope = np.array([piece.slopes[0][1] if piece.slopes else (0.0,) * kinds for piece in pieces]).reshape(-1, kinds)
        self._cut = np.array([place[piece.slopes[0][0]] if piece.slopes else len(self._cuts) for piece in pieces], dtype=np.int64)


class EdgesPriced:
    """Edges at shares. fractions: of tensors, per kind, by the numbers of `EdgePrices`."""

    def __init__(self, prices: EdgePrices, shares: Shares, fractions: Array, exposed: Exposed):
        self.prices, self.shares, self.fractions, self.exposed = prices, shares, fractions, exposed
        self.values = [self._values(part) for part in prices.parts]
        self.copies = [self._copies(part) for part in prices.parts]

    def moved(self, number: int, form: Form, free: bool) -> Moved | None:
        """What an edge does in a form, freed or not; None where it is to be priced by its terms, because nothing moves or it is cut again."""
        place, row = self.prices.rows[int(free), number].tolist()
        if place < 0:
            return None
        part = self.prices.parts[place]
        which = self.prices.forms.index(form) if len(self.values[place]) > 1 and form in self.prices.forms else 0
        ahead, back = (tuple(own[row].tolist()) for own in self.copies[place][which])
        links, times = self.prices.costs.links[part.axis], (int(part.forward[row]), int(part.backward[row]))
        return Moved(tuple(self.values[place][which][row].tolist()), *times, bool(part.sums[row]), links.cuts, (ahead, back))

    def weighted(self, forward: Array, backward: Array, alone: bool = True) -> Array:
        """(price, weights) -> weighted seconds; the weights of what runs forward, and backward: weights x kinds. alone: with communication for which
        not all kinds wait (and, without, of what is cut again nothing else either)."""
        every: list[Array] = []
        for part, values, copies in zip(self.prices.parts, self.values, self.copies, strict=True):
            found = []
            for value, (ahead, back) in zip(values, copies, strict=True):
                apart = value @ forward.T * part.forward[:, None] + value @ backward.T * part.backward[:, None]
                together = value.max(axis=1, keepdims=True) * (part.forward + part.backward)[:, None]
                found.append(np.where(part.joins[:, None], together, apart if alone else 0.0) + ahead @ forward.T + back @ backward.T)
            every.append(np.where(part.even[:, None], found[0], np.minimum.reduce(found)))
        known = np.concatenate([*every, np.full((1, len(forward)), np.inf)])  # last: nowhere
        prices: Array = np.minimum.reduce(known.take(self.prices.ways, axis=0))
        prices[np.isinf(prices)] = 0.0  # nothing moves
        of_recut, terms, waited, forth = self.prices.recuts.T
        seconds = self.prices.terms.values(self.shares).take(terms, axis=0)
        own = np.where(forth[:, None], seconds @ forward.T, seconds @ backward.T) if alone else 0.0
        np.add.at(prices, of_recut, np.where(waited[:, None], seconds.max(axis=1, keepdims=True), own))
        return prices

    def _values(self, part: Part) -> list[Array]:
        """Per form, seconds of the collective: rows x kinds."""
        first, second = (self.fractions[which] * part.bytes[:, None] for which in (part.first, part.second))
        forms, links = self.prices.forms if part.collective == "all_gather" else self.prices.forms[:1], self.prices.costs.links[part.axis]
        found = [
            np.maximum.reduce([np.array(a) * first + np.array(b) * second + np.outer(part.latency, c) for a, b, c in pieces])
            for pieces in (links.pieces(part.collective, form) for form in forms)
        ]
        counted = self.exposed.of(links.cuts)
        return found if counted == 1.0 else [np.where(part.sums[:, None], counted * seconds, seconds) for seconds in found]

    def _copies(self, part: Part) -> list[tuple[Array, Array]]:
        """Per form, seconds of copies forward and backward: rows x kinds."""
        costs, whole = self.prices.costs, part.whole[:, None]
        shorter, longer = (self.fractions[which] * (whole * np.array(costs.per_byte)) for which in (part.shorter, part.longer))

        def seconds(passes: Array) -> Array:
            total: Array = passes[:, :1] * shorter + passes[:, 1:2] * longer + passes[:, 2:] * np.array(costs.launch)
            return total

        forms = range(len(self.prices.forms) if part.collective == "all_gather" else 1)
        return [(seconds(part.copied[:, form, 0]), seconds(part.copied[:, form, 1])) for form in forms]


def _cut_again(states: Sequence[State], sources: Numbers, targets: Numbers) -> Mask:
    """Which edges are re-cuts. states: of their placements."""
    shards = np.array([isinstance(s, Sharded) for s in states])
    found: Mask = shards[sources] & shards[targets]
    pairs = zip(sources[found].tolist(), targets[found].tolist(), strict=True)
    found[found] = np.array([is_recut(states[p], states[q]) for p, q in pairs], dtype=bool)
    return found


def _replicated(placement: Placement) -> tuple[bool, ...]:
    """On which axes a placement is whole."""
    return tuple([s == REPLICATED for s in placement.states])


def _coded(values: Iterable[Any]) -> Numbers:
    """Numbers, equal for equal values."""
    return np.array(list(map(Numbering().of_value, values)), dtype=np.int64)


def mixed(*columns: Numbers) -> Numbers:
    """One number per row, equal for equal rows."""
    mixed, size = columns[0], int(columns[0].max(initial=0)) + 1
    for column in columns[1:]:
        width = int(column.max(initial=0)) + 1
        if size * width > MOST:
            _, mixed = np.unique(mixed, return_inverse=True)
            size = int(mixed.max()) + 1
        mixed, size = mixed * width + column, size * width
    return mixed
