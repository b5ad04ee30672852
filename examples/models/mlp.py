"""A perceptron with wide layers: the smallest model worth planning.

hapx plan examples/models/mlp.py:build --cluster cluster_specs/a100x2_p100x2.yaml
hapx plan examples/models/mlp.py:wide --cluster cluster_specs/a100x8.yaml
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers of the given widths, GELU between them. Returns the mean squared error."""

    def __init__(self, *widths: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return F.mse_loss(self.layers[-1](x), targets)


def build() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """4 layers of 1024 with a batch of 4096: data parallelism."""
    return _on_meta(4096, 1024, 1024, 1024, 1024, 1024)


def wide() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Layers of 8192 and 32768 with a batch of 64: splitting the layers pays on fast links."""
    return _on_meta(64, 8192, 32768, 8192, 32768, 8192)


def _on_meta(batch: int, *widths: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.device("meta"):
        return MLP(*widths), (torch.zeros(batch, widths[0]), torch.zeros(batch, widths[-1]))
