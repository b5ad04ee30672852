"""Hub models at their published sizes, on `meta`: captured, every operator with a rule, repeated layers found, planned."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from examples.models import hub
from hapx.cluster.spec import ClusterSpec
from hapx.cost.coverage import Coverage, coverage
from hapx.graph.capture import capture
from hapx.planner import plan_graphs
from hapx.theory.derive import derive
from support.plans import flat

pytestmark = pytest.mark.hub

PAPER, LARGE = "cluster_specs/v100x2_p100x6.yaml", "cluster_specs/h100x8_a100x8.yaml"


@pytest.mark.parametrize(
    ("factory", "parameters", "layers", "cluster", "strategy"),
    [
        (hub.bert_base, 109_514_298, 12, PAPER, "dp-even"),
        (hub.gpt2, 124_439_808, 12, PAPER, "dp-even"),
        (hub.llama_8b, 8_030_261_248, 32, LARGE, "zero"),
    ],
    ids=["bert", "gpt2", "llama"],
)
def test_published_size(factory: Callable[[], hub.Example], parameters: int, layers: int, cluster: str, strategy: str) -> None:
    model, inputs = factory()
    assert sum(p.numel() for p in model.parameters()) == parameters
    graph = capture(model, inputs)
    assert coverage(graph) == Coverage(())
    assert max(b[1] for b in graph.block_of if b is not None) == layers - 1
    theory = derive(graph, flat(4))
    products = [i for i, n in enumerate(graph.nodes) if n.call.op in ("aten.linear", "aten.addmm", "aten.scaled_dot_product_attention")]
    assert len(products) >= 4 * layers
    for i in products:  # the batch, and something of the model
        assert len({t.work for t in theory.triples[i] if t.work[0] is not None}) >= 2, graph.nodes[i]
    plan = plan_graphs([graph], ClusterSpec.load(cluster), strategy=strategy)
    assert "every operator is covered by a rule" in str(plan).splitlines()
