"""The models of `examples/models`: at full size on `meta`, and tiny in float64 for equivalence tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.models import _initialise

FOLDER = Path(__file__).parents[2] / "examples" / "models"
VOCABULARY, CONTEXT = 13, 6


@cache
def load(name: str) -> ModuleType:
    """A file of the zoo as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and the next ones."""
    tokens = torch.randint(0, VOCABULARY, (batch, CONTEXT + 1), generator=_generator(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def masked_text(batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens; targets at about a third of the positions, unevenly over the batch."""
    tokens, targets = text(batch, seed)
    masked = torch.rand(batch, CONTEXT, generator=_generator(seed + 1)) < torch.linspace(0.1, 0.6, batch)[:, None]
    masked[0, 0] = True
    return tokens, targets.masked_fill(~masked, load("bert").IGNORED)


def images(batch: int, seed: int) -> tuple[Tensor, Tensor]:
    pixels = torch.randn(batch, 3, 8, 8, generator=_generator(seed), dtype=torch.float64)
    return pixels, torch.randint(0, 5, (batch,), generator=_generator(seed + 1))


@dataclass(frozen=True)
class Tiny:
    """Two layers of width 16."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Tensor, Tensor]]

    def model(self) -> nn.Module:
        """The same weights at every call."""
        module = self.make()
        _initialise(module, 0, torch.float64)
        return module


def _bert() -> nn.Module:
    bert: Any = load("bert")
    made: nn.Module = bert.BERT(VOCABULARY, 16, CONTEXT, [bert.Layer(16, 4) for _ in range(2)])
    return made


def _llama(tied: bool) -> nn.Module:
    llama: Any = load("llama")
    made: nn.Module = llama.Llama(llama.Size(VOCABULARY, 16, layers=2, heads=4, groups=2, hidden=24, tied=tied), CONTEXT)
    return made


TINY: Mapping[str, Tiny] = {
    "vit": Tiny(lambda: load("vit").ViT(8, 4, width=16, heads=4, layers=2, classes=5), images),
    "bert": Tiny(_bert, masked_text),
    "bert_moe": Tiny(lambda: load("bert_moe").BERTMoE(VOCABULARY, 16, CONTEXT, heads=4, layers=2, experts=4), masked_text),
    "gpt3": Tiny(lambda: load("gpt3").GPT(VOCABULARY, 16, 4, 2, CONTEXT), text),
    "llama": Tiny(lambda: _llama(tied=False), text),
}


class Balanced(nn.Module):
    """One mixture on embedded tokens, balanced over the whole batch by a product of two means, which no mean of local products is."""

    def __init__(self, weight: float):
        super().__init__()
        moe: Any = load("bert_moe")
        self.weight = weight
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.experts = moe.Experts(4, 8, 16)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        made, _ = self.experts(x)
        shares = self.experts.gate(x).softmax(-1).flatten(0, 1)
        chosen = F.one_hot(shares.argmax(-1), 4).to(shares.dtype)
        balance = (shares.mean(0) * chosen.mean(0)).sum() * 4
        loss = F.cross_entropy(self.head(x + made).flatten(0, 1), targets.flatten(), ignore_index=load("bert").IGNORED)
        return loss + self.weight * balance
