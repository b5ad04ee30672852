"""Llama-style language models on the `meta` device: grouped-query attention, rotary positions, RMS norms, SwiGLU. 1B (`build`) and 8B (`llama_8b`):

hapx plan examples/models/llama.py:build --cluster cluster_specs/a100x8.yaml
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """`groups`: heads of keys and values, each shared by heads / groups queries."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    groups: int
    hidden: int
    tied: bool


SIZES = {
    "1B": Size(vocabulary=128256, width=2048, layers=16, heads=32, groups=8, hidden=8192, tied=True),
    "8B": Size(vocabulary=128256, width=4096, layers=32, heads=32, groups=8, hidden=14336, tied=False),
}


def rotary(context: int, size: int, base: float = 500_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines [context, size] of the angles by which pairs (i, i + size / 2) are turned."""
    angles = torch.arange(context)[:, None] * base ** (-torch.arange(0, size, 2) / size)
    return torch.cat([angles, angles], dim=-1).cos(), torch.cat([angles, angles], dim=-1).sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.width = size.width // size.heads  # of a head
        self.norm1 = nn.RMSNorm(size.width, eps=1e-5)
        self.q = nn.Linear(size.width, size.width, bias=False)
        self.k = nn.Linear(size.width, size.groups * self.width, bias=False)
        self.v = nn.Linear(size.width, size.groups * self.width, bias=False)
        self.proj = nn.Linear(size.width, size.width, bias=False)
        self.norm2 = nn.RMSNorm(size.width, eps=1e-5)
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Returns the mean cross-entropy over all positions."""

    def __init__(self, size: Size, context: int):
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.tied:
            self.head.weight = self.tokens.weight
        cos, sin = rotary(context, size.width // size.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(size: str = "1B", batch: int = 64, context: int = 2048) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model of that size and one global batch."""
    with torch.device("meta"):
        model = Llama(SIZES[size], context)
        tokens = torch.zeros(batch, context, dtype=torch.int64)
        return model, (tokens, torch.zeros_like(tokens))


llama_8b = partial(build, "8B", 16)
