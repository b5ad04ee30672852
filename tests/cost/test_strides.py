"""What is a view and what is copied: torch's own condition, and whole models against the tensors that torch makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hapx.cost.compute import copied_operands, hidden, is_view, work
from hapx.cost.memory import base_of, saved
from hapx.cost.model import CostModel
from hapx.cost.strides import contiguous, strides, viewed
from hapx.graph.capture import capture
from hapx.ir import Graph, Kind
from hapx.theory.derive import derive
from support.clusters import ONE
from support.interpret import run_module
from support.saved import bytes_beside, keeping
from support.spectral import SPECTRAL
from support.theories import GraphBuilder, flat
from support.zoo import TINY

Inputs = tuple[Tensor, Tensor]


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape with strides that transposing, slicing and expanding make, and another shape of as many elements."""
    shape = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4))
    tensor = torch.empty([n * draw(st.sampled_from((1, 1, 2))) for n in shape])
    tensor = tensor[tuple(slice(0, n) for n in shape)]
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        tensor = tensor.expand(*(2 if n == 1 else n for n in tensor.shape))
    left, target = tensor.numel(), []
    while left > 1 and len(target) < 4:
        size = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        target.append(size)
        left //= size
    return tuple(tensor.shape), tuple(tensor.stride()), (*target, left)


@given(reshapes())
@settings(max_examples=300, deadline=None)
def test_a_reshape_is_a_view_where_torch_can_view(case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> None:
    shape, own, target = case
    tensor = torch.empty_strided(shape, own)
    try:
        expected = tensor.view(target).stride()
    except RuntimeError:
        expected = None
    found = viewed(shape, own, target)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found is not None
        assert [s for n, s in zip(target, found, strict=True) if n > 1] == [s for n, s in zip(target, expected, strict=True) if n > 1]


def test_strides_of_contiguous_tensors() -> None:
    assert [contiguous(s) for s in ((), (5,), (2, 3, 4))] == [(), (1,), (12, 4, 1)]


# ---- whole models ------------------------------------------------------------------------------------------------------------


class HandMade(nn.Module):
    """Attention by products and softmax: heads of one fused projection, their order changed and back."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.out, self.head = nn.Embedding(11, 16), nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 11)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x)
        q, k, v = (t.view(*x.shape, 4, 4).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        h = h + self.out(((q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v).transpose(1, 2).reshape(*x.shape, 16))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Encoder(nn.Module):
    """torch's own layers, whose attention has positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.layers = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.tokens(x), self.tokens(y))).flatten(0, 1), y.flatten())


class Windows(nn.Module):
    """Attention in windows of an image, then patches put together."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.qkv, self.out, self.merge = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(32, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        z = x.view(-1, 2, 2, 2, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 8)
        q, k, v = self.qkv(z).reshape(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        z = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 4, 8))
        x = x + z.view(-1, 2, 2, 2, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4, 8)
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return F.cross_entropy(self.merge(x).mean((1, 2)), y)


class ChannelsLast(nn.Module):
    """Linear layers on the channels of an image between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depth = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        z = self.down(F.gelu(self.up(self.norm(self.depth(x).permute(0, 2, 3, 1)))))
        return F.cross_entropy((x + z.permute(0, 3, 1, 2)).mean((-2, -1)), y)


def _tokens() -> Inputs:
    return torch.randint(0, 11, (6, 5)), torch.randint(0, 11, (6, 5))


def _images() -> Inputs:
    return torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "hand-made": (HandMade, _tokens), "encoder": (Encoder, _tokens), "windows": (Windows, _images), "channels last": (ChannelsLast, _images),
    **{name: (tiny.model, lambda tiny=tiny: tiny.inputs(6, 0)) for name, tiny in TINY.items()},  # type: ignore[misc]
    **{name: (model, lambda model=model: model().example(5)) for name, model in SPECTRAL.items()},  # type: ignore[misc]
}  # fmt: skip


