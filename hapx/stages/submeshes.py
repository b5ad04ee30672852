"""Which sets of devices may be a stage, and which of them are alike.

In: a cluster. Out: its *submeshes*: slices of a machine (`hapx.stages.slices`: aligned runs of a power of two of its devices) and sets of whole
machines, of any mix of types. Submeshes that no cost can tell apart (the same multiset of machines, each with the same multiset of device types and
the same link) are one `Shape`, so the planner answers for a shape once. A shape is a cluster of its own (`Shape.spec`); `ordered` lists a submesh's
devices in the order of the devices of that cluster.

A pipeline passes over machines one after another: a machine that is sliced is used up (or, where devices may be left out, given up) before the next
one is begun. So neighbouring stages are joined by their machine's link exactly where both are slices of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby

from hapx.cluster.spec import ClusterSpec, Link, Machine
from hapx.stages.slices import full, places


@dataclass(frozen=True, slots=True)
class Part:
    """Devices of one machine: their types and the link between them (None for a single device, which uses none)."""

    types: tuple[str, ...]
    intra: Link | None

    def __str__(self) -> str:
        return " + ".join(f"{len(list(run))} {name}" for name, run in groupby(self.types))


@dataclass(frozen=True)
class Shape:
    """What costs can know of a submesh. Types and parts are in the order in which they first appear in the cluster."""

    parts: tuple[Part, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.parts)

    def __reduce__(self) -> tuple[type[Shape], tuple[object, ...]]:
        return Shape, (self.parts,)  # hashes of words are others in other processes

    @cached_property
    def num_devices(self) -> int:
        return sum(len(p.types) for p in self.parts)

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Types of the devices, in the order of `ordered` and of the devices of `spec`."""
        return tuple(t for p in self.parts for t in p.types)

    def spec(self, cluster: ClusterSpec) -> ClusterSpec:
        """The shape as a cluster of its own. Nothing in it depends on where the submesh lies."""
        machines = tuple(Machine(f"m{i}", p.types, p.intra or cluster.inter) for i, p in enumerate(self.parts))
        types = {name: kind for name, kind in cluster.device_types.items() if name in self.types}
        return ClusterSpec(str(self), machines, types, cluster.inter, profile=cluster.profile)

    def __str__(self) -> str:
        runs = [(part, len(list(run))) for part, run in groupby(self.parts)]
        return ", ".join(f"{n} x ({part})" if n > 1 else str(part) for part, n in runs)


def type_order(cluster: ClusterSpec) -> dict[str, int]:
    """Types of devices numbered by first appearance."""
    return {name: i for i, name in enumerate(dict.fromkeys(d.type for d in cluster.devices))}


def ordered(cluster: ClusterSpec, devices: Iterable[int]) -> tuple[int, ...]:
    """Devices of a submesh in the order of its shape: device k of `shape_of(...).spec(...)` is the k-th."""
    order = type_order(cluster)
    return tuple(d for _, ds in sorted((_rank(part, order, machine), ds) for part, machine, ds in _parts(cluster, devices)) for d in ds)


def shape_of(cluster: ClusterSpec, devices: Iterable[int]) -> Shape:
    """The shape of a set of devices."""
    order = type_order(cluster)
    found = sorted(((part, machine) for part, machine, _ in _parts(cluster, devices)), key=lambda pm: _rank(pm[0], order, pm[1]))
    return Shape(tuple(part for part, _ in found))


def shape_of_parts(cluster: ClusterSpec, parts: Iterable[tuple[tuple[str, ...], Link]]) -> Shape:
    """The shape of parts of machines: types of devices in any order, and the machine's link."""
    order = type_order(cluster)
    made = (Part(tuple(sorted(types, key=order.__getitem__)), link if len(types) > 1 else None) for types, link in parts)
    return Shape(tuple(sorted(made, key=lambda p: _rank(p, order, 0))))


def units(cluster: ClusterSpec) -> tuple[tuple[int, ...], ...]:
    """What is moved from stage to stage: machines; where there is only one, its devices."""
    return cluster.members if len(cluster.machines) > 1 else tuple((d,) for d in cluster.members[0])


def slices(cluster: ClusterSpec) -> Iterator[tuple[int, ...]]:
    """Every slice of every machine."""
    start = 0
    for machine in cluster.machines:
        for first, width in places(machine.devices, full(machine.devices)):
            yield tuple(range(start + first, start + first + width))
        start += len(machine.devices)


def submeshes(cluster: ClusterSpec) -> Iterator[tuple[int, ...]]:
    """Every submesh: slices, then every set of whole machines (their number is 2^machines - 1: for small clusters)."""
    yield from slices(cluster)
    machines = range(len(cluster.machines))
    for chosen in (c for n in machines for c in combinations(machines, n + 1)):
        yield tuple(d.index for d in cluster.devices if d.machine in chosen)


def _parts(cluster: ClusterSpec, devices: Iterable[int]) -> Iterator[tuple[Part, int, tuple[int, ...]]]:
    """Per machine of a submesh: part, number of the machine, devices sorted by type."""
    order = type_order(cluster)
    chosen = sorted((cluster.devices[d] for d in devices), key=lambda d: (d.machine, order[d.type], d.index))
    for machine, run in groupby(chosen, key=lambda d: d.machine):
        mine = list(run)
        link = cluster.machines[machine].intra if len(mine) > 1 else None
        yield Part(tuple(d.type for d in mine), link), machine, tuple(d.index for d in mine)


def _rank(part: Part, order: dict[str, int], machine: int) -> tuple[object, ...]:
    link = (part.intra.bandwidth, part.intra.latency) if part.intra else (0.0, 0.0)
    return tuple(order[t] for t in part.types), link, machine
