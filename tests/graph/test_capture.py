"""A captured graph, run node by node, is the module: same loss, gradients and buffers, bit for bit in float64."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hapx.graph.capture import capture
from hapx.ir import Graph, Kind, TorchConst
from support.interpret import run_module
from support.models import CNN, GPT, MLP


def assert_same(module: nn.Module, graph: Graph, inputs: Sequence[Tensor], expected: Tensor, reference: nn.Module) -> dict[str, Tensor]:
    """`expected`: the loss of `reference`, a copy of `module` that has run; the graph is run on `module`."""
    values = run_module(graph, module, inputs)
    assert torch.equal(values[graph.loss], expected)
    if expected.requires_grad:
        expected.backward()
        values[graph.loss].backward()
    for (name, a), (_, b) in zip(module.named_parameters(), reference.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    for (name, a), (_, b) in zip(module.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    return values


def check(module: nn.Module, *inputs: Tensor, **options: Any) -> Graph:
    """Capture, then compare the graph with a copy of the module."""
    graph = capture(module, inputs, **options)
    reference = copy.deepcopy(module)
    output = reference(*inputs)
    loss = output if isinstance(output, Tensor) else output[0]
    assert_same(module, graph, inputs, loss, reference)
    return graph


MODELS = {"mlp": lambda: MLP((6, 8, 8, 8, 4)), "gpt": lambda: GPT(11, 8, 2, 2, 6), "cnn": CNN}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, mode: str) -> None:
    model = MODELS[name]().train(mode == "train")
    graph = check(model, *model.example(5))
    assert graph.mode == mode and graph.batch == 5
    assert set(dict(model.named_parameters())) == {r.name for r in graph.of_kind(Kind.PARAMETER)}
    assert set(dict(model.named_buffers())) == {r.name for r in graph.of_kind(Kind.BUFFER)}


def test_gpt_details() -> None:
    graph = capture(GPT(11, 8, 2, 2, 6, dropout=0.1), GPT(11, 8, 2, 2, 6).example(3))
    assert graph.tied == (("tok.weight", "head.weight"),)
    assert graph.input_names == ("idx", "targets")
    assert "head.weight" not in graph.refs
    attention = [n for n in graph.nodes if n.call.op == "aten.scaled_dot_product_attention"]
    assert [n.module for n in attention] == ["blocks.0", "blocks.1"]
    assert all(n.source == "models.py:72: y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)" for n in attention)
    assert attention[0].call["dropout_p"] == 0.1 and attention[0].call["is_causal"] is True and attention[0].call["scale"] is None
    (split, _) = (n for n in graph.nodes if n.call.op == "aten.split")
    assert [o.shape for o in split.outputs] == [(3, 6, 8)] * 3 and split.call["split_size"] == 8 and split.call["dim"] == 2
    assert len(split.batch_dims) == 3
    (arange,) = (n for n in graph.nodes if n.call.op == "aten.arange")
    assert arange.outputs[0].kind is Kind.CONSTANT and arange.call["device"] is None
    assert arange.call["dtype"] == TorchConst("dtype", "int64")
    assert not any("view" in n.call.op for n in graph.nodes), "a view depends on strides, which differ between kernels"


def test_eval_drops_dropout() -> None:
    model = GPT(11, 8, 2, 1, 6, dropout=0.5)
    assert sum(n.call.op == "aten.dropout" for n in capture(model, model.example(2)).nodes) == 3
    evaluated = capture(model, model.example(2), training=False)
    assert evaluated.mode == "eval" and not any(n.call.op == "aten.dropout" for n in evaluated.nodes)
    assert model.training and all(m.training for m in model.modules())


def test_batch_norm_keeps_its_buffers() -> None:
    model = CNN()
    graph = capture(model, model.example(4))
    assert {r.name for r in graph.refs.values() if r.mutated} == {f"bn{i}.running_{s}" for i in (1, 2) for s in ("mean", "var")}
    norms = [n for n in graph.nodes if n.call.op == "aten.batch_norm"]
    assert [n.call["running_mean"].name for n in norms] == ["bn1.running_mean", "bn2.running_mean"]
    assert [o.target for o in graph.outputs if o.role == "buffer"] == ["bn1.num_batches_tracked", "bn2.num_batches_tracked"]


def test_nothing_of_the_module_changes() -> None:
    model = GPT(11, 8, 2, 1, 6, dropout=0.1)
    model.blocks[0].eval()
    before = {k: (v, v.clone(), v._version) for k, v in model.state_dict(keep_vars=True).items()}
    flags = [m.training for m in model.modules()]
    seeds = torch.get_rng_state(), random.getstate()
    capture(model, model.example(2))
    capture(model, model.example(2), training=False)
    after = model.state_dict(keep_vars=True)
    assert all(after[k] is v and torch.equal(v, old) and v._version == version for k, (v, old, version) in before.items())
    assert all(p.grad is None for p in model.parameters())
    assert flags == [m.training for m in model.modules()]
    assert torch.equal(seeds[0], torch.get_rng_state()) and seeds[1] == random.getstate()


def test_meta_and_no_grad_and_ints_give_the_same_graph() -> None:
    model = GPT(11, 8, 2, 2, 6)
    graph = capture(model, model.example(2))
    with torch.device("meta"):
        ghost = GPT(11, 8, 2, 2, 6)
    assert capture(ghost, model.example(2)).hash == graph.hash
    assert capture(ghost, tuple(t.to("meta") for t in model.example(2))).hash == graph.hash
    with torch.no_grad():
        assert capture(model, model.example(2, seed=3)).hash == graph.hash
    assert capture(model, model.example(3)).hash != graph.hash
    assert capture(model, model.example(2), training=False).hash != graph.hash


# -- inputs ---------------------------------------------------------------------------------------------------------------------------


class Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor, unused: Tensor | None = None, power: int = 2) -> Tensor:
        return ((self.scale * x - y) ** power).mean()


def test_the_same_tensor_twice_is_two_inputs() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    graph = capture(Difference(), (x, x))
    used = {name for n in graph.nodes for name in n.call.refs()}
    assert {"x", "y"} <= used and graph.input_names == ("x", "y")


def test_keyword_and_unused_inputs_and_constants() -> None:
    x, y, z = (torch.randn(3, 4, dtype=torch.float64) for _ in range(3))
    model = Difference()
    graph = capture(model, {"y": y, "power": 4, "unused": z, "x": x})
    assert graph.input_names == ("x", "y", "unused"), "in the order of the signature"
    assert graph.refs["unused"].kind is Kind.INPUT
    reference = copy.deepcopy(model)
    assert_same(model, graph, (x, y, z), reference(x, y, power=4), reference)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("spare", torch.zeros(3))

    def forward(self, batch: dict[str, Any], *rest: Tensor, weights: Sequence[Tensor]) -> Tensor:
        out = self.linear(batch["x"]) + batch["pair"][1]
        return (out * weights[0] - rest[0] * rest[1]).square().mean()


def test_nested_inputs() -> None:
    model, reference = Nested(), None
    t = [torch.randn(3, 4, dtype=torch.float64) for _ in range(6)]
    kwargs = {"weights": [t[5]]}

    class Call(nn.Module):  # positional and keyword arguments at once come from a caller; here: a dict for one, a tuple for the other
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, a: dict[str, Any], b: Tensor, c: Tensor, w: list[Tensor]) -> Tensor:
            return self.inner(a, b, c, weights=w)

    outer = Call()
    inputs = ({"x": t[0], "pair": (t[1], t[2])}, t[3], t[4], kwargs["weights"])
    graph = capture(outer, inputs)
    assert graph.input_names == ("a_x", "a_pair_0", "a_pair_1", "b", "c", "w_0")
    assert {"inner.unused.weight", "inner.spare", "a_pair_0"} <= set(graph.refs)
    reference = copy.deepcopy(outer)
    assert_same(outer, graph, t, reference(*inputs), reference)


def test_frozen_parameters() -> None:
    model = MLP((4, 4, 4))
    model.layers[0].requires_grad_(False)
    graph = check(model, *model.example(3))
    assert not graph.refs["layers.0.weight"].requires_grad and graph.refs["layers.1.weight"].requires_grad
    first, second = (n for n in graph.nodes if n.call.op == "aten.linear")
    assert not first.outputs[0].requires_grad and second.outputs[0].requires_grad


# -- outputs --------------------------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    logits: Tensor
    loss: Tensor


class Pair(NamedTuple):
    logits: Tensor
    loss: Tensor


class Returning(nn.Module):
    def __init__(self, form: str):
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.float64)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        logits = self.linear(x)
        loss = logits.square().mean()
        forms = {
            "tuple": (loss, [logits, {"x": x}]),
            "dict": {"logits": logits, "loss": loss},
            "dataclass": Result(logits, loss),
            "named": Pair(logits, loss),
        }
        return forms[self.form]


class Literals(nn.Module):
    """Makes tensors of numbers where its input is; one is empty, as caches are before their first token."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        cache = torch.tensor([], dtype=x.dtype, device=x.device)
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        h = torch.cat([cache, self.linear(x) * scale.to(x.dtype)], dim=-1)
        both = torch.cat([h, cache, h.exp()], dim=0)
        return (both / torch.tensor(0.5, dtype=x.dtype, device=x.device)).mean()


