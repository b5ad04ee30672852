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

BATCH, CONTEXT, VOCABULARY = 1024, 128, 50257


def build() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and one global batch."""
    with torch.device("meta"):
        model = GPT(VOCABULARY, width=768, heads=12, layers=12, context=CONTEXT)
        tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.int64)
        return model, (tokens, torch.zeros_like(tokens))
