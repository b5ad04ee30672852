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

from hapx.cost.copies import copied
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


@dataclass(frozen=True, slots=True)
class Part:
    """Edges along one axis that run one collective: their numbers; numbers of fractions of the tensor (see `AxisLinks.pieces`); bytes; part of a
    message's latency that counts; how often it runs forward and backward; whether all kinds wait for it; whether every form is alike;
    what devices copy for it (edge, form, direction, bytes of the shard and of the whole and kernels), of tensors whose fractions have the numbers
    `shard` and `longer`."""

    axis: int
    collective: str
    edges: Numbers
    first: Numbers
    second: Numbers
    shard: Numbers
    longer: Numbers
    bytes: Array
    latency: Array
    forward: Array
    backward: Array
    joins: Mask
    even: Mask
    copied: Array


class EdgePrices:
    """Prices of `edges` by a cost model. forms: those that are allowed."""

    def __init__(self, costs: CostModel, edges: Sequence[Edge], forms: frozenset[str]):
        self.costs, self.count = costs, len(edges)
        self.forms = [f for f in FORMS if f.value in forms] or [Form.PADDED]
        fractions: dict[Placement, int] = {}
        self._runs: dict[Any, tuple[list[tuple[Any, str]], bool]] = {}
        rows: dict[tuple[int, str], list[tuple[Any, ...]]] = {}
        for number, edge in enumerate(edges):
            self._row(number, edge, fractions, rows)
        self.parts = [_part(axis, name, found) for (axis, name), found in rows.items()]
        # what is cut again moves by the difference of two shares: such edges are few, each is priced by its own terms
        self.recuts = [(number, self._recut(edge)) for number, edge in enumerate(edges) if _is_recut(edge)]
        self._affine(list(fractions))

    def at(self, shares: Shares, forward: Array, backward: Array) -> Array:
        """(edge, weights) -> weighted seconds; the weights of what runs forward, and backward: weights x kinds."""
        at = np.zeros((len(self._cuts) + 1, self._const.shape[1]))
        for i, cut in enumerate(self._cuts):
            at[i] = shares[cut]
        fractions = self._const + self._slope * at[self._cut]
        prices = np.zeros((self.count, len(forward)))
        for part in self.parts:
            first, second = fractions[part.first] * part.bytes[:, None], fractions[part.second] * part.bytes[:, None]
            passed = [fractions[which] * np.array(self.costs.per_byte) for which in (part.shard, part.longer)]
            prices[part.edges] = self._priced(part, first, second, passed, forward, backward)
        for number, step in self.recuts:
            for event in step.communication:
                value, weights = event.term.at(shares), forward if event.direction == "forward" else backward
                prices[number] += value.max() if event.cuts else weights @ value
            for term, weights in ((step.forward, forward), (step.backward, backward)):
                if term is not None:
                    prices[number] += weights @ term.at(shares)
        return prices

    def _recut(self, edge: Edge) -> StepCost:
        source, target = edge.before.states[edge.axis], edge.after.states[edge.axis]
        step = Communication(edge.axis, source, target, Form.NONE, edge.ref.requires_grad)
        return self.costs.conversion(edge.ref, (step,), edge.after)

    def _priced(self, part: Part, first: Array, second: Array, passed: list[Array], forward: Array, backward: Array) -> Array:
        links, found = self.costs.links[part.axis], []
        for number, form in enumerate(self.forms if part.collective == "all_gather" else self.forms[:1]):
            values = [np.array(a) * first + np.array(b) * second + np.outer(part.latency, c) for a, b, c in links.pieces(part.collective, form)]
            if not values:
                return np.zeros((len(part.edges), len(forward)))
            value = np.maximum.reduce(values)
            apart = value @ forward.T * part.forward[:, None] + value @ backward.T * part.backward[:, None]
            together = value.max(axis=1, keepdims=True) * (part.forward + part.backward)[:, None]
            total = np.where(part.joins[:, None], together, apart)
            for way, weights in enumerate((forward, backward)):
                shard, whole, kernels = part.copied[:, number, way].T
                seconds = shard[:, None] * passed[0] + whole[:, None] * passed[1] + np.outer(kernels, self.costs.launch)
                total += seconds @ weights.T
            found.append(total)
        best: Array = np.where(part.even[:, None], found[0], np.minimum.reduce(found))
        return best

    def _row(self, number: int, edge: Edge, fractions: dict[Placement, int], rows: dict[tuple[int, str], list[tuple[Any, ...]]]) -> None:
        """What an edge needs to be priced, added to `rows`; nothing where nothing moves."""
        ref, axis, before, after, _ = edge
        if _is_recut(edge):
            return
        source, target = before.states[axis], after.states[axis]
        key = id(ref), source, target, edge.free  # references are the graph's own objects
        if key not in self._runs:
            ways = ((self.costs.collectives(ref, source, target, free), free) for free in edge.free)
            self._runs[key] = min(ways, key=lambda way: len(way[0]))
        runs, free = self._runs[key]
        if not runs:
            return

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
        size = ref.bytes / self.costs.sharers(axis, after) / self.costs.repeats if synchronises else float(ref.bytes)
        latency = self.costs.part_of_bucket(ref) / self.costs.repeats if synchronises else 1.0
        ahead = float(sum(direction == "forward" for direction, _ in runs))
        shard, longer = (fraction(p) for p in copied(axis, before, after))
        cuts = synchronises or self.costs.links[axis].cuts
        copies = [
            [(own.first * ref.bytes, own.second * ref.bytes, own.kernels) for own in self.costs.copies(ref, axis, before, after, form, free)]
            for form in self.forms
        ]
        row = (number, first, second, shard, longer, size, latency, ahead, len(runs) - ahead, cuts, even, copies)
        rows.setdefault((axis, name), []).append(row)

    def _affine(self, fractions: Sequence[Placement]) -> None:
        """The fractions as affine functions of the shares."""
        pieces = [self.costs.view.fraction(p) for p in fractions]
        assert all(len(piece.slopes) < 2 for piece in pieces), "a fraction depends on one cut"
        self._cuts = list(dict.fromkeys(cut for piece in pieces for cut, _ in piece.slopes))
        place, kinds = {cut: i for i, cut in enumerate(self._cuts)}, len(self.costs.kinds)
        self._const = np.array([piece.const for piece in pieces]).reshape(-1, kinds)
        self._slope = np.array([piece.slopes[0][1] if piece.slopes else (0.0,) * kinds for piece in pieces]).reshape(-1, kinds)
        self._cut = np.array([place[piece.slopes[0][0]] if piece.slopes else len(self._cuts) for piece in pieces], dtype=np.int64)


def _is_recut(edge: Edge) -> bool:
    return is_recut(edge.before.states[edge.axis], edge.after.states[edge.axis])


def _part(axis: int, name: str, rows: list[tuple[Any, ...]]) -> Part:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return Part(axis, name, *columns)