def test_literals_have_their_values_on_meta_too() -> None:
    graph, on_meta = (capture(Literals().to(device), torch.ones(2, 4, device=device)) for device in ("cpu", "meta"))
    assert sorted(graph.constants.values()) == [(0.5,), (1.0, 2.0, 3.0, 4.0)]
    assert on_meta.hash == graph.hash
    assert on_meta.constants == graph.constants
    cats = [n for n in graph.nodes if n.call.op == "aten.cat"]
    assert [len(n.call["tensors"]) for n in cats] == [2]  # the empty one is left out
    model = Literals()
    x = torch.randn(2, 4)
    assert torch.equal(run_module(graph, model, (x,))[graph.loss], model(x))


@pytest.mark.parametrize(("form", "places"), [("tuple", ["1.0", "1.1.x"]), ("dict", ["logits"]), ("dataclass", ["logits"]), ("named", ["logits"])])
def test_forms_of_output(form: str, places: list[str]) -> None:
    graph = capture(Returning(form), (torch.randn(2, 4, dtype=torch.float64),))
    assert graph.outputs[0].role == "loss" and graph.refs[graph.loss].shape == ()
    assert [(o.role, o.target) for o in graph.outputs[1:]] == [("result", p) for p in places]
    assert graph.refs[graph.outputs[1].tensor].shape == (2, 3)


