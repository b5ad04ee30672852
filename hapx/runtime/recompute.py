"""Regions of a program that are computed a second time in backward instead of keeping what they made.

In: the local program of a region (a piece of the forward pass, collectives included). Out: a module that computes it, keeps its inputs only, and
computes it again when its backward begins. Invariants: the second time gives the same values, because random masks are functions of the step
and buffers have the values they had; nothing is written twice (running statistics); and every rank begins the second time at the same place,
at the region's backward, with all of its collectives, whatever a rank keeps or has nothing of. (`torch.utils.checkpoint` begins when the first
saved tensor is asked for, which a rank without elements never does.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from hapx.collectives.rng import Rng


class Recomputed(nn.Module):
    """A region.

    Args:
        body: takes the region's inputs, returns the tuple of its outputs.
        written: numbers of the inputs that are buffers and get new values in this forward pass, inside of the region or after it.
        grads: per output, whether a cotangent flows back.
        rng: its step belongs to the region's values.
    """

    def __init__(self, body: fx.GraphModule, written: frozenset[int], grads: Sequence[bool], rng: Rng):
        super().__init__()
        self.body, self.written, self.grads, self.rng = body, written, tuple(grads), rng

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled() or not any(self.grads) or not any(t.requires_grad for t in inputs):
            return self.body(*inputs)  # type: ignore[no-any-return]
        return _Recompute.apply(self, *inputs)  # type: ignore[no-any-return]

    def again(self, inputs: Sequence[Tensor], step: int) -> tuple[Tensor, ...]:
        """The outputs of the forward pass number `step`, with a graph."""
        now, self.rng.step = self.rng.step, step
        try:
            with torch.enable_grad(), torch.autocast(inputs[0].device.type, enabled=False):
                return self.body(*inputs)  # type: ignore[no-any-return]
        finally:
            self.rng.step = now

    def extra_repr(self) -> str:
        return "computed again in backward"


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Recomputed, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.region, ctx.step = region, region.rng.step
        ctx.save_for_backward(*(t.clone() if i in region.written else t for i, t in enumerate(inputs)))
        outputs = region.body(*inputs)
        ctx.mark_non_differentiable(*(t for t, grad in zip(outputs, region.grads, strict=True) if not grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        region, needed = ctx.region, ctx.needs_input_grad[1:]
        inputs = [
            (t.clone() if i in region.written else t.detach()).requires_grad_(grad)
            for i, (t, grad) in enumerate(zip(ctx.saved_tensors, needed, strict=True))
        ]
        outputs = region.again(inputs, ctx.step)
        pairs = [(t, c) for t, c, grad in zip(outputs, cotangents, region.grads, strict=True) if grad and t.requires_grad]
        wanted = [t for t, grad in zip(inputs, needed, strict=True) if grad]
        found = iter(torch.autograd.grad([t for t, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True))
        return None, *(next(found) if grad else None for grad in needed)
