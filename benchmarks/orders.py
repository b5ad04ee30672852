"""What the fixed topological order costs: the optimum in the order in which a graph is written, against the best of its other orders.

In: how many graphs, how many orders of each at most. Out: a row per mesh. The search decides node by node in one order, and phases and conversions
follow that order; all else of the space is the same in every order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, islice
from statistics import median

import networkx as nx
from rich.table import Table

from benchmarks.random_cases import FLAT, SQUARE, RandomShares, cluster
from benchmarks.random_graphs import branching_graph, reordered
from benchmarks.whole_space import RULE
from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.errors import PlanError
from hapx.ir import Graph
from hapx.plan import Mesh
from hapx.synth.search import synthesize
from hapx.theory.derive import derive
from hapx.theory.triple import Theory


@dataclass(frozen=True)
class Orders:
    """Seconds of the optimum in each order, that in which the graph is written first; complete: these are all orders."""

    costs: tuple[float, ...]
    complete: bool

    @property
    def default(self) -> float:
        """What the default order costs more than the best one, relative."""
        return self.costs[0] / min(self.costs) - 1

    @property
    def worst(self) -> float:
        return max(self.costs) / min(self.costs) - 1


def dependencies(graph: Graph) -> nx.DiGraph:
    """Which node feeds which."""
    edges = nx.DiGraph()
    edges.add_nodes_from(range(len(graph.nodes)))
    for i, node in enumerate(graph.nodes):
        edges.add_edges_from((graph.producer[name], i) for name in node.call.refs() if name in graph.producer)
    return edges


def orders(graph: Graph, most: int, seed: int) -> tuple[list[tuple[int, ...]], bool]:
    """All topological orders, or where there are more than `most` so many random ones; the one that is written comes first."""
    edges, written = dependencies(graph), tuple(range(len(graph.nodes)))
    found = [tuple(o) for o in islice(nx.all_topological_sorts(edges), most + 1)]
    complete = len(found) <= most
    drawn = found if complete else list(islice(dict.fromkeys(_random_orders(edges, seed, 20 * most)), most))
    return list(dict.fromkeys([written, *drawn])), complete


def _random_orders(edges: nx.DiGraph, seed: int, number: int) -> Iterator[tuple[int, ...]]:
    rng = random.Random(seed)
    for _ in range(number):
        missing, order = {i: edges.in_degree(i) for i in edges}, []
        ready = [i for i, n in missing.items() if n == 0]
        while ready:
            order.append(ready.pop(rng.randrange(len(ready))))
            for j in edges.successors(order[-1]):
                missing[j] -= 1
                if missing[j] == 0:
                    ready.append(j)
        yield tuple(order)


def reordered_theory(theory: Theory, order: Sequence[int]) -> Theory:
    """The same triples for the nodes in another order."""
    triples = tuple(tuple(replace(t, node=k) for t in theory.triples[i]) for k, i in enumerate(order))
    return replace(theory.with_triples(triples), graph=reordered(theory.graph, order))


def thinned(theory: Theory, keep: int, seed: int) -> Theory:
    """`keep` triples per node, drawn at random: programs that communicate much more than an optimum of the whole theory does."""
    rng = random.Random(seed)
    return theory.with_triples(tuple(rng.sample(ts, min(keep, len(ts)))) for ts in theory.triples)


def compare_orders(theory: Theory, spec: ClusterSpec, most: int, seed: int) -> Orders:
    """The optimum of every order, at the same shares."""
    found, complete = orders(theory.graph, most, seed)
    costs = []
    for order in found:
        other = reordered_theory(theory, order)
        model = CostModel(other, spec, "fp32", "adamw", "train")
        costs.append(synthesize(other, model, RandomShares(theory.mesh, model, seed), restriction=RULE).cost)
    return Orders(tuple(costs), complete)


def _cases(mesh: Mesh, keep: int | None, most: int) -> Iterator[tuple[int, Orders]]:
    """Operators and comparison of one graph after the other; thinned theories without a program are passed over."""
    for seed in count():
        graph = branching_graph(seed)
        theory = derive(graph, mesh) if keep is None else thinned(derive(graph, mesh), keep, seed)
        spec = cluster(("fast", 2), ("slow", 2), bandwidth=10 ** random.Random(seed).uniform(8, 10))
        with suppress(PlanError):
            yield len(graph.nodes), compare_orders(theory, spec, most, seed)


def order_table(graphs: int, most: int) -> Table:
    """Random branching graphs on two machines of unlike devices: whole theories (fewer of them), and thinned ones."""
    table = Table("mesh", "triples", "graphs", "operators", "orders median/max", "all orders", "default is best", "default / best median", "max",
                  "worst / best max", "time", title="3. The fixed order: the default order against the best one")  # fmt: skip
    for mesh, keep, number, limit in ((FLAT, None, graphs // 4, most // 2), (FLAT, 2, graphs, most), (SQUARE, 2, graphs, most)):
        began, cases = time.perf_counter(), list(islice(_cases(mesh, keep, limit), number))
        sizes, found = [n for n, _ in cases], [f for _, f in cases]
        above, counts = [f.default for f in found], [len(f.costs) for f in found]
        table.add_row(mesh.name, "all" if keep is None else f"{keep} per node", str(number), f"{min(sizes)} to {max(sizes)}",
                      f"{median(counts):.0f} / {max(counts)}", str(sum(f.complete for f in found)), str(sum(a < 1e-9 for a in above)),
                      f"+{median(above):.2%}", f"+{max(above):.2%}", f"+{max(f.worst for f in found):.2%}",
                      f"{time.perf_counter() - began:.0f} s")  # fmt: skip
    return table
