"""Branches that decide nothing but whether there is an error are left out of the captured program, with a warning; all others are refused."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.errors import CaptureError
from hapx.graph.capture import capture
from hapx.graph.capture_raises import CheckLeftOutWarning
from hapx.planner import plan_module
from support.asserting import asserted
from support.clusters import THREE
from support.equivalence import assert_equivalent

Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.loss = nn.Linear(4, 4, dtype=torch.float64), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.linear(x), y)


def inputs(step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(9, 4, generator=generator, dtype=torch.float64), torch.randint(4, (9,), generator=generator)


def too_large(h: Tensor, y: Tensor) -> Tensor:
    if y is not None and y.max() >= 4:
        raise ValueError(f"labels up to {y.max()}")
    return F.cross_entropy(h, y)


def not_finite(h: Tensor, y: Tensor) -> Tensor:
    if not torch.isfinite(h).all() or h.isnan().any():
        raise RuntimeError("not finite")
    return F.cross_entropy(h, y)


def otherwise(h: Tensor, y: Tensor) -> Tensor:
    if (y < 4).all():
        h = h * 2
    else:
        raise ValueError
    return F.cross_entropy(h, y)


def in_a_context(h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        if y.max() >= 4:
            raise ValueError
    return F.cross_entropy(h, y)


def number_too_large(h: Tensor, y: Tensor) -> Tensor:
    if y.max().item() + 1 > 4 or h.max().item() != h.max().item():
        raise ValueError(f"labels up to {y.max().item()}")
    return F.cross_entropy(h, y)


CHECKS = [too_large, asserted, not_finite, otherwise, in_a_context, number_too_large]


@pytest.mark.parametrize("loss", CHECKS)
def test_what_only_raises_is_left_out(loss: Loss) -> None:
    with pytest.warns(CheckLeftOutWarning, match=r"a check of values is not part of the captured program: .*\.py:\d+: (if|assert)"):
        graph = capture(Model(loss), inputs(0))
    assert {node.call.op for node in graph.nodes} <= {"aten.linear", "aten.mul", "aten.cross_entropy_loss"}


def test_the_warning_is_of_the_users_line_and_once() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        plan_module(Model(too_large), THREE, inputs(0))  # which captures more than once
    assert [(w.category, w.filename) for w in said] == [(CheckLeftOutWarning, __file__)]
    assert linecache.getline(__file__, said[0].lineno).strip().startswith("plan_module(Model(too_large)")


@pytest.mark.filterwarnings("ignore::hapx.graph.capture_raises.CheckLeftOutWarning")
@pytest.mark.parametrize("loss", [too_large, otherwise, number_too_large])
def test_models_that_check_train_as_on_one_device(loss: Loss) -> None:
    model = partial(Model, loss)
    assert_equivalent(model, inputs, plan_module(model(), THREE, inputs(0), strategy="dp-proportional"), steps=2)


def both_go_on(h: Tensor, y: Tensor) -> Tensor:
    if y.max() >= 4:
        h = h * 2
    return F.cross_entropy(h, y)


def something_first(h: Tensor, y: Tensor) -> Tensor:
    if y.max() >= 4:
        h = h * 2
        raise ValueError
    return F.cross_entropy(h, y)


def kept(h: Tensor, y: Tensor) -> Tensor:
    small = bool(y.max() < 4)
    return F.cross_entropy(h * small, y)


def chosen(h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h * 2 if y.max() > 4 else h, y)


def caught(h: Tensor, y: Tensor) -> Tensor:
    try:
        if y.max() >= 4:
            raise ValueError
    except ValueError:
        h = h * 2
    return F.cross_entropy(h, y)


def number_goes_on(h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h * 2 if y.max().item() > 4 else h, y)


@pytest.mark.parametrize("loss", [both_go_on, something_first, kept, chosen, caught, number_goes_on])
def test_branches_that_go_on_are_refused(loss: Loss) -> None:
    with pytest.raises(CaptureError, match=r"(?s)test_capture_raises\.py.*the computation depends on the values of a tensor"):
        capture(Model(loss), inputs(0))
