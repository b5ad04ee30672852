"""What is kept: optimizer state, and what forward saves for backward."""

from __future__ import annotations

import pytest

from hapx.cost.memory import allocates, base_of, kept, saved, states_of, storage_bytes
from hapx.errors import HapError
from hapx.ir import Kind, TensorRef
from support.theories import GraphBuilder, mlp


@pytest.mark.parametrize("name,factor", [("adamw", 4), ("AdamW", 4), ("sgd", 2), ("sgd-momentum", 3), ("lion", 3)])
def test_storage_is_parameter_gradient_and_state(name: str, factor: int):
    ref = TensorRef("w", (10,), "float32", Kind.PARAMETER, True)
    assert storage_bytes(ref, states_of(name), training=True) == factor * 40
    assert storage_bytes(ref, states_of(name), training=False) == 40


def test_state_is_fp32_whatever_the_parameter_is():
    assert storage_bytes(TensorRef("w", (10,), "bfloat16", Kind.PARAMETER, True), 2, training=True) == 2 * 20 + 80


def test_a_buffer_has_no_gradient():
    assert storage_bytes(TensorRef("b", (10,), "float32", Kind.BUFFER, False), 2, training=True) == 40


def test_an_unknown_optimizer_is_named_with_those_that_are_known():
    with pytest.raises(HapError, match=r"unknown optimizer 'admw'; allowed: sgd, .*adamw"):
        states_of("admw")


def test_an_mlp_keeps_what_its_backward_needs():
    g = mlp()
    assert [saved(n, g) for n in g.nodes] == [("x",), ("a",), ("a", "w2"), ("y", "y"), ()]
    assert kept(g) == {"x", "a", "w2", "y"}
    assert {n for n in g.refs if allocates(g, n, kept(g))} == {"a", "y"}  # inputs and parameters are there anyway


def test_a_product_keeps_only_the_factor_whose_partner_needs_a_gradient():
    b = GraphBuilder()
    b.tensor("x", (4, 6))
    b.parameter("w", 4, 6)
    b.call("y", "aten.mul.Tensor", (4, 6), self="x", other="w")
    b.call("z", "aten.div.Tensor", (4, 6), self="y", other="x")
    g = b.graph("z")
    assert [saved(n, g) for n in g.nodes] == [("x",), ("x",)]


def test_views_keep_their_base_once():
    """Attention saves three views of one fused product: that product is kept, and nothing else of it."""
    b = GraphBuilder()
    b.tensor("x", (2, 4, 8))
    b.parameter("w", 24, 8)
    b.call("qkv", "aten.linear.default", (2, 4, 24), input="x", weight="w", bias=None)
    for i, name in enumerate("qkv"):
        b.call(f"{name}0", "aten.slice.Tensor", (2, 4, 8), self="qkv", dim=2, start=8 * i, end=8 * i + 8, step=1)
        b.call(name, "aten.view.default", (2, 4, 2, 4), self=f"{name}0", size=(2, 4, 2, 4))
    b.call(
        "y", "aten.scaled_dot_product_attention.default", (2, 4, 2, 4), query="q", key="k", value="v", attn_mask=None, dropout_p=0.0, is_causal=False
    )
    g = b.graph("y")
    assert base_of(g, "q") == "q0"
    assert base_of(g, "q0") == "qkv"
    assert base_of(g, "qkv") is None
    assert {n for n in g.refs if allocates(g, n, kept(g))} == {"qkv", "y"}


def test_nothing_is_saved_where_no_gradient_flows():
    b = GraphBuilder()
    b.tensor("x", (4, 6))
    b.parameter("w", 6)
    b.call("y", "aten.relu.default", (4, 6), self="x")
    b.call("z", "aten.add.Tensor", (4, 6), self="y", other="w", alpha=1)
    g = b.graph("z")
    assert [saved(n, g) for n in g.nodes] == [(), ()]
    assert kept(g) == frozenset()
