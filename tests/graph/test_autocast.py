"""Autocast in a captured graph: casts of values are nodes, casts of parameters belong to the calls that read them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.graph.capture import capture
from hapx.graph.normalize_autocast import Policies
from hapx.ir import Graph
from support.interpret import run_module
from support.models import CNN, GPT, MLP

LOWER = [torch.bfloat16, torch.float16]


class Mixed(nn.Module):
    """Autocast inside of the model, switched off again inside of that; a transposed weight, mixed dtypes, a mean under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.linspace(-1, 1, 32).reshape(4, 8))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.first(x)
            both = torch.cat([h, torch.tanh(x @ self.first.weight.t())], dim=1)
            with torch.autocast("cpu", enabled=False):
                h = self.second(h.float() * self.scale) + both.sum(1, keepdim=True)
            scores = torch.einsum("nd,kd->nk", h, self.table)
            with torch.no_grad():
                weight = F.softmax(self.second(h), -1).mean()
            return F.cross_entropy(scores, y) * weight + F.mse_loss(h, both[:, :8]) + scores.softmax(-1).norm()

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, 6, generator=generator), torch.randint(0, 4, (batch,), generator=generator)


class Scan(nn.Module):
    """A state that einsums of several kinds write and read, step by step; some of them are products, which autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self.read = nn.Linear(6, 4), nn.Linear(6, 4)
        self.decay = nn.Parameter(torch.linspace(0.1, 1, 24).reshape(6, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state, made = x.new_zeros(x.shape[0], 6, 4), []
        for step in (x, 2 * x):
            state = torch.exp(-torch.einsum("bd,dn->bdn", step.sigmoid(), self.decay)) * state + torch.einsum("bd,bn->bdn", step, self.write(step))
            made.append(torch.einsum("bdn,bn->bd", state, self.read(step)))
        return F.cross_entropy(torch.stack(made, 1).sum(1), y)

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        return Mixed().example(batch, seed)


class Turned(nn.Module):
    """Pairs of numbers that are turned as complex ones, in float32, between products that autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.first(x).float().unflatten(-1, (4, 2)))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones(4, device=x.device), torch.arange(4.0, device=x.device)))
        return F.cross_entropy(self.second(turned.flatten(1).to(x.dtype)), y)

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        return Mixed().example(batch, seed)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": partial(MLP, (6, 8, 3), dtype=torch.float32),
    "gpt": partial(GPT, 13, 8, 2, 2, 6, dtype=torch.float32),
    "cnn": partial(CNN, dtype=torch.float32),
    "mixed": Mixed,
    "scan": Scan,
    "turned": Turned,
    "bfloat16 mlp": partial(MLP, (6, 8, 3), dtype=torch.bfloat16),
}


def captured(module: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Graph:
    with torch.autocast("cpu", dtype):
        return capture(module, inputs)


@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_graph_computes_what_autocast_computes(name: str, dtype: torch.dtype) -> None:
    """The loss bit by bit; gradients within the dtype's rounding, because torch casts a value again at every use."""
    plain = MODELS[name]()
    graph_model = deepcopy(plain)
    inputs: tuple[Tensor, ...] = plain.example(5)  # type: ignore[operator]
    graph = captured(graph_model, inputs, dtype)
    loss = run_module(graph, graph_model, inputs)[graph.loss]
    with torch.autocast("cpu", dtype):
        expected = plain(*inputs)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for (n, p), q in zip(graph_model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.dtype == q.grad.dtype == p.dtype
        assert torch.allclose(p.grad, q.grad, rtol=0, atol=2 * torch.finfo(torch.bfloat16).eps * float(q.grad.abs().max())), n
    for p, q in zip(graph_model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(p, q)


def test_what_is_tried_with_dtypes_that_an_operator_does_not_take_is_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    captured(Turned(), Turned().example(5), torch.bfloat16)
    assert capfd.readouterr() == ("", "")


def test_autocast_changes_something() -> None:
    model = MODELS["gpt"]()
    inputs = model.example(5)  # type: ignore[operator]
    with torch.autocast("cpu", torch.bfloat16):
        low = float(model(*inputs).detach())
    assert abs(low - float(model(*inputs).detach())) > 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_meta_is_captured_under_autocast_too(name: str) -> None:
    inputs = MODELS[name]().example(5)  # type: ignore[operator]
    with torch.device("meta"):
        empty = MODELS[name]()
    assert all(p.is_meta for p in empty.parameters())
    here, meta = (captured(model, inputs, torch.bfloat16) for model in (MODELS[name](), empty))
    assert str(meta) == str(here)
    assert meta.hash == here.hash
    assert meta.hash != capture(MODELS[name](), inputs).hash or name == "mixed"


def test_capture_leaves_a_module_on_meta_as_it_was() -> None:
    model = MODELS["gpt"]().to("meta")
    before = {n: id(t) for n, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]}
    captured(model, MODELS["gpt"]().example(5), torch.bfloat16)  # type: ignore[operator]
    assert {n: id(t) for n, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]} == before
    assert all(p.is_meta for p in model.parameters())


def test_parameters_are_cast_by_the_calls_that_read_them() -> None:
    graph = captured(MODELS["gpt"](), MODELS["gpt"]().example(5), torch.bfloat16)  # type: ignore[operator]
    linears = [n for n in graph.nodes if n.call.op == "aten.linear"]
    assert all({r for r in n.call.refs() if graph.refs[r].kind.value == "parameter"} == {name for name, _ in n.casts} for n in linears)
    assert {dtype for n in linears for _, dtype in n.casts} == {"bfloat16"}
    assert "reading %blocks.0.up.weight as bfloat16" in str(graph)
    casts = [n for n in graph.nodes if n.call.op == "aten.to"]
    assert all(graph.refs[n.call.refs()[0]].kind.value == "value" for n in casts)
    # layer norm and the residual stream stay in float32, products and attention do not
    assert {n.outputs[0].dtype for n in graph.nodes if n.call.op in ("aten.layer_norm", "aten.cross_entropy_loss")} == {"float32"}
    assert {n.outputs[0].dtype for n in graph.nodes if n.call.op in ("aten.linear", "aten.scaled_dot_product_attention")} == {"bfloat16"}


def test_one_value_is_cast_once() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(x)
            return sum(part(h) for part in self.parts).float().mean()

    graph = captured(Three(), (torch.ones(2, 4),), torch.bfloat16)
    assert [n.call.refs() for n in graph.nodes if n.call.op == "aten.to" and n.outputs[0].dtype == "bfloat16"] == [("tanh",)]


def test_policies_of_operators() -> None:
    ask = partial(Policies("cpu").target, lower=torch.bfloat16)
    x, low = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)
    aten = torch.ops.aten
    assert ask(aten.mm.default, {"self": x, "mat2": low}) == torch.bfloat16
    assert ask(aten.mse_loss.default, {"self": low, "target": x, "reduction": 1}) == torch.float32
    assert ask(aten.relu.default, {"self": low}) is None
    assert ask(aten.add.Tensor, {"self": low, "other": x, "alpha": 1}) is None
    assert ask(aten.mm.default, {"self": x.double(), "mat2": x.double()}) is None  # float64 is never cast
    for _ in range(2):  # not the answer of another equation
        assert ask(aten.einsum.default, {"equation": "ij,jk->ijk", "tensors": [x, x], "path": None}) is None
        assert ask(aten.einsum.default, {"equation": "ij,jk->ik", "tensors": [x, x], "path": None}) == torch.bfloat16
