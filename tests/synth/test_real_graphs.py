"""The search against exhaustive enumeration on real theories: random graphs over registered operators, real costs, unequal devices.

All programs of a six-operator graph are too many to enumerate (over 10^5), so each node keeps a few of its triples, drawn at random;
what is left of the theory is searched and enumerated in full.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.cost.terms import Vector
from hapx.plan import Axis, Mesh
from hapx.restriction import Restriction
from hapx.states import Cut
from hapx.synth.exhaustive import Enumeration
from hapx.synth.search import synthesize
from hapx.synth.writer import Solution
from hapx.theory.derive import derive
from hapx.theory.replay import replay
from hapx.theory.triple import Theory
from support.random_graphs import random_graph

PADDED = frozenset({"padded"})
LINK = {"bandwidth": "1 Gbit/s", "latency": "1 us"}
FLAT = Mesh("flat", (Axis("devices", 2, "devices"),), (0, 1), 0)
SQUARE = Mesh("2x2", (Axis("machines", 2, "machines"), Axis("devices", 2, "devices")), (0, 1, 2, 3), 0)


def device(flops: float) -> dict[str, object]:
    return {"flops": flops, "memory": "1 GiB", "memory_bandwidth": "1 GB/s", "kernel_latency": "1 us"}


def cluster(per_machine: int, inter: Mapping[str, str] = LINK) -> ClusterSpec:
    """Two machines, the first four times as fast."""
    machines = [{"name": kind, "device": kind, "devices": per_machine} for kind in ("fast", "slow")]
    types = {"fast": device(4e7), "slow": device(1e7)}
    return ClusterSpec.load({"name": "c", "machines": machines, "device_types": types, "network": {"inter": inter, "intra": LINK}})


class Proportional(dict[Cut, Vector]):
    """Shares proportional to speed; storage rows a little off, so that rows differ."""

    def __init__(self, mesh: Mesh, costs: CostModel):
        super().__init__()
        self.mesh, self.costs = mesh, costs

    def __missing__(self, cut: Cut) -> Vector:
        if cut.row.kind == "even":
            self[cut] = np.full(len(self.costs.kinds), 1 / self.mesh.sizes[cut.row.axis])
        else:
            self[cut] = np.array(self.costs.speeds) * (0.9 if cut.row.kind == "storage" else 1.0)
        return self[cut]


def thinned(theory: Theory, seed: int, keep: int) -> Theory:
    """The theory with at most `keep` triples per node, the first (all whole) among them."""
    rng = random.Random(seed)
    drawn = tuple((ts[0], *rng.sample(ts[1:], min(keep - 1, len(ts) - 1))) for ts in theory.triples)
    stored = {name: placements[:1] + placements[-1:] for name, placements in theory.stored.items()}
    return replace(theory, triples=drawn, stored={n: tuple(dict.fromkeys(p)) for n, p in stored.items()})


@pytest.mark.parametrize(("mesh", "seed"), [(FLAT, s) for s in range(24)] + [(SQUARE, s) for s in (*range(24, 32), *range(33, 36))])
def test_equals_enumeration(mesh: Mesh, seed: int) -> None:
    graph = random_graph(seed, operators=6, linears=2, biases=False)
    theory = thinned(derive(graph, mesh), seed, keep=3 if mesh is FLAT else 2)
    costs = CostModel(theory, cluster(len(mesh.devices) // 2), "fp32", "adamw", "train")
    shares = Proportional(mesh, costs)
    count = Enumeration(theory, costs, shares, forms=PADDED).run()
    solution = synthesize(theory, costs, shares, restriction=Restriction(forms=PADDED))
    print(f"graph {seed} on {mesh.name}: {count.programs} legal programs, {solution.statistics.expansions} expansions")
    assert len(graph.nodes) >= 6
    assert count.programs >= 1000
    assert solution.cost == pytest.approx(count.cost, rel=1e-9)
    replay(solution.program, theory, solution.storage_of)


def shared(solution: Solution) -> int:
    """Conversions that go through shards of the inner axis."""
    bodies = (i.triple.body for i in solution.program.instructions)
    return sum(isinstance(b, tuple) and [c.axis for c in b] == [1, 0, 1] for b in bodies)


def test_equals_enumeration_where_machines_are_far_apart() -> None:
    """Paths through shards of the inner axis are part of the space, of its bound, and of what is best."""
    used = 0
    for seed in (24, 26, 28, 31, 33, 35):
        graph = random_graph(seed, operators=6, linears=2, biases=False)
        theory = thinned(derive(graph, SQUARE), seed, keep=2)
        costs = CostModel(theory, cluster(2, {"bandwidth": "10 Mbit/s", "latency": "1 us"}), "fp32", "adamw", "train")
        shares = Proportional(SQUARE, costs)
        count = Enumeration(theory, costs, shares, forms=PADDED).run()
        solution = synthesize(theory, costs, shares, restriction=Restriction(forms=PADDED))
        print(f"graph {seed}: {count.programs} legal programs, {shared(solution)} conversions through shards")
        assert solution.cost == pytest.approx(count.cost, rel=1e-9)
        replay(solution.program, theory, solution.storage_of)
        used += shared(solution) > 0
    assert used >= 1
