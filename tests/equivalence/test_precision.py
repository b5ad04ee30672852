"""Mixed precision: loss curves of 50 steps on 4 ranks stay within the spread of a single device.

The spread is measured: the same training on one device with plain PyTorch, the samples inside of each batch in another order, which changes
nothing but rounding. (On a CPU that is next to nothing at first: products are summed in float32. The differences grow with the steps, so the
largest of the whole curve is what counts.) Gradients in another dtype, and a model in bfloat16, are compared within the dtype's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hapx.collectives.communicator import create_groups
from hapx.cost.remat import with_blocks
from hapx.graph.capture import capture
from hapx.plan import Plan
from hapx.planner import plan_module
from hapx.restriction import Restriction
from hapx.runtime.executor import Executor
from hapx.runtime.scaler import GradScaler
from hapx.theory.derive import derive
from hapx.theory.triple import Theory
from support.cases import MESHES
from support.clusters import FOUR
from support.devices import brought, device, placed
from support.equivalence import run_ranks, train_rank, train_single, uses_of
from support.models import CNN, GPT, MLP
from support.random_programs import random_plan

STEPS, BATCH, ORDERS = 50, 10, 12
LOWER = {"bfloat16": torch.bfloat16, "float16": torch.float16}
STRATEGIES: dict[str, str | Restriction] = {
    "4:4:1:1": Restriction("4:4:1:1", mesh="flat", split="batch", ratios=(4.0, 4.0, 1.0, 1.0)),
    "zero": Restriction("zero", mesh="flat", split="batch", storage="sharded-free", ratios="speed"),
    "tensor-parallel": "tensor-parallel",
    "sufficient factors": Restriction("sfb", mesh="flat", split="batch", sfb="always"),
}


def gpt(dtype: torch.dtype = torch.float32) -> nn.Module:
    return GPT(13, 16, 2, 1, 6, dtype=dtype)


def batch(step: int) -> tuple[Tensor, ...]:
    example: tuple[Tensor, ...] = gpt().example(BATCH, seed=step % 5)  # type: ignore[operator]
    return example


@dataclass(frozen=True)
class Curve:
    """Losses, and the steps that the scaler skipped."""

    losses: list[float]
    skipped: list[int]


def train(module: nn.Module, loss_of: Callable[[int], Tensor], scaler: Any, clip: Callable[[], object]) -> Curve:
    """50 steps of AdamW, with a gradient scaler or without."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=6e-2)
    losses, skipped = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(step)
        losses.append(float(loss.detach()))
        if scaler is None:
            loss.backward()
            clip()
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += [step] if scaler.get_scale() < scale else []
    return Curve(losses, skipped)


# much too high at first, then low enough: ranks sum float16 gradients of their own samples in float32, so they overflow a little later than
# one device does, and near that border they would skip other steps
SCALE = {"init_scale": 2.0**24, "backoff_factor": 2.0**-10, "growth_interval": 1000}


@cache
def alone(dtype: str, order: int) -> Curve:
    """One device, the samples of each batch in the order number `order`."""
    module = gpt()
    permutation = torch.randperm(BATCH, generator=torch.Generator().manual_seed(order)) if order else torch.arange(BATCH)

    def loss_of(step: int) -> Tensor:
        with torch.autocast("cpu", LOWER[dtype]):
            loss: Tensor = module(*(t[permutation] for t in batch(step)))
        return loss

    scaler = torch.amp.GradScaler("cpu", **SCALE) if dtype == "float16" else None  # type: ignore[arg-type]
    return train(module, loss_of, scaler, lambda: nn.utils.clip_grad_norm_(module.parameters(), 1.0))


@cache
def planned(dtype: str, strategy: str) -> Plan:
    with torch.autocast("cpu", LOWER[dtype]):
        plan = plan_module(gpt(), FOUR, batch(0), strategy=STRATEGIES[strategy], autocast=dtype)
    plan.verify()
    return plan


