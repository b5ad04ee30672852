"""A model file as users write one, with an operator of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.library.custom_op("hapx_tests::swish", mutates_args=())
def swish(x: Tensor) -> Tensor:
    return x * x.sigmoid()


@swish.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx, g: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    (x,) = ctx.saved_tensors
    s = x.sigmoid()
    return g * (s + x * s * (1 - s))


swish.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = swish(self.up(x))
        return (self.down(h) ** 2).mean()


def build() -> tuple[nn.Module, tuple[Tensor]]:
    return Net(), (torch.randn(128, 64),)
