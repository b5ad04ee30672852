"""Views and data movement."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Sample, ids, sample, t

Shapes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
RESHAPES: Shapes = (
    ((4, 6), (24,)), ((2, 3, 12), (2, 3, 4, 3)), ((2, 4, 6), (8, 6)), ((4, 1, 6), (4, 6)), ((6, 4), (4, 6)), ((2, 3, 4), (6, 1, 4)),
    ((12, 5), (3, 4, 5)),
)  # fmt: skip


def views() -> Iterator[Sample]:
    for shape, size in RESHAPES:
        yield sample("view", self=t(*shape), size=size)
    yield sample("view", self=ids(4, 6, limit=9), size=(24,))
    yield sample("_unsafe_view", self=t(4, 6), size=(2, 2, 6))
    yield sample("reshape", self=t(4, 6), shape=(2, 2, 6))
    yield sample("flatten.using_ints", self=t(2, 3, 4), start_dim=1)
    yield sample("unflatten.int", self=t(4, 6), dim=1, sizes=(2, 3))
    yield sample("squeeze", self=t(4, 1, 6))
    yield sample("squeeze.dim", self=t(4, 1, 6), dim=1)
    yield sample("squeeze.dim", self=t(4, 2, 6), dim=1)
    yield sample("squeeze.dims", self=t(4, 1, 6, 1), dim=(1, 3))
    yield sample("unsqueeze", self=t(4, 6), dim=1)
    yield sample("ravel", self=t(4, 6))
    yield sample("transpose.int", self=t(4, 5, 6), dim0=0, dim1=-1)
    yield sample("swapaxes", self=t(4, 5, 6), axis0=0, axis1=-1)
    yield sample("permute", self=t(4, 5, 6), dims=(2, 0, -2))
    yield sample("movedim.int", self=t(4, 5, 6), source=0, destination=-1)
    yield sample("movedim.intlist", self=t(4, 5, 6), source=(0, 1), destination=(1, 2))
    for name in ("t", "numpy_T", "mT"):
        yield sample(name, self=t(4, 6))
    yield sample("t", self=t(4))
    yield sample("numpy_T", self=t(4, 5, 6))
    yield sample("mT", self=t(4, 5, 6))
    yield sample("select.int", self=t(4, 5, 6), dim=1, index=2)
    yield sample("unbind.int", self=t(4, 2, 6), dim=1)
    yield sample("narrow", self=t(4, 5, 6), dim=1, start=1, length=2)
    yield sample("cumsum", self=t(4, 6), dim=1)
    yield sample("flip", self=t(4, 5, 6), dims=(1,))
    yield sample("roll", self=t(4, 6), shifts=(1,), dims=(1,))
    yield sample("roll", self=t(4, 6), shifts=(1,))


def pieces() -> Iterator[Sample]:
    """Slices, splits, concatenation, expansion, triangles."""
    yield sample("slice.Tensor", self=t(4, 6), dim=1, start=1, end=4)
    yield sample("slice.Tensor", self=t(4, 6), dim=0)
    yield sample("slice.Tensor", self=t(4, 6), dim=1, step=2)
    yield sample("split.Tensor", self=t(4, 12), split_size=4, dim=1)
    yield sample("split.Tensor", self=t(4, 6), split_size=4, dim=-1)
    yield sample("chunk", self=t(4, 6), chunks=2, dim=1)
    yield sample("split_with_sizes", self=t(4, 6), split_sizes=(2, 4), dim=1)
    yield sample("split_with_sizes", self=t(4, 6), split_sizes=(3, 3), dim=1)
    yield sample("split.sizes", self=t(4, 6), split_size=(3, 3), dim=1)
    yield sample("tensor_split.sections", self=t(4, 6), sections=2, dim=1)
    for name in ("cat", "concat"):
        yield sample(name, tensors=[t(4, 6), t(4, 6)], dim=1)
    yield sample("cat", tensors=[t(4, 6), t(4, 3)], dim=-1)
    yield sample("cat", tensors=[ids(4, limit=5), ids(4, limit=5)])
    yield sample("stack", tensors=[t(4, 6), t(4, 6)], dim=1)
    yield sample("expand", self=t(4, 1, 6), size=(4, 5, 6))
    yield sample("expand", self=t(6), size=(4, -1))
    for name in ("tril", "triu"):
        yield sample(name, self=t(3, 4, 6))
