"""Scans, sorting, searching; repetition; diagonals."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Sample, ids, ordered, permuted, sample, t, words


def scans() -> Iterator[Sample]:
    for name in words("cumprod logcumsumexp cummax cummin"):
        yield sample(name, self=t(4, 6), dim=1)
    yield sample("cumprod", self=t(4, 5, 6), dim=0)
    for name in words("sort argsort mode"):
        yield sample(name, self=t(4, 6), dim=0)
    yield sample("sort.stable", self=t(4, 6), stable=True, dim=1)
    yield sample("argsort.stable", self=t(4, 6), stable=True, dim=1)
    yield sample("topk", self=t(4, 6), k=2)
    yield sample("topk", self=t(4, 6, 3), k=2, dim=1)
    for keepdim in (False, True):
        yield sample("kthvalue", self=t(4, 6), k=2, dim=0, keepdim=keepdim)
        yield sample("median.dim", self=t(4, 5, 6), dim=1, keepdim=keepdim)
    yield sample("nanmedian.dim", self=t(4, 6), dim=1)
    yield sample("diff", self=t(4, 6), dim=1)
    yield sample("diff", self=t(5, 6), n=2, dim=0, prepend=t(2, 6), append=t(1, 6))
    yield sample("bucketize.Tensor", self=t(4, 6), boundaries=ordered(5))
    yield sample("searchsorted.Tensor", sorted_sequence=ordered(5), self=t(4, 6), right=True)
    yield sample("searchsorted.Tensor", sorted_sequence=ordered(4, 5), self=t(4, 6))
    yield sample("searchsorted.Tensor", sorted_sequence=t(4, 5, grad=False), self=t(4, 6), sorter=permuted(4, 5))
    yield sample("histc", self=t(4, 6, grad=False), bins=5, min=-1, max=1)
    yield sample("histc", self=t(4, 6, grad=False), bins=5)


def repeats() -> Iterator[Sample]:
    for counts in ((2, 3), (5, 1, 3), (1, 1)):
        yield sample("repeat", self=t(4, 6), repeats=counts)
    yield sample("repeat", self=t(1, 6), repeats=(5, 2))
    yield sample("repeat", self=ids(4, limit=9), repeats=(3, 2))
    yield sample("tile", self=t(4, 6), dims=(2,))
    yield sample("tile", self=t(4, 6), dims=(3, 1, 2))
    for dim in (0, 1):
        yield sample("repeat_interleave.self_int", self=t(4, 6), repeats=2, dim=dim)
    yield sample("repeat_interleave.self_int", self=t(4, 6), repeats=2)
    yield sample("repeat_interleave.self_int", self=t(6), repeats=3, dim=None, output_size=18)


def diagonals() -> Iterator[Sample]:
    """Diagonals, grids and mirror images."""
    yield sample("diagonal", self=t(4, 5, 6), dim1=0, dim2=2)
    yield sample("diagonal", self=t(4, 5, 6), offset=1, dim1=-2, dim2=-1)
    yield sample("diag_embed", self=t(4, 6))
    yield sample("diag_embed", self=t(4, 6), offset=-1, dim1=0, dim2=1)
    yield sample("diag", self=t(4, 6))
    yield sample("diag", self=t(4), diagonal=1)
    yield sample("trace", self=t(4, 6))
    for k in (1, 2, 3):
        yield sample("rot90", self=t(4, 5, 6), k=k, dims=(0, 2))
    yield sample("fliplr", self=t(4, 5, 6))
    yield sample("flipud", self=t(4, 6))
    yield sample("meshgrid", tensors=[t(4), t(6), t(5)])
    for indexing in ("ij", "xy"):
        yield sample("meshgrid.indexing", tensors=[t(4), t(6)], indexing=indexing)
    yield sample("meshgrid.indexing", tensors=[ids(4, limit=9), ids(6, limit=9)], indexing="xy")
