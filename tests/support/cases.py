"""Named models for equivalence tests: what captures badly, splits unevenly or needs a composite. All in float64, all small.

In: a name. Out: a `Case`: how to make the model and its inputs, its graph, its theory on a mesh (each made once). `assert_case` asks that
a plan trains it as one device does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.graph.capture import capture
from hapx.ir import Graph
from hapx.plan import Mesh, Plan
from hapx.theory.derive import derive
from hapx.theory.triple import Theory
from support.equivalence import Mode, Trace, Uses, assert_equivalent, compare, run_ranks, train_rank, uses_of
from support.models import CNN, GPT, MLP, _initialise
from support.plans import flat, two_level
from support.random_programs import random_plan
from support.spectral import SPECTRAL
from support.vision import VISION, VISION_WITH_MASKS


class Classifier(nn.Module):
    """Embedding with padding, then class scores per position; cross entropy in all its variants (targets -1 are ignored)."""

    def __init__(self, classes: int = 7, width: int = 6, *, smoothing: float = 0.0, weights: bool = False, reduction: str = "mean", seed: int = 0):
        super().__init__()
        self.classes, self.smoothing, self.reduction = classes, smoothing, reduction
        self.table = nn.Embedding(9, width, padding_idx=2)
        self.score = nn.Linear(width, classes)
        self.register_buffer("weight", torch.linspace(0.5, 2.0, classes, dtype=torch.float64) if weights else None)
        _initialise(self, seed, torch.float64)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        scores = self.score(torch.tanh(self.table(idx)))
        loss = F.cross_entropy(
            scores.transpose(1, 2), targets, self.weight, ignore_index=-1, label_smoothing=self.smoothing, reduction=self.reduction
        )
        return loss if self.reduction != "none" else (loss * loss).mean()

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        idx = torch.randint(0, 9, (batch, 3), generator=generator)
        targets = torch.randint(-1, self.classes, (batch, 3), generator=generator)
        targets[0, 0], targets[0, 1] = 1, -1  # some counted, some ignored
        return idx, targets


class Attention(nn.Module):
    """Grouped-query attention with a padding mask (or causal), residual and RMS norm; squared error against the inputs, summed."""

    def __init__(self, width: int = 12, heads: int = 6, groups: int = 2, *, mask: str = "bool", dropout: float = 0.0, seed: int = 0):
        super().__init__()
        self.width, self.heads, self.groups, self.mask, self.dropout = width, heads, groups, mask, dropout
        self.size = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size)
        self.v = nn.Linear(width, groups * self.size)
        self.out = nn.Linear(width, width)
        self.gate = nn.Linear(width, 2 * width)
        self.norm = nn.RMSNorm(width)
        _initialise(self, seed, torch.float64)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        B, T, _ = x.shape
        h = self.norm(x)
        q = self.q(h).view(B, T, self.heads, self.size).transpose(1, 2)
        k = self.k(h).view(B, T, self.groups, self.size).transpose(1, 2)
        v = self.v(h).view(B, T, self.groups, self.size).transpose(1, 2)
        mask = padding[:, None, None, :]
        if self.mask == "float":
            mask = torch.zeros_like(padding, dtype=x.dtype).masked_fill(~padding, -1e9)[:, None, None, :]
        y = F.scaled_dot_product_attention(
            q, k, v, None if self.mask == "causal" else mask, dropout_p=self.dropout, is_causal=self.mask == "causal", enable_gqa=True
        )
        h = x + self.out(y.transpose(1, 2).reshape(B, T, self.width))
        gate, up = self.gate(h).chunk(2, dim=-1)
        return F.mse_loss(h + F.silu(gate) * up, x, reduction="sum") / 100

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, 4, self.width, generator=generator, dtype=torch.float64)
        padding = torch.rand(batch, 4, generator=generator) < 0.7
        padding[:, 0] = True
        return x, padding


class Vision(nn.Module):
    """Patches by convolution, a class token, one encoder layer used twice, a frozen table, a buffer, a parameter without use; the loss is made
    of a mean, a sum and a log-softmax."""

    def __init__(self, width: int = 8, heads: int = 2, classes: int = 4, *, seed: int = 0):
        super().__init__()
        self.heads, self.classes = heads, classes
        self.patch = nn.Conv2d(2, width, 2, stride=2)
        self.token = nn.Parameter(torch.ones(1, 1, width))
        self.position = nn.Parameter(torch.ones(1, 5, width), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width, dtype=torch.float64))
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.head = nn.Linear(2 * width, classes)
        _initialise(self, seed, torch.float64)

    def encode(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2) * 0.5).softmax(-1)
        return x + self.proj((scores @ v).transpose(1, 2).flatten(2))

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        x = self.encode(self.encode(x)) * self.scale
        both = torch.cat([x[:, 0], x[:, 1:].mean(1)], dim=-1)
        log_p = F.log_softmax(self.head(both), dim=-1)
        with torch.no_grad():
            confidence = log_p.exp().amax(-1, keepdim=True)
        return -(log_p * targets * confidence).sum(-1).mean() + 1e-2 * (x * x).sum() / x.shape[0]

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(batch, 2, 4, 4, generator=generator, dtype=torch.float64)
        return images, torch.rand(batch, self.classes, generator=generator, dtype=torch.float64)


def evaluated(model: Callable[[], nn.Module]) -> nn.Module:
    """The model in eval mode (which can be trained all the same)."""
    return model().eval()


@dataclass(frozen=True)
class Case:
    """`random`: the model draws masks, so that one device means the executor on one device."""

    name: str
    model: Callable[[], nn.Module]
    batch: int
    random: bool = False

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        return self.model().example(self.batch, seed=step)  # type: ignore[operator]

    @property
    def graph(self) -> Graph:
        return _graph(self.name)

    def theory(self, mesh: Mesh) -> Theory:
        return _theory(self.name, mesh)


def _cases(*cases: Case) -> Mapping[str, Case]:
    return {c.name: c for c in cases}


CASES = _cases(
    Case("mlp", partial(MLP, (5, 8, 6, 3)), 7),
    Case("mlp of 8", partial(MLP, (5, 8, 6, 3)), 8),
    Case("gpt", partial(GPT, 11, 12, 3, 1, 4), 5),
    Case("cnn", partial(CNN, 3, 4, 5), 5),
    Case("cnn, eval mode", partial(evaluated, partial(CNN, 3, 4, 5)), 5),
    Case("vision", Vision, 5),
    Case("gpt with dropout", partial(GPT, 11, 12, 3, 1, 4, 0.3), 5, random=True),
    Case("cross entropy", Classifier, 5),
    Case("cross entropy, smoothed, weighted", partial(Classifier, smoothing=0.1, weights=True), 5),
    Case("cross entropy, sum", partial(Classifier, smoothing=0.2, reduction="sum"), 3),
    Case("cross entropy, weighted, none", partial(Classifier, weights=True, reduction="none"), 5),
    Case("attention, mask", Attention, 5),
    Case("attention, float mask", partial(Attention, mask="float"), 3),
    Case("attention, causal", partial(Attention, mask="causal"), 5),
    Case("attention, causal, dropout", partial(Attention, mask="causal", dropout=0.3), 5, random=True),
    *(Case(name, model, 5) for name, model in VISION.items()),
    *(Case(f"{name}, eval mode", partial(evaluated, VISION[name]), 3) for name in ("resnet", "signal")),
    *(Case(name, model, 5, random=True) for name, model in VISION_WITH_MASKS.items()),
    *(Case(name, model, 5) for name, model in SPECTRAL.items()),
)
MESHES: Mapping[str, Mesh] = {"1": flat(1), "2": flat(2), "3": flat(3), "4": flat(4), "2x2": two_level(2, 2)}


@cache
def _graph(name: str) -> Graph:
    case = CASES[name]
    return capture(case.model(), case.inputs(0))


@cache
def _theory(name: str, mesh: Mesh) -> Theory:
    return derive(CASES[name].graph, mesh)


# ---- the oracle ------------------------------------------------------------------------------------------------------------


def assert_case(case: Case, plan: Plan, *, steps: int = 3, mode: Mode = "threads") -> Uses:
    """`support.equivalence.assert_equivalent` for a case. Where the model draws masks, one device is the executor on a mesh of one."""
    if not case.random:
        return assert_equivalent(case.model, case.inputs, plan, steps=steps, mode=mode)
    expected = executor_alone(case, steps)
    for rank, trace in enumerate(run_ranks(plan, train_rank, plan, case.model, case.inputs, steps, "sgd", mode=mode)):
        compare(trace, expected, f"rank {rank}")
    return uses_of(plan)


def executor_alone(case: Case, steps: int) -> Trace:
    """What the same builder does on one device."""
    plan = random_plan(case.theory(MESHES["1"]), Random(0))
    (trace,) = run_ranks(plan, train_rank, plan, case.model, case.inputs, steps, "sgd")
    return trace  # type: ignore[no-any-return]
