"""The price of many communications at once, for bounds.

In: *edges*: a tensor, one axis, the placements before and after. Out: at given shares and weights over device kinds, weighted seconds of each. What
does not depend on shares (which collective runs, on how many bytes) is laid out in arrays once; at given shares a few array operations price all.

A weighted price replaces the maximum over kinds by a weighted sum, but for what synchronises all kinds whatever is pending, which stays a maximum.
Invariant: the price of an edge is that of the cheapest allowed form and variant, as `CostModel.conversion` prices each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hapx.cost.copies import Copies, copied, sort
from hapx.cost.network import SCALAR_BYTES
from hapx.cost.terms import Shares
from hapx.ir import TensorRef
from hapx.plan import Communication, Form
from hapx.states import REPLICATED, Placement, Sharded, is_recut

if TYPE_CHECKING:
    from hapx.cost.model import CostModel, StepCost

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

FORMS = (Form.PADDED, Form.GROUPED, Form.POINT_TO_POINT)


class Edge(NamedTuple):
    """A tensor whose placements `before` and `after` differ on `axis` only. free: the variants that are allowed (see `Communication.free`)."""

    ref: TensorRef
    axis: int
    before: Placement
    after: Placement
    free: tuple[bool, ...]


class Run(NamedTuple):
    """What edges have in common whose tensors differ in size alone: numbers of fractions of the tensor (see `AxisLinks.pieces`); on how many devices
    a gradient's sum is shared out (0: no gradient is summed); how often the collective runs forward and backward; whether all kinds wait for it;
    whether every form is alike; what devices copy for it (by form and direction), of tensors whose fractions have the numbers `shard`, `longer`."""

    axis: int
    collective: str
    first: int
    second: int
    shard: int
    longer: int
    sharers: int
    forward: float
    backward: float
    joins: bool
    even: bool
    copied: tuple[tuple[Copies, ...], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Edges along one axis that run one collective: their numbers; of each, what its `Run` says; bytes that are sent, and of the tensor; part of a
    message's latency that counts; whether it is the sum of a gradient."""

    axis: int
    collective: str
    edges: Numbers
    first: Numbers
    second: Numbers
    shard: Numbers
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


class Moved(NamedTuple):
    """An edge in one form: seconds per kind of its collective, how often that runs forward and backward, whether it is the sum of a gradient, whether
    it ends phases; seconds of copies, forward and backward."""

    seconds: tuple[float, ...]
    forward: int
    backward: int
    sums: bool
    cuts: bool
    copied: tuple[tuple[float, ...], tuple[float, ...]]


