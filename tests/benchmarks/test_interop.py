"""The benchmark of the inter-operator program: its formulas keep their own bounds, and few pairs are asked."""

from __future__ import annotations

from benchmarks.interop import clusters, solved


def test_few_asks_on_a_small_cluster() -> None:
    cluster = dict(clusters())["8 H100, 8 A100"]
    found, _ = solved(cluster, 8)
    proven, _ = solved(cluster, 8, prove=True)
    assert found.asked < found.pairs / 5
    assert proven.gap <= 0.005 and proven.pipelines[0].time <= found.pipelines[0].time <= 1.02 * proven.pipelines[0].time
