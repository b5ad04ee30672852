"""Products with sufficient factor broadcasting (HAP sections 2.2 and 4.3): the input and the result Sharded alike along one dim, the parameters
Invariant.

The gradient of a parameter is a product of two factors, the operator's input and the cotangent of its result. Instead of summing gradients over the
devices, backward gathers both factors, and every device computes the whole gradient: less to send where the parameter is larger than both.

In: local tensors; `gather`: the devices that hold the shards (None: there is only one); `block`: how they cut the dim of the input; the form of the
gathers. Out: the local result. Invariant: the gradients of parameters are whole, and equal on all devices of `gather`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hapx.collectives.blocks import gather_shards
from hapx.collectives.communicator import Communicator
from hapx.layout import Block
from hapx.plan import Form


class _Product(Protocol):
    """An operator that is linear in its input (if that has a gradient), its weight and its bias; of `cotangent` and input either both are local, or
    both are whole."""

    def result(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def of_input(self, cotangent: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    def of_weight(self, cotangent: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    def of_bias(self, cotangent: Tensor, bias: Tensor) -> Tensor: ...


class _SufficientFactors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: _Product, gather: Communicator, block: Block, form: Form
    ) -> Tensor:
        # a weight that is not read again must not be kept for its shape: it may be one that was gathered
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else weight.new_empty(()).expand(weight.shape), bias)
        ctx.product, ctx.gather, ctx.block, ctx.form = product, gather, block, form
        return product.result(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        of_x = ctx.product.of_input(cotangent, x, weight) if for_x else None
        of_weight = of_bias = None
        if for_weight or for_bias:
            whole = gather_shards(cotangent, ctx.block, ctx.gather, ctx.form)
            if for_weight:
                of_weight = ctx.product.of_weight(whole, gather_shards(x, ctx.block, ctx.gather, ctx.form), weight)
            if for_bias:
                of_bias = ctx.product.of_bias(whole, bias)
        return of_x, of_weight, of_bias, None, None, None, None


def _apply(
    product: _Product, x: Tensor, weight: Tensor, bias: Tensor | None, gather: Communicator | None, block: Block | None, form: Form | str
) -> Tensor:
    if gather is None:
        gather_alone: Tensor = product.result(x, weight, bias)
        return gather_alone
    assert block is not None, "factors are gathered, but how they are cut is not said"
    result: Tensor = _SufficientFactors.apply(x, weight, bias, product, gather, block, Form(form))
    return result


def _rows(t: Tensor) -> Tensor:
    return t.flatten(0, -2)  # not reshape(-1, width): a width may be 0


# --- matrix products ----------------------------------------------------------------------------------------------------------


class _Linear:
    """x @ weight.T + bias."""

    def result(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def of_input(self, cotangent: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return cotangent @ weight.conj()

    def of_weight(self, cotangent: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _rows(cotangent).T @ _rows(x).conj()

    def of_bias(self, cotangent: Tensor, bias: Tensor) -> Tensor:
        return _rows(cotangent).sum(0)


@dataclass(frozen=True, slots=True)
class _Matmul:
    """alpha x @ weight + beta bias; the bias broadcast over rows."""

    alpha: complex = 1
    beta: complex = 1

    def result(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            return torch.addmm(bias, x, weight, beta=self.beta, alpha=self.alpha)
        return self._scaled(x @ weight, self.alpha)

    def of_input(self, cotangent: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._scaled(cotangent @ weight.mH, self.alpha.conjugate())

    def of_weight(self, cotangent: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._scaled(_rows(x).mH @ _rows(cotangent), self.alpha.conjugate())

    def of_bias(self, cotangent: Tensor, bias: Tensor) -> Tensor:
        return self._scaled(cotangent.sum_to_size(bias.shape), self.beta.conjugate())

    @staticmethod
    def _scaled(t: Tensor, factor: complex) -> Tensor:
        return t if factor == 1 else t * factor


def linear_sfb(
    input: Tensor, weight: Tensor, bias: Tensor | None, gather: Communicator | None, block: Block | None, form: Form | str = Form.PADDED
) -> Tensor:
    """torch.nn.functional.linear; `block` cuts a leading dim of the input."""
    assert block is None or block.dim < input.dim() - 1, (block, tuple(input.shape))
    return _apply(_Linear(), input, weight, bias, gather, block, form)


def matmul_sfb(self: Tensor, other: Tensor, gather: Communicator | None, block: Block | None, form: Form | str = Form.PADDED) -> Tensor:
    """torch.matmul with a matrix `other`; `block` cuts a leading dim of `self`."""
    assert other.dim() == 2 and (block is None or block.dim < self.dim() - 1), (block, tuple(self.shape), tuple(other.shape))
    return _apply(_Matmul(), self, other, None, gather, block, form)


def addmm_sfb(
    self: Tensor, mat1: Tensor, mat2: Tensor, beta: complex, alpha: complex, rows: bool, gather: Communicator | None, block: Block | None,
    form: Form | str = Form.PADDED,
) -> Tensor:  # fmt: skip
    """torch.addmm; `block` cuts the rows of `mat1`. rows: `self` has rows of its own, cut like them; else it is Invariant and one for all rows."""
    if not rows:
        return _apply(_Matmul(alpha, beta), mat1, mat2, self, gather, block, form)
    return _apply(_Matmul(alpha), mat1, mat2, None, gather, block, form) + beta * self


# --- convolution --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Convolution:
    """`shape`: of the local result (kernels refuse weights and images without elements). `options`: of torch.convolution, behind the bias."""

    shape: tuple[int, ...]
    options: tuple[Any, ...]

    def result(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if _something(x, weight):
            return torch.convolution(x, weight, bias, *self.options)
        zeros = x.new_zeros(self.shape)
        return zeros if bias is None else zeros + bias.reshape(-1, *[1] * (weight.dim() - 2))

    def of_input(self, cotangent: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(cotangent, x, weight, 0) if _something(x, weight) else torch.zeros_like(x)

    def of_weight(self, cotangent: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(cotangent, x, weight, 1) if _something(x, weight) else torch.zeros_like(weight)

    def of_bias(self, cotangent: Tensor, bias: Tensor) -> Tensor:
        return cotangent.sum([d for d in range(cotangent.dim()) if d != 1])

    def _backward(self, cotangent: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
        wanted = [which == 0, which == 1, False]
        gradient: Tensor = torch.ops.aten.convolution_backward(cotangent, x, weight, None, *self.options, wanted)[which]
        return gradient


def _something(x: Tensor, weight: Tensor) -> bool:
    """Whether there is a filter, and an image that it could pass over."""
    return weight.numel() > 0 and 0 not in x.shape[1:]


def convolution_sfb(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int, excess: Sequence[int], shape: Sequence[int], gather: Communicator | None, block: Block | None,
    form: Form | str = Form.PADDED,
) -> Tensor:  # fmt: skip
    """torch.convolution as a product of patches and filters; `block` cuts the samples, dim 0 of the input.

    excess: zeros behind the end of each dim of the image that `padding` does not have in front of it. shape: of the local result."""
    if any(excess):
        input = F.pad(input, [side for e in reversed(excess) for side in (0, e)])
    options = (list(stride), list(padding), list(dilation), transposed, list(output_padding), groups)
    return _apply(_Convolution(tuple(shape), options), input, weight, bias, gather, block, form)


# --- embedding ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Embedding:
    """Rows `offset`, `offset` + 1, ... of a table, of which the input has global numbers; zeros for rows of other devices."""

    offset: int
    padding_idx: int
    scale_grad_by_freq: bool

    def result(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None
        local, mine = self._local(x, weight)
        if not weight.shape[0]:
            return weight.new_zeros(*x.shape, weight.shape[1])
        return F.embedding(local.masked_fill(~mine, 0), weight).masked_fill(~mine[..., None], 0)

    def of_input(self, cotangent: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("row numbers have no gradient")

    def of_weight(self, cotangent: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Rows of others, and the one that gets no gradient, go to a row behind the last one, which is dropped."""
        rows = weight.shape[0]
        local, mine = self._local(x, weight)
        local = local.masked_fill(~mine | (x == self.padding_idx), rows)
        cotangent = cotangent.reshape(prod(x.shape), weight.shape[1])
        table: Tensor = torch.ops.aten.embedding_dense_backward(cotangent, local.reshape(-1), rows + 1, rows, self.scale_grad_by_freq)
        return table[:rows]

    def of_bias(self, cotangent: Tensor, bias: Tensor) -> Tensor:
        raise AssertionError("an embedding has no bias")

    def _local(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        local = x - self.offset
        return local, (local >= 0) & (local < weight.shape[0])


def embedding_sfb(
    weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool, offset: int, gather: Communicator | None, block: Block | None,
    form: Form | str = Form.PADDED,
) -> Tensor:  # fmt: skip
    """Rows of a table of which this device has rows offset, offset + 1, ...; `block` cuts a dim of the indices. The factors of the table's gradient
    are the indices and the cotangents of the rows: small where few rows of a large table are read.

    padding_idx: global number of the row that gets no gradient, -1 for none."""
    return _apply(_Embedding(offset, padding_idx, scale_grad_by_freq), indices, weight, None, gather, block, form)
