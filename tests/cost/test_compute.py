"""FLOPs and bytes of single calls, by hand."""

from __future__ import annotations

import pytest

from hapx.cost.compute import DRAWN, NOTHING, PER_SCORE, SCORE_BLOCK, hidden, is_view, work
from hapx.ir import Kind
from support.theories import GraphBuilder


def test_linear():
    b = GraphBuilder()
    b.tensor("x", (2, 3, 8))
    b.parameter("w", 5, 8)
    b.parameter("c", 5)
    b.call("y", "aten.linear.default", (2, 3, 5), input="x", weight="w", bias="c")
    b.call("z", "aten.linear.default", (2, 3, 8), input="y", weight=b.parameter("v", 8, 5), bias=None)
    g = b.graph("z")
    first, second = (work(g, n) for n in g.nodes)
    assert first.forward == 2 * 6 * 8 * 5
    assert first.backward == first.of_weight == first.forward  # the input needs no gradient
    assert first.kernels_back == 2  # weight and bias
    assert dict(first.moved) == {"x": 192, "w": 160, "c": 20, "y": 120}
    assert second.backward == 2 * second.forward
    assert second.of_weight == second.forward


@pytest.mark.parametrize(
    "target,left,right,out,flops",
    [
        ("aten.mm.default", (4, 6), (6, 8), (4, 8), 2 * 4 * 6 * 8),
        ("aten.bmm.default", (3, 4, 6), (3, 6, 8), (3, 4, 8), 3 * 2 * 4 * 6 * 8),
    ],
)
def test_products(target: str, left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...], flops: float):
    b = GraphBuilder()
    b.parameter("a", *left)
    b.parameter("b", *right)
    b.call("y", target, out, self="a", mat2="b")
    g = b.graph_without_inputs("y")
    assert work(g, g.nodes[0]).forward == flops
    assert work(g, g.nodes[0]).backward == 2 * flops


def test_convolution_counts_one_filter_per_output_element():
    b = GraphBuilder()
    b.tensor("x", (2, 4, 9, 9))
    b.parameter("w", 6, 2, 3, 3)  # two groups
    b.call("y", "aten.conv2d.default", (2, 6, 7, 7), input="x", weight="w", bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=2)
    g = b.graph("y")
    assert work(g, g.nodes[0]).forward == 2 * (2 * 6 * 7 * 7) * (2 * 3 * 3)


def test_transposed_convolution_spreads_every_input_element_over_one_filter():
    b = GraphBuilder()
    b.tensor("x", (2, 4, 5, 5))
    b.parameter("w", 4, 3, 2, 2)  # two groups
    b.call("y", "aten.conv_transpose2d.input", (2, 6, 10, 10), input="x", weight="w", bias=None, stride=(2, 2), groups=2)
    g = b.graph("y")
    assert work(g, g.nodes[0]).forward == 2 * (2 * 4 * 5 * 5) * (3 * 2 * 2)
    assert work(g, g.nodes[0]).of_weight == work(g, g.nodes[0]).forward


def test_masks_of_channels_are_small():
    b = GraphBuilder()
    b.parameter("w", 2, 6, 5, 5)
    b.call("d", "aten.dropout.default", (2, 6, 5, 5), input="w", p=0.5, train=True)
    b.call("f", "aten.feature_dropout.default", (2, 6, 5, 5), input="d", p=0.5, train=True)
    b.call("n", "aten.group_norm.default", (2, 6, 5, 5), input="f", num_groups=3, weight=None, bias=None, eps=1e-5, cudnn_enabled=False)
    g = b.graph_without_inputs("n")
    assert [hidden(g, n) for n in g.nodes] == [(("d", 300.0),), (("f", 12.0),), (("n", 8.0 * 2 * 3),)]


def drawn(node_of):
    b = GraphBuilder()
    b.parameter("w", 2, 6, 5, 5)
    node_of(b)
    g = b.graph_without_inputs("y")
    return work(g, g.nodes[0]).moved[-1][1] / DRAWN


def test_random_words_are_counted_forward():
    shape = (2, 6, 5, 5)
    assert drawn(lambda b: b.call("y", "aten.dropout.default", shape, input="w", p=0.5, train=True)) == 300
    assert drawn(lambda b: b.call("y", "aten.feature_dropout.default", shape, input="w", p=0.5, train=True)) == 12
    assert drawn(lambda b: b.call("y", "aten.rand.default", (300,), size=(300,))) == 300
    assert drawn(lambda b: b.call("y", "aten.neg.default", shape, self="w")) == 300 * 4 / DRAWN, "none"
    plain, dropping = (attention(False, dropout=p) for p in (0.0, 0.5))
    more = sum(size for _, size in work(dropping, dropping.nodes[0]).moved) - sum(size for _, size in work(plain, plain.nodes[0]).moved)
    scores = 2 * 4 * 16 * 16
    assert more == scores * (DRAWN + 2 * 4 + 1) - 4 * 2 * 4 * 16
    assert sum(size for _, size in work(dropping, dropping.nodes[0]).moved_back) < scores * DRAWN, "backward draws nothing"


