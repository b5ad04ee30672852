"""Small models that many tests share. Each returns its mean training loss and has `example(batch)`: one batch of inputs.

Weights and floating inputs are float64 by default, so that equivalence tests can ask for (nearly) exact equality. Everything is
reproducible: weights come from `seed` of the constructor, inputs from `seed` of `example`; the global generator is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _initialise(model: nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Draw every parameter from its own generator: small weights, biases and norms that are not at a special value."""
    model.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.device.type == "meta":
                continue
            scale = 0.1 if parameter.dim() == 1 else (parameter[0].numel()) ** -0.5
            offset = 1.0 if parameter.dim() == 1 and bool((parameter == 1).all()) else 0.0
            parameter.copy_(offset + scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


class MLP(nn.Module):
    """Linear layers of the given widths with GELU between them; mean squared error."""

    def __init__(self, widths: Sequence[int], *, bias: bool = True, seed: int = 0, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.widths = tuple(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in zip(self.widths, self.widths[1:], strict=False))
        self.dtype = dtype
        _initialise(self, seed, dtype)

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.features(x), targets)

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, self.widths[0], generator=generator, dtype=torch.float64).to(self.dtype)
        return x, torch.randn(batch, self.widths[-1], generator=generator, dtype=torch.float64).to(self.dtype)


class Block(nn.Module):
    """A pre-norm transformer block with a fused QKV projection."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A character-level language model: tied head, learned positions; mean cross-entropy over all positions."""

    def __init__(
        self,
        vocab: int,
        width: int,
        heads: int,
        layers: int,
        context: int,
        dropout: float = 0.0,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ):
        super().__init__()
        self.vocab, self.context = vocab, context
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight
        _initialise(self, seed, dtype)

    def logits(self, idx: Tensor) -> Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.drop(self.tok(idx) + self.pos(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(idx).flatten(0, 1), targets.flatten())

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(0, self.vocab, (batch, self.context + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class CNN(nn.Module):
    """Two convolutions with batch norm on 8x8 images, then a linear classifier; mean cross-entropy."""

    def __init__(self, channels: int = 3, width: int = 4, classes: int = 5, *, seed: int = 0, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.channels, self.classes, self.dtype = channels, classes, dtype
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, classes)
        _initialise(self, seed, dtype)

    def logits(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(self.pool(x).flatten(1))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), targets)

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, self.channels, 8, 8, generator=generator, dtype=torch.float64).to(self.dtype)
        return x, torch.randint(0, self.classes, (batch,), generator=generator)
