"""The theory of captured models: nothing stays replicated without a reason, heads and hidden dims can be split, and it is fast."""

from __future__ import annotations

import warnings

import pytest
import torch

from hapx.graph.capture import capture
from hapx.ir import Graph
from hapx.plan import Mesh
from hapx.states import Partial, Sharded
from hapx.theory.derive import derive
from hapx.theory.grains import find_grains
from hapx.theory.registry import Site, lookup
from hapx.theory.triple import Theory
from support.models import CNN, GPT, MLP
from support.theories import flat, two_level

MLP_GRAPH = MLP((12, 16, 8)), 8
GPT_GRAPH = GPT(vocab=11, width=24, heads=4, layers=2, context=6, dropout=0.1), 4
CNN_GRAPH = CNN(channels=3, width=4, classes=5), 8


def captured(case: tuple[torch.nn.Module, int]) -> Graph:
    model, batch = case
    return capture(model, model.example(batch))  # type: ignore[operator]


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    return {"mlp": captured(MLP_GRAPH), "gpt": captured(GPT_GRAPH), "cnn": captured(CNN_GRAPH)}


def strict(graph: Graph, mesh: Mesh) -> Theory:
    """The theory; an operator without a rule is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return derive(graph, mesh)


@pytest.mark.parametrize("mesh", [flat(4), two_level(2, 2)], ids=lambda m: m.name)
@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn"])
def test_no_operator_is_only_replicated_without_a_reason(name: str, mesh: Mesh, graphs: dict[str, Graph]) -> None:
    graph = graphs[name]
    for node, triples in zip(graph.nodes, strict(graph, mesh).triples, strict=True):
        entry = lookup(node.call)
        assert entry is not None
        split = any(isinstance(s, Sharded) for t in triples for p in (*t.pre, *t.post) for s in p.placement.states)
        scalar = all(o.size == 1 for o in node.outputs) and all(graph.refs[n].size == 1 for n in node.call.refs())
        assert split or entry.reason or scalar, f"{node.call.target} is only replicated"


@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn"])
def test_every_node_can_run_on_shares_of_the_batch(name: str, graphs: dict[str, Graph]) -> None:
    """From the first use of the batch to the loss: some triple that splits it, or sums over it."""
    graph = graphs[name]
    theory = strict(graph, flat(4))
    batch = {tensor for tensor, _ in theory.batch}
    for node, triples in zip(graph.nodes, theory.triples, strict=True):
        if any(n in batch for n in node.call.refs()):
            assert any((p.tensor, p.placement.states[0]) in theory.batch for t in triples for p in t.pre), node
    last = [t for t in theory.triples[-1] if any((p.tensor, p.placement.states[0]) in theory.batch for p in t.pre)]
    assert last and all(isinstance(t.post[0].placement.states[0], Partial) for t in last)


def test_heads_and_hidden_dims_of_the_transformer_can_be_split(graphs: dict[str, Graph]) -> None:
    graph = graphs["gpt"]
    g = find_grains(graph)
    for i in range(2):
        qkv, proj = g.classes[f"blocks.{i}.qkv.weight", Site(0, 3)], g.classes[f"blocks.{i}.proj.weight", Site(1)]
        assert qkv == proj and g.units[f"blocks.{i}.proj.weight", Site(1)] == 4, "heads: four units through the whole attention"
        up, down = g.classes[f"blocks.{i}.up.weight", Site(0)], g.classes[f"blocks.{i}.down.weight", Site(1)]
        assert up == down and g.units[f"blocks.{i}.up.weight", Site(0)] == 96
    attention = [k for k, n in enumerate(graph.nodes) if n.call.op == "aten.scaled_dot_product_attention"]
    theory = strict(graph, two_level(2, 2))
    for k in attention:
        assert any(str(t.post[0].placement) == "S0[4],S1[4]" for t in theory.triples[k]), "batch over machines, heads inside"


def test_the_vocabulary_can_be_split_in_embedding_head_and_loss(graphs: dict[str, Graph]) -> None:
    g = find_grains(graphs["gpt"])
    loss = next(n for n in graphs["gpt"].nodes if n.call.op == "aten.cross_entropy_loss")
    assert g.classes["tok.weight", Site(0)] == g.classes[loss.call.refs()[0], Site(1)]


def test_channels_of_the_convolutions_can_be_split(graphs: dict[str, Graph]) -> None:
    graph = graphs["cnn"]
    theory = strict(graph, flat(2))
    first = next(i for i, n in enumerate(graph.nodes) if n.call.op == "aten.conv2d")
    assert "S1[4]" in {str(t.post[0].placement) for t in theory.triples[first]}


@pytest.fixture(scope="module")
def gpt2() -> Graph:
    """GPT-2 small, on meta, 8 x 128 tokens."""
    with torch.device("meta"):
        model = GPT(50257, 768, 12, 12, 128, dtype=torch.float32)
        ids = torch.empty(8, 128, dtype=torch.int64)
    return capture(model, (ids, ids))


@pytest.mark.slow
def test_the_theory_grows_with_the_depth_only(gpt2: Graph) -> None:
    """Every block has the same number of triples."""
    theory = derive(gpt2, flat(8))
    counts: dict[int, int] = {}
    for triples, block in zip(theory.triples, gpt2.block_of, strict=True):
        if block is not None:
            counts[block[1]] = counts.get(block[1], 0) + len(triples)
    assert len(counts) >= 10 and len(set(counts.values())) == 1, counts
