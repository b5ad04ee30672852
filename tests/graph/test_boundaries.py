"""`hapx.mark_layer_boundary`: the capture knows where it was called, everything else is as if it had not been."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import hapx
from hapx import codec
from hapx.graph.capture import capture
from hapx.graph.regions import Mark, find_boundaries
from hapx.ir import Graph
from support.interpret import run_module


class Marked(nn.Module):
    """Three blocks with boundaries between them; a dead value, and operators that the capture adds or removes, around the boundaries."""

    def __init__(self, *, marks: bool = True, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.ReLU(inplace=True)) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.marks, self.checkpoints = marks, checkpoints

    def block(self, i: int, h: Tensor) -> Tensor:
        if self.marks:
            hapx.mark_layer_boundary()
        h.exp()  # nobody uses it
        return self.blocks[i](h) + h

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        for i in range(3):
            h = checkpoint(self.block, i, h, use_reentrant=False) if self.checkpoints else self.block(i, h)
        with torch.no_grad():
            if self.marks:
                hapx.mark_layer_boundary()
            scale = h.abs().mean()
        loss = (self.norm(h) / scale).square().mean()
        if self.marks:
            hapx.mark_layer_boundary()  # nothing follows
        return loss


def operators(graph: Graph) -> list[str]:
    """The operators of every layer, in short."""
    cuts = [0, *graph.boundaries, len(graph.nodes)]
    names = [n.call.op.removeprefix("aten.") for n in graph.nodes]
    return [" ".join(names[a:b]) for a, b in pairwise(cuts)]


LAYERS = ["mul", *["linear relu add"] * 3, "detach abs mean add batch_norm div square mean"]


def of(model: nn.Module, **options: Any) -> Graph:
    return capture(model, torch.ones(2, 4), **options)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_layers_are_what_lies_between_marks(checkpoints: bool) -> None:
    graph = of(Marked(checkpoints=checkpoints))
    assert operators(graph) == LAYERS
    assert all(r.start in graph.boundaries for r in graph.regions if r.kind == "checkpoint")


def test_a_graph_is_the_same_with_and_without_marks() -> None:
    graph, plain = of(Marked()), of(Marked(marks=False))
    assert plain.boundaries == ()
    assert plain.hash == graph.hash
    assert [str(n) for n in plain.nodes] == [str(n) for n in graph.nodes]
    assert plain.block_of == graph.block_of
    assert plain.regions == graph.regions


def test_the_graph_is_the_model() -> None:
    model, x = Marked().double(), torch.randn(2, 4, dtype=torch.float64)
    graph, reference = capture(model, x), copy.deepcopy(model)
    loss = run_module(graph, model, (x,))[graph.loss]
    expected = reference(x)
    expected.backward()
    loss.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_evaluation_meta_autocast_and_default_devices() -> None:
    graph = of(Marked())
    assert operators(of(Marked(), training=False))[1:4] == LAYERS[1:4]
    with torch.device("meta"):  # a torch function mode of its own
        ghost = Marked()
        assert of(ghost).boundaries == graph.boundaries
    assert of(ghost).boundaries == graph.boundaries
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [o.split()[:2] for o in operators(of(Marked()))[1:4]] == [["to", "linear"]] * 3
    with torch.no_grad():
        assert of(Marked()).boundaries == graph.boundaries


def test_marks_inside_of_a_loss_function() -> None:
    def loss(h: Tensor, y: Tensor) -> Tensor:
        hapx.mark_layer_boundary()
        return (h - y).square().mean()

    graph = capture(nn.Linear(4, 4), (torch.ones(2, 4), torch.ones(2, 4)), loss_fn=loss)
    assert operators(graph) == ["linear", "sub square mean"]


def test_marks_in_a_row_and_before_the_first_operator_are_no_boundaries_of_their_own() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            hapx.mark_layer_boundary()
            h = super().forward(x)
            hapx.mark_layer_boundary()
            h.exp()
            hapx.mark_layer_boundary()
            return h.sum()

    assert operators(of(Model(4, 4))) == ["linear", "sum"]


def test_nodes_without_a_mark_belong_to_the_layer_before() -> None:
    assert find_boundaries([Mark(), Mark(layer=1), Mark(), Mark(layer=1), Mark(layer=4), Mark()]) == (1, 4)
    assert find_boundaries([Mark(layer=2), Mark(layer=2)]) == ()
    assert find_boundaries([]) == ()


def test_boundaries_are_kept_with_the_graph() -> None:
    graph = of(Marked())
    assert codec.decode(codec.encode(graph), Graph) == graph


def test_outside_of_a_capture_nothing_happens() -> None:
    class Log(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    hapx.mark_layer_boundary()
    model, plain = Marked(), Marked(marks=False)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 4)
    with Log(), torch.device("cpu"):
        loss = model(x)
        loss.backward()
    assert torch.equal(loss, plain(x))
    assert torch.fx.symbolic_trace(Marked(marks=True)).graph.find_nodes(op="call_function", target=hapx.mark_layer_boundary) == []


@pytest.mark.parametrize("strict", [False, True])
def test_export_sees_no_operator(strict: bool) -> None:
    marked, plain = (torch.export.export(Marked(marks=m), (torch.ones(2, 4),), strict=strict) for m in (True, False))
    assert [str(n.target) for n in marked.graph.nodes] == [str(n.target) for n in plain.graph.nodes]


def test_compiled_models_are_whole() -> None:
    torch.compiler.reset()
    model, x = Marked().eval(), torch.randn(2, 4)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
