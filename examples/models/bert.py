"""BERT-Base as a masked language model, on the `meta` device: 12 layers of width 768, 128 tokens of 33280, the head tied to the embedding.

hapx plan examples/models/bert.py:build --cluster cluster_specs/v100x2_p100x6.yaml
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT, VOCABULARY = 128, 33280
IGNORED = -100  # target of a position that was not masked


class Attention(nn.Module):
    """Every position sees every other one."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))


class Layer(nn.Module):
    """Attention and a perceptron, each followed by a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class BERT(nn.Module):
    """Embedding, layers and a tied head. Returns the mean cross-entropy over the positions whose target is not IGNORED."""

    def __init__(self, vocabulary: int, width: int, context: int, layers: Sequence[nn.Module]):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(layers)
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.tokens.weight

    def embed(self, tokens: Tensor) -> Tensor:
        return self.norm(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))

    def score(self, x: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.transform_norm(F.gelu(self.transform(x))))
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.score(x, targets)


def build(batch: int = 2048) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and one global batch: 32 sequences for each of 64 devices."""
    with torch.device("meta"):
        model = BERT(VOCABULARY, 768, CONTEXT, [Layer(768, 12) for _ in range(12)])
        tokens = torch.zeros(batch, CONTEXT, dtype=torch.int64)
        return model, (tokens, torch.zeros_like(tokens))
