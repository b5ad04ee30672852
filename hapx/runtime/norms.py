"""The norm of the gradient of a model whose parameters lie in pieces on many devices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hapx.runtime.parameters import ParameterStore


@torch.no_grad()
def clip_grad_norm_(store: ParameterStore, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales all gradients so that the norm of the whole gradient is at most `max_norm`; returns the norm before (a collective
    call). Each element of the model counts once, however it is stored."""
    norm_type = float(norm_type)
    named = [(n, p) for n, p in store.module.named_parameters() if p.grad is not None]
    gradients = [p.grad.detach() for n, p in named if p.grad is not None and p.grad.numel() and store.counted(n)]
    counted = [g.to(torch.promote_types(g.dtype, torch.float64)) for g in gradients]
    local = torch.zeros((), dtype=torch.float64, device=store.device)
    if math.isinf(norm_type):
        for g in counted:
            local = torch.maximum(local, g.abs().max())
        total = store.everyone.all_reduce(local.reshape(1), "max")[0]
    else:
        for g in counted:
            local += g.abs().pow(norm_type).sum()
        total = store.everyone.all_reduce(local.reshape(1))[0].pow(1.0 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for _, p in named:
        assert p.grad is not None
        p.grad.mul_(scale.to(p.grad.dtype))
    dtype = next((p.dtype for p in store.module.parameters()), torch.float32)  # alike on all devices, whatever they have gradients of
    return total.to(dtype.to_real())