SECONDS = (*((dtype, "tensor-parallel") for dtype in LOWER), ("float16", "4:4:1:1"), ("float16", "zero"), ("bfloat16", "sufficient factors"))


def curve_of_rank(plan: Plan, dtype: str, threads: Any = None) -> Curve:
    executor = Executor(plan, threads.rank, gpt(), create_groups(plan.stages[0].mesh, threads), device=device())
    graph = plan.graphs[plan.first]

    def loss_of(step: int) -> Tensor:
        return executor.run(plan.first, placed(dict(zip(graph.input_names, batch(step), strict=True))))[graph.loss]

    scaler = GradScaler(executor, **SCALE) if dtype == "float16" else None
    return train(executor.module, loss_of, scaler, lambda: executor.clip_grad_norm_(1.0))


@pytest.mark.parametrize(
    ("dtype", "strategy"),
    [pytest.param(dtype, of, marks=[pytest.mark.slow] if (dtype, of) in SECONDS else []) for dtype in LOWER for of in STRATEGIES],
)
def test_loss_curves_stay_within_the_spread_of_one_device(dtype: str, strategy: str) -> None:
    runs = torch.tensor([alone(dtype, order).losses for order in range(ORDERS)], dtype=torch.float64)
    spread = float((runs.max(0).values - runs.min(0).values).max())
    assert runs[:, -5:].mean() < 0.9 * runs[:, :5].mean()  # it learns
    plan = planned(dtype, strategy)
    print(uses := uses_of(plan))
    assert uses.sharded_flops > 0.7
    curves = run_ranks(plan, curve_of_rank, plan, dtype)
    for curve in curves:
        away = float((torch.tensor(curve.losses, dtype=torch.float64) - runs.mean(0)).abs().max())
        print(f"at most {away:.2g} from the mean of one device's runs, whose spread is {spread:.2g}")
        assert away <= spread
        early = (torch.tensor(curve.losses[:8], dtype=torch.float64) - runs.mean(0)[:8]).abs()
        assert (early <= 2 * torch.finfo(LOWER[dtype]).eps * runs.mean(0)[:8]).all()  # before differences have grown: rounding
        assert curve == curves[0]
    assert (curves[0].skipped == []) == (dtype == "bfloat16")
    assert curves[0].skipped == alone(dtype, 0).skipped


# ---- a model in bfloat16, gradients in another dtype --------------------------------------------------------------------------


def low_mlp() -> nn.Module:
    return MLP((6, 8, 3), dtype=torch.bfloat16)


def low_mlp_batch(step: int) -> tuple[Tensor, ...]:
    example: tuple[Tensor, ...] = low_mlp().example(7, seed=step)  # type: ignore[operator]
    return example


@pytest.mark.parametrize("strategy", ["dp-even", "zero", "tensor-parallel"])
def test_a_model_in_bfloat16_trains_in_bfloat16(strategy: str) -> None:
    plan = plan_module(low_mlp(), FOUR, low_mlp_batch(0), strategy=strategy)
    expected = train_single(low_mlp, low_mlp_batch, 2, "sgd")
    eps = torch.finfo(torch.bfloat16).eps
    for trace in run_ranks(plan, train_rank, plan, low_mlp, low_mlp_batch, 2, "sgd"):
        assert trace.losses == pytest.approx(expected.losses, rel=4 * eps)
        for name, g in expected.gradients[0].items():
            assert trace.gradients[0][name].dtype == torch.bfloat16
            assert torch.allclose(trace.gradients[0][name].float(), g.float(), rtol=0, atol=4 * eps * float(g.abs().max())), name


def cnn() -> nn.Module:
    return CNN(dtype=torch.float32)


def gradients(plan: Plan, dtype: torch.dtype | None, threads: Any = None) -> dict[str, Tensor]:
    executor = Executor(plan, threads.rank, cnn(), create_groups(plan.stages[0].mesh, threads), device=device(), gradient_dtype=dtype)
    graph = plan.graphs[plan.first]
    executor.run(plan.first, placed(dict(zip(graph.input_names, cnn().example(7), strict=True))))[graph.loss].backward()  # type: ignore[operator]
    return brought(executor.store.full_gradients())