def attention(causal: bool, positions: int = 16, dropout: float = 0.0):
    b = GraphBuilder()
    q, k, v = (b.parameter(n, 2, 4, positions, 8) for n in "qkv")
    b.call(
        "y", "aten.scaled_dot_product_attention.default", (2, 4, positions, 8),
        query=q, key=k, value=v, attn_mask=None, dropout_p=dropout, is_causal=causal,
    )  # fmt: skip
    return b.graph_without_inputs("y")


def test_attention_is_two_products_and_a_softmax():
    whole = attention(False)
    scores = 2 * 4 * 16 * 16
    assert work(whole, whole.nodes[0]).forward == scores * (2 * 2 * 8 + PER_SCORE)
    assert work(whole, whole.nodes[0]).backward == scores * (5 * 2 * 8 + 2 * PER_SCORE)
    assert hidden(whole, whole.nodes[0]) == (("y", 4 * 2 * 4 * 16),)


def test_a_causal_mask_saves_blocks_of_scores():
    """Nothing within one block, nearly half of many."""
    for positions, part in ((16, 1.0), (SCORE_BLOCK, 1.0), (4 * SCORE_BLOCK, 0.625), (64 * SCORE_BLOCK, 0.5 + 1 / 128)):
        whole, causal = attention(False, positions), attention(True, positions)
        assert work(causal, causal.nodes[0]).forward == pytest.approx(part * work(whole, whole.nodes[0]).forward)
        assert work(causal, causal.nodes[0]).backward == pytest.approx(part * work(whole, whole.nodes[0]).backward)


@pytest.mark.parametrize(
    ("op", "arguments", "result", "forward", "backward"),
    [
        ("aten.softmax.int", {"dim": -1}, (64, 97), 4, 4),  # three reads and a write; back twice the two tensors
        ("aten.log_softmax.int", {"dim": -1}, (64, 97), 4, 4),
        ("aten.cross_entropy_loss.default", {"target": "t", "weight": None, "reduction": 1}, (), 4, 5),  # with the log-softmax that is kept
    ],
)
def test_a_softmax_reads_its_rows_three_times(op, arguments, result, forward, backward):
    b = GraphBuilder()
    x = b.parameter("x", 64, 97)
    b.tensor("t", (64,), dtype="int64")
    b.call("y", op, result, self=x, **arguments)
    done = work(b.graph("y"), b.graph("y").nodes[0])
    rest = 64 * 8 + 4 if result == () else 0
    assert sum(size for _, size in done.moved) == forward * 4 * 64 * 97 + rest
    assert sum(size for _, size in done.moved_back) == backward * 4 * 64 * 97 + 2 * rest


def test_an_embedding_reads_rows_and_has_a_dense_gradient():
    b = GraphBuilder()
    b.tensor("ids", (4, 8), dtype="int64")
    b.parameter("w", 1000, 16)
    b.call("y", "aten.embedding.default", (4, 8, 16), weight="w", indices="ids", padding_idx=-1)
    g = b.graph("y")
    done = work(g, g.nodes[0])
    assert sum(dict(done.moved).values()) == 4 * 8 * 8 + 2 * 4 * 8 * 16 * 4
    assert dict(done.moved_back)["w"] == 1000 * 16 * 4


def test_views_and_constants_cost_nothing():
    b = GraphBuilder()
    b.parameter("w", 4, 6)
    b.call("a", "aten.view.default", (24,), self="w", size=(24,))
    b.call("t", "aten.t.default", (6, 4), self="w")
    b.call("r", "aten.reshape.default", (24,), self="t", shape=(24,))
    b.call("k", "aten.reshape.default", (2, 12), self="w", shape=(2, 12))
    b.call("d", "aten.dropout.default", (4, 6), input="w", p=0.0, train=True)
    b.call("e", "aten.dropout.default", (4, 6), input="w", p=0.5, train=True)
    b.call("c", "aten.to.dtype", (4, 6), self="w", dtype=None)
    b.call("m", "aten.arange.default", (4,), "int64", end=4)
    b.refs["m"] = b.refs["m"].__class__("m", (4,), "int64", Kind.CONSTANT, False)
    b.nodes[-1] = b.nodes[-1].__class__(b.nodes[-1].call, (b.refs["m"],), "", "", (None,))
    g = b.graph_without_inputs("e")
    free = {n.outputs[0].name for n in g.nodes if work(g, n) == NOTHING}
    assert free == {"a", "t", "k", "d", "c", "m"}  # the reshape of a transposed tensor copies
    assert {n.outputs[0].name for n in g.nodes if is_view(g, n)} == free - {"m"}


def test_everything_else_moves_its_operands_and_outputs():
    b = GraphBuilder()
    b.tensor("x", (4, 6))
    b.parameter("w", 6)
    b.call("y", "aten.mul.Tensor", (4, 6), self="x", other="w")
    b.call("z", "aten.gt.Scalar", (4, 6), "bool", self="x", other=0)
    g = b.graph("y")
    first, second = (work(g, n) for n in g.nodes)
    assert first.forward == 0
    assert first.moved == (("x", 96), ("w", 24), ("y", 96))
    assert first.moved_back == (("x", 192), ("w", 48), ("y", 192))
    assert second.moved_back == ()
    assert second.kernels_back == 0
