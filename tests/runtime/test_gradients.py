"""Gradient synchronisation: buckets, accumulation, no_sync, several forwards, scaling, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import hapx.runtime.gradients as gradients_module
from hapx.collectives import alone
from hapx.collectives.communicator import create_groups
from hapx.plan import Plan
from hapx.runtime.executor import Executor, share_out
from hapx.runtime.gradients import GradientSynchroniser, Layout, Use, bucket_layout
from support.equivalence import run_ranks
from support.models import MLP
from support.plans import mlp_batch_split, mlp_tensor_parallel, mlp_two_level

WIDTHS = (5, 8, 3)
model = partial(MLP, WIDTHS)
CPU = torch.device("cpu")
PLANS: dict[str, Callable[[], Plan]] = {
    "batch 6:2": lambda: mlp_batch_split(WIDTHS, (6, 2)),
    "batch 8:0": lambda: mlp_batch_split(WIDTHS, (8, 0)),
    "hidden 5:3": lambda: mlp_tensor_parallel(WIDTHS, (5, 3), 8),
    "machines 6:2": lambda: mlp_two_level(WIDTHS, (6, 2), 2),
}

Loss = Callable[[int], Tensor]
Procedure = Callable[[nn.Module, Loss, Any], Any]


def inputs(seed: int) -> tuple[Tensor, ...]:
    return model().example(8, seed=seed)


class OneDevice:
    """What an Executor offers, for a plain module."""

    def __init__(self, module: nn.Module):
        self.module = module

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def no_sync(self) -> Any:
        return torch.enable_grad()


def on_one_device(procedure: Procedure) -> tuple[Any, dict[str, Tensor]]:
    module = model()
    result = procedure(module, lambda seed: module(*inputs(seed)), OneDevice(module))
    return result, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def on_rank(plan: Plan, procedure: Procedure, bucket_bytes: int, threads: Any = None) -> tuple[Any, dict[str, Tensor]]:
    executor = Executor(plan, threads.rank, model(), create_groups(plan.stages[0].mesh, threads), bucket_bytes=bucket_bytes)

    def loss(seed: int) -> Tensor:
        return executor.run(plan.first, dict(zip(("x", "targets"), inputs(seed), strict=True)))["mse_loss"]

    result = procedure(executor.module, loss, executor)
    return result, executor.store.full_gradients()


def same_as_one_device(name: str, procedure: Procedure, bucket_bytes: int = 25 * 2**20) -> Any:
    expected, gradients = on_one_device(procedure)
    largest = max(float(g.abs().max()) for g in gradients.values())
    for found, got in run_ranks(PLANS[name](), on_rank, PLANS[name](), procedure, bucket_bytes):
        assert got.keys() == gradients.keys()
        for n, g in gradients.items():
            assert torch.allclose(got[n], g, rtol=0, atol=1e-12 * largest), n
        if expected is not None:
            assert found == pytest.approx(expected, rel=1e-12)
    return expected


# ---- procedures ------------------------------------------------------------------------------------------------------------------


def once(module: nn.Module, loss: Loss, run: Any) -> None:
    loss(0).backward()


def scaled(module: nn.Module, loss: Loss, run: Any) -> None:
    (loss(0) * 1024 / 3).backward()


def accumulated(module: nn.Module, loss: Loss, run: Any) -> None:
    loss(0).backward()
    loss(1).backward()


def several_forwards(module: nn.Module, loss: Loss, run: Any) -> None:
    (loss(0) + 2 * loss(1)).backward()


def twice_through_one_graph(module: nn.Module, loss: Loss, run: Any) -> None:
    value = loss(0)
    value.backward(retain_graph=True)
    value.backward()


def forward_that_is_dropped(module: nn.Module, loss: Loss, run: Any) -> None:
    loss(1)
    loss(0).backward()


def without_sync(module: nn.Module, loss: Loss, run: Any) -> None:
    with run.no_sync():
        loss(0).backward()
        loss(1).backward()
    loss(2).backward()


def zeroed_after_no_sync(module: nn.Module, loss: Loss, run: Any) -> None:
    with run.no_sync():
        loss(0).backward()
    for p in module.parameters():
        p.grad = None
    loss(1).backward()


def clipped(norm_type: float) -> Procedure:
    def clip(module: nn.Module, loss: Loss, run: Any) -> float:
        loss(0).backward()
        return float(run.clip_grad_norm_(0.1, norm_type))

    return clip


def lightly_clipped(module: nn.Module, loss: Loss, run: Any) -> float:
    loss(0).backward()
    return float(run.clip_grad_norm_(1e6))


PROCEDURES = [
    once, scaled, accumulated, several_forwards, twice_through_one_graph, forward_that_is_dropped, without_sync, zeroed_after_no_sync,
    lightly_clipped,
]  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("procedure", PROCEDURES)
def test_gradients_are_those_of_one_device(name: str, procedure: Procedure) -> None:
    same_as_one_device(name, procedure)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_uses_the_global_norm(name: str, norm_type: float) -> None:
    assert same_as_one_device(name, clipped(norm_type)) > 0.1


@pytest.mark.parametrize("name", ["batch 6:2", "machines 6:2"])
@pytest.mark.parametrize("procedure", [several_forwards, without_sync])
def test_small_buckets_give_the_same(name: str, procedure: Procedure) -> None:
    same_as_one_device(name, procedure, bucket_bytes=100)


# ---- one pass by hand ---------------------------------------------------------------------------------------------------------------


class Silent(torch.autograd.Function):
    """Gives its operand no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> None:  # type: ignore[override]
        return None


