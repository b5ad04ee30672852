"""Where torch looks at values that decide nothing but whether there is an error, or how a kernel goes about it: neither can be captured.

Distributions look whether their parameters and values are valid, unless `validate_args` is given: they do not while a model is captured. A few
functions have stand-ins here that compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution

from hapx.operators import ctc


@contextmanager
def unvalidated() -> Iterator[None]:
    """Inside, distributions that are not told to do not look at values."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def gaussian_nll_loss(input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> Tensor:
    """torch.nn.functional.gaussian_nll_loss, without a look whether variances are negative. Raises ValueError for sizes and names as torch does."""
    if isinstance(var, float):
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.dim() != var.dim() or sum(m for n, m in zip(input.shape, var.shape, strict=True) if n != m) != 1:
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    var = var + (var.clamp(min=eps) - var).detach()  # its gradient is passed on where it is too small, too
    loss = 0.5 * (var.log() + (input - target).square() / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


class InOneRow:
    """What a mask selects of the rows of a matrix of integers, one behind the other: how many there are depends on values, but `ctc_loss` takes
    them. It is no tensor: whoever asks for anything else fails, and capture says why (see `hapx.graph.capture_trace`).

    Attributes:
        rows: of every row what is selected, from its beginning on, then zeros. lengths: how much that is.
    """

    def __init__(self, rows: Tensor, mask: Tensor):
        # now: later they may be written to; and nothing is left behind them, such as -100, that is no class: kernels do not look at that
        self.rows = rows.masked_fill(~mask, 0).gather(1, torch.argsort((~mask).long(), dim=1, stable=True))
        self.lengths = mask.sum(1)


def masked_select(input: Tensor, mask: Tensor) -> Tensor | InOneRow:
    """torch.masked_select; of rows of integers what can be put off."""
    if mask.dtype == torch.bool and input.shape == mask.shape and input.dim() == 2 and input.dtype in (torch.int32, torch.int64):
        return InOneRow(input, mask)
    return torch.masked_select(input, mask)


ONE_ROW = "targets of ctc_loss lie one behind the other"


def ctc_loss(
    log_probs: Tensor, targets: Tensor | InOneRow, input_lengths: Tensor | Sequence[int], target_lengths: Tensor | Sequence[int], blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.ctc_loss, as an operator of our own that gives the loss of every sample: that of torch reads lengths as Python numbers.
    Targets in one row may be those that a mask selects of padded ones; a sample whose length is not what is selected of its row is NaN. Raises
    NotImplementedError for others in one row, ValueError for names as torch does."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    alone, selected = log_probs.dim() == 2, None
    if isinstance(targets, InOneRow):
        targets, selected = targets.rows, targets.lengths
    if targets.dim() == 1 and not alone:
        raise NotImplementedError(ONE_ROW)
    lengths = [torch.as_tensor(n, device=log_probs.device).reshape(-1) for n in (input_lengths, target_lengths)]
    if alone:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
    losses: Tensor = ctc(log_probs, targets, *lengths, blank, zero_infinity)
    if selected is not None:
        losses = torch.where(lengths[1] == selected, losses, torch.nan)
    if reduction == "mean":
        return (losses / lengths[1].clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses.squeeze(0) if alone else losses


def cov(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """torch.cov, which looks whether there are as many observations as `correction` asks for. (Weights are looked at as before.)"""
    if fweights is not None or aweights is not None or input.dim() > 2:
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.mH / max(rows.shape[1] - correction, 0)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """torch.corrcoef, by covariances."""
    found = cov(input)
    if found.dim() == 0:
        return found / found
    deviation = found.diagonal().real.sqrt()
    found = found / deviation[:, None] / deviation
    return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1)) if found.is_complex() else found.clamp(-1, 1)


STAND_INS: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        F.gaussian_nll_loss: gaussian_nll_loss, F.ctc_loss: ctc_loss, torch.masked_select: masked_select, Tensor.masked_select: masked_select,
        torch.cov: cov, Tensor.cov: cov, torch.corrcoef: corrcoef, Tensor.corrcoef: corrcoef,
    }
)  # fmt: skip
