"""What oneDNN's kernels keep and copy, against torch on this processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from hapx.cost.compute import hidden
from hapx.cost.memory import saved
from hapx.cost.on_cpu import kept_on_cpu, temporaries_on_cpu, vector_of_cpu
from hapx.graph.capture import capture
from hapx.planner import plan_graphs
from support.clusters import ONE
from support.saved import bytes_beside, keeping

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


class Recurrent(nn.Module):
    def __init__(self, layers: int, both: bool, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, 32, layers, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.lstm(x)[0].sum(-1), y)


@pytest.mark.parametrize("layers,both,width", [(1, False, 32), (1, False, 64), (2, False, 16), (2, True, 32)])
def test_an_lstm_keeps_its_workspace(layers: int, both: bool, width: int) -> None:
    module = Recurrent(layers, both, width)
    x, y = torch.randn(16, 20, width, requires_grad=True), torch.randn(16, 20)
    graph = capture(module, (x, y))
    with keeping() as kept:
        module.lstm(x)
    node = next(n for n in graph.nodes if n.call.op == "aten.lstm")
    plan = plan_graphs([graph], ONE)
    (triple,) = [i.triple for i in plan.stages[0].programs[plan.first].instructions if i.triple.node == graph.nodes.index(node)]
    names = [n for n in saved(node, graph) if n in graph.producer or n in graph.input_names]
    said = sum(graph.refs[n].bytes for n in names) + sum(size for _, size in (*hidden(graph, node), *kept_on_cpu(graph, node, triple.placements)))
    assert said == pytest.approx(bytes_beside(kept, (*module.parameters(), x)), rel=0.1)


class Convolution(nn.Module):
    def __init__(self, make: Callable[..., nn.Module], stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 1), make(16, 24, 3, stride, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.first(x)).mean((1, 2, 3)), y)


@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_with_strides_copy_what_they_spread(make: Callable[..., nn.Module], stride: int) -> None:
    module = Convolution(make, stride)
    x, y = torch.randn(4, 8, 12, 12), torch.randn(4)
    graph = capture(module, (x, y))
    node = [n for n in graph.nodes if n.call.op.startswith("aten.conv")][1]
    spread = graph.refs[node.call.refs()[0]] if make is nn.Conv2d else node.outputs[0]
    before = module.first(x)
    result = module.second(before)
    cotangent = torch.ones_like(result)
    copies = _clones(lambda: module.second(before)), _clones(lambda: torch.autograd.grad(result, before, cotangent))
    said = temporaries_on_cpu(graph, node, backward=False), temporaries_on_cpu(graph, node, backward=True)
    assert tuple(map(len, said)) == copies
    assert all(sizes == ((spread.name, float(spread.bytes)),) for sizes in said if sizes)
    assert sum(copies) == (stride > 1)


def _clones(run: Callable[[], object]) -> int:
    """How many tensors torch's own kernels copy."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return sum(e.name == "aten::clone" for e in found.events())


VECTORS = {"AVX512": 16, "AVX2": 8}


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux says what the processor has")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in VECTORS, reason="a processor with other vectors, or torch was told to take others")
def test_vectors_are_as_wide_as_torch_says() -> None:
    assert vector_of_cpu() == VECTORS[torch.backends.cpu.get_cpu_capability()]
