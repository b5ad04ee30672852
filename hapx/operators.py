"""Operators by name; and those of our own, for what torch has only in a form that cannot be captured. Importing this registers them with
torch.library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hapx.functions import make_known


def find_overload(target: str) -> torch._ops.OpOverload:
    """The one named "aten.linear.default", or made of a torch.autograd.Function. Raises ValueError and AttributeError where there is none."""
    namespace, name, which = target.split(".")
    make_known(namespace, name)
    found = getattr(getattr(getattr(torch.ops, namespace), name), which)
    assert isinstance(found, torch._ops.OpOverload)
    return found


@torch.library.custom_op("hapx_ops::ctc", mutates_args=())  # type: ignore[untyped-decorator]
def ctc(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    """Connectionist temporal classification (Graves et al. 2006): the loss of every sample, as torch.nn.functional.ctc_loss without a reduction.

    Args:
        log_probs: (steps, batch, classes). targets: (batch, length), padded behind target_lengths. input_lengths, target_lengths: (batch,).
        blank: number of the class that stands for none. zero_infinity: whether a sample whose target does not fit into its input counts 0.
    """
    losses = _losses(log_probs, targets, _on_host(input_lengths, target_lengths), blank, zero_infinity)[0]
    return losses.masked_fill(losses == torch.inf, 0.0) if zero_infinity else losses


def _losses(log_probs: Tensor, targets: Tensor, lengths: Sequence[Tensor], blank: int, zero_infinity: bool) -> tuple[Tensor, Tensor]:
    """Losses, and the logarithms of what the first steps of a target have: how many they are depends on lengths, so they are no result."""
    found: tuple[Tensor, Tensor] = torch.ops.aten._ctc_loss.Tensor(log_probs, targets, *lengths, blank, zero_infinity)
    return found


def _on_host(*lengths: Tensor) -> list[Tensor]:
    """Where torch's kernels read them."""
    return [n.to("cpu", torch.int64) for n in lengths]


@ctc.register_fake  # type: ignore[untyped-decorator]
def _(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    log_probs, targets, *both = ctx.saved_tensors
    lengths = _on_host(*both)
    losses, first = _losses(log_probs, targets, lengths, ctx.blank, ctx.zero_infinity)
    found = torch.ops.aten._ctc_loss_backward.Tensor(cotangent, log_probs, targets, *lengths, losses, first, ctx.blank, ctx.zero_infinity)
    return found, None, None, None, None, None


ctc.register_autograd(_gradient, setup_context=_keep)
