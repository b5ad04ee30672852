"""Models and clusters on which pipelines are compared, and the graphs of their micro-batches.

In: names. Out: `Case`s. Models are captured on `meta` in their own precision; nothing is captured before it is asked for.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from benchmarks.workloads import CLUSTERS, example_module, machines
from hapx.cluster.spec import ClusterSpec
from hapx.graph.capture import capture
from hapx.graph.captures import first_rows
from hapx.ir import Graph
from hapx.planner import key_of
from hapx.restriction import AUTO, Restriction
from hapx.setting import Setting
from hapx.theory.normalise import MixedSamplesWarning, normalised

PRECISION, OPTIMIZER = "fp32", "adamw"


@dataclass(eq=False)
class Model:
    """build: the module and one global batch. unit: what a batch has so many of per sample ("tokens" or "samples")."""

    name: str
    build: Callable[[], tuple[Any, Any]]
    unit: str = "samples"
    per_sample: int = 1
    capture_seconds: float = 0.0  # of CPU, so far
    known: dict[int, Graph] = field(default_factory=dict)

    @cached_property
    def made(self) -> tuple[Any, Any]:
        return self.build()

    @property
    def whole(self) -> Graph:
        """The graph of the whole batch."""
        return self.parts(1)

    def parts(self, number: int) -> Graph:
        """The graph of one of so many micro-batches; for 1 that of the batch."""
        if number not in self.known:
            began, (module, inputs) = time.process_time(), self.made
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MixedSamplesWarning)
                if number == 1:
                    self.known[1] = capture(module, inputs)
                else:
                    whole = self.whole
                    self.known[number] = normalised(capture(module, first_rows(inputs, whole.batch, whole.batch // number)), whole)
            self.capture_seconds += time.process_time() - began
        return self.known[number]


@dataclass(frozen=True)
class Case:
    """A model on a cluster."""

    model: Model
    cluster_name: str
    cluster: ClusterSpec

    @property
    def name(self) -> str:
        return f"{self.model.name} on {self.cluster_name}"

    def setting(self, rule: Restriction = AUTO) -> Setting:
        whole = self.model.whole
        return Setting(whole, key_of(whole), self.cluster, rule, PRECISION, OPTIMIZER)

    def rate(self, seconds: float) -> str:
        """Samples or tokens per second."""
        per_second = self.model.whole.batch * self.model.per_sample / seconds
        return f"{per_second:.0f} {self.model.unit}/s" if per_second < 1e4 else f"{per_second / 1e3:.0f}k {self.model.unit}/s"


def gpt(size: str, batch: int = 1024) -> Model:
    module = example_module("gpt3")
    return Model(f"GPT {size}", lambda: module.build(size, batch), "tokens", module.CONTEXT)


def small_gpt(layers: int, width: int = 1024, batch: int = 128) -> Model:
    """A GPT of a few layers, with 256 tokens of 8192."""
    import torch

    module = example_module("gpt")

    def build() -> tuple[Any, Any]:
        with torch.device("meta"):
            tokens = torch.zeros(batch, 256, dtype=torch.int64)
            return module.GPT(8192, width, width // 64, layers, 256), (tokens, torch.zeros_like(tokens))

    return Model(f"GPT of {layers} layers", build, "tokens", 256)


def bert_moe(devices: int) -> Model:
    """Two experts and 32 sequences per device."""
    module = example_module("bert_moe")
    return Model(f"BERT-MoE ({2 * devices} experts)", lambda: module.build(2 * devices, 32 * devices))


def wide_resnet(size: str, batch: int = 1536) -> Model:
    module = example_module("wide_resnet")
    return Model(f"Wide-ResNet {size}", lambda: module.make(module.SIZES[size], batch))


def v100(number: int) -> ClusterSpec:
    """Equal machines, as in Alpa's experiments: 8 V100 each, 25 Gbit/s between them."""
    return machines((number, "V100-SXM2-16GB", 8), inter="25 Gbit/s")


def clusters(quick: bool = False) -> dict[str, ClusterSpec]:
    if quick:
        small = machines((1, "V100-SXM2-16GB", 4), (2, "P100-SXM2-16GB", 4))
        return {"4 V100 + 2 x 4 P100": small, "4 H100 + 4 A100": machines((1, "H100-SXM5-80GB", 4), (1, "A100-SXM4-80GB", 4), inter="25 Gbit/s")}
    return {
        "paper": ClusterSpec.load(str(CLUSTERS / "v100x2_p100x6.yaml")),
        "8 H100 + 8 A100": ClusterSpec.load(str(CLUSTERS / "h100x8_a100x8.yaml")),
    }


def cases(quick: bool = False) -> list[Case]:
    """Small ones, or those of the comparison."""
    found = []
    for name, cluster in clusters(quick).items():
        if quick:
            models = [small_gpt(4)]
        else:
            models = [gpt(s) for s in ("1.3B", "2.6B", "6.7B", "15B", "39B")]
            models += [bert_moe(cluster.num_devices), *(wide_resnet(s) for s in ("250M", "1B", "4B"))]
        found += [Case(m, name, cluster) for m in models]
    return found
