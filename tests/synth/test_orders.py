"""Other topological orders of a graph: which there are, and that a reordered theory is the same theory."""

from __future__ import annotations

import pytest

from benchmarks.orders import Orders, compare_orders, dependencies, orders, reordered_theory
from benchmarks.random_cases import FLAT, cluster
from benchmarks.random_graphs import branching_graph
from hapx.synth.search import program_key
from hapx.theory.derive import derive


def test_orders_are_topological_and_the_written_one_is_first() -> None:
    graph = branching_graph(0)
    found, complete = orders(graph, 100, 0)
    assert complete and found[0] == tuple(range(len(graph.nodes)))
    assert len(set(found)) == len(found) > 5
    for order in found:
        at = {node: k for k, node in enumerate(order)}
        assert all(at[a] < at[b] for a, b in dependencies(graph).edges)
    drawn, complete = orders(graph, 4, 0)
    assert not complete and len(set(drawn)) in (4, 5) and set(drawn) <= set(found)


def test_a_reordered_theory_has_the_same_triples() -> None:
    graph = branching_graph(1)
    theory = derive(graph, FLAT)
    order = orders(graph, 100, 0)[0][-1]
    other, again = reordered_theory(theory, order), derive(reordered_theory(theory, order).graph, FLAT)
    assert [set(map(str, ts)) for ts in other.triples] == [set(map(str, ts)) for ts in again.triples]
    assert all(t.node == k for k, ts in enumerate(other.triples) for t in ts)
    assert program_key(other) == program_key(theory)
    assert other.graph.hash != graph.hash


def test_costs_of_orders() -> None:
    compared = compare_orders(derive(branching_graph(2), FLAT), cluster(("fast", 2), ("slow", 2)), 4, 0)
    assert len(compared.costs) in (4, 5)
    assert 0 <= compared.default <= compared.worst
    three = Orders((1.1, 1.0, 1.2), True)
    assert (three.default, three.worst) == pytest.approx((0.1, 0.2))
