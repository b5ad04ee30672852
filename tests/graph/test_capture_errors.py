"""What cannot be captured is refused with the user's line and what to change; the module stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hapx.errors import CaptureError, HapError, UnsupportedOperatorError
from hapx.graph.capture import capture
from support.bodies import Forward, Model


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 + 0 * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 5


def branch(m: Model, h: Tensor) -> Tensor:
    if h.sum() > 0:
        return h.mean()
    return h.sum()


def item(m: Model, h: Tensor) -> Tensor:
    return h.mean() * h.max().item()


def nonzero(m: Model, h: Tensor) -> Tensor:
    return h[h > 0].mean()


def counting(m: Model, h: Tensor) -> Tensor:
    m.calls += 1
    m.seen.append(1)
    return h.mean()


def caching(m: Model, h: Tensor) -> Tensor:
    m.last = h
    return h.mean()


def own_backward(m: Model, h: Tensor) -> Tensor:
    return Double.apply(h).mean()


def reentrant(m: Model, h: Tensor) -> Tensor:
    return checkpoint(torch.sin, h, use_reentrant=True).mean()


def wrong_shape(m: Model, h: Tensor) -> Tensor:
    return (h @ torch.zeros(5, 5)).mean()


def large_constant(m: Model, h: Tensor) -> Tensor:
    return h.mean() + LARGE.mean()


def trainable_constant(m: Model, h: Tensor) -> Tensor:
    return (h * TRAINABLE).mean()


def condition(m: Model, h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,)).mean()


def detached(m: Model, h: Tensor) -> Tensor:
    return h.detach().mean()


def packed(m: Model, h: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(h[..., None], torch.tensor([4, 3, 2]), batch_first=True).data.mean()


LARGE = torch.zeros(1_000_001)
TRAINABLE = torch.ones(4, requires_grad=True)

CASES = [
    (branch, CaptureError, "depends on the values", True),
    (item, CaptureError, "depends on the values", True),
    (nonzero, CaptureError, "depends on", True),
    (counting, CaptureError, "forward changes", False),
    (caching, CaptureError, "forward changes last", False),
    (own_backward, CaptureError, "autograd.Function Double cannot be captured: its forward draws", True),
    (reentrant, CaptureError, "use_reentrant=False", True),
    (packed, CaptureError, "packed sequences cannot be captured", True),
    (wrong_shape, CaptureError, "tracing forward failed", True),
    (large_constant, CaptureError, "1000001 elements", False),
    (trainable_constant, CaptureError, "is no part of the model", True),
    (condition, HapError, "cond", False),
    (detached, CaptureError, "does not depend on any parameter", False),
]


@pytest.mark.parametrize(("body", "error", "message", "line"), CASES, ids=[c[0].__name__ for c in CASES])
def test_refused(body: Forward, error: type[HapError], message: str, line: bool, capfd: Any) -> None:
    model = Model(body)
    before = set(vars(model))
    with pytest.raises(error, match=message) as caught:
        capture(model, (torch.randn(3, 4),))
    if line:
        assert "test_capture_errors.py:" in str(caught.value)
    assert "; " in str(caught.value), "says what to do"
    assert set(vars(model)) == before and model.calls == 0 and model.seen == []
    assert isinstance(model.linear.weight, nn.Parameter) and type(model.linear.weight.data) is Tensor
    assert capfd.readouterr() == ("", "")


RETURNS = [
    (lambda m, h: h, r"returned a float32 tensor of shape \[3, 4\].*loss_fn="),
    (lambda m, h: None, "returned None"),
    (lambda m, h: (h, h.mean()), r"returned a tuple \(0: a float32 tensor of shape \[3, 4\], 1: a float32 tensor of shape \[\]\)"),
    (lambda m, h: {"logits": h}, r"returned a dict \(logits: "),
    (lambda m, h: h.argmax(), r"returned a int64 tensor of shape \[\]"),
    (lambda m, h: 3.0, "returned 3.0"),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("body", "message"), RETURNS)
def test_no_scalar_loss(body: Forward, message: str, training: bool) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Model(body), (torch.randn(3, 4),), training=training)


def mean(m: Model, h: Tensor) -> Tensor:
    return h.mean()


def test_inputs_that_do_not_fit() -> None:
    model, x = Model(mean), torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"do not fit Model.forward: too many.*forward\(x"):
        capture(model, (x, x))
    with pytest.raises(CaptureError, match="unexpected keyword argument 'y'"):
        capture(model, {"x": x, "y": x})
    with pytest.raises(CaptureError, match="hold no tensor"):
        capture(model, (3,))
    with pytest.raises(CaptureError, match="example_inputs is a int"):
        capture(model, 3)
    with pytest.raises(CaptureError, match=r"use torch\.as_tensor"):
        capture(model, (x.numpy(),))
    with pytest.raises(CaptureError, match="do not fit a loss function"):
        capture(model, {"x": x}, loss_fn=lambda out, y: out)
    with pytest.raises(CaptureError, match=r"loss_fn\(out, y\) does not take the output and 0 targets: missing a required argument: 'y'"):
        capture(model, (x,), loss_fn=lambda out, y: out)
    with pytest.raises(CaptureError, match=r"loss_fn\(input.* does not take the output and 2 targets: too many"):
        capture(model, (x, x, x), loss_fn=nn.MSELoss())
    with pytest.raises(CaptureError, match="loss_fn returned a float32 tensor"):
        capture(Model(lambda m, h: h), (x, x), loss_fn=lambda out, y: out - y)


def test_models_that_do_not_fit() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match="the model is a function"):
        capture(mean, (x,))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="loss_fn has parameters"):
        capture(Model(lambda m, h: h), (x, x), loss_fn=nn.Linear(2, 2))
    split = Model(mean)
    split.other = nn.Linear(2, 2, device="meta")
    with pytest.raises(CaptureError, match=r"several devices: 'linear\.weight' on cpu, 'other\.weight' on meta"):
        capture(split, (x,))
    shared = Model(mean)
    shared.alias = nn.Parameter(shared.linear.weight.detach())
    with pytest.raises(CaptureError, match="share memory"):
        capture(shared, (x,))
    half = Model(mean)
    half.register_buffer("eighth", torch.zeros(2, dtype=torch.float8_e4m3fn))
    with pytest.raises(CaptureError, match="buffer 'eighth': a float8_e4m3fn tensor"):
        capture(half, (x,))


def test_batch_norm_that_averages_over_all_steps() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 1), nn.Flatten(0))
    with pytest.raises(CaptureError, match=r"batch norm with momentum=None reads how often it ran; give it a momentum"):
        capture(model, (torch.randn(3, 4), torch.randn(3)), loss_fn=nn.functional.mse_loss)


def test_unsupported_is_a_hap_error() -> None:
    assert issubclass(UnsupportedOperatorError, HapError)
