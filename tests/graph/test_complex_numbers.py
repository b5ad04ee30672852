"""Complex numbers in a captured graph: torch.istft gives what it gives, whatever its arguments are; adjoints conjugate; what is real is looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hapx.graph.capture import capture
from hapx.states import PARTIAL
from hapx.theory.derive import derive
from hapx.theory.probe import truth
from hapx.theory.samples import sample, t
from support.interpret import run_module
from support.plans import flat

WINDOW = torch.hann_window(8, dtype=torch.float64) + 0.1
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hops": {"hop_length": 3, "window": WINDOW},
    "not centred": {"center": False, "window": WINDOW},
    "normalised": {"normalized": True, "window": WINDOW},
    "a narrow window": {"win_length": 6, "hop_length": 2, "window": WINDOW[1:7]},
    "narrow, all ones": {"win_length": 5, "hop_length": 2},
    "both halves": {"onesided": False, "window": WINDOW},
    "shorter": {"length": 17, "window": WINDOW},
    "longer": {"length": 31, "window": WINDOW},
}


class Inverse(nn.Module):
    def __init__(self, options: dict[str, Any]):
        super().__init__()
        self.scale, self.options = nn.Parameter(torch.linspace(0.5, 1.5, 7, dtype=torch.float64)), options

    def forward(self, real: Tensor, imag: Tensor) -> Tensor:
        signal = torch.istft(torch.complex(real, imag) * self.scale, 8, **self.options)
        return (signal * torch.arange(signal.shape[-1], device=signal.device)).square().mean()


@pytest.mark.filterwarnings("ignore:The length of signal is shorter", "ignore:A window was not provided")
@pytest.mark.parametrize("rows", [(), (3,)], ids=["one signal", "rows"])
@pytest.mark.parametrize("case", CASES)
def test_signals_and_gradients_are_those_of_torch(case: str, rows: tuple[int, ...]) -> None:
    generator, height = torch.Generator().manual_seed(0), 8 if case == "both halves" else 5
    inputs = tuple(torch.randn(*rows, height, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    plain, own = Inverse(CASES[case]), Inverse(CASES[case])
    expected = plain(*inputs)
    expected.backward()
    graph = capture(own, inputs)
    assert not any(n.call.op == "aten.istft" for n in graph.nodes)
    found = run_module(graph, own, inputs)[graph.loss]
    found.backward()
    assert torch.allclose(found, expected, rtol=1e-12)
    assert own.scale.grad is not None and plain.scale.grad is not None
    assert torch.allclose(own.scale.grad, plain.scale.grad, rtol=1e-10)


class Adjoints(nn.Module):
    """Of complex and of real matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 7, dtype=torch.float64))

    def forward(self, real: Tensor, imag: Tensor) -> Tensor:
        z = torch.complex(real, imag) * self.scale
        products = z.mH @ z, z.adjoint() @ z, z.H @ z, ((real * self.scale).mH @ imag) * z[0, 0]
        return sum((p.imag.tril().square().sum() + p.real.sum() for p in products), torch.zeros(()))


def test_adjoints_conjugate() -> None:
    inputs = tuple(torch.randn(5, 7, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(2))
    plain, own = Adjoints(), Adjoints()
    expected = plain(*inputs)
    expected.backward()
    graph = capture(own, inputs)
    found = run_module(graph, own, inputs)[graph.loss]
    found.backward()
    assert torch.allclose(found, expected, rtol=1e-12)
    assert own.scale.grad is not None and plain.scale.grad is not None
    assert torch.allclose(own.scale.grad, plain.scale.grad, rtol=1e-10)


@pytest.mark.parametrize("dtype, partial", [("float64", True), ("complex128", False)])
def test_whether_parts_of_a_sum_are_real_says_nothing_of_complex_numbers(dtype: str, partial: bool) -> None:
    case = truth(sample("isreal", self=t(4, 6, dtype=dtype)))
    (triples,) = derive(case.graph, flat(2)).triples
    assert any(PARTIAL in p.placement.states for triple in triples for p in triple.pre) == partial