@pytest.mark.parametrize("strategy", ["dp-even", "zero"])
def test_gradients_are_summed_in_the_dtype_that_was_chosen(strategy: str) -> None:
    plan = plan_module(cnn(), FOUR, cnn().example(7), strategy=strategy)  # type: ignore[operator]
    exact, low = (run_ranks(plan, gradients, plan, dtype)[0] for dtype in (None, torch.bfloat16))
    largest = max(float(g.abs().max()) for g in exact.values())
    for name, g in exact.items():
        assert low[name].dtype == torch.float32
        assert torch.equal(low[name], low[name].bfloat16().float()), name  # the sum is a bfloat16
        assert torch.allclose(low[name], g, rtol=0, atol=2 * torch.finfo(torch.bfloat16).eps * largest), name
    assert any(not torch.equal(g, g.bfloat16().float()) for g in exact.values())


def test_accumulated_gradients_are_summed_in_the_dtype_that_was_chosen() -> None:
    """What `no_sync` kept aside is kept as it is and joins in the last sum."""
    plan = plan_module(cnn(), FOUR, cnn().example(7), strategy="dp-even")  # type: ignore[operator]

    def accumulate(dtype: torch.dtype | None, threads: Any = None) -> dict[str, Tensor]:
        executor = Executor(plan, threads.rank, cnn(), create_groups(plan.stages[0].mesh, threads), device=device(), gradient_dtype=dtype)
        graph = plan.graphs[plan.first]
        inputs = placed(dict(zip(graph.input_names, cnn().example(7), strict=True)))  # type: ignore[operator]
        with executor.no_sync():
            executor.run(plan.first, inputs)[graph.loss].backward()
        executor.run(plan.first, inputs)[graph.loss].backward()
        return brought(executor.store.full_gradients())

    exact, low = (run_ranks(plan, accumulate, dtype)[0] for dtype in (None, torch.bfloat16))
    largest = max(float(g.abs().max()) for g in exact.values())
    for name, g in exact.items():
        assert torch.equal(low[name], low[name].bfloat16().float()), name
        assert torch.allclose(low[name], g, rtol=0, atol=2 * torch.finfo(torch.bfloat16).eps * largest), name


# ---- random programs: every operator and composite of the models gets the dtypes that it expects -----------------------------------

MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": partial(GPT, 11, 12, 3, 2, 4, dtype=torch.float32), "cnn": cnn}


def one_batch(model: str, step: int) -> tuple[Tensor, ...]:
    example: tuple[Tensor, ...] = MODELS[model]().example(5, seed=step)  # type: ignore[operator]
    return example


@cache
def theory_under_autocast(model: str, dtype: str, mesh: str) -> Theory:
    with torch.autocast("cpu", LOWER[dtype]):
        return derive(with_blocks(capture(MODELS[model](), one_batch(model, 0))), MESHES[mesh])


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 8))])
@pytest.mark.parametrize("mesh", ["3", "2x2"])
@pytest.mark.parametrize("dtype", LOWER)
@pytest.mark.parametrize("model", MODELS)
def test_random_programs_under_autocast(model: str, dtype: str, mesh: str, seed: int) -> None:
    plan = random_plan(theory_under_autocast(model, dtype, mesh), Random(seed))
    module, eps = MODELS[model](), torch.finfo(LOWER[dtype]).eps
    with torch.autocast("cpu", LOWER[dtype]):
        loss = module(*one_batch(model, 0))
    loss.backward()
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in expected.values())
    for trace in run_ranks(plan, train_rank, plan, MODELS[model], partial(one_batch, model), 1, "sgd"):
        assert trace.losses[0] == pytest.approx(float(loss.detach()), rel=8 * eps)
        for name, g in expected.items():
            assert torch.allclose(trace.gradients[0][name], g, rtol=0, atol=32 * eps * largest), name
