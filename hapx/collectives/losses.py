"""Losses whose samples, elements or classes are split over devices.

In: local predictions and targets. Out: the local part of the loss: Partial where it is a mean or a sum, Sharded where it is not reduced.
Invariant: the local parts sum to torch's loss of the whole, however unequal the shares are: a mean is the local sum over the *global* count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hapx.collectives.communicator import Communicator
from hapx.collectives.cross_entropy import MEAN, NONE, counted, over, owned


def mean_loss(operator: str, count: int, **arguments: Any) -> Tensor:
    """The mean of any loss that is computed row by row: its local rows, summed and divided by `count`, the number of rows on all devices.

    operator: the loss, "aten.l1_loss.default"; arguments: its own."""
    total, dtype = _summed(operator, arguments)
    return (total / count).to(dtype)


def sum_loss(operator: str, **arguments: Any) -> Tensor:
    """The sum of a loss that is computed row by row, as the sum of its local rows: zero where there are none. Arguments as of `mean_loss`."""
    total, dtype = _summed(operator, arguments)
    return total.to(dtype)


def _summed(operator: str, arguments: Mapping[str, Any]) -> tuple[Tensor, torch.dtype]:
    """The sum of the local rows in at least float32 (it overflows half precision where the mean does not), and the dtype of the loss."""
    name, _, overload = operator.removeprefix("aten.").partition(".")
    function: Callable[..., Tensor] = getattr(getattr(torch.ops.aten, name), overload)
    rows = function(**{**arguments, "reduction": NONE})
    return rows.sum(dtype=torch.promote_types(rows.dtype, torch.float32)), rows.dtype


def nll_loss(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, batch: Communicator | None, offset: int
) -> Tensor:
    """Arguments as of aten.nll_loss_nd: scores (C), (N, C) or (N, C, d1, ...), targets without the C; `weight` whole.

    A row costs -w_t x_t; the mean divides by the sum of w_t over all rows of all devices, which is data (rows with `ignore_index` count nothing).
    batch: splits rows. offset: this device has the classes offset, offset + 1, ...; rows with other targets cost nothing here."""
    scores = self.movedim(1, -1) if self.dim() > 1 else self
    valid = target != ignore_index
    known = target.masked_fill(~valid, 0)
    mine, local = owned(known, offset, scores.shape[-1])
    picked = scores.gather(-1, local).squeeze(-1) if scores.shape[-1] else scores.sum(-1)  # the sum of nothing, which knows its operand
    rows = -picked.masked_fill(~(mine & valid), 0)
    if weight is not None:
        rows = rows * weight[known]
    if reduction == NONE:
        return rows
    total = rows.sum(dtype=torch.promote_types(rows.dtype, torch.float32))
    if reduction == MEAN:
        total = total / over(batch, counted(target, weight, ignore_index), total)
    return total.to(self.dtype)
