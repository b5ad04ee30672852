"""Calls whose local output has no elements, and the few kernels that get an empty contraction wrong.

A device with a length of zero still takes part in every collective, forward and backward, so its local program keeps every
instruction. Some kernels refuse empty tensors (conv2d without output channels, `view(0, -1)`): such a call, found by trying it when
the program is built, is replaced by `EmptyCall`. Its output has the right shape, and every floating operand gets a gradient of
zeros, which is what the sum over no elements is. Invariant: autograd visits the same instructions in the same order on every device;
calls that do run keep what they would keep on the others, so that freed parameters are gathered again by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

Description = tuple[tuple[int, ...], torch.dtype, bool]  # of a tensor: shape, dtype, whether it requires a gradient


def example(shape: Sequence[int], dtype: torch.dtype, grad: bool, device: torch.device) -> Tensor:
    """A tensor of zeros that takes no memory to speak of."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)).requires_grad_(grad)


def accepts(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> bool:
    """Whether the kernel takes these arguments, forward and backward, and gives outputs of `shapes`, and a gradient to every operand that
    requires one (attention of no heads forgets its mask, whose owner would wait for it on the other devices)."""
    try:
        results = function(*args, **kwargs)
        outputs = [results] if isinstance(results, Tensor) else list(results)
        differentiable = [t for t in outputs if t.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.zeros_like(t) for t in differentiable])
            if any(t.requires_grad and t.is_leaf and t.grad is None for t in _tensors((args, tuple(kwargs.values())))):
                return False
    except Exception:  # whatever a kernel says, custom ones included
        return False
    return [tuple(t.shape) for t in outputs] == [tuple(s) for s in shapes]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _tensors(v)


def kept_operands(function: Callable[..., Any], operands: Sequence[Description], device: torch.device, real: bool = False) -> tuple[int, ...]:
    """Positions of the operands that a call keeps for backward, itself or as a view; seen by running it on tensors without values, or with zeros on
    the device (`real`: which kernel runs is decided there, and tensors without values are given to another one)."""
    kept: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with nullcontext() if real else FakeTensorMode(), saved_tensors_hooks(note, lambda t: t):
        leaves = [(torch.zeros if real else torch.empty)(shape, dtype=dtype, device=device, requires_grad=grad) for shape, dtype, grad in operands]
        results = function(*leaves)
        storages = {t.untyped_storage()._cdata for t in kept}
        found = tuple(i for i, x in enumerate(leaves) if x.untyped_storage()._cdata in storages)
        del results
    return found


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: EmptyCall, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*(operands[i] for i in call.saves))
        ctx.shapes = [(x.shape, x.dtype, x.device) if x.is_floating_point() or x.is_complex() else None for x in operands]
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
        outputs: of each, the local shape, the dtype and whether a cotangent flows back.
        listed: whether the operator returns a tuple or list.
        saves: positions of the operands that the operator keeps for backward elsewhere.
    """

    def __init__(self, target: str, outputs: Sequence[Description], listed: bool, saves: tuple[int, ...] = ()):
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
        return zeros if bias is None else zeros + bias.reshape(-1, *[1] * (weight.dim() - 2))

    def extra_repr(self) -> str:
        return f"{self.target} over no channels: {list(self.shape)}"
