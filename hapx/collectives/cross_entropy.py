"""Cross entropy where the rows, the classes, or both are split over devices.

In: local logits and targets. Out: the local part of the loss: Partial over the axes that split the rows (mean, sum) or Sharded with them
(none), Invariant over the axes that split the classes. Invariant: value and gradient are those of torch's cross_entropy of the whole.

Per row with logits x, target t, class weights w (1 if none), smoothing a, C classes, log Z = log sum_c exp x_c:

    loss = (1 - a) w_t (log Z - x_t) + a / C * (sum_c w_c log Z - sum_c w_c x_c)
    d loss / d x_c = (1 - a) w_t (p_c - [c = t]) + a / C * (p_c sum_k w_k - w_c),    p_c = exp(x_c - log Z)

A row whose target is `ignore_index` counts nothing. The mean divides by the sum of w_t over all rows of all devices, which is data.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hapx.collectives.communicator import Communicator
from hapx.errors import UnsupportedOperatorError

NONE, MEAN = 0, 1  # aten's numbers for reductions; 2 is the sum


def cross_entropy(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, label_smoothing: float,
    batch: Communicator | None, classes: Communicator | None, offset: int, count: int,
) -> Tensor:  # fmt: skip
    """Arguments as of aten.cross_entropy_loss: logits (C), (N, C) or (N, C, d1, ...), targets without the C; `weight` whole.

    batch: splits rows; classes: splits the C, this device has classes offset, offset + 1, ...; count: global number of classes."""
    probabilities = target.is_floating_point()
    if probabilities and classes is not None:
        raise UnsupportedOperatorError("cross_entropy with probabilities as targets cannot be split over classes", allowed="class indices as targets")
    if classes is None:
        rows = F.cross_entropy(
            self, target, weight, ignore_index=ignore_index, reduction="none" if reduction == NONE else "sum", label_smoothing=label_smoothing
        )
    else:
        rows = _split_classes(self, target, weight, ignore_index, label_smoothing, classes, offset, count)
    if reduction == NONE:
        return rows.to(self.dtype)
    total = rows.sum()
    if reduction == MEAN:
        ones = target.numel() // count if probabilities else counted(target, weight, ignore_index)
        total = total / over(batch, ones, total)
    return total.to(self.dtype)


def counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Sum of the weights of the local targets that are not ignored; without weights their number."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum()
    return (weight.detach().to(torch.float64)[target.masked_fill(~valid, 0)] * valid).sum()


def over(batch: Communicator | None, local: Tensor | int, like: Tensor) -> Tensor:
    """The sum of `local` over the devices, as a divisor of `like`."""
    total = torch.as_tensor(local, device=like.device)
    total = total if batch is None else batch.all_reduce(total)
    return total.to(torch.promote_types(like.dtype, torch.float32))


def _split_classes(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float, classes: Communicator, offset: int, count: int
) -> Tensor:
    """The loss of each row, the same on every device of `classes`; in at least float32."""
    x = logits.movedim(1, -1) if logits.dim() > 1 else logits
    valid = target != ignore_index
    known = target.masked_fill(~valid, 0)
    wide = torch.promote_types(x.dtype, torch.float32)
    w = torch.ones(count, dtype=wide, device=x.device) if weight is None else weight.detach().to(wide)
    losses: Tensor = _ClassLoss.apply(x, known, w, smoothing, classes, offset)
    return losses.masked_fill(~valid, 0)


class _ClassLoss(torch.autograd.Function):
    """(..., local classes) -> (...). Two collectives forward (a max, a sum), none backward: the cotangent is Invariant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, weight: Tensor, smoothing: float, classes: Communicator, offset: int) -> Tensor:
        wide = x.to(weight.dtype)
        own = x.shape[-1]
        highest = wide.amax(-1) if own else wide.new_full(x.shape[:-1], -math.inf)
        highest = classes.all_reduce(highest, "max")
        highest = highest.masked_fill(highest.isinf(), 0)  # infinite logits then give what they give on one device
        shifted = wide - highest[..., None]  # everything relative to the highest: large logits cost no digits
        mine, local = owned(target, offset, own)
        picked = shifted.gather(-1, local).squeeze(-1).masked_fill(~mine, 0) if own else torch.zeros_like(highest)
        sums = [shifted.exp().sum(-1), picked]
        if smoothing:
            sums.append(shifted @ weight[offset : offset + own])
        total = classes.all_reduce(torch.stack(sums))
        log_z = total[0].log()
        target_weight = weight[target]
        losses = (1 - smoothing) * target_weight * (log_z - total[1])
        if smoothing:
            losses = losses + smoothing / len(weight) * (weight.sum() * log_z - total[2])
        ctx.save_for_backward(x, target, highest, log_z, weight)
        ctx.smoothing, ctx.offset = smoothing, offset
        return losses

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        x, target, highest, log_z, weight = ctx.saved_tensors
        a, own = ctx.smoothing, x.shape[-1]
        target_weight = (1 - a) * weight[target]
        factor = target_weight
        if a:
            factor = factor + a / len(weight) * weight.sum()
        gradient = (x.to(weight.dtype) - highest[..., None] - log_z[..., None]).exp_() * (factor * cotangent)[..., None]
        if own:
            mine, local = owned(target, ctx.offset, own)
            gradient.scatter_add_(-1, local, -(target_weight * cotangent * mine)[..., None])
            if a:
                gradient -= a / len(weight) * cotangent[..., None] * weight[ctx.offset : ctx.offset + own]
        return gradient.to(x.dtype), None, None, None, None, None


def owned(target: Tensor, offset: int, own: int) -> tuple[Tensor, Tensor]:
    """Which targets are classes of this device, and their local numbers (0 where they are not) with a dim for gather."""
    local = target - offset
    mine = (local >= 0) & (local < own)
    return mine, local.masked_fill(~mine, 0)[..., None]
