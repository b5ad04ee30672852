"""Interpolation, padding, shuffled pixels and channels, windows as columns, sampling at given points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hapx.theory.samples.draw import Sample, sample, t, words

IMAGES = {1: (4,), 2: (4, 5), 3: (2, 4, 3)}


def interpolations() -> Iterator[Sample]:
    for n, image in IMAGES.items():
        larger = tuple(2 * s for s in image)
        for name in (f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d"):
            yield from _interpolation(name, n, image, larger)
    corners = {"align_corners": False}
    yield from _interpolation("upsample_linear1d", 1, (4,), (7,), **corners)
    for name in words("upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"):
        yield from _interpolation(name, 2, (4, 5), (7, 3), **corners)
    yield sample("upsample_bilinear2d.vec", input=t(2, 3, 4, 5), output_size=(8, 7), scale_factors=None, align_corners=True)
    yield from _interpolation("upsample_trilinear3d", 3, (2, 4, 3), (3, 4, 6), **corners)


def _interpolation(name: str, n: int, image: tuple[int, ...], size: tuple[int, ...], **constants: Any) -> Iterator[Sample]:
    yield sample(name, self=t(2, 3, *image), output_size=size, **constants)
    yield sample(f"{name}.vec", input=t(2, 3, *image), output_size=None, scale_factors=(2.0,) * n, **constants)


def paddings() -> Iterator[Sample]:
    yield sample("pad", self=t(2, 3, 4, 5), pad=(1, 2, 0, 1))
    yield sample("pad", self=t(2, 3, 4, 5), pad=(0, 0, 0, 0, 1, 1), value=0.5)
    yield sample("pad", self=t(2, 3, 6), pad=(-1, 0), value=0.0)
    for mode in words("reflect replicate circular"):
        yield sample("pad", self=t(2, 3, 4, 5), pad=(1, 2, 0, 1), mode=mode)
    yield sample("constant_pad_nd", self=t(2, 3, 4), pad=(1, 1))
    yield sample("constant_pad_nd", self=t(2, 3, 4), pad=(1, 1), value=2.0)
    yield sample("_pad_circular", self=t(2, 3, 4), pad=(1, 1))
    for n, image in IMAGES.items():
        for name in words("reflection replication"):
            yield sample(f"{name}_pad{n}d", self=t(2, 3, *image), padding=(1, 0) + (0, 1) * (n - 1))


def shuffles() -> Iterator[Sample]:
    yield sample("pixel_shuffle", self=t(2, 12, 4, 5), upscale_factor=2)
    yield sample("pixel_shuffle", self=t(12, 4, 5), upscale_factor=2)
    yield sample("pixel_unshuffle", self=t(2, 3, 4, 6), downscale_factor=2)
    for groups in (2, 3):
        yield sample("channel_shuffle", self=t(2, 12, 5), groups=groups)
        yield sample("native_channel_shuffle", self=t(2, 6, 5, 3, grad=False), groups=groups)  # torch has no gradient of it


def columns() -> Iterator[Sample]:
    window = {"dilation": (1, 1), "padding": (0, 0), "stride": (1, 1)}
    yield sample("im2col", self=t(2, 3, 4, 5), kernel_size=(3, 2), **window)
    yield sample("im2col", self=t(3, 4, 5), kernel_size=(3, 2), **window | {"padding": (1, 1)})
    yield sample("col2im", self=t(2, 12, 12), output_size=(4, 5), kernel_size=(2, 2), **window)
    yield sample("unfold", self=t(3, 8, 5), dimension=1, size=4, step=2)
    yield sample("unfold", self=t(3, 8, 5), dimension=1, size=2, step=2)
    yield sample("unfold", self=t(3, 9, 5), dimension=-2, size=2, step=3)
    yield sample("unfold", self=t(3, 8, 5), dimension=1, size=3, step=4)


def points() -> Iterator[Sample]:
    for name in ("grid_sampler", "grid_sampler_2d"):
        yield sample(name, input=t(2, 3, 4, 5), grid=t(2, 6, 7, 2), interpolation_mode=0, padding_mode=0, align_corners=False)
    for name in ("grid_sampler", "grid_sampler_3d"):
        yield sample(name, input=t(2, 3, 4, 5, 2), grid=t(2, 3, 4, 5, 3), interpolation_mode=0, padding_mode=1, align_corners=True)
    yield sample("grid_sampler", input=t(2, 3, 4, 5), grid=t(2, 6, 7, 2), interpolation_mode=2, padding_mode=2, align_corners=False)
    yield sample("affine_grid_generator", theta=t(4, 2, 3), size=(4, 3, 5, 6), align_corners=False)
    yield sample("affine_grid_generator", theta=t(4, 3, 4), size=(4, 3, 2, 5, 6), align_corners=True)
