"""Reductions, normalisation, pooling."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Sample, booleans, dtype, ids, positive, sample, t

POOLS = (("max_pool", "kernel_size"), ("avg_pool", "kernel_size"), ("adaptive_avg_pool", "output_size"), ("adaptive_max_pool", "output_size"))


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


def norms() -> Iterator[Sample]:
    """Softmax, normalisation, pooling."""
    yield sample("softmax.int", self=t(3, 4, 6), dim=1)
    yield sample("log_softmax.int", self=t(4, 6), dim=-1)
    yield sample("_softmax", self=t(4, 6), dim=-1, half_to_float=False)
    yield sample("_log_softmax", self=t(4, 6), dim=0, half_to_float=False)
    yield sample("layer_norm", input=t(3, 4, 6), normalized_shape=(6,), weight=t(6), bias=t(6))
    yield sample("layer_norm", input=t(4, 6), normalized_shape=(6,), weight=t(6), bias=None)
    yield sample("layer_norm", input=t(4, 6), normalized_shape=(6,), weight=None, bias=None)
    yield sample("layer_norm", input=t(3, 4, 6), normalized_shape=(4, 6), weight=t(4, 6), bias=t(4, 6))
    yield sample("rms_norm", input=t(3, 4, 6), normalized_shape=(6,), weight=t(6))
    yield sample("rms_norm", input=t(4, 6), normalized_shape=(6,), weight=None)
    for training in (True, False):
        stats = {"running_mean": t(6, grad=False), "running_var": positive(6, grad=False)}
        constants = {"training": training, "momentum": 0.3, "eps": 1e-5, "cudnn_enabled": True}
        yield sample("batch_norm", input=t(4, 6, 5), weight=t(6), bias=t(6), **stats, **constants)
        yield sample("batch_norm", input=t(8, 6), weight=None, bias=None, **stats, **constants)
    yield sample("batch_norm", input=t(4, 6, 5), weight=t(6), bias=t(6), running_mean=None, running_var=None, **(constants | {"training": True}))
    for name, argument in POOLS:
        for rank, image in ((1, (3, 2, 6)), (2, (3, 2, 4, 6)), (2, (3, 4, 6))):
            yield sample(f"{name}{rank}d", self=t(*image), **{argument: (2,) * rank})
