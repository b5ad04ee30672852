"""Reading and writing at indices."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Reason, Sample, booleans, ids, permuted, positive, sample, t, words


def indexing() -> Iterator[Sample]:
    """Along one dim."""
    for dim in (0, 1):
        yield sample("gather", self=t(4, 6), dim=dim, index=ids(4, 6, limit=4))
    yield sample("gather", self=t(4, 6), dim=-1, index=ids(4, 1, limit=6))
    yield sample("gather", Reason.DEGENERATE_SIZE, self=t(5, 6), dim=1, index=ids(4, 3, limit=6))
    yield sample("gather", self=ids(4, 6, limit=9), dim=1, index=ids(4, 3, limit=6))
    yield sample("take_along_dim", self=t(4, 6), indices=ids(4, 3, limit=6), dim=1)
    yield sample("take_along_dim", self=t(4, 1, 6), indices=ids(1, 5, 6, limit=4), dim=0)
    yield sample("take_along_dim", self=t(4, 6), indices=ids(5, limit=24), dim=None)
    for dim in (0, 1):
        yield sample("index_select", self=t(5, 6), dim=dim, index=ids(4, limit=5))
    yield sample("index_select", self=t(4, 6), dim=-1, index=ids(limit=6))
    yield sample("scatter.src", self=t(4, 6), dim=1, index=permuted(4, 5), src=t(4, 5))
    yield sample("scatter.src", self=t(5, 6), dim=0, index=permuted(4, 6, dim=0), src=t(4, 6))
    yield sample("scatter.value", self=t(4, 6), dim=1, index=ids(4, 3, limit=6), value=0.5)
    yield sample("scatter.value", self=t(4, 6), dim=1, index=ids(4, 3, limit=6), value=0.0)
    for reduce in ("add", "multiply"):
        yield sample("scatter.reduce", self=t(4, 6, grad=False), dim=1, index=ids(4, 5, limit=6), src=t(4, 5, grad=False), reduce=reduce)
        yield sample("scatter.value_reduce", self=t(4, 6, grad=False), dim=1, index=ids(4, 5, limit=6), value=1.5, reduce=reduce)
    yield sample("scatter_add", self=t(4, 6), dim=1, index=ids(4, 5, limit=6), src=t(4, 5))
    yield sample("scatter_add", self=t(7, 6), dim=0, index=ids(4, 6, limit=7), src=t(4, 6))
    yield sample("scatter_add", Reason.DEGENERATE_SIZE, self=t(4, 6), dim=0, index=ids(3, 5, limit=4), src=t(3, 5))
    for reduce in words("sum mean prod amax amin"):
        yield sample("scatter_reduce.two", self=t(4, 6), dim=1, index=ids(4, 5, limit=6), src=positive(4, 5), reduce=reduce)
    yield sample("scatter_reduce.two", self=t(4, 6), dim=1, index=ids(4, 5, limit=6), src=t(4, 5), reduce="sum", include_self=False)
    for dim in (0, 1):
        yield sample("index_add", self=t(4, 6), dim=dim, index=ids(5, limit=4), source=t(5, 6) if dim == 0 else t(4, 5), alpha=2)
    yield sample("index_copy", self=t(4, 6), dim=1, index=permuted(3), source=t(4, 3))
    yield sample("index_fill.int_Scalar", self=t(4, 6), dim=1, index=ids(3, limit=6), value=0.5)
    yield sample("index_fill.int_Scalar", self=t(4, 6), dim=0, index=ids(3, limit=4), value=0.0)
    yield sample("index_fill.int_Tensor", self=t(4, 6), dim=1, index=ids(3, limit=6), value=t())
    yield sample("index_reduce", self=positive(4, 6), dim=1, index=ids(3, limit=6), source=positive(4, 3), reduce="amax")


def advanced() -> Iterator[Sample]:
    """self[indices], several of them, and flat indices."""
    yield sample("index.Tensor", self=t(5, 6), indices=[ids(4, limit=5)])
    yield sample("index.Tensor", self=t(5, 6), indices=[ids(4, 3, limit=5)])
    yield sample("index.Tensor", self=t(5, 6), indices=[None, ids(4, limit=5)])
    yield sample("index.Tensor", self=t(5, 6), indices=[ids(4, limit=5), ids(4, limit=6)])
    yield sample("index.Tensor", self=t(5, 6, 7), indices=[ids(4, 1, limit=5), ids(3, limit=6)])
    yield sample("index.Tensor", self=t(5, 6, 7), indices=[ids(4, limit=5), None, ids(4, limit=7)])
    yield sample("index.Tensor", self=ids(5, 6, limit=9), indices=[ids(4, limit=5)])
    yield sample("index_put", self=t(5, 6), indices=[permuted(4)], values=t(4, 6))
    yield sample("index_put", self=t(5, 6), indices=[ids(4, limit=5)], values=t())
    yield sample("index_put", self=t(5, 6), indices=[ids(4, limit=5)], values=t(4, 6), accumulate=True)
    yield sample("index_put", self=t(5, 6), indices=[None, ids(4, limit=6)], values=t(4), accumulate=True)
    yield sample("index_put", self=t(5, 6, 7), indices=[ids(4, 1, limit=5), ids(3, limit=6)], values=t(4, 3, 1), accumulate=True)
    yield sample("index_put", self=t(4, 6), indices=[booleans(4)], values=t())
    yield sample("index_put", self=t(4, 6), indices=[booleans(4, 6)], values=t(1))
    yield sample("index_put", self=t(4, 6), indices=[booleans(4)], values=t(6))
    yield sample("take", self=t(4, 6), index=ids(5, 3, limit=24))
    yield sample("put", self=t(4, 6), index=ids(5, limit=24), source=t(5), accumulate=True)
    yield sample("put", self=t(4, 6), index=permuted(5), source=t(5))
    yield sample("masked_scatter", self=t(4, 6), mask=booleans(4, 6), source=t(24))
