"""Products, attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hapx.theory.samples.draw import Draw, Reason, Sample, booleans, sample, t

Shapes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
MATMULS: Shapes = (
    ((4, 6), (6, 5)), ((6,), (6,)), ((4, 6), (6,)), ((6,), (6, 5)), ((3, 4, 6), (6, 5)), ((2, 3, 4, 6), (3, 6, 5)), ((3, 4, 6), (6,)),
    ((6,), (3, 6, 5)),
)  # fmt: skip


def products() -> Iterator[Sample]:
    """Matrix products."""
    yield sample("linear", input=t(4, 6), weight=t(5, 6), bias=t(5))
    yield sample("linear", input=t(2, 4, 6), weight=t(5, 6), bias=None)
    yield sample("linear", input=t(6), weight=t(5, 6), bias=t(5))
    yield sample("linear", input=t(4, 6, grad=False), weight=t(5, 6), bias=t(5))
    yield sample("linear", input=t(4, 6), weight=t(5, 6, grad=False), bias=t(5, grad=False))
    yield sample("linear", input=t(4, 6), weight=t(5, 6, grad=False), bias=t(5))
    yield sample("mm", self=t(4, 6), mat2=t(6, 5))
    yield sample("bmm", self=t(3, 4, 6), mat2=t(3, 6, 5))
    for added in ((4, 5), (5,), (1, 5), (4, 1)):
        yield sample("addmm", self=t(*added), mat1=t(4, 6), mat2=t(6, 5), beta=2, alpha=3)
    for shape in ((3, 4, 5), (4, 5), (1, 4, 1)):
        yield sample("baddbmm", self=t(*shape), batch1=t(3, 4, 6), batch2=t(3, 6, 5), alpha=2)
    yield sample("mv", self=t(4, 6), vec=t(6))
    yield sample("dot", self=t(6), tensor=t(6))
    for left, right in MATMULS:
        yield sample("matmul", self=t(*left), other=t(*right))


def attention() -> Iterator[Sample]:
    def call(mask: Draw | None = None, kv: int = 4, **constants: Any) -> Sample:
        excuse = Reason.RANDOM if constants.get("dropout_p") else None
        tensors = {"query": t(2, 4, 5, 3), "key": t(2, kv, 6, 3), "value": t(2, kv, 6, 7), "attn_mask": mask}
        return sample("scaled_dot_product_attention", excuse, **tensors, **constants)

    yield call(is_causal=True)
    yield call()
    yield call(t(5, 6, grad=False))
    yield call(booleans(2, 1, 5, 6))
    yield call(t(1, 4, 5, 6))
    yield call(booleans(2, 1, 5, 6), kv=2, enable_gqa=True)
    yield call(kv=2, enable_gqa=True)
    yield call(dropout_p=0.4)
    yield call(dropout_p=0.4, is_causal=True)
    yield call(kv=2, enable_gqa=True, dropout_p=0.4)
    yield call(kv=2, enable_gqa=True, dropout_p=0.4, is_causal=True)
    yield sample("scaled_dot_product_attention", query=t(4, 5, 3), key=t(4, 6, 3), value=t(4, 6, 7), scale=0.3)