def test_loss_fn() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 3, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    model = Classifier()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,))
    weight = torch.rand(3, dtype=torch.float64)
    loss_fn = nn.CrossEntropyLoss(weight=weight)
    graph = capture(model, (x, y), loss_fn=loss_fn)
    assert graph.input_names == ("x", "targets") and {n.module for n in graph.nodes} <= {"", "body"}
    assert graph.nodes[0].module == "body" and "body.weight" in graph.refs
    assert list(graph.constants.values()) == [tuple(weight.tolist())]
    reference = copy.deepcopy(model)
    assert_same(model, graph, (x, y), loss_fn(reference(x), y), reference)
    again = capture(model, ({"x": x}, (y, x)), loss_fn=lambda out, t, z: F.cross_entropy(out, t) + z.mean())
    assert again.input_names == ("x", "targets_0", "targets_1")


# -- contexts -------------------------------------------------------------------------------------------------------------------------


class Contexts(nn.Module):
    """Checkpoints of modules and functions (one in another), no_grad with a buffer update, autocast."""

    def __init__(self, autocast: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)).double()
        self.out = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("average", torch.zeros(4, dtype=torch.float64))
        self.autocast = autocast

    def inner(self, x: Tensor) -> Tensor:
        return checkpoint(self.out, x.sin(), use_reentrant=False).cos()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x = checkpoint(self.inner, x, use_reentrant=False)
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            scale = self.out.weight.norm() + x.norm()
        x = x / scale + self.out.bias
        if self.autocast:
            x = x.float()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = x @ x.T
            x = x.double()
        return x.square().mean()


@pytest.mark.parametrize("autocast", [False, True])
def test_contexts(autocast: bool) -> None:
    graph = check(Contexts(autocast), torch.randn(3, 4, dtype=torch.float64))
    inside = [[n.call.op for n in graph.nodes[r.start : r.stop]] for r in graph.regions if r.kind == "checkpoint"]
    assert inside == [["aten.linear", "aten.tanh"]] * 2 + [["aten.sin", "aten.linear", "aten.cos"]]
    (quiet,) = (r for r in graph.regions if r.kind == "no_grad")
    assert not any(o.requires_grad for n in graph.nodes[quiet.start : quiet.stop] for o in n.outputs)
    assert [o.target for o in graph.outputs if o.role == "buffer"] == ["average"]
    cast = [(r.options, [n.call.op for n in graph.nodes[r.start : r.stop]]) for r in graph.regions if r.kind == "autocast"]
    assert [c[0] for c in cast] == [(("dtype", TorchConst("dtype", "bfloat16")),)] * autocast
    assert not autocast or cast[0][1][-1] == "aten.matmul"


def test_callers_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model.forward = lambda x: model[1](model[0](x)).float().mean()  # type: ignore[method-assign]
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = capture(model, (x,))
        expected = model(x)
    (region,) = graph.regions
    assert (region.kind, region.start, region.stop) == ("autocast", 0, len(graph.nodes))
    assert graph.nodes[0].outputs[0].dtype == "bfloat16"
    values = run_module(graph, model, (x,))
    assert torch.equal(values[graph.loss], expected)


def test_no_grad_method_and_detach() -> None:
    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)

        @torch.no_grad()
        def target(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)).softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return (h - self.target(h)).square().mean() + (h.detach() * self.b(x)).mean()

    graph = check(Target(), torch.randn(3, 4, dtype=torch.float64))
    assert sum(n.call.op == "aten.detach" for n in graph.nodes) >= 2


def test_gpt2_small_on_meta() -> None:
    with torch.device("meta"):
        model = GPT(50257, 768, 12, 12, 128, dropout=0.1, dtype=torch.float32)
    inputs = tuple(torch.zeros(8, 128, dtype=torch.int64) for _ in range(2))
    graph = capture(model, inputs)
    assert {b for b in graph.block_of if b is not None} == {(0, i) for i in range(12)}
    assert sum(b is not None for b in graph.block_of) == 12 * 21


def test_a_loss_takes_as_many_targets_as_it_likes() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    for given in ((x,), x, {"inputs": x}):
        assert [n.call.op for n in capture(model, given, loss_fn=lambda out: out.mean()).nodes] == ["aten.linear", "aten.mean"]
    two = capture(model, (x, (x, x)), loss_fn=lambda out, y, z: (out * y + z).mean())
    assert capture(model, (x, x, x), loss_fn=lambda out, y, z: (out * y + z).mean()).hash == two.hash
    assert two.input_names == ("input", "targets_0", "targets_1")
