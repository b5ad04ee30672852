"""Text that every machine has: the source of the Python standard library, as numbers.

One symbol per character; characters that occur less than `RARE` times share symbol 0.
"""

from __future__ import annotations

import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

RARE = 100


@dataclass(frozen=True)
class Text:
    """`symbols`: character of each number ("?" for 0). `train`, `validation`: the text as numbers, int64."""

    source: str
    symbols: tuple[str, ...]
    train: Tensor
    validation: Tensor

    @property
    def entropy(self) -> float:
        """Unigram entropy of the whole text in nats: the loss of a model that only knows how often each symbol occurs."""
        counts = torch.bincount(torch.cat([self.train, self.validation]), minlength=len(self.symbols)).double()
        p = counts[counts > 0] / counts.sum()
        return float(-(p * p.log()).sum())

    def batch(self, size: int, context: int, generator: torch.Generator, *, validation: bool = False) -> tuple[Tensor, Tensor]:
        """`size` random pieces of `context` symbols, and the same pieces one symbol later."""
        text = self.validation if validation else self.train
        starts = torch.randint(0, len(text) - context, (size, 1), generator=generator)
        pieces = text[starts + torch.arange(context + 1)]
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()

    def encode(self, text: str) -> list[int]:
        numbers = {c: i for i, c in enumerate(self.symbols) if i}
        return [numbers.get(c, 0) for c in text]

    def decode(self, numbers: list[int]) -> str:
        return "".join(self.symbols[n] for n in numbers)


def standard_library(held_out: float = 0.05) -> Text:
    """The top-level modules of the running Python, in alphabetical order; every 20th file is held out for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.glob("*.py"))
    contents = [f.read_text(encoding="utf-8", errors="replace") for f in files]
    counts = Counter("".join(contents))
    kept = sorted(c for c, n in counts.items() if n >= RARE)
    numbers = {c: i + 1 for i, c in enumerate(kept)}
    table = {ord(c): numbers.get(c, 0) for c in counts}
    every = round(1 / held_out)

    def encoded(validation: bool) -> Tensor:
        chosen = "".join(c for i, c in enumerate(contents) if (i % every == every - 1) == validation)
        return torch.frombuffer(bytearray(chosen.translate(table).encode("latin-1")), dtype=torch.uint8).long()

    return Text(str(root), ("?", *kept), encoded(False), encoded(True))
