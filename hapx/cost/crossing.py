"""Seconds that tensors take from one stage of a pipeline to another.

In: bytes between devices and what is gathered after them (`hapx.reshard`); a cluster. Out: seconds. All messages of a crossing are under way at once:

    max over network cards of what enters or leaves / bandwidth, over devices of the same inside a machine,   + a latency,
    + the gathers inside the receiving stage (padded, the slowest group).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, log2

from hapx.cluster.spec import ClusterSpec
from hapx.reshard import ReshardPlan, bytes_between


def crossing_seconds(plans: Iterable[tuple[ReshardPlan, int]], cluster: ClusterSpec) -> float:
    """Of tensors that cross together, each with the bytes of an element."""
    machine = [d.machine for d in cluster.devices]
    inside, cards, latency, gathers = dict[tuple[str, int], float](), dict[tuple[str, int], float](), 0.0, 0.0
    for plan, itemsize in plans:
        for (source, target), moved in bytes_between(plan, itemsize).items():
            latency = max(latency, cluster.link((source, target)).latency)
            if machine[source] == machine[target]:
                seconds = moved / cluster.machine_of(source).intra.bandwidth
                _add(inside, {("out", source): seconds, ("in", target): seconds})
            else:
                seconds = moved / cluster.inter.bandwidth
                _add(cards, {("out", machine[source]): seconds, ("in", machine[target]): seconds})
        gathers += _gathers(plan.gathers, itemsize, cluster)
    return max([0.0, *inside.values(), *cards.values()]) + latency + gathers


def crossing_links(plans: Iterable[tuple[ReshardPlan, int]], cluster: ClusterSpec) -> tuple[tuple[str, int], ...]:
    """What these messages occupy, each in one direction: network cards by machine, and the links of devices inside machines."""
    found: dict[tuple[str, int], None] = {}
    for source, target in (pair for plan, itemsize in plans for pair in bytes_between(plan, itemsize)):
        a, b = (cluster.devices[d].machine for d in (source, target))
        ends = (("device out", source), ("device in", target)) if a == b else (("card out", a), ("card in", b))
        found |= dict.fromkeys(ends)
    return tuple(found)


def _add(total: dict[tuple[str, int], float], more: Mapping[tuple[str, int], float]) -> None:
    for key, value in more.items():
        total[key] = total.get(key, 0.0) + value


def _gathers(gathers: Mapping[tuple[int, ...], Sequence[int]], itemsize: int, cluster: ClusterSpec) -> float:
    """The slowest of the groups; those that cross a card share it."""
    crossing = Counter[int]()
    for group in gathers:
        machines = {cluster.devices[d].machine for d in group}
        crossing.update(machines if len(machines) > 1 else ())
    slowest = 0.0
    for group, shares in gathers.items():
        link, n = cluster.link(group), len(group)
        sharing = max((crossing[cluster.devices[d].machine] for d in group), default=1) or 1
        slowest = max(slowest, (n - 1) * max(shares) * itemsize / link.bandwidth * sharing + ceil(log2(n)) * link.latency)
    return slowest
