"""Random small planning problems: a graph, a cluster of two to four kinds of devices, and a mesh view of it.

In: a seed. Out: a `Case`. Graphs have 4 to 9 operators; devices differ by up to ten times, links are anything from a bottleneck to no matter; in
every fifth case memory binds: what would be the fastest plan does not fit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.random_graphs import random_graph
from hapx.cluster.spec import ClusterSpec, DeviceType, Link, Machine
from hapx.errors import InsufficientMemoryError
from hapx.ir import Graph
from hapx.lower import memory
from hapx.plan import Mesh
from hapx.planner import Counters, Setting, key_of, plan_spmd, views
from hapx.restriction import AUTO

PLENTY = 2**40  # bytes


@dataclass(frozen=True)
class Case:
    """`binds`: memory is less than the fastest plan needs."""

    seed: int
    setting: Setting
    mesh: Mesh
    binds: bool

    @property
    def graph(self) -> Graph:
        return self.setting.graph


@cache
def case(seed: int) -> Case:
    """The problem of a seed."""
    rng, binds = random.Random(seed), seed % 5 == 4
    setting, mesh = _drawn(seed, rng, binds)
    return Case(seed, _short_of_memory(setting, mesh, rng) if binds else setting, mesh, binds)


@cache
def case_with(seed: int, memory: tuple[int, ...]) -> Case:
    """The problem of a seed with so many bytes per kind of devices, whatever the planner finds."""
    setting, mesh = _drawn(seed, random.Random(seed), seed % 5 == 4)
    types = {kind.name: replace(kind, memory=own) for kind, own in zip(setting.cluster.device_types.values(), memory, strict=True)}
    return Case(seed, replace(setting, cluster=replace(setting.cluster, device_types=types)), mesh, True)


def _drawn(seed: int, rng: random.Random, binds: bool) -> tuple[Setting, Mesh]:
    widths = rng.choice(((4, 6, 12), (8, 24, 32), (16, 64, 128)))
    graph = random_graph(seed, operators=rng.randint(4, 6 if binds else 9), batch=rng.choice((6, 12, 24, 48, 96)), widths=widths)
    cluster = _cluster(rng)
    found = views(cluster, AUTO)
    return Setting(graph, key_of(graph), cluster, AUTO, "fp32", "adamw"), found[0] if binds else rng.choice(found)


def _cluster(rng: random.Random) -> ClusterSpec:
    inside, between = Link(_log(rng, 1e6, 1e9), _log(rng, 1e-7, 1e-5)), Link(_log(rng, 1e5, 1e9), _log(rng, 1e-7, 1e-4))
    names = [f"kind-{k}" for k in range(rng.randint(2, 4))]
    types = {n: DeviceType(n, {"fp32": _log(rng, 1e7, 1e8)}, PLENTY, _log(rng, 1e8, 1e9), 1.0, _log(rng, 1e-7, 1e-5)) for n in names}
    alike = rng.choice((0, 0, 2))  # devices of every machine; 0: each has its own number
    groups = [(n,) * (alike or rng.randint(1, 2)) for n in names]
    if rng.random() < 0.3:
        return ClusterSpec("one machine", (Machine("m", tuple(d for g in groups for d in g), inside),), types, between)
    machines = [g for g in groups for _ in range(rng.randint(1, 2))]
    return ClusterSpec("machines", tuple(Machine(f"m{i}", g, inside) for i, g in enumerate(machines)), types, between)


def _log(rng: random.Random, low: float, high: float) -> float:
    """Between low and high, evenly on a logarithmic scale."""
    return float(low * (high / low) ** rng.random())


def _short_of_memory(setting: Setting, mesh: Mesh, rng: random.Random) -> Setting:
    """The setting with devices that cannot hold the fastest plan, but some plan."""
    best = plan_spmd(setting, Counters(), [mesh])[0]
    peak, types = max(memory(best)), setting.cluster.device_types
    skew = {name: rng.uniform(0.7, 1.4) for name in types}
    part = rng.uniform(0.3, 0.9)
    while True:
        limited = {name: replace(t, memory=int(peak * part * skew[name])) for name, t in types.items()}
        tight = replace(setting, cluster=replace(setting.cluster, device_types=limited))
        try:
            plan_spmd(tight, Counters(), [mesh])
        except InsufficientMemoryError:
            part *= 1.1
        else:
            return tight
