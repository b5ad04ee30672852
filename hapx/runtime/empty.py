"""Calls whose local output has no elements, and the few kernels that get an empty contraction wrong.

A device with a length of zero still takes part in every collective, forward and backward, so its local program keeps every
instruction. Some kernels refuse empty tensors (conv2d without output channels, `view(0, -1)`): such a call, found by trying it when
the program is built, is replaced by `EmptyCall`. Its output has the right shape, and every floating operand gets a gradient of
zeros, which is what the sum over no elements is. Invariant: autograd visits the same instructions in the same order on every device;
calls that do run keep what they would keep on the others, so that freed parameters are gathered again by all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def example(shape: Sequence[int], dtype: torch.dtype, grad: bool, device: torch.device) -> Tensor:
    """A tensor of zeros that takes no memory to speak of."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)).requires_grad_(grad)


def accepts(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> bool:
    """Whether the kernel takes these arguments, forward and backward, and gives outputs of `shapes`."""
    try:
        results = function(*args, **kwargs)
        outputs = [results] if isinstance(results, Tensor) else list(results)
        differentiable = [t for t in outputs if t.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.zeros_like(t) for t in differentiable])
    except Exception:  # whatever a kernel says, custom ones included
        return False
    return [tuple(t.shape) for t in outputs] == [tuple(s) for s in shapes]


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: EmptyCall, *operands: Tensor) -> tuple[Tensor, ...]:
        if call.saves:
            ctx.save_for_backward(*operands[:2])
        ctx.shapes = [(x.shape, x.dtype, x.device) if x.is_floating_point() else None for x in operands]
        device = operands[0].device
        outputs = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, _ in call.outputs)
        ctx.mark_non_differentiable(*(t for t, (_, _, grad) in zip(outputs, call.outputs, strict=True) if not grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # a freed parameter is gathered again here, as it is on the other devices
        return None, *(
            torch.zeros(s[0], dtype=s[1], device=s[2]) if s is not None and needed else None
            for s, needed in zip(ctx.shapes, ctx.needs_input_grad[1:], strict=True)
        )


class EmptyCall(nn.Module):
    """Stands for a call of `target` that computes nothing on this device.

    Args:
        outputs: (local shape, dtype, whether a cotangent flows back) of each.
        listed: whether the operator returns a tuple or list.
        saves: whether the operator keeps its first two operands for backward.
    """

    def __init__(self, target: str, outputs: Sequence[tuple[tuple[int, ...], torch.dtype, bool]], listed: bool, saves: bool = False):
        super().__init__()
        self.target, self.outputs, self.listed, self.saves = target, tuple(outputs), listed, saves

    def forward(self, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = _Nothing.apply(self, *operands)
        return results if self.listed else results[0]

    def extra_repr(self) -> str:
        return f"{self.target} without elements: {', '.join(str(list(shape)) for shape, _, _ in self.outputs)}"


class EmptyConvolution(nn.Module):
    """A convolution over no input channels: zeros, plus the bias. (The kernels return a tensor without channels.)"""

    def __init__(self, target: str, shape: tuple[int, ...]):
        super().__init__()
        self.target, self.shape = target, shape

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        zeros: Tensor = EmptyCall(self.target, [(self.shape, x.dtype, x.requires_grad or weight.requires_grad)], False)(x, weight)
        return zeros if bias is None else zeros + bias.reshape(-1, *[1] * (len(self.shape) - 2))

    def extra_repr(self) -> str:
        return f"{self.target} over no channels: {list(self.shape)}"
