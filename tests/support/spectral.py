"""Models that compute with complex numbers: rotary embeddings, Fourier operators, a state space, a spectral loss, complex layers. All in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.models import _initialise


def _drawn(seed: int, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


def _complex(seed: int, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.complex(*_drawn(seed, shape, shape)) / math.sqrt(shape[0]))


class Rotary(nn.Module):
    """Attention whose positions turn pairs of numbers (Su et al. 2021), by complex numbers as in the reference code of Llama; the angles are a
    tensor that is neither parameter nor buffer."""

    def __init__(self, width: int = 8, heads: int = 2, context: int = 8):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        _initialise(self, 0, torch.float64)
        size = width // heads
        angles = torch.outer(torch.arange(context), 100.0 ** -(torch.arange(0, size, 2) / size)).double()
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[: x.shape[1], None].to(x.device)).flatten(3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (self.turned(q), self.turned(k), v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.mse_loss(self.out(h), y)

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, ...]:
        return _drawn(seed, (batch, 6, 8), (batch, 6, 8))


class Fourier(nn.Module):
    """A Fourier operator (Li et al. 2021): the low frequencies of an image times complex weights, written into slices."""

    def __init__(self, width: int = 4, modes: int = 2):
        super().__init__()
        self.modes = modes
        self.lift, self.across, self.head = nn.Conv2d(1, width, 1), nn.Conv2d(width, width, 1), nn.Conv2d(width, 1, 1)
        _initialise(self, 0, torch.float64)
        self.low, self.high = _complex(1, width, width, modes, modes), _complex(2, width, width, modes, modes)

    def spectral(self, x: Tensor) -> Tensor:
        m, found = self.modes, torch.fft.rfft2(x)
        out = torch.zeros_like(found)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, :m, :m], self.low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(out, s=x.shape[-2:])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.lift(x)
        for _ in range(2):
            h = F.gelu(self.spectral(h) + self.across(h))
        return F.mse_loss(self.head(h), y)

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, ...]:
        return _drawn(seed, (batch, 1, 6, 6), (batch, 1, 6, 6))


class StateSpace(nn.Module):
    """Diagonal state spaces (S4D, Gu et al. 2022): a kernel made of complex exponentials, a convolution by Fourier transforms."""

    def __init__(self, width: int = 4, states: int = 3):
        super().__init__()
        self.pairs = nn.Parameter(torch.empty(width, states, 2))
        self.step, self.decay, self.skip = (nn.Parameter(torch.empty(s)) for s in ((width,), (width, states), (width,)))
        self.read = nn.Linear(width, width)
        _initialise(self, 0, torch.float64)
        self.register_buffer("frequency", math.pi * torch.arange(states, dtype=torch.float64))

    def kernel(self, length: int) -> Tensor:
        a = -self.decay.exp() + 1j * self.frequency
        step = self.step.exp().unsqueeze(-1)
        c = torch.view_as_complex(self.pairs) * ((a * step).exp() - 1.0) / a
        powers = ((a * step).unsqueeze(-1) * torch.arange(length, device=a.device)).exp()
        return 2 * torch.einsum("hn, hnl -> hl", c, powers).real

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        n = x.shape[-1]
        product = torch.fft.rfft(x, n=2 * n) * torch.fft.rfft(self.kernel(n), n=2 * n)
        h = torch.fft.irfft(product, n=2 * n)[..., :n] + x * self.skip.unsqueeze(-1)
        return F.mse_loss(self.read(F.gelu(h).transpose(1, 2)), y)

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, ...]:
        return _drawn(seed, (batch, 4, 10), (batch, 10, 4))


class Separator(nn.Module):
    """A mask over the spectrogram of a mixture gives a signal, which is compared, and its spectrogram, with and without logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.across, self.along = nn.Linear(5, 5), nn.Conv1d(5, 5, 3, padding=1)
        _initialise(self, 0, torch.float64)
        self.register_buffer("window", torch.hann_window(8, dtype=torch.float64))

    def spectra(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.stft(x, 8, 4, window=self.window, return_complex=True)
        return z, (z.real.square() + z.imag.square() + 1e-6).sqrt()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z, size = self.spectra(x)
        mask = torch.sigmoid(self.along(F.relu(self.across(size.transpose(1, 2))).transpose(1, 2)))
        signal = torch.istft(mask * z, 8, 4, window=self.window, length=x.shape[-1])
        found, wanted = self.spectra(signal)[1], self.spectra(y)[1]
        return F.mse_loss(signal, y) + F.l1_loss(found, wanted) + F.mse_loss(found.log(), wanted.log())

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, ...]:
        return _drawn(seed, (batch, 24), (batch, 24))


class Phasors(nn.Module):
    """Complex layers with modReLU (Arjovsky et al. 2016) between them; the loss reads magnitudes and phases."""

    def __init__(self, width: int = 6, hidden: int = 8, classes: int = 3):
        super().__init__()
        self.a, self.b, self.c = _complex(1, hidden, width), _complex(2, classes, hidden), _complex(3, classes)
        self.bias = nn.Parameter(_drawn(4, (hidden,))[0])

    def forward(self, x: Tensor, y: Tensor, classes: Tensor) -> Tensor:
        h = F.linear(torch.complex(x, y), self.a)
        size = h.abs()
        h = F.relu(size + self.bias) * h / (size + 0.1)
        z = F.linear(h, self.b, self.c)
        return F.cross_entropy((z * z.conj()).real, classes) + 0.1 * z.angle().square().mean()

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, ...]:
        classes = torch.randint(3, (batch,), generator=torch.Generator().manual_seed(seed))
        return (*_drawn(seed, (batch, 6), (batch, 6)), classes)


SPECTRAL: dict[str, Callable[[], nn.Module]] = {
    "rotary": Rotary, "fourier": Fourier, "state space": StateSpace, "separator": Separator, "phasors": Phasors,
}  # fmt: skip
