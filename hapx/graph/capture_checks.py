"""What torch looks at values for only to raise an error: such checks cannot be captured, so they are left out.

Distributions look whether their parameters and values are valid, unless `validate_args` is given; a few functions look at their arguments, and have
stand-ins here that compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution


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


STAND_INS: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType({F.gaussian_nll_loss: gaussian_nll_loss})
