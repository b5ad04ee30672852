"""Pipelines against one device: stages on submeshes of unequal size and speed, several schedules, parameters tied across stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from support.clusters import TWO_MACHINES, slow_devices
from support.models import CNN, GPT, MLP
from support.staged import assert_staged, staged_plan

SIX = slow_devices(["fast", "slow"], ["medium", "medium"], ["slow", "fast"])
HALVES = ((0, 1), (2, 3))
GPT_4: Callable[[], Any] = partial(GPT, vocab=13, width=8, heads=4, layers=4, context=6)


def example(model: Callable[[], Any], batch: int, step: int) -> Sequence[Tensor]:
    found: Sequence[Tensor] = model().example(batch, step)
    return found


def examples(model: Callable[[], Any], batch: int = 8) -> Callable[[int], Sequence[Tensor]]:
    return partial(example, model, batch)


@pytest.mark.parametrize("style", ["gpipe", "1f1b", "1f1b-warm:1"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_gpt_with_a_tied_head(style: str, number: int) -> None:
    plan = staged_plan(GPT_4(), examples(GPT_4)(0), TWO_MACHINES, HALVES, number, style)
    assert [len(s.copies) for s in plan.storage if s.name == "tok.weight"] == [2]
    assert_staged(GPT_4, examples(GPT_4), plan, optimizer="adamw", steps=2)


@pytest.mark.parametrize(
    "devices, style",
    [(((0, 1), (2, 3), (4, 5)), "1f1b"), (((0,), (1, 2, 3), (4, 5)), "1f1b-warm:2"), (((0, 1, 2), (3, 4, 5), (0, 1, 2), (3, 4, 5)), "interleaved")],
    ids=["equal", "unequal", "interleaved"],
)
def test_six_devices(devices: Sequence[Sequence[int]], style: str) -> None:
    plan = staged_plan(GPT_4(), examples(GPT_4)(0), SIX, devices, 4, style)
    assert len(plan.stages) == len(devices)
    assert_staged(GPT_4, examples(GPT_4), plan, steps=2)


@pytest.mark.parametrize("model", [CNN, partial(MLP, (6, 8, 8, 3))], ids=["cnn", "mlp"])
def test_other_models(model: Callable[[], nn.Module]) -> None:
    """A CNN mixes samples in its batch norm: with one micro-batch it equals one device all the same."""
    plan = staged_plan(model(), examples(model)(0), TWO_MACHINES, HALVES, 1 if model is CNN else 4)
    assert_staged(model, examples(model), plan)


@pytest.mark.gloo
def test_on_processes() -> None:
    plan = staged_plan(GPT_4(), examples(GPT_4)(0), TWO_MACHINES, HALVES, 4)
    assert_staged(GPT_4, examples(GPT_4), plan, optimizer="adamw", mode="gloo")
