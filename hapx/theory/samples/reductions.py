"""Reductions and softmax."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Sample, booleans, dtype, ids, sample, t


def reductions() -> Iterator[Sample]:
    yield sample("sum", self=t(4, 6))
    yield sample("sum", self=ids(4, 6, limit=9))
    yield sample("mean", self=t(4, 6))
    for keepdim in (False, True):
        yield sample("sum.dim_IntList", self=t(3, 4, 6), dim=(0, -1), keepdim=keepdim)
        yield sample("mean.dim", self=t(3, 4, 6), dim=(0, -1), keepdim=keepdim)
        yield sample("max.dim", self=t(4, 6), dim=1, keepdim=keepdim)
        yield sample("amax", self=t(4, 6), dim=(1,), keepdim=keepdim)
    yield sample("mean.dim", self=t(4, 6), dim=(1,), dtype=dtype("float32"))
    yield sample("amax", self=t(4, 6))
    yield sample("amin", self=t(4, 6), dim=(0,))
    yield sample("min.dim", self=t(4, 6), dim=0)
    yield sample("argmax", self=t(4, 6), dim=1)
    yield sample("argmax", self=t(4, 6))
    yield sample("argmin", self=t(4, 6), dim=0, keepdim=True)
    yield sample("prod.dim_int", self=t(4, 6), dim=1)
    yield sample("logsumexp", self=t(4, 6), dim=(1,))
    for name in ("var", "std"):
        yield sample(f"{name}.correction", self=t(4, 6), dim=(1,), correction=0)
        yield sample(f"{name}.dim", self=t(4, 6), dim=(1,))
    yield sample("any.dim", self=booleans(4, 6), dim=1)
    yield sample("all.dim", self=booleans(4, 6), dim=1)
    yield sample("norm.ScalarOpt_dim", self=t(4, 6), p=2, dim=(1,))
    yield sample("linalg_vector_norm", self=t(4, 6), dim=(1,))
    yield sample("max", self=t(4, 6))
    yield sample("min", self=t(4, 6))


def softmaxes() -> Iterator[Sample]:
    yield sample("softmax.int", self=t(3, 4, 6), dim=1)
    yield sample("log_softmax.int", self=t(4, 6), dim=-1)
    yield sample("_softmax", self=t(4, 6), dim=-1, half_to_float=False)
    yield sample("_log_softmax", self=t(4, 6), dim=0, half_to_float=False)
