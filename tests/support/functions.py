"""torch.autograd.Functions whose backward is not the derivative of their forward, and a model that uses them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from support.models import _initialise


class Swish(Function):
    """Saves its operand only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(1.7 * x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(1.7 * x)
        return g * (s + 1.7 * x * s * (1 - s))


class Reversed(Function):
    """Ganin and Lempitsky 2015: a gradient that turns round. Its output is its operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * g, None


class Rounded(Function):
    """A gradient that passes straight through."""

    @staticmethod
    def forward(x: Tensor, steps: int = 4) -> Tensor:
        return torch.round(steps * x) / steps

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class Projected(Function):
    """Several operands, one of them missing, and two outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        y = x @ weight.t()
        return y, (y * y).sum(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor, of_squares: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        g = g + 3 * of_squares[..., None] * (x @ weight.t())  # 2 would be the derivative
        return g @ weight, g.t() @ x, None


rounded = Rounded.apply  # as many do, before anybody captures


class Net(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        self.first, self.last, self.weight = nn.Linear(6, 8), nn.Linear(8, 4), nn.Parameter(torch.empty(5, 8))
        _initialise(self, seed, torch.float64)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = Swish.apply(self.first(x))
        h = h + 0.1 * rounded(h)
        projected, squares = Projected.apply(h, self.weight, None)
        return ((self.last(Reversed.apply(h, 0.3)) - targets) ** 2).mean() + 0.1 * (projected**2).mean() + 0.01 * squares.mean()


def inputs(step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(10, n, generator=generator, dtype=torch.float64) for n in (6, 4))
