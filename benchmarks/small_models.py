"""Whole small models for comparing the search with the integer program: two layers each, captured on `meta`."""

from __future__ import annotations

from functools import cache

import torch

from benchmarks import workloads
from hapx.graph.capture import capture
from hapx.ir import Graph


@cache
def gpt() -> Graph:
    """GPT of 2 layers, width 512, 128 tokens of 8192, batch 64."""
    module = workloads.example_module("gpt")
    with torch.device("meta"):
        model, tokens = module.GPT(8192, 512, 8, 2, 128), torch.zeros(64, 128, dtype=torch.int64)
    return capture(model, (tokens, torch.zeros_like(tokens)))


@cache
def bert() -> Graph:
    """BERT of 2 layers, width 768, 128 tokens of 33280, batch 128."""
    return workloads.bert(128, 2)


@cache
def vgg() -> Graph:
    """Five convolutions in three stages and a classifier of three layers, on 256 images of 32 x 32."""
    module = workloads.example_module("vgg19")
    with torch.device("meta"):
        model = module.VGG19(hidden=1024, stages=((64,), (128, 128), (256, 256)))
        return capture(model, (torch.zeros(256, 3, 32, 32), torch.zeros(256, dtype=torch.int64)))


@cache
def cnn() -> Graph:
    """Three convolutions with batch norm, on 256 images of 32 x 32."""
    return capture(*workloads.example_module("cnn").build())


@cache
def moe() -> Graph:
    """BERT of 2 layers, the second with a mixture of 8 experts, batch 128."""
    return workloads.bert_moe(128, 8, 2)


MODELS = {"GPT": gpt, "BERT": bert, "VGG-like": vgg, "CNN": cnn, "BERT-MoE": moe}
