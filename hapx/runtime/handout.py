"""The loss of a schedule that has run, backward passes included: `backward` hands out the gradients that were kept aside.

In: a loss without history, parameters, their gradients for a cotangent `seed` of the loss. Out: the loss, whose backward adds the gradients to
`.grad`, times what arrives there over the seed. Invariant: gradients are handed out without a copy, unless autograd is asked to keep its graph.
And what has no backward passes, and says so: the loss of a run without them, and results other than the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hapx.errors import LaunchError

Gradients = list[Tensor | None]


def with_gradients(loss: Tensor, parameters: Sequence[nn.Parameter], gradients: Gradients, seed: float) -> Tensor:
    """The loss with a backward. `gradients`: one per parameter; the list is emptied."""
    anchor = torch.zeros((), requires_grad=True, device=loss.device)
    result: Tensor = _Ran.apply(anchor, parameters, gradients, seed, loss)
    return result


def without_gradients(loss: Tensor) -> Tensor:
    """The loss of a run in evaluation mode, where gradients are enabled as on one device, but no backward passes were run."""
    result: Tensor = _Evaluated.apply(torch.zeros((), requires_grad=True, device=loss.device), loss)
    return result


class _Evaluated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        raise LaunchError("a pipeline runs no backward passes in evaluation mode", where="backward", hint="call model.train() before forward")


def beside_the_loss(result: Tensor) -> Tensor:
    """A result that one device could differentiate. Here gradients are those of the loss: a backward from a result, of which this rank may have a
    part only, raises LaunchError instead of leaving something out."""
    found: Tensor = _Beside.apply(torch.zeros((), requires_grad=True, device=result.device), result.detach())
    return found


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, result: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        raise LaunchError(
            "a result other than the loss has no gradient", where="backward", allowed="gradients of the loss that the module, or loss_fn, returns",
            hint="compute there what is to be differentiated, as a part of the loss; detach() results that are only looked at",
        )  # fmt: skip


class _Ran(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, parameters: Sequence[nn.Parameter], gradients: Gradients, seed: float, loss: Tensor) -> Tensor:
        ctx.parameters, ctx.gradients, ctx.seed = parameters, gradients, seed
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("backward through the loss of a pipeline a second time: its gradients were handed out; pass retain_graph=True before")
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        hand_out(ctx.parameters, ctx.gradients, float(cotangent.double()) / ctx.seed, keep)
        if not keep:
            ctx.gradients = None
        return None, None, None, None, None


@torch.no_grad()
def hand_out(parameters: Sequence[nn.Parameter], gradients: Gradients, factor: float, keep: bool) -> None:
    """Adds gradients, times a factor, to those of parameters; takes them out of the list, one by one, unless they are to be kept."""
    for i, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient is None:
            continue
        if not keep:
            gradients[i] = None
        if p.grad is not None:
            p.grad.add_(gradient, alpha=factor)
        else:
            p.grad = gradient.clone() if keep else gradient
            if factor != 1.0:
                p.grad.mul_(factor)
