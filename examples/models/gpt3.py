"""The GPT-3 family on the `meta` device, in the sizes of the Alpa paper's evaluation: 1024 tokens of 51200. 1.3B by default:

hapx plan examples/models/gpt3.py:build --cluster cluster_specs/h100x8_a100x8.yaml
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT

CONTEXT, VOCABULARY = 1024, 51200

# name: (width, layers, heads)
SIZES = {
    "125M": (768, 12, 12),
    "350M": (1024, 24, 16),
    "760M": (1536, 24, 16),
    "1.3B": (2048, 24, 32),
    "2.6B": (2560, 32, 32),
    "6.7B": (4096, 32, 32),
    "15B": (5120, 48, 40),
    "39B": (8192, 48, 64),
}


def build(size: str = "1.3B", batch: int = 64) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model of that size and one global batch. (The paper's has 1024 sequences, in micro-batches.)"""
    width, layers, heads = SIZES[size]
    with torch.device("meta"):
        model = GPT(VOCABULARY, width, heads, layers, CONTEXT)
        tokens = torch.zeros(batch, CONTEXT, dtype=torch.int64)
        return model, (tokens, torch.zeros_like(tokens))


gpt_350m, gpt_2_6b, gpt_6_7b, gpt_15b, gpt_39b = (partial(build, size) for size in ("350M", "2.6B", "6.7B", "15B", "39B"))
