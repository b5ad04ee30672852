"""Complex numbers and Fourier transforms."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Draw, Reason, Sample, Values, dtype, sample, t, words


def c(*shape: int, values: Values = Values.NORMAL, grad: bool = True) -> Draw:
    """Complex numbers."""
    return t(*shape, values=values, grad=grad, dtype="complex128")


def complex_numbers() -> Iterator[Sample]:
    """What makes them and takes them apart, and what is computed with them as with real ones."""
    yield sample("view_as_complex", self=t(4, 6, 2))
    yield sample("view_as_real", self=c(4, 6))
    yield sample("complex", real=t(4, 6), imag=t(4, 6))
    yield sample("polar", abs=t(4, 6), angle=t(4, 6))
    for name in words("_conj conj conj_physical resolve_conj resolve_neg real imag angle abs sgn exp sqrt reciprocal neg tanh"):
        yield sample(name, self=c(4, 6))
    for name in words("real resolve_neg"):
        yield sample(name, self=t(4, 6))
    yield sample("angle", Reason.ZERO_GRADIENT, self=t(4, 6))
    yield sample("mul.Tensor", self=c(4, 6), other=c(6))
    yield sample("mul.Tensor", self=c(4, 6), other=t(4, 1))
    yield sample("mul.Tensor", self=t(4, 6), other=1j)
    yield sample("add.Tensor", self=t(4, 6), other=c(4, 6))
    yield sample("div.Tensor", self=c(4, 6), other=c(4, 6, values=Values.POSITIVE))
    yield sample("pow.Tensor_Scalar", self=c(4, 6), exponent=2)
    yield sample("to.dtype", self=t(4, 6), dtype=dtype("complex128"))
    yield sample("sum.dim_IntList", self=c(4, 6), dim=(1,))
    yield sample("mean.dim", self=c(4, 6), dim=(1,))
    yield sample("linalg_vector_norm", self=c(4, 6), dim=(1,))
    yield sample("linear", input=c(4, 6), weight=c(5, 6), bias=c(5))
    yield sample("matmul", self=c(4, 6), other=c(6, 5))
    yield sample("einsum", equation="bix,iox->box", tensors=[c(4, 6, 3), c(6, 5, 3)], path=None)
    yield sample("select_scatter", self=t(4, 6, 2), src=t(4, 2), dim=1, index=2)


def transforms() -> Iterator[Sample]:
    for name in words("fft ifft hfft irfft"):
        yield sample(f"fft_{name}", self=c(4, 6))
    for name in words("fft rfft ihfft"):
        yield sample(f"fft_{name}", self=t(4, 5, 6), dim=1)
    yield sample("fft_rfft", self=t(4, 6), n=10, norm="ortho")
    for name in words("fft2 ifft2 irfft2 hfft2"):
        yield sample(f"fft_{name}", self=c(4, 5, 6))
    for name in words("rfft2 ihfft2"):
        yield sample(f"fft_{name}", self=t(4, 5, 6), s=(4, 4))
    for name in words("fftn ifftn irfftn hfftn"):
        yield sample(f"fft_{name}", self=c(4, 5, 6), dim=(0, -1))
    for name in words("rfftn ihfftn"):
        yield sample(f"fft_{name}", self=t(4, 5, 6), s=(6,))
    yield sample("fft_fftn", self=c(4, 6))
    for name in words("fft_fftshift fft_ifftshift"):
        yield sample(name, self=t(4, 6), dim=(1,))
        yield sample(name, self=t(4, 6))
    yield sample("stft", self=t(4, 24), n_fft=8, hop_length=4, window=t(8, grad=False), return_complex=True)
    yield sample("stft", self=t(4, 24), n_fft=8, return_complex=True)
    yield sample("stft", self=t(24), n_fft=8, return_complex=True)
    yield sample("stft.center", self=t(4, 24), n_fft=8, window=t(8), return_complex=True)
    for name in words("fft_fftfreq fft_rfftfreq"):
        yield sample(name, n=6)
