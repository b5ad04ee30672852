"""Composite operators: small local programs, some with communication, where one local operator is not enough.

In: local tensors, and arguments that the builder has resolved (Axes to a Communicator or None, LocalOffset and LocalSize to an int, LocalBlock to a
Block, LocalIndices to a tensor or None per dim). Out: local tensors. Invariant: every entry keeps the states it names, forward and,
through local autograd, in the dual states (Replicated - Partial, Invariant and Sharded with themselves).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hapx.collectives.batch_norm import batch_norm, instance_norm
from hapx.collectives.blocks import gather_shards
from hapx.collectives.communicator import Communicator
from hapx.collectives.cross_entropy import cross_entropy
from hapx.collectives.dropout import alpha_dropout, attention_dropout, dropout
from hapx.collectives.indexing import gather, index
from hapx.collectives.losses import mean_loss, nll_loss
from hapx.layout import Block
from hapx.plan import Form


def embedding(weight: Tensor, indices: Tensor, padding_idx: int, offset: int) -> Tensor:
    """Rows of a table of which this device has rows offset, offset + 1, ... (perhaps none): Partial over the axis that splits them.

    Other ids give zeros. `padding_idx`: global id whose row gets no gradient, -1 for none."""
    rows = weight.shape[0]
    if not rows:  # the sum of no rows: zeros that know their parameter
        return weight.sum(0).expand(*indices.shape, weight.shape[1]).contiguous()
    local = indices - offset
    mine = (local >= 0) & (local < rows)
    padding = padding_idx - offset if offset <= padding_idx < offset + rows else -1
    return torch.embedding(weight, local.masked_fill(~mine, 0), padding).masked_fill(~mine[..., None], 0)


def mean(self: Tensor, dim: Sequence[int] | None, keepdim: bool, count: int, dtype: torch.dtype | None) -> Tensor:
    """Local sum / global count: Partial over the axes that split a reduced dim. `count`: elements per result, on all devices."""
    result = dtype or self.dtype
    # at least float32: the sum overflows half precision where the mean does not
    total = torch.sum(self, list(range(self.dim())) if dim is None else list(dim), keepdim=keepdim, dtype=torch.promote_types(result, torch.float32))
    return (total / count).to(result)


def weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    """v / |v| * g, with one norm for each slice along `dim` (-1: one for all of v)."""
    others = [d for d in range(v.dim()) if d != dim]
    return v * (g / v.square().sum(others, keepdim=dim != -1).sqrt())


class _SufficientFactors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gather: Communicator, block: Block, form: Form) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gather, ctx.block, ctx.form, ctx.has_bias = gather, block, form, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_x = cotangent @ weight if for_x else None
        grad_weight = grad_bias = None
        if for_weight or (ctx.has_bias and for_bias):
            whole = gather_shards(cotangent, ctx.block, ctx.gather, ctx.form).flatten(0, -2)  # not -1: a width may be 0
            if for_weight:
                grad_weight = whole.T @ gather_shards(x, ctx.block, ctx.gather, ctx.form).flatten(0, -2)
            if ctx.has_bias and for_bias:
                grad_bias = whole.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


def linear_sfb(
    input: Tensor, weight: Tensor, bias: Tensor | None, gather: Communicator | None, block: Block | None, form: Form | str = Form.PADDED
) -> Tensor:
    """Linear with sufficient factor broadcasting (HAP section 4.3): input and result Sharded along a leading dim, weight and bias
    Invariant. In backward both factors of the weight's gradient, the input and the output's cotangent, are gathered instead of the
    gradient being reduced; every device computes it whole.

    block: how the devices of `gather` cut the leading dim of `input`."""
    if gather is None:
        return F.linear(input, weight, bias)
    assert block is not None and block.dim < input.dim() - 1, (block, tuple(input.shape))
    result: Tensor = _SufficientFactors.apply(input, weight, bias, gather, block, Form(form))
    return result


COMPOSITES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        f"hapx.{function.__name__}": function
        for function in (
            embedding, gather, index, cross_entropy, nll_loss, mean_loss, batch_norm, instance_norm, mean, linear_sfb, weight_norm, dropout,
            alpha_dropout, attention_dropout,
        )
    }
)  # fmt: skip
