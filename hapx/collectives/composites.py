"""Composite operators: small local programs, some with communication, where one local operator is not enough.

In: local tensors, and arguments that the builder has resolved (Axes to a Communicator or None, LocalOffset and LocalSize to an int, LocalBlock to a
Block, LocalIndices to a tensor or None per dim). Out: local tensors. Invariant: every entry keeps the states it names, forward and,
through local autograd, in the dual states (Replicated - Partial, Invariant and Sharded with themselves).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from hapx.collectives.batch_norm import batch_norm, instance_norm
from hapx.collectives.cross_entropy import cross_entropy
from hapx.collectives.draws import rand, randint, randn
from hapx.collectives.dropout import alpha_dropout, attention_dropout, dropout
from hapx.collectives.factors import addmm_sfb, convolution_sfb, embedding_sfb, linear_sfb, matmul_sfb
from hapx.collectives.indexing import gather, index
from hapx.collectives.losses import mean_loss, nll_loss, sum_loss


def embedding(weight: Tensor, indices: Tensor, padding_idx: int, offset: int) -> Tensor:
    """Rows of a table of which this device has rows offset, offset + 1, ... (perhaps none): Partial over the axis that splits them. A table without
    columns is not looked up: the kernel's backward on GPUs writes one all the same.

    Other ids give zeros. `padding_idx`: global id whose row gets no gradient, -1 for none."""
    rows = weight.shape[0]
    if not weight.numel():  # the sum of no rows: zeros that know their parameter
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
    return v * (g / (v * v.conj()).real.sum(others, keepdim=dim != -1).sqrt())


COMPOSITES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        f"hapx.{function.__name__}": function
        for function in (
            embedding, gather, index, cross_entropy, nll_loss, mean_loss, sum_loss, batch_norm, instance_norm, mean, weight_norm, dropout,
            alpha_dropout, attention_dropout, rand, randn, randint, linear_sfb, matmul_sfb, addmm_sfb, convolution_sfb, embedding_sfb,
        )
    }
)  # fmt: skip
