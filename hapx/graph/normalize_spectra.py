"""Of complex numbers: adjoints as conjugates of transposes, and signals from short-time Fourier transforms as what torch.istft computes, but for its
look at the values of the window.

In: the arguments of torch.istft. Out: the signals. With frames f_t = the inverse transform of spectrum t times the window w, and hops of h,

    out[n] = sum over t of f_t[n - t h] / sum over t of w[n - t h]^2

where torch raises an error if a denominator is (nearly) 0; here such samples are not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hapx.graph.normalize_bags import Compute
from hapx.graph.normalize_flatten import Slot

TARGET = "aten.istft.default"

aten = torch.ops.aten


def adjoint(bound: Mapping[str, Any], compute: Compute) -> Slot:
    """Of complex matrices."""
    return compute(aten.transpose.int, self=compute(aten._conj.default, self=bound["self"]), dim0=-2, dim1=-1)


def signals(bound: Mapping[str, Any], compute: Compute) -> Slot:
    """Real signals, one per row of the spectra (batch?, frequencies, frames)."""
    spectra: torch.Tensor = bound["self"].fake
    size, frames = bound["n_fft"], spectra.shape[-1]
    hop, batch = bound["hop_length"] or size // 4, tuple(spectra.shape[:-2])
    span = size + hop * (frames - 1)
    rows = compute(aten.transpose.int, self=bound["self"], dim0=-2, dim1=-1)
    if spectra.shape[-2] != size // 2 + 1:  # both halves are given, of which one is enough
        rows = compute(aten.slice.Tensor, self=rows, dim=-1, start=0, end=size // 2 + 1)
    pieces = compute(aten.fft_irfft.default, self=rows, n=size, norm="ortho" if bound["normalized"] else None)
    window = _window(bound, size, compute)
    if window is not None:
        pieces = compute(aten.mul.Tensor, self=pieces, other=window)
        squares = compute(aten.square.default, self=window)
    else:
        squares = compute(aten.ones.default, size=[size], dtype=spectra.dtype.to_real(), device=spectra.device)
    total = _overlapped(pieces, size, hop, span, compute)
    weight = _overlapped(compute(aten.expand.default, self=squares, size=[frames, size]), size, hop, span, compute)
    start = size // 2 if bound["center"] else 0
    end = start + bound["length"] if bound["length"] is not None else span - start
    if (start, end) != (0, span):
        total, weight = (compute(aten.slice.Tensor, self=t, dim=-1, start=start, end=end) for t in (total, weight))
    found = compute(aten.div.Tensor, self=total, other=weight)
    if end > span:
        found = compute(aten.constant_pad_nd.default, self=found, pad=[0, end - span])
    assert found.fake is not None and tuple(found.fake.shape[:-1]) == batch, (found.fake, batch)
    return found


def _window(bound: Mapping[str, Any], size: int, compute: Compute) -> Slot | None:
    """As wide as a frame, in its middle; None: all ones."""
    width = bound["win_length"] or size
    window: Slot | None = bound["window"]
    if width == size:
        return window
    if window is None:
        spectra: torch.Tensor = bound["self"].fake
        window = compute(aten.ones.default, size=[width], dtype=spectra.dtype.to_real(), device=spectra.device)
    left = (size - width) // 2
    return compute(aten.constant_pad_nd.default, self=window, pad=[left, size - width - left])


def _overlapped(pieces: Slot, size: int, hop: int, span: int, compute: Compute) -> Slot:
    """Frames (batch?, frames, size) added up where they lie: (batch?, span)."""
    assert pieces.fake is not None
    columns = compute(aten.transpose.int, self=pieces, dim0=-2, dim1=-1)
    window = {"kernel_size": [1, size], "dilation": [1, 1], "padding": [0, 0], "stride": [1, hop]}
    added = compute(aten.col2im.default, self=columns, output_size=[1, span], **window)
    return compute(aten.reshape.default, self=added, shape=[*pieces.fake.shape[:-2], span])
