"""Norms and optimizers that need whole gradients are refused where a rank has pieces, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from hapx.api import HAP
from hapx.errors import HapError
from support.clusters import slow_devices
from support.models import MLP
from support.pool import pool

WIDTHS = (6, 8, 3)
BATCH = 8
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": torch.optim.LBFGS,
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2]),
}


def distributed(strategy: str) -> tuple[HAP, tuple[torch.Tensor, ...]]:
    batch = MLP(WIDTHS).example(BATCH)
    cluster = slow_devices(["fast", "slow"])
    hap = HAP(MLP(WIDTHS), cluster, batch, strategy=strategy)
    hap(*batch).backward()
    return hap, batch


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except HapError as error:
        return str(error)
    return ""


def clips(strategy: str) -> tuple[str, str, float, float]:
    hap, _ = distributed(strategy)
    refused = said_by(lambda: clip_grad_norm_(hap.parameters(), 0.01))  # imported before hapx replaced what it calls
    norm = said_by(lambda: nn.utils.get_total_norm([p.grad for p in hap.parameters() if p.grad is not None]))
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    return refused, norm, float(hap.clip_grad_norm_(0.01)), float(clip_grad_norm_(other.parameters(), 1.0))


def steps(strategy: str) -> dict[str, str]:
    hap, batch = distributed(strategy)

    def closure() -> torch.Tensor:
        loss: torch.Tensor = hap(*batch)
        return loss

    return {name: said_by(lambda make=make: make(list(hap.parameters())).step(closure)) for name, make in OPTIMIZERS.items()}  # type: ignore[misc]


@pytest.mark.gloo
def test_pytorchs_norm_of_pieces_is_refused() -> None:
    batch, alone = MLP(WIDTHS).example(BATCH), MLP(WIDTHS)
    alone(*batch).backward()
    expected = float(clip_grad_norm_(alone.parameters(), 1e9))
    for refused, norm, own, other in pool(2).run(clips, "zero"):
        assert refused.startswith("clip_grad_norm_: torch.nn.utils sees only this rank's part") and "model.clip_grad_norm_(max_norm)" in refused
        assert norm == refused
        assert own == pytest.approx(expected, rel=1e-9) and other == pytest.approx(6**0.5)


@pytest.mark.gloo
def test_pytorchs_norm_of_whole_gradients_is_left_alone() -> None:
    for refused, norm, own, _ in pool(2).run(clips, "dp-proportional"):
        assert (refused, norm) == ("", "") and own == pytest.approx(0.01, rel=1e-3)  # it was clipped before


@pytest.mark.gloo
def test_optimizers_that_look_at_whole_tensors_are_refused_on_pieces() -> None:
    for said in pool(2).run(steps, "zero"):
        assert not said["AdamW"] and not said["SGD"]
        for name in ("Adafactor", "LBFGS", "Muon"):
            assert said[name].startswith(f"optimizer.step: {name} needs whole tensors") and "AdamW" in said[name]
    for said in pool(2).run(steps, "dp-proportional"):
        assert not any(said.values()), said


def wraps(strategy: str) -> tuple[list[str], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What wrapping it, and a container of it, says; its state; its gradients after a step under the last wrapper that was made."""
    hap, batch = distributed(strategy)
    told, called = [], hap
    for make in (lambda: DistributedDataParallel(hap), lambda: DistributedDataParallel(nn.ModuleDict({"inner": hap}))):
        told.append(said_by(make))
    if not told[0]:
        called = DistributedDataParallel(hap)  # type: ignore[assignment]
    DistributedDataParallel(nn.Linear(2, 2))  # one of something else
    hap.zero_grad()
    called(*batch).backward()
    return told, hap.full_state_dict(), hap.full_gradients()


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["zero", "dp-proportional"])
def test_pytorchs_data_parallelism_around_pieces_is_refused(strategy: str) -> None:
    """It would give all ranks the pieces of the first; around whole parameters it changes nothing."""
    batch, alone = MLP(WIDTHS).example(BATCH), MLP(WIDTHS)
    alone(*batch).backward()
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    for told, state, found in pool(2).run(wraps, strategy):
        assert [bool(t) for t in told] == [strategy == "zero"] * 2
        assert all("part of the model is distributed already" in t and "use the hapx.HAP as it is" in t for t in told if t)
        torch.testing.assert_close(state, dict(alone.state_dict()))
        torch.testing.assert_close(found, gradients)
