"""Tensors made from numbers."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Sample, dtype, sample, t, words


def creation() -> Iterator[Sample]:
    yield sample("arange", end=6)
    yield sample("arange.start", start=1, end=6)
    yield sample("arange.start_step", start=1, end=9, step=2)
    yield sample("zeros", size=(4, 6), dtype=dtype("float64"))
    yield sample("ones", size=(4, 6), dtype=dtype("float64"))
    yield sample("full", size=(4, 6), fill_value=2.0, dtype=dtype("float64"))
    yield sample("eye", n=4)
    yield sample("eye.m", n=4, m=6)
    yield sample("scalar_tensor", s=2.0)
    yield sample("linspace", start=0.0, end=1.0, steps=6)
    yield sample("new_zeros", self=t(5), size=(4, 6))
    yield sample("new_ones", self=t(5), size=(4, 6))
    yield sample("new_full", self=t(5), size=(4, 6), fill_value=2.0)
    yield sample("logspace", start=0.0, end=1.0, steps=6)
    yield sample("range", start=0, end=5)
    yield sample("range.step", start=0, end=5, step=2)
    for name in words("tril_indices triu_indices"):
        yield sample(name, row=4, col=6, offset=1)
    for name in words("hann_window hamming_window bartlett_window blackman_window kaiser_window"):
        yield sample(name, window_length=6)
        yield sample(f"{name}.periodic", window_length=6, periodic=False)
    yield sample("kaiser_window.beta", window_length=6, periodic=True, beta=3.0)
