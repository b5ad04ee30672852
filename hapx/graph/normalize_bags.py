"""Embedding bags, written as the operators they are made of, so that samples, bags, rows and columns of the table may be split.

In: the arguments of torch.embedding_bag. Out: the pooled rows. With ids i_1 ... i_N, weights w (1 if none) and bags b_1 ... b_N,

    out[b] = sum over the n with b_n = b of w_n table[i_n],    mean: divided by the number of them (at least 1); `padding_idx` counts nothing.

Bags of equal length (the form with two-dimensional ids) are a sum over a dim; others are found by searching the offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from hapx.graph.normalize_flatten import Slot
from hapx.ir import Node

TARGETS = frozenset({"aten.embedding_bag.default", "aten.embedding_bag.padding_idx"})
SUM, MEAN = 0, 1  # torch's numbers for modes; 2 is the maximum

aten = torch.ops.aten


class Compute(Protocol):
    """Appends a call and gives its result."""

    def __call__(self, op: torch._ops.OpOverload, **arguments: Any) -> Slot: ...


def can_be_written_out(bound: Mapping[str, Any]) -> bool:
    """Sums and means, without gradients that depend on how often an id occurs."""
    return bound["mode"] in (SUM, MEAN) and not bound["scale_grad_by_freq"] and not bound["sparse"] and not bound["include_last_offset"]


def bag_length(bound: Mapping[str, Any], producer: Callable[[Slot], Node | None]) -> int | None:
    """The length that all bags have, if the offsets are 0, L, 2 L, ...; None if that cannot be seen."""
    node = producer(bound["offsets"])
    if node is None or node.call.target != "aten.arange.start_step":
        return None
    call, step = node.call, int(node.call["step"])
    regular = call["start"] == 0 and call["end"] == bound["indices"].fake.numel() and step > 0 and call["end"] % step == 0
    return step if regular else None


def embedding_bag(bound: Mapping[str, Any], length: int | None, compute: Compute) -> Slot:
    """The pooled rows. `length`: of all bags, None if they differ."""
    table, ids, weights, padding = bound["weight"], bound["indices"], bound["per_sample_weights"], bound.get("padding_idx")
    if padding is not None:
        padding %= table.fake.shape[0]  # negative ones count from the end
    shape = tuple(ids.fake.shape)
    if length is not None:
        shape = (ids.fake.numel() // length, length)
        ids = compute(aten.reshape.default, self=ids, shape=list(shape))
    rows = compute(aten.embedding.default, weight=table, indices=ids, padding_idx=-1 if padding is None else padding)
    if weights is not None:
        rows = compute(aten.mul.Tensor, self=rows, other=compute(aten.reshape.default, self=weights, shape=[*shape, 1]))
    ignored = None
    if padding is not None:
        ignored = compute(aten.eq.Scalar, self=ids, other=padding)
        rows = compute(aten.masked_fill.Scalar, self=rows, mask=compute(aten.unsqueeze.default, self=ignored, dim=-1), value=0.0)
    if length is not None:
        return _equal(rows, ignored, bound["mode"], compute)
    return _unequal(rows, ignored, bound["offsets"], bound["mode"], compute)


def _equal(rows: Slot, ignored: Slot | None, mode: int, compute: Compute) -> Slot:
    """rows: (bags, length, width)."""
    if mode == MEAN and ignored is None:
        return compute(aten.mean.dim, self=rows, dim=[1])
    total = compute(aten.sum.dim_IntList, self=rows, dim=[1])
    if mode == SUM:
        return total
    return _divided(total, compute(aten.sum.dim_IntList, self=compute(aten.logical_not.default, self=ignored), dim=[1]), compute)


def _unequal(rows: Slot, ignored: Slot | None, offsets: Slot, mode: int, compute: Compute) -> Slot:
    """rows: (samples, width)."""
    assert rows.fake is not None and offsets.fake is not None
    samples, width = rows.fake.shape
    positions = compute(aten.arange.default, end=samples, device=rows.fake.device)
    after = compute(aten.searchsorted.Tensor, sorted_sequence=offsets, self=positions, right=True)
    bags = compute(aten.sub.Tensor, self=after, other=1)
    size = offsets.fake.shape[0]
    nothing = compute(aten.new_zeros.default, self=rows, size=[size, width])
    total = compute(aten.index_add.default, self=nothing, dim=0, index=bags, source=rows)
    if mode == SUM:
        return total
    ones = compute(aten.new_ones.default, self=rows, size=[samples])
    if ignored is not None:
        ones = compute(aten.masked_fill.Scalar, self=ones, mask=ignored, value=0.0)
    none = compute(aten.new_zeros.default, self=rows, size=[size])
    return _divided(total, compute(aten.index_add.default, self=none, dim=0, index=bags, source=ones), compute)


def _divided(total: Slot, counts: Slot, compute: Compute) -> Slot:
    counts = compute(aten.clamp_min.default, self=counts, min=1)
    return compute(aten.div.Tensor, self=total, other=compute(aten.unsqueeze.default, self=counts, dim=1))
