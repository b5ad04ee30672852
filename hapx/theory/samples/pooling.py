"""Pooling and unpooling."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Sample, ids, sample, t

POOLS = (("max_pool", "kernel_size"), ("avg_pool", "kernel_size"), ("adaptive_avg_pool", "output_size"), ("adaptive_max_pool", "output_size"))
IMAGES = {1: (8,), 2: (4, 6), 3: (4, 2, 6)}


def pools() -> Iterator[Sample]:
    """With and without a batch; windows that lie side by side, overlap, or leave something out; padded."""
    for n, image in IMAGES.items():
        for name, argument in POOLS:
            yield sample(f"{name}{n}d", self=t(3, 2, *image), **{argument: (2,) * n})
            yield sample(f"{name}{n}d", self=t(4, *image), **{argument: (2,) * n})
        yield sample(f"max_pool{n}d", self=t(3, 2, *image), kernel_size=(2,) * n, stride=(1,) * n)
        yield sample(f"avg_pool{n}d", self=t(3, 2, *image), kernel_size=(2,) * n, stride=(2,) * n, padding=(1,) * n)
        yield sample(f"max_pool{n}d_with_indices", self=t(3, 2, *image), kernel_size=(2,) * n)
        yield sample(f"adaptive_avg_pool{n}d", self=t(3, 2, *image), output_size=(1,) * n)
    yield sample("max_pool2d", self=t(3, 2, 9, 6), kernel_size=(2, 1), stride=(3, 2))
    yield sample("max_pool2d", self=t(3, 2, 8, 7), kernel_size=(2, 2), stride=(2, 2), dilation=(2, 1), padding=(1, 1), ceil_mode=True)
    yield sample("avg_pool2d", self=t(3, 2, 7, 6), kernel_size=(2, 2), ceil_mode=True, count_include_pad=False, divisor_override=3)


def unpools() -> Iterator[Sample]:
    yield sample("max_unpool2d", self=t(3, 4, 2, 3), indices=ids(3, 4, 2, 3, limit=4), output_size=(4, 6))
    yield sample(
        "max_unpool3d", self=t(2, 3, 2, 3, 2), indices=ids(2, 3, 2, 3, 2, limit=4), output_size=(4, 3, 2), stride=(2, 1, 1), padding=(0, 0, 0)
    )