class EdgePrices:
    """Prices of `edges` by a cost model. forms: those that are allowed."""

    def __init__(self, costs: CostModel, edges: Sequence[Edge], forms: frozenset[str]):
        self.costs, self.count = costs, len(edges)
        self.forms = [f for f in FORMS if f.value in forms] or [Form.PADDED]
        fractions: dict[Placement, int] = {}
        runs: dict[Any, Run | None] = {}
        self.known: dict[Any, tuple[Sequence[tuple[str, str]], tuple[tuple[Copies, ...], ...]]] = {}  # see `_carried_out`
        self._flagged: dict[str, tuple[Any, ...]] = {}
        rows: dict[tuple[int, str], list[tuple[int, Run, TensorRef]]] = {}
        self.rows: dict[tuple[int, bool], tuple[int, int]] = {}  # (edge, whether what is gathered is freed) -> its part, and its row there
        numbers: dict[tuple[int, str], int] = {}
        for number, edge in enumerate(edges):
            for free in edge.free:
                key = self._alike(edge, free)
                if key not in runs:
                    runs[key] = self._run(edge, free, fractions)
                run = runs[key]
                if run is not None:
                    own = rows.setdefault((run.axis, run.collective), [])
                    self.rows[number, free] = numbers.setdefault((run.axis, run.collective), len(numbers)), len(own)
                    own.append((number, run, edge.ref))
        self.parts = [self._part(found) for found in rows.values()]
        # what is cut again moves by the difference of two shares: such edges are few, each is priced by its own terms
        self.recuts = {number: self._recut(edge) for number, edge in enumerate(edges) if _is_recut(edge)}
        self._affine(list(fractions))

    def at(self, shares: Shares, exposed: float = 1.0) -> EdgesPriced:
        """At the given shares. exposed: how much of the sums of gradients counts."""
        at = np.zeros((len(self._cuts) + 1, self._const.shape[1]))
        for i, cut in enumerate(self._cuts):
            at[i] = shares[cut]
        return EdgesPriced(self, shares, self._const + self._slope * at[self._cut], exposed)

    def _recut(self, edge: Edge) -> StepCost:
        source, target = edge.before.states[edge.axis], edge.after.states[edge.axis]
        step = Communication(edge.axis, source, target, Form.NONE, edge.ref.requires_grad)
        return self.costs.conversion(edge.ref, (step,), edge.after)

    def _alike(self, edge: Edge, free: bool) -> Any:
        """Equal only for edges with one `Run` (placements are the theory's own objects, held by the edges)."""
        ref, axis, before, after, _ = edge
        return axis, id(before), id(after), free, self._flags(ref)

    def _flags(self, ref: TensorRef) -> tuple[Any, ...]:
        found = self._flagged.get(ref.name)
        if found is None:
            found = self._flagged[ref.name] = ref.kind, ref.requires_grad, ref.bytes <= SCALAR_BYTES, self.costs.computed_again(ref)
        return found

    def _run(self, edge: Edge, free: bool, fractions: dict[Placement, int]) -> Run | None:
        """None where nothing moves, or the edge is priced otherwise."""
        ref, axis, before, after, _ = edge
        if _is_recut(edge):
            return None
        source, target = before.states[axis], after.states[axis]
        runs, passes = self._carried_out(edge, free)
        if not runs or self.costs.links[axis].size == 1:
            return None

        def fraction(placement: Placement) -> int:
            return fractions.setdefault(placement, len(fractions))

        synchronises, name = runs[0][0] == "synchronise", runs[0][1]
        if name == "all_reduce" and not synchronises and ref.bytes <= SCALAR_BYTES:
            name = "sum_of_numbers"
        whole = fraction(after.with_state(axis, REPLICATED) if isinstance(target, Sharded) else after)
        first, second = whole, whole
        if name == "all_gather":
            first = fraction(before if isinstance(source, Sharded) else after)
        elif name == "all_to_all":
            first, second = fraction(before), fraction(after)
        even = all(s.cut.row.kind == "even" for s in (source, target) if isinstance(s, Sharded))
        ahead = float(sum(direction == "forward" for direction, _ in runs))
        shard, longer = (fraction(p) for p in copied(axis, before, after))
        cuts = synchronises or self.costs.links[axis].cuts
        sharers = self.costs.sharers(axis, after) if synchronises else 0
        return Run(axis, name, first, second, shard, longer, sharers, ahead, len(runs) - ahead, cuts, even, passes)

    def _carried_out(self, edge: Edge, free: bool) -> tuple[Sequence[tuple[str, str]], tuple[tuple[Copies, ...], ...]]:
        """Collectives of an edge, and what is copied around them in every form. Of the other axes these see only whether one is whole, and of this
        one the sorts of its states."""
        ref, axis, before, after, _ = edge
        source, target = before.states[axis], after.states[axis]
        shared = len(after.states) > 1 and any(a != axis and s == REPLICATED for a, s in enumerate(after.states))
        key = sort(source), sort(target), free, shared, self._flags(ref)
        if key not in self.known:
            copies = tuple(self.costs.copies(ref, axis, before, after, form, free) for form in self.forms)
            self.known[key] = self.costs.collectives(ref, source, target, free), copies
        return self.known[key]

    def _part(self, rows: Sequence[tuple[int, Run, TensorRef]]) -> Part:
        numbers, runs, refs = zip(*rows, strict=True)
        place = {id(run): i for i, run in enumerate(runs)}
        at = {i: k for k, i in enumerate(place.values())}
        columns = [np.array(column) for column in zip(*(runs[i] for i in at), strict=True)]
        _, _, first, second, shard, longer, sharers, forward, backward, joins, even, passes = columns
        which = np.array([at[place[id(run)]] for run in runs])
        of_ref = {r.name: (float(r.bytes), self.costs.part_of_bucket(r)) for r in {r.name: r for r in refs}.values()}
        whole, part = np.array([of_ref[r.name] for r in refs]).T
        summed = sharers[which] > 0
        sent = np.where(summed, whole / np.maximum(sharers[which], 1) / self.costs.repeats, whole)
        latency = np.where(summed, part / self.costs.repeats, 1.0)
        return Part(
            runs[0].axis, runs[0].collective, np.array(numbers), first[which], second[which], shard[which], longer[which], sent, whole, latency,
            summed, forward[which], backward[which], joins[which], even[which], passes[which],
        )  # fmt: skip

    def _affine(self, fractions: Sequence[Placement]) -> None:
        """The fractions as affine functions of the shares."""
        pieces = [self.costs.view.fraction(p) for p in fractions]
        assert all(len(piece.slopes) < 2 for piece in pieces), "a fraction depends on one cut"
        self._cuts = list(dict.fromkeys(cut for piece in pieces for cut, _ in piece.slopes))
        place, kinds = {cut: i for i, cut in enumerate(self._cuts)}, len(self.costs.kinds)
        self._const = np.array([piece.const for piece in pieces]).reshape(-1, kinds)
        self._slope = np.array([piece.slopes[0][1] if piece.slopes else (0.0,) * kinds for piece in pieces]).reshape(-1, kinds)
        self._cut = np.array([place[piece.slopes[0][0]] if piece.slopes else len(self._cuts) for piece in pieces], dtype=np.int64)


