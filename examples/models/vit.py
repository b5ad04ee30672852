"""The vision transformer of the HAP paper's evaluation, on the `meta` device: images of 32 x 32 in patches of 4 x 4, 12 layers of width 768.

hapx plan examples/models/vit.py:build --cluster cluster_specs/v100x2_p100x6.yaml
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention between all patches, then a perceptron for each; both behind a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Args: size: of the square images; patch: side of the square patches. Returns the mean cross-entropy of the class token's scores."""

    def __init__(self, size: int, patch: int, width: int, heads: int, layers: int, classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)
        nn.init.normal_(self.token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.classify(self.norm(x)[:, 0]), targets)


def build(batch: int = 2048) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and one global batch: 32 images for each of 64 devices."""
    with torch.device("meta"):
        model = ViT(size=32, patch=4, width=768, heads=12, layers=12, classes=10)
        return model, (torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64))
