"""Small cases for comparing the search with its oracles: a random graph over registered operators, thinned until every program can be enumerated,
real costs on a cluster of unlike devices, random shares.

In: a mesh and a seed. Out: a `Case`, the same one every time. All programs of a graph of six operators are too many to enumerate (over 10^5), so each
node keeps some of its triples, drawn at random; triples are put back one by one until at least `LEAST` programs are legal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np

from benchmarks.random_graphs import random_graph
from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.cost.terms import Shares, Vector
from hapx.plan import Axis, Mesh, Triple
from hapx.states import Cut, Row
from hapx.synth.exhaustive import Enumeration
from hapx.theory.derive import derive
from hapx.theory.triple import Theory

PADDED = frozenset({"padded"})
FLAT = Mesh("flat", (Axis("devices", 4, "devices"),), (0, 1, 2, 3), 0)
SQUARE = Mesh("2x2", (Axis("machines", 2, "machines"), Axis("devices", 2, "devices")), (0, 1, 2, 3), 0)
SPEEDS = {"fast": 4e7, "medium": 2e7, "slow": 1e7}
LEAST = 1000  # legal programs of a case
MOST = 5 * LEAST  # a triple that makes more is not put back


@dataclass(frozen=True)
class Case:
    """`found`: every legal program, by enumeration."""

    theory: Theory
    costs: CostModel
    shares: Shares
    found: Enumeration


def cluster(*machines: tuple[str, int], bandwidth: float = 1e9, inside: float | None = None) -> ClusterSpec:
    """Machines of (type, devices), so slow that small graphs are worth splitting. bandwidth: bit/s; inside: that of links inside, if it differs."""
    inter, intra = ({"bandwidth": f"{b / 1e9} Gbit/s", "latency": "1 us"} for b in (bandwidth, inside or bandwidth))
    types = {name: {"flops": flops, "memory": "1 GiB", "memory_bandwidth": "1 GB/s", "kernel_latency": "1 us"} for name, flops in SPEEDS.items()}
    made = [{"name": f"m{i}", "device": name, "devices": devices} for i, (name, devices) in enumerate(machines)]
    return ClusterSpec.load({"name": "small", "machines": made, "device_types": types, "network": {"inter": inter, "intra": intra}})


class RandomShares(dict[Cut, Vector]):
    """Shares of every cut that is asked for: of each row proportional to speed, and off by a random factor. Some kinds get nothing."""

    def __init__(self, mesh: Mesh, costs: CostModel, seed: int, spread: float = 0.5):
        super().__init__()
        self.mesh, self.costs, self.seed, self.spread = mesh, costs, seed, spread
        self.rows: dict[Row, Vector] = {}

    def __missing__(self, cut: Cut) -> Vector:
        if cut.row not in self.rows:
            self.rows[cut.row] = self._row(cut.row)
        self[cut] = self.rows[cut.row]
        return self[cut]

    def _row(self, row: Row) -> Vector:
        if row.kind == "even":
            return np.full(len(self.costs.kinds), 1 / self.mesh.sizes[row.axis])
        rng = random.Random(f"{self.seed} {row}")
        drawn = [s * np.exp(rng.gauss(0, self.spread)) * (rng.random() > 0.05) for s in self.costs.speeds]
        own = np.array(drawn if any(drawn) else self.costs.speeds)
        return own / (own @ self.costs.sizes)


def random_case(mesh: Mesh, seed: int) -> Case | None:
    """A case of 6 to 8 operators on four devices: of two kinds, or (on flat meshes, sometimes) of one or of three. None where the seed has none."""
    rng = random.Random(f"{mesh.name} {seed}")
    graph = random_graph(seed, operators=rng.choice((6, 6, 7, 8)), linears=rng.choice((2, 3)), biases=rng.random() < 0.3)
    machines = [("fast", 2), ("slow", 2)]
    if mesh.name == "flat":
        machines = rng.choice([machines, machines, [("fast", 1), ("medium", 1), ("slow", 2)], [("slow", 4)]])
    theory = derive(graph, mesh)
    costs = CostModel(theory, cluster(*machines, bandwidth=10 ** rng.uniform(8, 10)), "fp32", "adamw", "train")
    return _thinned(theory, costs, RandomShares(mesh, costs, seed), rng)


def random_cases(mesh: Mesh, number: int) -> Iterator[tuple[int, Case]]:
    """The first so many seeds that have a case, with it."""
    made = ((seed, case) for seed in count() if (case := random_case(mesh, seed)) is not None)
    return islice(made, number)


def _thinned(theory: Theory, costs: CostModel, shares: Shares, rng: random.Random) -> Case | None:
    """The case with one triple per node, then with more of them until at least `LEAST` programs are legal, but not more than `MOST`."""
    stored = {n: tuple(dict.fromkeys((p[0], p[-1]))) for n, p in theory.stored.items()}
    left = [(i, t) for i, ts in enumerate(theory.triples) for t in ts]
    rng.shuffle(left)
    kept: list[tuple[Triple, ...]] = [() for _ in theory.triples]
    for i, triple in reversed(left):
        kept[i] = kept[i] or (triple,)
    left = [(i, t) for i, t in left if t not in kept[i]]
    case: Case | None = None
    refused = 0
    while case is None or (len(case.found.found) < LEAST and left and refused < 2):
        trial = list(kept)
        if case is not None:
            i, triple = left.pop()
            trial[i] = (*kept[i], triple)
        drawn = replace(theory.with_triples(trial), stored=stored)
        found = Enumeration(drawn, costs, shares, forms=PADDED, most=MOST)
        if found.run().complete:
            kept, case = trial, Case(drawn, costs, shares, found)
        elif case is None:
            return None
        else:
            refused += 1
    return case if case is not None and len(case.found.found) >= LEAST else None
