"""Convolution and transposed convolution."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Sample, sample, t


def convolutions() -> Iterator[Sample]:
    yield sample("conv1d", input=t(4, 6, 5), weight=t(8, 6, 3), bias=t(8), padding=(1,))
    yield sample("conv1d", input=t(6, 5), weight=t(8, 6, 3), bias=t(8))
    yield sample("conv1d", input=t(3, 4, 12), weight=t(6, 4, 2), bias=t(6), stride=(3,))
    yield sample("conv2d", input=t(4, 6, 7, 5), weight=t(8, 6, 3, 3), bias=t(8), padding=(1, 1))
    yield sample("conv2d", input=t(4, 6, 7, 5), weight=t(8, 6, 3, 3), bias=None, padding=(1, 1))
    yield sample("conv2d", input=t(4, 6, 7, 5, grad=False), weight=t(8, 6, 3, 3), bias=t(8), padding=(1, 1))
    yield sample("conv2d", input=t(2, 3, 4, 5), weight=t(6, 3, 1, 1), bias=t(6))
    yield sample("conv2d", input=t(2, 3, 8, 6), weight=t(4, 3, 2, 2), bias=t(4), stride=(2, 2))
    yield sample("conv3d", input=t(2, 3, 2, 3, 4), weight=t(4, 3, 1, 2, 2), bias=t(4))
    for name, image, kernel in (("conv1d", (4, 6, 5), (3,)), ("conv2d", (4, 6, 7, 5), (3, 3)), ("conv3d", (2, 3, 3, 5, 4), (3, 3, 1))):
        yield sample(f"{name}.padding", input=t(*image), weight=t(8, image[1], *kernel), bias=t(8), padding="same")
    yield sample("conv2d.padding", input=t(2, 3, 4, 5), weight=t(6, 3, 1, 2), bias=None, padding="valid")
    yield sample("conv1d.padding", input=t(3, 4, 5), weight=t(6, 4, 2), bias=t(6), padding="same")  # more behind than in front


def grouped() -> Iterator[Sample]:
    """In groups of channels: of several, of one (depthwise), with several filters for each channel."""
    yield sample("conv2d", input=t(4, 6, 7, 5), weight=t(8, 3, 3, 3), bias=t(8), groups=2)
    yield sample("conv2d", input=t(3, 8, 5, 5), weight=t(12, 2, 3, 3), bias=None, groups=4)
    yield sample("conv2d", input=t(3, 6, 5, 4), weight=t(6, 1, 3, 3), bias=t(6), groups=6, padding=(1, 1))
    yield sample("conv1d", input=t(3, 4, 5), weight=t(12, 1, 3), bias=t(12), groups=4)
    yield sample("conv3d.padding", input=t(2, 4, 3, 4, 3), weight=t(4, 1, 3, 1, 3), bias=t(4), groups=4, padding="same")
    yield sample("conv_transpose1d", input=t(3, 4, 5), weight=t(4, 3, 3), bias=t(12), groups=4)
    yield sample("conv_transpose2d.input", input=t(3, 8, 3, 4), weight=t(8, 3, 3, 3), bias=t(12), groups=4, stride=(2, 2), output_padding=(1, 1))


def transposed() -> Iterator[Sample]:
    yield sample("conv_transpose1d", input=t(4, 6, 5), weight=t(6, 8, 3), bias=t(8), stride=(2,), output_padding=(1,))
    yield sample("conv_transpose1d", input=t(4, 6, 5), weight=t(6, 8, 2), bias=None, stride=(3,), output_padding=(1,))
    yield sample("conv_transpose2d.input", input=t(4, 6, 3, 5), weight=t(6, 8, 3, 3), bias=t(8), stride=(2, 2), padding=(1, 1), output_padding=(1, 0))
    yield sample("conv_transpose2d.input", input=t(2, 6, 3, 4), weight=t(6, 4, 2, 2), bias=t(4), stride=(2, 2))
    yield sample("conv_transpose2d.input", input=t(6, 3, 4), weight=t(6, 4, 2, 2), bias=t(4))
    yield sample("conv_transpose3d.input", input=t(2, 3, 2, 3, 4), weight=t(3, 4, 1, 2, 2), bias=t(4), stride=(1, 2, 2))
    for turned, weight in ((False, (8, 3, 3, 3)), (True, (6, 4, 3, 3))):
        constants = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "output_padding": (0, 0)}
        yield sample("convolution", input=t(4, 6, 7, 5), weight=t(*weight), bias=t(8), transposed=turned, groups=2, **constants)
