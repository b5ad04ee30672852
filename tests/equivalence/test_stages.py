"""Pipelines against one device: stages on submeshes of unequal size and speed, several schedules, parameters tied across stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hapx import HAP
from hapx import plan as plan_of
from hapx.ir import Graph
from hapx.plan import Plan
from hapx.restriction import Restriction
from support.clusters import TWO, TWO_MACHINES, slow_devices
from support.devices import brought
from support.equivalence import Mode
from support.models import CNN, GPT, MLP
from support.pool import pool
from support.staged import assert_staged, micro_graph, staged_plan

SIX = slow_devices(["fast", "slow"], ["medium", "medium"], ["slow", "fast"])
HALVES = ((0, 1), (2, 3))
GPT_4: Callable[[], Any] = partial(GPT, vocab=13, width=8, heads=4, layers=4, context=6)
GPT_1: Callable[[], Any] = partial(GPT_4, layers=1)


def example(model: Callable[[], Any], batch: int, step: int) -> Sequence[Tensor]:
    found: Sequence[Tensor] = model().example(batch, step)
    return found


def examples(model: Callable[[], Any], batch: int = 8) -> Callable[[int], Sequence[Tensor]]:
    return partial(example, model, batch)


@cache
def graphs(number: int) -> tuple[Graph, Graph]:
    """Of `GPT_4`."""
    return micro_graph(GPT_4(), examples(GPT_4)(0), number)


@pytest.mark.parametrize("style", ["gpipe", "1f1b", "1f1b-warm:1"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_gpt_with_a_tied_head(style: str, number: int) -> None:
    plan = staged_plan(GPT_4(), examples(GPT_4)(0), TWO_MACHINES, HALVES, number, style, graphs=graphs(number))
    assert [len(s.copies) for s in plan.storage if s.name == "tok.weight"] == [2]
    assert_staged(GPT_4, examples(GPT_4), plan, optimizer="adamw", steps=2)


def test_one_stage_that_accumulates() -> None:
    plan = staged_plan(GPT_1(), examples(GPT_1)(0), TWO_MACHINES, [(0, 1, 2, 3)], 4)
    assert len(plan.stages) == 1 and len(plan.schedules[plan.first].micro_batches) == 4
    assert_staged(GPT_1, examples(GPT_1), plan, optimizer="adamw", steps=2)


@pytest.mark.parametrize(
    "devices, style",
    [
        pytest.param(((0, 1), (2, 3), (4, 5)), "1f1b", id="equal"),
        pytest.param(((0,), (1, 2, 3), (4, 5)), "1f1b-warm:2", id="unequal"),
        pytest.param(((0, 1, 2), (3, 4, 5), (0, 1, 2), (3, 4, 5)), "interleaved", id="interleaved", marks=pytest.mark.slow),
    ],
)
def test_six_devices(devices: Sequence[Sequence[int]], style: str) -> None:
    plan = staged_plan(GPT_4(), examples(GPT_4)(0), SIX, devices, 4, style, graphs=graphs(4))
    assert len(plan.stages) == len(devices)
    assert_staged(GPT_4, examples(GPT_4), plan, steps=2)


@pytest.mark.parametrize("model", [CNN, partial(MLP, (6, 8, 8, 3))], ids=["cnn", "mlp"])
def test_other_models(model: Callable[[], nn.Module]) -> None:
    """A CNN mixes samples in its batch norm: with one micro-batch it equals one device all the same."""
    plan = staged_plan(model(), examples(model)(0), TWO_MACHINES, HALVES, 1 if model is CNN else 4)
    assert_staged(model, examples(model), plan)


@cache
def in_another_order() -> Plan:
    cluster = slow_devices(["slow", "fast"], ["fast", "slow"], inter="1 Mbit/s", speed=1e7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return plan_of(GPT_4(), cluster, examples(GPT_4)(0), micro_batches=4, strategy=Restriction("two stages", max_stages=2))


@pytest.mark.parametrize("mode", ["threads", pytest.param("processes", marks=pytest.mark.gloo)])
def test_devices_in_another_order_than_the_clusters(mode: Mode) -> None:
    """Like submeshes are planned once, so devices of a stage are in the order of their types; here machines list them in different orders."""
    plan = in_another_order()
    assert len(plan.stages) == 2 and any(list(s.devices) != sorted(s.devices) for s in plan.stages)
    plan.verify()
    assert_staged(GPT_4, examples(GPT_4), plan, steps=2, mode=mode)


@pytest.mark.gloo
def test_on_processes() -> None:
    plan = staged_plan(GPT_4(), examples(GPT_4)(0), TWO_MACHINES, HALVES, 4, graphs=graphs(4))
    assert_staged(GPT_4, examples(GPT_4), plan, optimizer="adamw", mode="processes")


SLOW_LINK = slow_devices(["fast", "fast"], ["slow", "slow"], inter="2 Mbit/s", speed=1e8)
GPT_WIDE: Callable[[], Any] = partial(GPT, vocab=13, width=32, heads=4, layers=4, context=16)


def two_losses(trained: nn.Module, module: Any, batch: int = 16) -> list[float]:
    """Of two steps with Adam on the examples of `module`."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    losses = []
    for step in range(2):
        loss = trained(*module.example(batch, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def deep() -> MLP:
    return MLP((64,) * 25)


AUTOMATIC = {  # model, batch, cluster
    "1f1b": (GPT_WIDE, 16, SLOW_LINK),
    "interleaved": (deep, 4, slow_devices(["fast", "fast"], ["slow", "slow"], inter="4 Mbit/s", speed=2e6)),
}


def train_as_users_do(case: str) -> tuple[str, list[float], dict[str, Tensor]]:
    """On this rank: nothing says that there is a pipeline."""
    model, batch, cluster = AUTOMATIC[case]
    module = model()
    hap = HAP(module, cluster, example_inputs=module.example(batch, 0))
    losses = two_losses(hap, module, batch)
    return hap.plan.schedules[hap.plan.first].name, losses, brought(hap.full_state_dict())


@pytest.mark.gloo
@pytest.mark.parametrize("case", AUTOMATIC)
def test_auto_chooses_a_pipeline_over_a_slow_link(case: str) -> None:
    model, batch, _ = AUTOMATIC[case]
    module = model()
    expected = two_losses(module, module, batch)
    for style, losses, state in pool(4).run(train_as_users_do, case, timeout=120):
        assert style.startswith(case)
        assert losses == pytest.approx(expected, rel=1e-9)
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-8, atol=1e-10)


def train_with(plan: Plan) -> tuple[int, list[float], dict[str, Tensor]]:
    module = GPT_1()
    hap = HAP(module, TWO, plan=plan, example_inputs=module.example(16, 0))
    losses = two_losses(hap, module)
    return len(hap.plan.stages), losses, brought(hap.full_state_dict())


@pytest.mark.gloo
def test_a_plan_that_accumulates_trains_as_any_other() -> None:
    module = GPT_1()
    plan = staged_plan(module, module.example(16, 0), TWO, [(0, 1)], 4, optimizer="adamw")
    expected = two_losses(module, module)
    for stages, losses, state in pool(2).run(train_with, plan, timeout=120):
        assert stages == 1
        assert losses == pytest.approx(expected, rel=1e-9)
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-8, atol=1e-10)
