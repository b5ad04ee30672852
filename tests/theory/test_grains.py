"""Units of dims that are joined through the graph: heads, blocks of a fused projection, flattened batches."""

from __future__ import annotations

from hapx.ir import Graph, Node, OpCall, Ref, TensorRef
from hapx.ir import Kind as TensorKind
from hapx.theory.derive import derive
from hapx.theory.grains import Grains, find_grains
from hapx.theory.registry import Site
from support.theories import GraphBuilder, flat


def qkv(batch: int = 2, tokens: int = 3, width: int = 24, heads: int = 4) -> Graph:
    """A fused projection, split in three, viewed as heads, attended, put together, projected."""
    b = GraphBuilder()
    b.tensor("x", (batch, tokens, width))
    b.parameter("w", 3 * width, width)
    b.parameter("v", width, width)
    b.call("y", "aten.linear.default", (batch, tokens, 3 * width), input="x", weight="w", bias=None)
    _split(b, "y", ("q", "k", "u"), width)
    for name in ("q", "k", "u"):
        b.call(f"{name}h", "aten.view.default", (batch, tokens, heads, width // heads), self=name, size=(batch, tokens, heads, width // heads))
        b.call(f"{name}t", "aten.transpose.int", (batch, heads, tokens, width // heads), self=f"{name}h", dim0=1, dim1=2)
    b.call(
        "a", "aten.scaled_dot_product_attention.default", (batch, heads, tokens, width // heads),
        query="qt", key="kt", value="ut", attn_mask=None, dropout_p=0.0, is_causal=True, scale=None, enable_gqa=False,
    )  # fmt: skip
    b.call("at", "aten.transpose.int", (batch, tokens, heads, width // heads), self="a", dim0=1, dim1=2)
    b.call("z", "aten.reshape.default", (batch, tokens, width), self="at", shape=(batch, tokens, width))
    b.call("o", "aten.linear.default", (batch, tokens, width), input="z", weight="v", bias=None)
    b.call("loss", "aten.sum.default", (), self="o", dtype=None)
    return b.graph("loss")


def _split(b: GraphBuilder, source: str, names: tuple[str, ...], size: int) -> None:
    shape = (*b.refs[source].shape[:-1], size)
    outputs = tuple(TensorRef(n, shape, "float32", TensorKind.VALUE, b.refs[source].requires_grad) for n in names)
    b.refs |= {o.name: o for o in outputs}
    b.nodes.append(Node(OpCall("aten.split.Tensor", (("self", Ref(source)), ("split_size", size), ("dim", -1))), outputs, "", "", (0,) * len(names)))


def units(grains: Grains, tensor: str, dim: int, outer: int = 1) -> int:
    return grains.units[tensor, Site(dim, outer)]


def test_a_fused_projection_is_cut_in_blocks_of_heads() -> None:
    g = find_grains(qkv())
    assert units(g, "w", 0, 3) == 4  # three blocks of four heads; each unit is six rows
    assert units(g, "y", 2, 3) == 4
    assert g.classes["w", Site(0, 3)] == g.classes["v", Site(1)] == g.classes["qt", Site(1)]
    assert g.classes["w", Site(0)] != g.classes["w", Site(0, 3)]


def test_a_plain_split_of_the_fused_dim_joins_nothing_behind_it() -> None:
    g = find_grains(qkv())
    assert all(g.classes["w", Site(0)] != c for (t, _), c in g.classes.items() if t not in ("w", "y"))


def test_columns_viewed_as_heads_have_the_units_of_heads() -> None:
    g = find_grains(qkv(width=48, heads=4))
    assert units(g, "z", 2) == 4 and units(g, "v", 1) == 4 and units(g, "v", 0) == 48


def test_flattening_batch_and_tokens() -> None:
    b = GraphBuilder()
    b.tensor("x", (4, 6, 5))
    b.call("f", "aten.flatten.using_ints", (24, 5), self="x", start_dim=0, end_dim=1)
    b.call("r", "aten.relu.default", (24, 5), self="f")
    b.call("loss", "aten.sum.default", (), self="r", dtype=None)
    g = find_grains(b.graph("loss"))
    assert units(g, "f", 0) == 4 and units(g, "r", 0) == 4, "the batch: four units of six rows"
    assert units(g, "f", 0, 4) == 6 and g.classes["r", Site(0, 4)] == g.classes["x", Site(1)], "tokens: four blocks of six"
    assert g.batch == {g.classes["x", Site(0)]}


def test_the_batch_is_known_through_views() -> None:
    graph = qkv()
    cuts = {(name, s.dim) for name, s in derive(graph, flat(2)).batch}
    assert {("x", 0), ("y", 0), ("at", 0), ("a", 0), ("o", 0)} <= cuts
    assert not any(name in ("w", "v") for name, _ in cuts)


def test_a_chain_of_views_keeps_the_factor() -> None:
    b = GraphBuilder()
    b.tensor("x", (2, 3, 8))
    b.call("a", "aten.view.default", (2, 3, 4, 2), self="x", size=(2, 3, 4, 2))
    b.call("t", "aten.permute.default", (4, 2, 3, 2), self="a", dims=(2, 0, 1, 3))
    b.call("c", "aten.reshape.default", (8, 6), self="t", shape=(8, 6))
    b.call("loss", "aten.sum.default", (), self="c", dtype=None)
    g = find_grains(b.graph("loss"))
    assert g.classes["c", Site(0)] == g.classes["x", Site(2)] and units(g, "c", 0) == 4
    assert g.classes["c", Site(0, 4)] == g.classes["x", Site(0)] and units(g, "c", 0, 4) == 2
    assert g.classes["x", Site(2, 4)] == g.classes["c", Site(1, 3)] == g.classes["a", Site(3)]


def test_sites_may_go_around_many_times() -> None:
    """A shuffle moves a site to the next factor of the dim, the sum brings it back before the shuffle: eighty times around."""
    b = GraphBuilder()
    size = 2**80
    b.tensor("x", (size,))
    b.call("a", "aten.view.default", (2, size // 2), self="x", size=(2, size // 2))
    b.call("t", "aten.transpose.int", (size // 2, 2), self="a", dim0=0, dim1=1)
    b.call("s", "aten.reshape.default", (size,), self="t", shape=(size,))
    b.call("y", "aten.add.Tensor", (size,), self="x", other="s", alpha=1)
    b.call("loss", "aten.sum.default", (), self="y", dtype=None)
    g = find_grains(b.graph("loss"))
    assert {site.outer for site, _ in g.sites_of["y"]} == {2**k for k in range(80)}


def test_grouped_query_attention_is_cut_by_kv_heads() -> None:
    b = GraphBuilder()
    for name, heads in (("q", 8), ("k", 2), ("v", 2)):
        b.tensor(name, (2, heads, 5, 3))
    b.call(
        "a", "aten.scaled_dot_product_attention.default", (2, 8, 5, 3),
        query="q", key="k", value="v", attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=True,
    )  # fmt: skip
    b.call("loss", "aten.sum.default", (), self="a", dtype=None)
    g = find_grains(b.graph("loss"))
    assert units(g, "q", 1) == 2 and units(g, "k", 1) == 2 and units(g, "a", 1) == 2
    assert g.classes["q", Site(1)] == g.classes["k", Site(1)] == g.classes["a", Site(1)]


def test_parts_of_unequal_size_keep_their_dim_whole() -> None:
    b = GraphBuilder()
    b.tensor("x", (4, 6))
    outputs = tuple(TensorRef(n, (4, s), "float32", TensorKind.VALUE, False) for n, s in (("p", 2), ("q", 4)))
    b.refs |= {o.name: o for o in outputs}
    b.nodes.append(Node(OpCall("aten.split_with_sizes.default", (("self", Ref("x")), ("split_sizes", (2, 4)), ("dim", 1))), outputs, "", "", (0, 0)))
    b.call("loss", "aten.sum.default", (), self="q", dtype=None)
    g = find_grains(b.graph("loss"))
    assert g.classes["x", Site(1)] != g.classes["q", Site(1)]
    assert g.classes["x", Site(0)] == g.classes["q", Site(0)]