class EdgesPriced:
    """Edges at shares. fractions: of tensors, per kind, by the numbers of `EdgePrices`."""

    def __init__(self, prices: EdgePrices, shares: Shares, fractions: Array, exposed: float):
        self.prices, self.shares, self.fractions, self.exposed = prices, shares, fractions, exposed
        self.values = [self._values(part) for part in prices.parts]
        self.copies = [self._copies(part) for part in prices.parts]

    def moved(self, number: int, form: Form, free: bool) -> Moved | None:
        """What an edge does in a form, freed or not; None where it is to be priced by its terms, because nothing moves or it is cut again."""
        at = self.prices.rows.get((number, free))
        if at is None:
            return None
        part, row = self.prices.parts[at[0]], at[1]
        which = self.prices.forms.index(form) if len(self.values[at[0]]) > 1 and form in self.prices.forms else 0
        ahead, back = (tuple(own[row].tolist()) for own in self.copies[at[0]][which])
        links, times = self.prices.costs.links[part.axis], (int(part.forward[row]), int(part.backward[row]))
        return Moved(tuple(self.values[at[0]][which][row].tolist()), *times, bool(part.sums[row]), links.cuts, (ahead, back))

    def weighted(self, forward: Array, backward: Array) -> Array:
        """(edge, weights) -> weighted seconds; the weights of what runs forward, and backward: weights x kinds."""
        prices = np.full((self.prices.count, len(forward)), np.inf)
        for part, values, copies in zip(self.prices.parts, self.values, self.copies, strict=True):
            found = []
            for value, (ahead, back) in zip(values, copies, strict=True):
                apart = value @ forward.T * part.forward[:, None] + value @ backward.T * part.backward[:, None]
                together = value.max(axis=1, keepdims=True) * (part.forward + part.backward)[:, None]
                found.append(np.where(part.joins[:, None], together, apart) + ahead @ forward.T + back @ backward.T)
            best: Array = np.where(part.even[:, None], found[0], np.minimum.reduce(found))
            np.minimum.at(prices, part.edges, best)
        prices[np.isinf(prices)] = 0.0  # nothing moves
        for number, step in self.prices.recuts.items():
            for event in step.communication:
                seconds, weights = event.term.at(self.shares), forward if event.direction == "forward" else backward
                prices[number] += seconds.max() if event.cuts else weights @ seconds
            for term, weights in ((step.forward, forward), (step.backward, backward)):
                if term is not None:
                    prices[number] += weights @ term.at(self.shares)
        return prices

    def _values(self, part: Part) -> list[Array]:
        """Per form, seconds of the collective: rows x kinds."""
        first, second = (self.fractions[which] * part.bytes[:, None] for which in (part.first, part.second))
        forms, links = self.prices.forms if part.collective == "all_gather" else self.prices.forms[:1], self.prices.costs.links[part.axis]
        found = [
            np.maximum.reduce([np.array(a) * first + np.array(b) * second + np.outer(part.latency, c) for a, b, c in pieces])
            for pieces in (links.pieces(part.collective, form) for form in forms)
        ]
        return found if self.exposed == 1.0 else [np.where(part.sums[:, None], self.exposed * seconds, seconds) for seconds in found]

    def _copies(self, part: Part) -> list[tuple[Array, Array]]:
        """Per form, seconds of copies forward and backward: rows x kinds."""
        costs, whole = self.prices.costs, part.whole[:, None]
        shard, longer = (self.fractions[which] * (whole * np.array(costs.per_byte)) for which in (part.shard, part.longer))

        def seconds(passes: Array) -> Array:
            total: Array = passes[:, :1] * shard + passes[:, 1:2] * longer + passes[:, 2:] * np.array(costs.launch)
            return total

        forms = range(len(self.prices.forms) if part.collective == "all_gather" else 1)
        return [(seconds(part.copied[:, form, 0]), seconds(part.copied[:, form, 1])) for form in forms]


def _is_recut(edge: Edge) -> bool:
    return is_recut(edge.before.states[edge.axis], edge.after.states[edge.axis])
