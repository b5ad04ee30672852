"""BERT-Base in which every second perceptron is a mixture of experts, on the `meta` device. Two experts per device, 128 by default:

hapx plan examples/models/bert_moe.py:build --cluster cluster_specs/v100x2_p100x6.yaml

Top-2 gating after GShard (Lepikhin et al. 2021, section 2.2): the sequences are the groups, and an expert takes `capacity` tokens of each;
tokens that come too late pass by. In the names of dims, g are groups, s tokens of a group, e experts, c places in an expert's buffer.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from bert import BERT, CONTEXT, VOCABULARY, Attention, Layer


def route(scores: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """From scores [g, s, e]: the weights [g, s, e, c] with which tokens get back what experts make of them, and the balancing loss."""
    experts = scores.shape[-1]
    shares = scores.softmax(-1)
    first = F.one_hot(shares.argmax(-1), experts).to(shares.dtype)
    second = F.one_hot((shares * (1 - first)).argmax(-1), experts).to(shares.dtype)
    balance = (shares.mean(1) * first.mean(1)).mean() * experts**2
    # first choices come before all second ones
    place_first = first.cumsum(1) - first
    place_second = second.cumsum(1) - second + first.sum(1, keepdim=True)
    total = (shares * (first + second)).sum(-1, keepdim=True)

    def weights(choice: Tensor, place: Tensor) -> Tensor:
        kept = choice * (place < capacity)
        slot = (place * kept).sum(-1).to(torch.int64)
        return torch.einsum("gse,gsc->gsec", shares * kept / total, F.one_hot(slot, capacity).to(shares.dtype))

    return weights(first, place_first) + weights(second, place_second), balance


class Experts(nn.Module):
    """A mixture of perceptrons. `slack`: places of an expert's buffer per token that it gets if all experts get equally many."""

    def __init__(self, experts: int, width: int, hidden: int, slack: float = 1.25):
        super().__init__()
        self.slack = slack
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        nn.init.normal_(self.up, std=width**-0.5)
        nn.init.normal_(self.down, std=hidden**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [g, s, m] -> (tokens [g, s, m], balancing loss)."""
        capacity = math.ceil(2 * self.slack * x.shape[1] / self.up.shape[0])
        combine, balance = route(self.gate(x), capacity)
        sent = torch.einsum("gsec,gsm->egcm", (combine > 0).to(x.dtype), x)
        hidden = F.gelu(torch.einsum("egcm,emh->egch", sent, self.up))
        made = torch.einsum("egch,ehm->egcm", hidden, self.down)
        return torch.einsum("gsec,egcm->gsm", combine, made), balance


class ExpertLayer(nn.Module):
    """Attention and a mixture of experts, each followed by a norm."""

    def __init__(self, width: int, heads: int, experts: int):
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm1 = nn.LayerNorm(width)
        self.experts = Experts(experts, width, 4 * width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm1(x + self.attention(x))
        made, balance = self.experts(x)
        return self.norm2(x + made), balance


class BERTMoE(BERT):
    """The loss of BERT plus `weight` times the balancing loss of every mixture."""

    def __init__(self, vocabulary: int, width: int, context: int, heads: int, layers: int, experts: int, weight: float = 0.01):
        made = [ExpertLayer(width, heads, experts) if i % 2 else Layer(width, heads) for i in range(layers)]
        super().__init__(vocabulary, width, context, made)
        self.weight = weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, balance = self.embed(tokens), torch.zeros((), dtype=self.head.weight.dtype, device=tokens.device)
        for layer in self.layers:
            if isinstance(layer, ExpertLayer):
                x, loss = layer(x)
                balance = balance + loss
            else:
                x = layer(x)
        return self.score(x, targets) + self.weight * balance


def build(experts: int = 128, batch: int = 2048) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and one global batch: 2 experts and 32 sequences for each of 64 devices."""
    with torch.device("meta"):
        model = BERTMoE(VOCABULARY, 768, CONTEXT, heads=12, layers=12, experts=experts)
        tokens = torch.zeros(batch, CONTEXT, dtype=torch.int64)
        return model, (tokens, torch.zeros_like(tokens))
