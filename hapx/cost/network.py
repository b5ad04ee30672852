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

Bandwidth: a group inside one machine has that machine's link. A ring over several machines crosses each machine's network card once in each
direction, however many devices of a machine it has: its bandwidth is the slowest card's, divided by the number of groups of this axis that
cross that card at the same time (8 for the outer axis of 8 machines x 8 devices, 1 for a flat mesh), and at most that of the links inside.
Point-to-point messages and all_to_all have no ring: all n devices that a group has in one machine send through its card.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2, prod

from hapx.cost.terms import Piece, Term, maximum
from hapx.cost.view import View
from hapx.plan import Form


@dataclass(frozen=True)
class AxisLinks:
    """The links along one mesh axis. Per kind: `ring` bandwidth, `inside` bandwidth between devices of one machine, `card` bandwidth of a
    machine's network card for one group (infinite where groups stay inside), `latency`, and `mates`: devices of a group in one machine.
    `cuts`: whether a collective synchronises all kinds (all but the inner axis of two)."""

    size: int
    ring: tuple[float, ...]
    inside: tuple[float, ...]
    card: tuple[float, ...]
    latency: tuple[float, ...]
    mates: tuple[int, ...]
    cuts: bool

    def all_reduce(self, whole: Piece) -> Term | None:
        """`whole`: bytes of the tensor on a device of each kind."""
        m = self.size
        return None if m == 1 else maximum([self._over(whole, self.ring, 2 * (m - 1) / m) + self.messages(2 * self.rounds)])

    def all_gather(self, form: Form, shard: Piece, whole: Piece) -> Term | None:
        """`shard`, `whole`: bytes on a device of each kind before and after. A reduce_scatter costs the same."""
        m = self.size
        if m == 1:
            return None
        if form is Form.GROUPED:
            return maximum([self._over(whole, self.ring) + self.messages(m)])
        if form is Form.POINT_TO_POINT:
            rest = whole + shard.scaled([-1.0] * len(self.ring))
            pieces = [self._over(shard, self.inside, m - 1), self._over(rest, self.inside)]
            if self.crosses:
                n = self.mates
                others = whole + shard.scaled([-float(k) for k in n])
                pieces += [shard.scaled([k * (m - k) / b for k, b in zip(n, self.card, strict=True)])]
                pieces += [others.scaled([k / b for k, b in zip(n, self.card, strict=True)])]
            return maximum(p + self.messages(m - 1) for p in pieces)
        return maximum([self._over(shard, self.ring, m - 1) + self.messages(self.rounds)])

    def all_to_all(self, *parts: Piece) -> Term | None:
        """`parts`: bytes on a device of each kind before and after, or whatever bounds what it sends and receives."""
        if self.size == 1:
            return None
        pieces = [self._over(p, self.inside) for p in parts]
        if self.crosses:
            pieces += [p.scaled([k / b for k, b in zip(self.mates, self.card, strict=True)]) for p in parts]
        return maximum(p + self.messages(self.size - 1) for p in pieces)

    @property
    def crosses(self) -> bool:
        """Whether groups of this axis have devices in several machines."""
        return min(self.card) < float("inf")

    @property
    def rounds(self) -> int:
        return ceil(log2(self.size))

    def _over(self, volume: Piece, bandwidth: tuple[float, ...], times: float = 1.0) -> Piece:
        return volume.scaled([times / b for b in bandwidth])

    def messages(self, count: int) -> Piece:
        """The time of so many messages one after another."""
        return Piece(tuple(count * a for a in self.latency))


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

        def ring(group: tuple[int, ...]) -> float:
            span = spans[group]
            inside = [cluster.machines[m].intra.bandwidth for m, n in span.items() if n > 1]
            return min([*inside, *(card[m] for m in span if len(span) > 1)], default=infinite)

        def latency(group: tuple[int, ...]) -> float:
            links = [cluster.machines[m].intra for m, n in spans[group].items() if n > 1] + ([cluster.inter] if len(spans[group]) > 1 else [])
            return max((link.latency for link in links), default=0.0)

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
        )
