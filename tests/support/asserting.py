"""A loss with `assert` in it: in test modules pytest rewrites these."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def asserted(h: Tensor, y: Tensor) -> Tensor:
    assert (y >= 0).all() and (y < 4).all(), "labels"
    return F.cross_entropy(h, y)
