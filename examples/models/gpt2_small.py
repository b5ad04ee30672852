"""GPT-2 small on the `meta` device: 12 layers, width 768, 128 tokens of 50257. For planning only, no memory is used:

hapx plan examples/models/gpt2_small.py:build --cluster cluster_specs/v100x2_p100x6.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT

CONTEXT, VOCABULARY = 128, 50257


def build(batch: int = 1024) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and one global batch."""
    with torch.device("meta"):
        model = GPT(VOCABULARY, width=768, heads=12, layers=12, context=CONTEXT)
        tokens = torch.zeros(batch, CONTEXT, dtype=torch.int64)
        return model, (tokens, torch.zeros_like(tokens))


def desktop() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """With 64 sequences instead of 1024: for two or four cards."""
    return build(64)
