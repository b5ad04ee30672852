"""Operators of a library of our own, as users register them with `torch.library`: what the planner has to find out by execution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("hapx_tests::squash", mutates_args=())
def squash(x: Tensor, slope: float) -> Tensor:
    """Elementwise and not linear."""
    return torch.where(x > 0, slope * x, x.tanh())


@squash.register_fake
def _(x: Tensor, slope: float) -> Tensor:
    return torch.empty_like(x)


def _squash_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.slope = inputs[1]


def _squash_backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return g * torch.where(x > 0, torch.full_like(x, ctx.slope), 1 - x.tanh() ** 2), None


squash.register_autograd(_squash_backward, setup_context=_squash_save)


@torch.library.custom_op("hapx_tests::row_softmax", mutates_args=())
def row_softmax(x: Tensor) -> Tensor:
    """Whole over the last dim."""
    return x.softmax(-1)


@row_softmax.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


row_softmax.register_autograd(
    lambda ctx, g: ctx.saved_tensors[0] * (g - (g * ctx.saved_tensors[0]).sum(-1, keepdim=True)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@torch.library.custom_op("hapx_tests::bilinear", mutates_args=())
def bilinear(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """out[b, o] = sum over i of x[b, i] * w[i, o] * y[b, o]: linear in each of its operands."""
    return (x @ w) * y


@bilinear.register_fake
def _(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(y)


def _bilinear_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, w, y = ctx.saved_tensors
    return (g * y) @ w.T, x.T @ (g * y), g * (x @ w)


bilinear.register_autograd(_bilinear_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("hapx_tests::tile_to", mutates_args=())
def tile_to(x: Tensor, rows: int) -> Tensor:
    """Checks a literal size: it cannot run on other rows than the model's."""
    if x.shape[0] != rows:
        raise ValueError(f"{rows} rows, not {x.shape[0]}")
    return x * 2.0


@tile_to.register_fake
def _(x: Tensor, rows: int) -> Tensor:
    return torch.empty_like(x)


tile_to.register_autograd(lambda ctx, g: (g * 2.0, None))


@torch.library.custom_op("hapx_tests::running_sum", mutates_args=())
def running_sum(x: Tensor) -> Tensor:
    """Every sample depends on those before it: the batch cannot be split."""
    return x.cumsum(0)


@running_sum.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


running_sum.register_autograd(lambda ctx, g: g.flip(0).cumsum(0).flip(0))


@torch.library.custom_op("hapx_tests::quantise", mutates_args=())
def quantise(x: Tensor, steps: int) -> Tensor:
    """Has no gradient."""
    return (x * steps).round() / steps


@quantise.register_fake
def _(x: Tensor, steps: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("hapx_tests::jitter", mutates_args=())
def jitter(x: Tensor) -> Tensor:
    """Random, without saying so."""
    return x + torch.randn_like(x)


@jitter.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


jitter.register_autograd(lambda ctx, g: g.clone())


@torch.library.custom_op("hapx_tests::late_cumsum", mutates_args=())
def late_cumsum(x: Tensor) -> Tensor:
    """Splits along the batch as long as there are few columns: a trap for trials in small shapes."""
    return x.cumsum(0) if x.shape[1] > 40 else x * 1.5


@late_cumsum.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


late_cumsum.register_autograd(
    lambda ctx, g: g.flip(0).cumsum(0).flip(0) if g.shape[1] > 40 else g * 1.5,
)


@torch.library.custom_op("hapx_tests::saturate", mutates_args=())
def saturate(x: Tensor, limit: float) -> Tensor:
    """Linear near zero: a trap for trials with small numbers."""
    return x.clamp(-limit, limit)


@saturate.register_fake
def _(x: Tensor, limit: float) -> Tensor:
    return torch.empty_like(x)


saturate.register_autograd(
    lambda ctx, g: (g * (ctx.saved_tensors[0].abs() <= ctx.limit), None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(inputs[0]), setattr(ctx, "limit", inputs[1]))[0],
)


@torch.library.custom_op("hapx_tests::wrong_gradient", mutates_args=())
def wrong_gradient(x: Tensor) -> Tensor:
    """Elementwise forward; its backward looks at the whole batch."""
    return x * 3.0


@wrong_gradient.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


wrong_gradient.register_autograd(lambda ctx, g: 3.0 * (g - g.mean(0, keepdim=True)))


@torch.library.custom_op("hapx_tests::sly", mutates_args=())
def sly(x: Tensor) -> Tensor:
    """Writes into its operand and does not say so."""
    x.detach().add_(1.0)
    return x * 2.0


@torch.library.custom_op("hapx_tests::nothing", mutates_args=())
def nothing(x: Tensor) -> Tensor:
    """The same values for all operands of a shape."""
    return torch.ones_like(x)


@nothing.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("hapx_tests::gpu_only", mutates_args=())
def gpu_only(x: Tensor) -> Tensor:
    """Has a kernel for GPUs only."""
    if x.device.type != "cuda":
        raise RuntimeError("only with CUDA")
    return x * 2.0


@torch.library.custom_op("hapx_tests::empty_hater", mutates_args=())
def empty_hater(x: Tensor) -> Tensor:
    """A sum; its kernel refuses empty tensors."""
    if x.numel() == 0:
        raise ValueError("empty")
    return x.sum()


empty_hater.register_autograd(
    lambda ctx, g: g.expand(ctx.shape).clone(), setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape)
)
