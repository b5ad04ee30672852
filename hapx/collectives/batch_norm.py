"""Batch norm with the statistics of the whole batch, whatever axes split it; instance norm, of which only the running statistics are.

In: local samples (N, C, ...), possibly none. Out: local results, Sharded like the input; running statistics updated in place, equally on
every device. Weight and bias are Replicated: their gradients are local sums, that is Partial.

With n elements per channel on all devices, mean = sum x / n, var = sum (x - mean)^2 / n (the mean first: no cancellation),
h = (x - mean) / sqrt(var + eps), y = w h + b, and, all sums over all devices (Ioffe and Szegedy 2015),

    dx = w / sqrt(var + eps) * (dy - sum(dy) / n - h sum(dy h) / n)
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hapx.collectives.communicator import Communicator


def batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float, batch: Communicator | None,
) -> Tensor:  # fmt: skip
    """Arguments as of aten.batch_norm; `batch`: the axes that split the samples. Without running statistics it always uses those of the batch."""
    if batch is None or not (training or running_mean is None):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    result, mean, var, n = _BatchNorm.apply(input, weight, bias, eps, batch)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((var * (n / (n - 1))).to(running_var.dtype), momentum)
    return result


def instance_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    use_input_stats: bool, momentum: float, eps: float, batch: Communicator | None,
) -> Tensor:  # fmt: skip
    """Arguments as of aten.instance_norm; `batch`: the axes that split the samples. Every sample has its own statistics; the running ones go towards
    their means over all samples."""
    if batch is None or not use_input_stats:
        return torch.instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, False)
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    image = list(range(2, input.dim()))
    centred = wide - wide.mean(image, keepdim=True)
    var = centred.square().mean(image, keepdim=True)
    result = centred * (var + eps).rsqrt()
    if weight is not None:
        result = result * _along_channels(weight.to(wide.dtype), input)
    if bias is not None:
        result = result + _along_channels(bias.to(wide.dtype), input)
    with torch.no_grad():
        size = math.prod(input.shape[2:])
        means, variances = wide.mean(image).sum(0), var.flatten(1).sum(0) * (size / (size - 1))
        # float64, so that the number of samples, which travels with the sums, is exact
        total = batch.all_reduce(torch.cat([means, variances, means.new_tensor([len(input)])]).to(torch.float64))
        mean, variance = (total[:-1] / total[-1]).chunk(2)
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_(variance.to(running_var.dtype), momentum)
    return result.to(input.dtype)


def _dims(t: Tensor) -> list[int]:
    return [d for d in range(t.dim()) if d != 1]


def _along_channels(v: Tensor, like: Tensor) -> Tensor:
    return v.reshape(1, -1, *[1] * (like.dim() - 2))


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, batch: Communicator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # float64, so that the count, which travels with the sums, is exact
        sums = wide.sum(_dims(x)).to(torch.float64)
        local = x.numel() // x.shape[1] if x.shape[1] else 0
        total = batch.all_reduce(torch.cat([sums, sums.new_tensor([local])]))
        n = total[-1]
        mean = total[:-1] / n
        centred = wide - _along_channels(mean, x).to(wide.dtype)
        var = batch.all_reduce(centred.square().sum(_dims(x)).to(torch.float64)) / n
        inverse = (var + eps).rsqrt().to(wide.dtype)
        result = centred * _along_channels(inverse if weight is None else inverse * weight.to(wide.dtype), x)
        if bias is not None:
            result += _along_channels(bias.to(wide.dtype), x)
        ctx.save_for_backward(x, weight, mean.to(wide.dtype), inverse)
        ctx.n, ctx.batch, ctx.bias_dtype = n, batch, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var, n)
        return result.to(x.dtype), mean, var, n

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        dy = cotangent.to(inverse.dtype)
        h = (x.to(inverse.dtype) - _along_channels(mean, x)) * _along_channels(inverse, x)
        d_bias, d_weight = dy.sum(_dims(x)), (dy * h).sum(_dims(x))
        dx = None
        if ctx.needs_input_grad[0]:
            of_bias, of_weight = (ctx.batch.all_reduce(torch.stack([d_bias, d_weight])).to(torch.float64) / ctx.n).to(inverse.dtype)
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            dx = (dy - _along_channels(of_bias, x) - h * _along_channels(of_weight, x)) * _along_channels(scale, x)
            dx = dx.to(x.dtype)
        grad_weight = d_weight.to(weight.dtype) if weight is not None else None
        return dx, grad_weight, d_bias.to(ctx.bias_dtype) if ctx.bias_dtype is not None else None, None, None
