"""Kernels and empty tensors: what refuses is replaced, what computes nonsense too, the rest runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hapx.runtime.calls import find_operator
from hapx.runtime.empty import EmptyCall, EmptyConvolution, accepts, example, kept_operands

CPU = torch.device("cpu")


def zeros(*shape: int) -> torch.Tensor:
    return example(shape, torch.float64, True, CPU)


@pytest.mark.parametrize(
    "target, operands, rest, shape, expected",
    [
        ("aten.linear.default", [(0, 5), (8, 5), (8,)], (), (0, 8), True),
        ("aten.conv2d.default", [(0, 3, 8, 8), (4, 3, 3, 3)], (), (0, 4, 6, 6), True),
        ("aten.conv2d.default", [(2, 3, 8, 8), (0, 3, 3, 3)], (), (2, 0, 6, 6), False),
        ("aten.view.default", [(0, 4)], ([0, -1],), (0, 4), False),
        ("aten.view.default", [(0, 4)], ([0, 2, 2],), (0, 2, 2), True),
        ("aten.scaled_dot_product_attention.default", [(2, 0, 5, 4)] * 3, (), (2, 0, 5, 4), True),
        ("aten.scaled_dot_product_attention.default", [(2, 0, 5, 4)] * 3 + [(1, 0, 5, 5)], (), (2, 0, 5, 4), False),
        ("aten.max_pool2d.default", [(2, 0, 8, 8)], ([2, 2],), (2, 0, 4, 4), False),
    ],
)  # fmt: skip
def test_kernels_are_tried(target: str, operands: list[tuple[int, ...]], rest: tuple[object, ...], shape: tuple[int, ...], expected: bool) -> None:
    assert accepts(find_operator(target), (*(zeros(*s) for s in operands), *rest), {}, [shape]) == expected


def test_empty_call_has_gradients_of_zeros() -> None:
    call = EmptyCall("aten.conv2d.default", [((2, 0, 6, 6), torch.float64, True)], listed=False, saves=(0, 1))
    x, w = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True), torch.zeros(0, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    y = call(x, w)
    assert y.shape == (2, 0, 6, 6)
    y.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert w.grad.shape == w.shape
    assert "aten.conv2d.default without elements: [2, 0, 6, 6]" in str(call)


def test_empty_call_with_several_outputs_and_an_integer_one() -> None:
    call = EmptyCall("aten.topk.default", [((0, 2), torch.float64, True), ((0, 2), torch.int64, False)], listed=True)
    values, indices = call(torch.zeros(0, 5, dtype=torch.float64, requires_grad=True))
    assert values.requires_grad
    assert not indices.requires_grad
    assert indices.dtype == torch.int64


def test_convolution_over_no_channels_is_the_bias() -> None:
    conv = EmptyConvolution("aten.conv2d.default", (2, 4, 6, 6))
    x, w = zeros(2, 0, 8, 8), zeros(4, 0, 3, 3)
    bias = nn.Parameter(torch.arange(4.0, dtype=torch.float64))
    y = conv(x, w, bias)
    assert torch.equal(y, torch.arange(4.0, dtype=torch.float64).reshape(1, 4, 1, 1).expand(2, 4, 6, 6))
    y.sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [72.0] * 4
    assert torch.equal(conv(x, w), torch.zeros(2, 4, 6, 6, dtype=torch.float64))


@pytest.mark.parametrize(
    "target, operands, rest, kept",
    [
        ("aten.conv2d.default", [(2, 3, 8, 8), (4, 3, 3, 3), (4,)], (), (0, 1)),
        ("aten.conv_transpose2d.input", [(2, 4, 8, 8), (4, 3, 3, 3), (3,)], (), (0, 1)),
        ("aten.group_norm.default", [(2, 4, 3, 3)], (2,), (0,)),
        ("aten.max_pool2d.default", [(2, 4, 8, 8)], ([2, 2],), (0,)),
        ("aten.reshape.default", [(2, 4)], ([8],), ()),
        ("aten.add.Tensor", [(2, 4), (4,)], (), ()),
    ],
)
def test_what_a_call_keeps_is_seen_without_values(
    target: str, operands: list[tuple[int, ...]], rest: tuple[object, ...], kept: tuple[int, ...]
) -> None:
    described = [(s, torch.float32, True) for s in operands]
    assert kept_operands(lambda *xs: find_operator(target)(*xs, *rest), described, CPU) == kept


def test_of_a_cast_operand_the_copy_is_kept() -> None:
    def convolution(*operands: torch.Tensor) -> torch.Tensor:
        return find_operator("aten.conv2d.default")(*(x.bfloat16() for x in operands))

    assert kept_operands(convolution, [((2, 3, 8, 8), torch.float32, True), ((4, 3, 3, 3), torch.float32, True)], CPU) == ()
