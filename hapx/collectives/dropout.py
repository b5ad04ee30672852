"""Dropout whose mask is a function of the global element index (see `hapx.collectives.rng`), alone and inside of attention.

In: local tensors and, per dim, the global indices of what is local. Out: local tensors. Invariant: what a device computes is its
slice of what a single device would compute with the same rng.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hapx.collectives.rng import Rng, keep_mask

Indices = Sequence[Tensor | None]
ALPHA = 1.7580993408473766  # SELU's scale times its alpha: minus the value at which it saturates


def dropout(input: Tensor, p: float, call: int, indices: Indices, shape: Sequence[int], rng: Rng) -> Tensor:
    """`input` with probability 1 - p, times 1 / (1 - p), else 0. Linear in `input`.

    call: number of the dropout in the program; indices: per dim, the global indices of the local elements (None: all of them);
    shape: of the whole tensor, or of its first dims: what lies along the others is kept or dropped together."""
    if p == 0:
        return input.clone()
    kept = input * _keep(input, p, call, indices, shape, rng)
    return kept if p == 1 else kept * (1 / (1 - p))


def alpha_dropout(input: Tensor, p: float, call: int, indices: Indices, shape: Sequence[int], rng: Rng) -> Tensor:
    """Arguments as of `dropout`. What is dropped becomes -ALPHA, then everything is scaled and shifted so that an input of mean 0 and variance 1
    keeps both (Klambauer et al. 2017, "Self-normalizing neural networks", section 2); with p = 1 it is 0."""
    if p == 0:
        return input.clone()
    if p == 1:
        return input * 0
    keep = _keep(input, p, call, indices, shape, rng)
    scale = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    shift = torch.where(keep, input.new_tensor(ALPHA * scale * p), input.new_tensor(ALPHA * scale * (p - 1)))
    return input * keep * scale + shift


def _keep(input: Tensor, p: float, call: int, indices: Indices, shape: Sequence[int], rng: Rng) -> Tensor:
    mask = keep_mask(p, call, indices, shape, rng, input.device)
    return mask.reshape(*mask.shape, *[1] * (input.dim() - mask.dim()))


def attention_dropout(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
    call: int, indices: Indices, shape: Sequence[int], rng: Rng,
) -> Tensor:  # fmt: skip
    """softmax(query key^T * scale + mask) value, with dropout of the weights: torch's scaled_dot_product_attention, not fused.

    indices, shape: of the (batch, head, query, key) weights. With `is_causal`, a query attends to keys up to its own global index.
    Rows with nothing to attend to are 0."""
    if enable_gqa and key.shape[-3] and query.shape[-3] != key.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3) for t in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    blocked = _blocked(scores, attn_mask, is_causal, indices)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask
        blocked = scores.isneginf() if blocked is None else blocked | scores.isneginf()
    if blocked is None:
        weights = scores.softmax(-1)
    else:
        dead = blocked.all(-1, keepdim=True)
        weights = scores.masked_fill(blocked & ~dead, -math.inf).masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    return dropout(weights, dropout_p, call, indices, shape, rng) @ value


def _blocked(scores: Tensor, attn_mask: Tensor | None, is_causal: bool, indices: Indices) -> Tensor | None:
    """Where a query must not attend, as far as booleans say so."""
    if is_causal:
        rows, columns = (
            torch.arange(n, device=scores.device) if i is None else i.to(scores.device) for n, i in zip(scores.shape[-2:], indices[-2:], strict=True)
        )
        return columns > rows[:, None]
    return ~attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else None
