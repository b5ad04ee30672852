"""Reductions beside sum, mean and maximum; products and distances of vectors."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Reason, Sample, dtype, ids, sample, t, words


def statistics() -> Iterator[Sample]:
    """Reductions beside sum, mean and maximum."""
    for keepdim in (False, True):
        yield sample("aminmax", self=t(4, 6), dim=1, keepdim=keepdim)
        for name in words("var_mean std_mean"):
            yield sample(f"{name}.correction", self=t(3, 4, 6), dim=(1,), correction=0, keepdim=keepdim)
            yield sample(f"{name}.dim", self=t(4, 6), dim=(0,), keepdim=keepdim)
        yield sample("nansum", Reason.VALUE, self=t(4, 6), dim=(1,), keepdim=keepdim)
    yield sample("count_nonzero.dim_IntList", self=ids(4, 6, limit=2), dim=(1,))
    yield sample("aminmax", self=t(4, 6))
    for name in words("any all"):
        yield sample(f"{name}.dims", self=ids(3, 4, 6, limit=2), dim=(0, 2))
        yield sample(name, self=ids(4, 6, limit=2))
    yield sample("nanmean", Reason.VALUE, self=t(4, 6), dim=(1,))
    yield sample("nansum", Reason.VALUE, self=t(4, 6))
    yield sample("count_nonzero", self=t(4, 6, grad=False))
    yield sample("frobenius_norm.dim", self=t(4, 6), dim=(1,))
    yield sample("linalg_norm", self=t(4, 6), dim=(1,))
    yield sample("linalg_norm.ord_str", self=t(3, 4, 6), ord="fro", dim=(1, 2))
    yield sample("linalg_matrix_norm", self=t(3, 4, 6), ord=1)
    yield sample("linalg_matrix_norm.str_ord", self=t(3, 4, 6), ord="fro", dim=(0, 2))
    yield sample("norm.ScalarOpt_dim_dtype", self=t(4, 6), p=3, dim=(1,), keepdim=False, dtype=dtype("float64"))
    yield sample("norm.Scalar", self=t(4, 6), p=2)
    yield sample("norm.ScalarOpt_dtype", self=t(4, 6), p=2, dtype=dtype("float64"))
    for name in words("prod median nanmedian"):
        yield sample(name, self=t(4, 6))
    for name in words("var std var_mean std_mean"):
        yield sample(name, self=t(4, 6), unbiased=False)
    yield sample("dist", self=t(4, 6), other=t(6))


def vectors() -> Iterator[Sample]:
    """Products and distances of vectors."""
    for added in ((4,), ()):
        yield sample("addmv", self=t(*added), mat=t(4, 6), vec=t(6), beta=2, alpha=3)
    for shape in ((4, 6), (6,), (4, 1)):
        yield sample("addr", self=t(*shape), vec1=t(4), vec2=t(6), alpha=2)
        yield sample("addbmm", self=t(*shape), batch1=t(3, 4, 5), batch2=t(3, 5, 6), beta=2)
    yield sample("vdot", self=t(6), other=t(6))
    yield sample("linalg_vecdot", x=t(4, 6), y=t(5, 1, 6))
    yield sample("linalg_vecdot", x=t(4, 6), y=t(4, 6), dim=0)
    yield sample("cosine_similarity", x1=t(4, 6, 5), x2=t(4, 6, 5))
    yield sample("cosine_similarity", x1=t(4, 1, 6), x2=t(5, 6), dim=-1)
    yield sample("linalg_cross", self=t(4, 1, 3), other=t(4, 5, 3))
    yield sample("cross", self=t(4, 3, 6), other=t(4, 3, 6), dim=1)
    for keepdim in (False, True):
        yield sample("pairwise_distance", x1=t(4, 6), x2=t(4, 6), keepdim=keepdim)
    yield sample("pairwise_distance", x1=t(5, 4, 6), x2=t(6), p=1)
    yield sample("cdist", x1=t(4, 6), x2=t(5, 6))
    yield sample("cdist", x1=t(3, 4, 6), x2=t(5, 6), p=1)
    yield sample("cdist", x1=t(27, 4), x2=t(5, 4))