def one_bucket(*names: str) -> tuple[GradientSynchroniser, Layout]:
    parameters = {name: nn.Parameter(torch.full((2,), float(i + 2))) for i, name in enumerate(names)}
    return GradientSynchroniser(parameters, {(0,): alone()}), bucket_layout([use(name, 2) for name in names], CPU)


def gradients(synchroniser: GradientSynchroniser) -> list[list[float] | None]:
    return [p.grad.tolist() if p.grad is not None else None for p in synchroniser.parameters.values()]


def test_what_backward_does_not_reach_has_no_gradient() -> None:
    synchroniser, layout = one_bucket("a", "b", "c")
    current = synchroniser.begin(layout)
    a, b, c = (current.enter((name, (0,))) for name in "abc")
    loss, other = (a * Silent.apply(c)).sum(), (b * 3).sum()
    loss.backward()
    assert gradients(synchroniser) == [[4.0, 4.0], None, None]
    other.backward()
    assert gradients(synchroniser) == [[4.0, 4.0], [3.0, 3.0], None]


def test_a_bucket_without_any_gradient_is_left_alone() -> None:
    synchroniser, layout = one_bucket("a")
    a = synchroniser.begin(layout).enter(("a", (0,)))
    Silent.apply(a).sum().backward()
    assert gradients(synchroniser) == [None]


def test_what_was_kept_aside_is_in_the_sum_although_the_next_backward_does_not_reach_it() -> None:
    """The bucket is launched when the others of it arrive, before the end of backward."""
    synchroniser, layout = one_bucket("a", "b")
    with synchroniser.no_sync():
        current = synchroniser.begin(layout)
        a, b = (current.enter((name, (0,))) for name in "ab")
        (a * 2 + b * 5).sum().backward()
    current = synchroniser.begin(layout)
    a, _ = (current.enter((name, (0,))) for name in "ab")
    launched: list[list[float]] = []
    start = gradients_module.start
    with patch.object(gradients_module, "start", lambda c, axes, flat: (launched.append(flat.tolist()), start(c, axes, flat))[1]):
        (a * 3).sum().backward()
    assert launched == [[5.0, 5.0, 5.0, 5.0]] and not synchroniser.held
    assert gradients(synchroniser) == [[5.0, 5.0], [5.0, 5.0]]


def test_a_frozen_parameter_enters_as_it_is() -> None:
    synchroniser, layout = one_bucket("a", "b")
    synchroniser.parameters["a"].requires_grad_(False)
    current = synchroniser.begin(layout)
    a, b = (current.enter((name, (0,))) for name in "ab")
    assert a is synchroniser.parameters["a"]
    (a * b).sum().backward()
    assert gradients(synchroniser) == [None, [2.0, 2.0]]


def test_a_parameter_that_changes_before_backward_is_noticed() -> None:
    synchroniser, layout = one_bucket("a")
    a = synchroniser.begin(layout).enter(("a", (0,)))
    loss = (a * a).sum()
    with torch.no_grad():
        synchroniser.parameters["a"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- layout ------------------------------------------------------------------------------------------------------------------------


def use(name: str, size: int, axes: tuple[int, ...] = (0,), dtype: torch.dtype = torch.float32) -> Use:
    return Use((name, axes), size, dtype)


def test_buckets_follow_backward_and_respect_the_limit() -> None:
    layout = bucket_layout([use("a", 10), use("b", 10), use("c", 15), use("d", 100)], CPU, limit=100)
    assert [[k[0] for k in b.keys] for b in layout.buckets] == [["d"], ["c", "b"], ["a"]]
    assert [b.size for b in layout.buckets] == [100, 25, 10]
    assert layout.numbers == {("d", (0,)): 0, ("c", (0,)): 1, ("b", (0,)): 1, ("a", (0,)): 2}


def test_buckets_do_not_mix_axes_or_dtypes() -> None:
    layout = bucket_layout([use("a", 1), use("b", 1, (0, 1)), use("c", 1), use("d", 1, dtype=torch.float64)], CPU)
    assert [[k[0] for k in b.keys] for b in layout.buckets] == [["d"], ["b"], ["c", "a"]]  # by their last members


def test_shares_are_rounded_by_largest_remainder() -> None:
    assert share_out(10, (0.4, 0.4, 0.1, 0.1)) == (4, 4, 1, 1)
    assert share_out(7, (0.5, 0.5)) == (4, 3)
    assert share_out(3, (1.0, 0.0)) == (3, 0)
