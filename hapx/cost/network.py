"""Time of collectives: an alpha-beta model of the links that a mesh axis uses.

In: a view and, per collective, the bytes that move as affine pieces. Out: terms in seconds. For m devices along an axis, N bytes of the
tensor that is whole along it, s_j N of it with device j, one message of latency a, and bandwidth b of the ring that passes every device once:

    all_reduce                  2 (m-1)/m N / b   + 2 ceil(log2 m) a      halving and doubling (Rabenseifner; Thakur et al. 2005): the volume of a
                                                                        ring with the latency of a tree; libraries switch between the two
    all_gather, padded          (m-1) max_j s_j N / b + ceil(log2 m) a    every piece is as large as the largest (HAP section 4.4)
    all_gather, grouped         N / b             + m a                   one broadcast per owner; they pass the ring one after another
    all_gather, point_to_point  max over devices and links of what leaves and what enters, + (m-1) a
    reduce_scatter              the same, with the directions exchanged
    all_to_all                  max over devices and links of what leaves and what enters, own part not subtracted (it is bilinear), + (m-1) a
    re-cut                      the same, of what moves (`hapx.cost.recut`)
    all_reduce of one number    2 ceil(log2 m) a'                       a' where it was measured, else a: hardly any rank has something to send, which
                                                                        counts where processes share cores (4 gloo ranks on 2 cores: a' = a / 5)

Bandwidth: a group inside one machine has that machine's link. A ring over several machines crosses each machine's network card once in each
direction, however many devices of a machine it has: its bandwidth is the slowest card's, divided by the number of groups of this axis that
cross that card at the same time (8 for the outer axis of 8 machines x 8 devices, 1 for a flat mesh), and at most that of the links inside.
Point-to-point messages and all_to_all have no ring: all n devices that a group has in one machine send through its card.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil, log2, prod

from hapx.cost.terms import Piece, Term, maximum
from hapx.cost.view import View
from hapx.plan import Form

SCALAR_BYTES = 8  # of one number of any type
Weights = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class AxisLinks:
    """The links along one mesh axis. Per kind: `ring` bandwidth, `inside` bandwidth between devices of one machine, `card` bandwidth of a
    machine's network card for one group (infinite where groups stay inside), `latency` (`scalar`: in sums of single numbers), and `mates`:
    devices of a group in one machine. `cuts`: whether a collective synchronises all kinds (all but the inner axis of two)."""

    size: int
    ring: tuple[float, ...]
    inside: tuple[float, ...]
    card: tuple[float, ...]
    latency: tuple[float, ...]
    mates: tuple[int, ...]
    cuts: bool
    scalar: tuple[float, ...]

    def all_reduce(self, whole: Piece, numbers: bool = False) -> Term | None:
        """`whole`: bytes of the tensor on a device of each kind. numbers: it is a single number, or a few."""
        return self._term(self.pieces("sum_of_numbers" if numbers else "all_reduce"), whole, whole)

    def all_gather(self, form: Form, shard: Piece, whole: Piece) -> Term | None:
        """`shard`, `whole`: bytes on a device of each kind before and after. A reduce_scatter costs the same."""
        return self._term(self.pieces("all_gather", form), shard, whole)

    def all_to_all(self, *parts: Piece) -> Term | None:
        """`parts`: bytes on a device of each kind before and after, or whatever bounds what it sends and receives."""
        if self.size == 1:
            return None
        (first, _, last), *rest = self.pieces("all_to_all")
        factors = [first, *(a for a, _, _ in rest if any(a))]
        return maximum(p.scaled(f) + Piece(last) for f in factors for p in parts)

    def pieces(self, collective: str, form: Form = Form.PADDED) -> list[Weights]:
        """The time of a collective as the maximum of pieces a x first + b x second + c, one number per kind each. first and second are bytes on a
        device: of an all_reduce (the whole, the whole), of an all_gather (the shard, the whole), of an all_to_all (before, after)."""
        if (collective, form) not in self._pieces:
            self._pieces[collective, form] = self._of_collective(collective, form)
        return self._pieces[collective, form]

    @cached_property
    def _pieces(self) -> dict[tuple[str, Form], list[Weights]]:
        return {}

    def _of_collective(self, collective: str, form: Form) -> list[Weights]:
        m, none = self.size, (0.0,) * len(self.ring)
        if m == 1:
            return []
        if collective == "all_reduce":
            return [(_over(self.ring, 2 * (m - 1) / m), none, self._messages(2 * self.rounds))]
        if collective == "sum_of_numbers":
            return [(_over(self.ring, 2 * (m - 1) / m), none, tuple(2 * self.rounds * a for a in self.scalar))]
        last = self._messages(m - 1)
        if collective == "all_to_all":
            pieces = [(_over(self.inside), none), (none, _over(self.inside))]
            if self.crosses:
                card = tuple(k / b for k, b in zip(self.mates, self.card, strict=True))
                pieces += [(card, none), (none, card)]
            return [(a, b, last) for a, b in pieces]
        if form is Form.GROUPED:
            return [(none, _over(self.ring), self._messages(m))]
        if form is Form.POINT_TO_POINT:
            pieces = [(_over(self.inside, m - 1), none), (_over(self.inside, -1.0), _over(self.inside))]
            if self.crosses:
                both = list(zip(self.mates, self.card, strict=True))
                pieces += [(tuple(k * (m - k) / b for k, b in both), none)]
                pieces += [(tuple(-k * k / b for k, b in both), tuple(k / b for k, b in both))]
            return [(a, b, last) for a, b in pieces]
        return [(_over(self.ring, m - 1), none, self._messages(self.rounds))]

    def _term(self, pieces: list[Weights], first: Piece, second: Piece) -> Term | None:
        return maximum(_sum(first, a, second, b, c) for a, b, c in pieces) if pieces else None

    @property
    def crosses(self) -> bool:
        """Whether groups of this axis have devices in several machines."""
        return min(self.card) < float("inf")

    @property
    def rounds(self) -> int:
        return ceil(log2(self.size))

    def messages(self, count: int) -> Piece:
        """The time of so many messages one after another."""
        return Piece(self._messages(count))

    def _messages(self, count: int) -> tuple[float, ...]:
        return tuple(count * a for a in self.latency)


def _over(bandwidth: tuple[float, ...], times: float = 1.0) -> tuple[float, ...]:
    return tuple(times / b for b in bandwidth)


def _sum(first: Piece, a: tuple[float, ...], second: Piece, b: tuple[float, ...], c: tuple[float, ...]) -> Piece:
    parts = [piece.scaled(factors) for piece, factors in ((first, a), (second, b)) if any(factors)]
    return sum(parts, Piece(c))


@dataclass(frozen=True)
class Network:
    """The links along every axis of a view."""

    view: View

    @cached_property
    def axes(self) -> tuple[AxisLinks, ...]:
        return tuple(self._links(axis) for axis in range(len(self.view.mesh.axes)))

    def _groups(self, axis: int) -> list[tuple[int, ...]]:
        mesh = self.view.mesh
        inner = prod(mesh.sizes[axis + 1 :])
        found: dict[tuple[int, int], list[int]] = {}
        for i, device in enumerate(mesh.devices):
            found.setdefault((i // (inner * mesh.sizes[axis]), i % inner), []).append(device)
        return [tuple(g) for g in found.values()]

    def _links(self, axis: int) -> AxisLinks:
        mesh, cluster, groups = self.view.mesh, self.view.cluster, self._groups(axis)
        machine = {d: cluster.devices[d].machine for d in mesh.devices}
        spans = {g: Counter(machine[d] for d in g) for g in groups}
        crossing = Counter(m for span in spans.values() if len(span) > 1 for m in span)
        infinite = float("inf")
        card = {m: cluster.inter.bandwidth / crossing[m] if crossing[m] else infinite for m in set(machine.values())}

        @cache
        def ring(group: tuple[int, ...]) -> float:
            span = spans[group]
            inside = [cluster.machines[m].intra.bandwidth for m, n in span.items() if n > 1]
            return min([*inside, *(card[m] for m in span if len(span) > 1)], default=infinite)

        @cache
        def latency(group: tuple[int, ...], scalar: bool = False) -> float:
            links = [cluster.machines[m].intra for m, n in spans[group].items() if n > 1] + ([cluster.inter] if len(spans[group]) > 1 else [])
            return max((link.of_scalars if scalar else link.latency for link in links), default=0.0)

        group_of = {d: g for g in groups for d in g}
        worst = self.view.worst
        inner = len(mesh.axes) == 2 and axis == 1 and axis != mesh.uneven and all(len(s) == 1 for s in spans.values())
        return AxisLinks(
            mesh.sizes[axis],
            worst(lambda d: ring(group_of[d]), min),
            worst(lambda d: cluster.machine_of(d).intra.bandwidth if spans[group_of[d]][machine[d]] > 1 else infinite, min),
            worst(lambda d: card[machine[d]] if len(spans[group_of[d]]) > 1 else infinite, min),
            worst(lambda d: latency(group_of[d])),
            tuple(int(n) for n in worst(lambda d: spans[group_of[d]][machine[d]])),
            not inner,
            worst(lambda d: latency(group_of[d], True)),
        )
