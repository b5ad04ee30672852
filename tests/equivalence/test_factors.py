"""Plans in which every product that can gathers its factors (SFB) train as one device does: linear layers, products with a matrix, convolutions,
embeddings with a padding row and with a tied head; uneven and empty shares; every form of the gathers; on one axis and on two."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.ir import OpCall
from hapx.plan import Form, Plan
from hapx.planner import plan_module
from hapx.restriction import Restriction
from hapx.theory.factors import gathered
from support.clusters import THREE, TWO_MACHINES
from support.equivalence import assert_equivalent, uses_of
from support.models import CNN, GPT, _initialise


class Tagger(nn.Module):
    """Ids with a padding row; products with parameters by matmul and addmm; the head is the table, transposed."""

    def __init__(self, vocabulary: int = 11, width: int = 6, seed: int = 0):
        super().__init__()
        self.vocabulary = vocabulary
        self.table = nn.Embedding(vocabulary, width, padding_idx=3)
        self.mix = nn.Parameter(torch.empty(width, 2 * width))
        self.bias, self.back = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(2 * width, width))
        _initialise(self, seed, torch.float64)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        h = torch.tanh(self.table(ids) @ self.mix)
        h = torch.addmm(self.bias, h.flatten(0, 1), self.back, beta=2, alpha=0.5)
        return F.cross_entropy(F.linear(h, self.table.weight), targets.flatten())

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.vocabulary, (2, batch, 4), generator=generator)
        ids[0, :, 0] = 3
        return ids[0], ids[1]


class Images(nn.Module):
    """Convolutions by name of padding, in groups, transposed, and of one dim."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.same = nn.Conv2d(2, 4, (1, 3), padding="same")
        self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.line = nn.Conv1d(4, 3, 3, stride=2)
        _initialise(self, seed, torch.float64)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = F.silu(self.grouped(F.silu(self.same(image))))
        return F.mse_loss(self.line(F.silu(self.up(x)).flatten(2)), target)

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        image = torch.randn(batch, 2, 4, 3, generator=generator, dtype=torch.float64)
        return image, torch.randn(batch, 3, 23, generator=generator, dtype=torch.float64)


MODELS: dict[str, Callable[[], Any]] = {
    "tagger": Tagger,
    "images": Images,
    "cnn": CNN,
    "gpt": partial(GPT, vocab=13, width=8, heads=4, layers=1, context=6),
}
# composites that a plan of the model must call
EXPECTED = {
    "tagger": {"embedding", "matmul", "addmm", "linear"},
    "images": {"convolution"},
    "cnn": {"convolution", "linear"},
    "gpt": {"embedding", "linear"},
}
CASES = {
    "uneven": (THREE, {"ratios": (4.0, 2.0, 1.0)}),
    "grouped": (THREE, {"ratios": (4.0, 2.0, 1.0), "forms": frozenset({"grouped"})}),
    "point to point": (THREE, {"ratios": (4.0, 2.0, 1.0), "forms": frozenset({"point_to_point"})}),
    "empty": (THREE, {"ratios": (5.0, 0.0, 2.0)}),
    "two machines": (TWO_MACHINES, {"mesh": "two-level", "ratios": (3.0, 1.0)}),
}


def example(model: str, step: int) -> tuple[Tensor, ...]:
    batch: tuple[Tensor, ...] = MODELS[model]().example(7, seed=step)
    return batch


@cache
def planned(model: str, case: str, sfb: str = "always") -> Plan:
    cluster, options = CASES[case]
    rule = Restriction(**{"name": case, "mesh": "flat", "split": "batch", "sfb": sfb, **options})  # type: ignore[arg-type]
    plan = plan_module(MODELS[model](), cluster, example(model, 0), strategy=rule)
    plan.verify()
    return plan


def factored(plan: Plan) -> list[OpCall]:
    bodies = (i.triple.body for i in plan.stages[0].program.instructions)
    return [body for body in bodies if isinstance(body, OpCall) and gathered(body) is not None]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_factors_are_gathered(model: str, case: str) -> None:
    plan = planned(model, case)
    assert {f"hapx.{name}_sfb" for name in EXPECTED[model]} <= uses_of(plan).targets
    form = {"grouped": Form.GROUPED, "point to point": Form.POINT_TO_POINT}.get(case)
    assert form is None or {body["form"] for body in factored(plan)} == {form.value}
    assert_equivalent(MODELS[model], partial(example, model), plan, optimizer="adamw")


@pytest.mark.gloo
@pytest.mark.parametrize("model", ["tagger", "images"])
def test_factors_are_gathered_by_processes(model: str) -> None:
    uses = assert_equivalent(MODELS[model], partial(example, model), planned(model, "grouped"), mode="processes")
    assert uses.sfb >= 4


@pytest.mark.parametrize("model", MODELS)
def test_never_means_never(model: str) -> None:
    assert not factored(planned(model, "uneven", "never"))
