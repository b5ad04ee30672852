"""torch.istft in a captured graph gives what it gives, whatever its arguments are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hapx.graph.capture import capture
from support.interpret import run_module

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
