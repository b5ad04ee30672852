"""What the benchmarks plan: models of `examples/models` captured on `meta`, and clusters made in code.

In: sizes. Out: graphs (cached within a process) and cluster specs. No weights, no devices.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hapx.cluster.spec import ClusterSpec
from hapx.graph.capture import capture
from hapx.ir import Graph

MODELS = Path(__file__).parents[1] / "examples" / "models"
CLUSTERS = Path(__file__).parents[1] / "cluster_specs"


@cache
def example_module(name: str) -> ModuleType:
    """A file of examples/models as a module; they find each other by name."""
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def random_tokens(batch: int, length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences and their targets."""
    return torch.randint(0, vocabulary, (batch, length)), torch.randint(0, vocabulary, (batch, length))


def random_images(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 32 x 32 and their classes, of 10."""
    return torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))


@cache
def vgg19(batch: int) -> Graph:
    """VGG19 on images of 32 x 32."""
    return capture(*example_module("vgg19").build(batch))


@cache
def vit(batch: int) -> Graph:
    """ViT of width 768 and 12 layers on 64 patches."""
    return capture(*example_module("vit").build(batch))


@cache
def bert(batch: int, layers: int = 12) -> Graph:
    """BERT of width 768, 128 tokens of 33280."""
    bert = example_module("bert")
    with torch.device("meta"):
        model = bert.BERT(bert.VOCABULARY, 768, bert.CONTEXT, [bert.Layer(768, 12) for _ in range(layers)])
        tokens = torch.zeros(batch, bert.CONTEXT, dtype=torch.int64)
    return capture(model, (tokens, torch.zeros_like(tokens)))


@cache
def bert_moe(batch: int, experts: int, layers: int = 12) -> Graph:
    """BERT in which every second perceptron is a mixture of `experts`."""
    moe = example_module("bert_moe")
    with torch.device("meta"):
        model = moe.BERTMoE(moe.VOCABULARY, 768, moe.CONTEXT, heads=12, layers=layers, experts=experts)
        tokens = torch.zeros(batch, moe.CONTEXT, dtype=torch.int64)
    return capture(model, (tokens, torch.zeros_like(tokens)))


def workload(name: str, devices: int, layers: int = 12) -> Graph:
    """A model by name at the paper's weak scaling: 64 samples per device for VGG19 and ViT, 32 for BERT, two experts per device."""
    if name == "VGG19":
        return vgg19(64 * devices)
    if name == "ViT":
        return vit(64 * devices)
    if name == "BERT":
        return bert(32 * devices, layers)
    assert name == "BERT-MoE", name
    return bert_moe(32 * devices, 2 * devices, layers)


INSIDE: Mapping[str, str] = {"V100-SXM2-16GB": "150 GB/s", "P100-SXM2-16GB": "80 GB/s"}  # links of a machine


def machines(*groups: tuple[int, str, int], inter: str = "10.4 Gbit/s", latency: str = "50 us") -> ClusterSpec:
    """A cluster of (count, device type, devices per machine), with one network between machines and one inside them."""
    made: list[dict[str, Any]] = []
    for i, (count, device, devices) in enumerate(groups):
        link = {"bandwidth": INSIDE.get(device, "150 GB/s"), "latency": "5 us"}
        made.append({"name": f"{device.lower()}-{i}", "count": count, "device": device, "devices": devices, "intra": link})
    network = {"inter": {"bandwidth": inter, "latency": latency}}
    return ClusterSpec.load({"name": " + ".join(f"{c}x{n} {d}" for c, d, n in groups), "machines": made, "network": network})


def paper_cluster(devices: int) -> ClusterSpec:
    """A quarter of V100 and the rest P100. From 8 to 64 devices: two machines of V100 and six of P100 with a part of their devices, as HAP
    (EuroSys'24, section 7.1) scales its testbed; beyond, more machines of eight."""
    if devices < 8:
        return machines((1, "V100-SXM2-16GB", max(1, devices // 4)), (1, "P100-SXM2-16GB", devices - max(1, devices // 4)))
    each = min(8, devices // 8)
    quarter = devices // each // 4
    return machines((quarter, "V100-SXM2-16GB", each), (3 * quarter, "P100-SXM2-16GB", each))