def run(name: str) -> tuple[Graph, dict[str, Tensor], int]:
    """The graph, its tensors as torch makes them, and the bytes that autograd keeps beside what the model is given."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    module, given_ = make(), inputs()
    graph = capture(module, given_)
    with keeping() as kept:
        made = run_module(graph, module, given_)
    return graph, made, bytes_beside(kept, (*module.parameters(), *module.buffers(), *given_))


@pytest.mark.parametrize("name", MODELS)
def test_views_and_strides_are_those_of_torch(name: str) -> None:
    graph, made, _ = run(name)
    known, views = strides(graph), 0
    unknown: set[str] = set()  # results of einsum lie as their products do
    for node in graph.nodes:
        if node.call.op == "aten.einsum" or unknown & set(node.call.refs()):
            unknown |= {o.name for o in node.outputs if node.call.op == "aten.einsum" or is_view(graph, node)}
            continue
        if not node.call.refs() or any(o.kind is Kind.CONSTANT for o in node.outputs):
            continue
        first = made[node.call.refs()[0]].untyped_storage().data_ptr()
        for out in node.outputs:
            own = made[out.name]
            assert (own.untyped_storage().data_ptr() == first) == is_view(graph, node), node
            views += is_view(graph, node)
            said = known.get(out.name, contiguous(out.shape))
            assert said is not None
            assert [s for n, s in zip(out.shape, said, strict=True) if n > 1] == [s for n, s in zip(out.shape, own.stride(), strict=True) if n > 1], (
                node
            )
    assert views > 1


@pytest.mark.parametrize("name", ["hand-made", "encoder", "windows", "channels last", "state space", "phasors"])
def test_what_a_model_keeps_is_what_autograd_keeps(name: str) -> None:
    """Beside the weight of a loss, a number."""
    graph, _, kept = run(name)

    def base(tensor: str) -> str:
        while (of := base_of(graph, tensor)) is not None:
            tensor = of
        return tensor

    names = {base(tensor) for node in graph.nodes for tensor in saved(node, graph)}
    found = sum(graph.refs[n].bytes for n in names if n in graph.producer) + sum(size for node in graph.nodes for _, size in hidden(graph, node))
    assert 0 <= kept - found <= 8


def two_products(rows: int, columns: int) -> Graph:
    """A transpose, a linear layer behind it, and the same layer of what is not transposed."""
    b = GraphBuilder()
    b.tensor("x", (rows, columns, 8))
    b.parameter("w", 8, 8)
    b.call("t", "aten.transpose.int", (columns, rows, 8), self="x", dim0=0, dim1=1)
    b.call("y", "aten.linear.default", (columns, rows, 8), input="t", weight="w", bias=None)
    b.call("z", "aten.linear.default", (rows, columns, 8), input="x", weight="w", bias=None)
    return b.graph("y", "z")


def test_a_product_copies_what_it_cannot_fold() -> None:
    g = two_products(4, 6)
    size = 4 * 6 * 8 * 4.0
    assert [copied_operands(g, n) for n in g.nodes][1:3] == [(("t", size),), ()]
    assert saved(g.nodes[1], g) == () and hidden(g, g.nodes[1]) == (("t", size),)
    assert saved(g.nodes[2], g) == ("x",) and hidden(g, g.nodes[2]) == ()


def test_products_of_operands_that_lie_otherwise_cost_otherwise() -> None:
    """The same operator on the same shapes, once behind a transpose."""
    g = two_products(6, 6)
    theory = derive(g, flat(1))
    costs = CostModel(theory, ONE, "fp32", "sgd", "train")
    assert theory.alike[1] == theory.alike[2]
    assert costs.form(theory.triples[1][0]) != costs.form(theory.triples[2][0])
    behind, direct = (sum(size for _, size in work(g, g.nodes[k]).moved) for k in (1, 2))
    assert behind == direct + 2 * 6 * 6 * 8 * 4
