"""`hapx.GradScaler` on 4 gloo ranks: one rank's overflow is everybody's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hapx
from hapx.api import HAP
from hapx.states import Sharded
from support.clusters import FOUR
from support.models import MLP
from support.pool import pool

pytestmark = pytest.mark.gloo
STEPS = 5
PLANTED = {1: 2, 3: 0}  # step -> the rank on which a gradient overflows


def model() -> nn.Module:
    return MLP((6, 8, 4), dtype=torch.float32)


def inputs(step: int) -> tuple[Tensor, ...]:
    example: tuple[Tensor, ...] = model().example(8, seed=step)  # type: ignore[operator]
    return example


def plant(module: nn.Module) -> None:
    """An infinite gradient in what this rank has of a parameter that is stored in shards."""
    gradient = next(p.grad for _, p in module.named_parameters() if p.grad is not None and p.grad.numel())
    gradient.view(-1)[0] = torch.inf


def train(scaler_of: Any, fused: bool, clip: bool) -> tuple[list[int], float, dict[str, Tensor], list[float], int]:
    """The steps that were skipped, the last scale, the state, the norms, and how many parameters are stored in shards."""
    hap = HAP(model(), FOUR, example_inputs=inputs(0), strategy="zero")
    sharded = sum(any(isinstance(s, Sharded) for s in st.copies[0].placement.states) for st in hap.plan.storage)
    optimizer = torch.optim.AdamW(hap.parameters(), lr=0.01, fused=fused)
    scaler = scaler_of(hap)
    skipped, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = hap(*inputs(step))
        scaler.scale(loss).backward()
        if PLANTED.get(step) == dist.get_rank():
            plant(hap)
        if clip:
            scaler.unscale_(optimizer)
            norms.append(float(hap.clip_grad_norm_(0.5)))
        before = [p.detach().clone() for p in hap.parameters()]
        scaler.step(optimizer)
        scaler.update()
        if all(torch.equal(a, b) for a, b in zip(before, hap.parameters(), strict=True)):
            skipped.append(step)
    return skipped, scaler.get_scale(), hap.full_state_dict(), norms, sharded


def ours(hap: HAP) -> Any:
    return hapx.GradScaler(hap, init_scale=1024.0)


def plain(hap: HAP) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


@pytest.mark.parametrize("fused, clip", [(False, False), (False, True), (True, False)], ids=["step", "unscale, clip, step", "fused optimizer"])
def test_all_ranks_skip_the_steps_in_which_one_overflows(fused: bool, clip: bool) -> None:
    results = pool(4).run(partial(train, ours, fused, clip))
    for skipped, scale, state, norms, sharded in results:
        assert skipped == sorted(PLANTED)
        assert scale == 256.0  # halved twice, on every rank
        assert sharded >= 3
        assert all(torch.equal(state[n], t) and bool(t.isfinite().all()) for n, t in results[0][2].items())
        assert [n == torch.inf for n in norms] == ([s in PLANTED for s in range(STEPS)] if clip else [])


def test_torchs_own_scaler_would_not() -> None:
    """The planted overflow is seen by one rank only."""
    results = pool(4).run(partial(train, plain, False, False))
    assert [r[0] for r in results] == [[3], [], [1], []]


def clipped() -> tuple[float, dict[str, Tensor]]:
    hap = HAP(model(), FOUR, example_inputs=inputs(0), strategy="zero")
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
    scaler = hapx.GradScaler(hap, init_scale=64.0)
    scaler.scale(hap(*inputs(0))).backward()
    scaler.unscale_(optimizer)
    norm = float(hap.clip_grad_norm_(0.1))
    return norm, hap.full_gradients()


def test_clipping_after_unscale_sees_the_true_norm() -> None:
    module = model()
    module(*inputs(0)).backward()
    expected = float(nn.utils.clip_grad_norm_(module.parameters(), 0.1))
    assert expected > 0.1
    for norm, gradients in pool(4).run(clipped):
        assert norm == pytest.approx(expected, rel=1e-5)
        for name, p in module.named_parameters():
            assert p.grad is not None
            assert torch.allclose(gradients[name], p.grad, rtol=1e-4, atol=1e-7), name


def test_a_disabled_scaler_does_nothing() -> None:
    class Model:
        device = torch.device("cpu")

        def seed_with(self, scale: object) -> None:
            pass

    scaler = hapx.GradScaler(Model(), enabled=False)  # type: ignore[arg-type]
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    assert scaler.get_scale() == 1.0
