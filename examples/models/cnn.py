"""A small convolutional classifier with batch norm, for images of 32 x 32.

hapx plan examples/models/cnn.py:build --cluster cluster_specs/rtx4090_rtx3060.yaml
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):
    """Stages of convolution, batch norm, ReLU and pooling; the mean over the image feeds a linear classifier."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256), classes: int = 10):
        super().__init__()
        sizes = (3, *widths)
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in zip(sizes, widths, strict=False))
        self.norms = nn.ModuleList(nn.BatchNorm2d(w) for w in widths)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = images
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return F.cross_entropy(self.classify(self.pool(x).flatten(1)), targets)


def build() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and one global batch of 256 images, on the `meta` device."""
    with torch.device("meta"):
        return CNN(), (torch.zeros(256, 3, 32, 32), torch.zeros(256, dtype=torch.int64))
