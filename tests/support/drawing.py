"""Models that draw random tensors in forward, as people write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Drawing(nn.Module):
    """Float64, rows of 8 numbers in."""

    width = 8

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, ...]:
        g = torch.Generator().manual_seed(seed)
        return (torch.randn(batch, self.width, dtype=torch.float64, generator=g),)


class VAE(Drawing):
    """A variational autoencoder: the code is drawn around its mean (Kingma, Welling 2013)."""

    def __init__(self, hidden: int = 12, code: int = 4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 2 * code)).double()
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.Tanh(), nn.Linear(hidden, 8)).double()

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        code = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return F.mse_loss(self.decoder(code), x) + 0.1 * divergence


class Diffusion(Drawing):
    """A denoiser: a time and noise are drawn per sample (Ho et al. 2020, algorithm 1)."""

    def __init__(self, times: int = 16, hidden: int = 12):
        super().__init__()
        self.times = times
        self.time = nn.Embedding(times, hidden).double()
        self.into, self.out = nn.Linear(8, hidden).double(), nn.Linear(hidden, 8).double()
        self.register_buffer("kept", torch.linspace(0.99, 0.01, times, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, self.times, (x.shape[0],), device=x.device)
        noise = torch.randn(x.shape, dtype=x.dtype, device=x.device)
        kept = self.kept[t][:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.out(F.silu(self.into(noisy) + self.time(t))), noise)


class StochasticDepth(Drawing):
    """Residual branches that are left out per sample (Huang et al. 2016), in the two usual spellings."""

    def __init__(self, layers: int = 4, hidden: int = 12, rate: float = 0.4, recompute: bool = False):
        super().__init__()
        self.rate, self.recompute = rate, recompute
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, hidden), nn.GELU(), nn.Linear(hidden, 8)).double() for _ in range(layers))
        self.head = nn.Linear(8, 3).double()

    def dropped(self, y: Tensor, k: int) -> Tensor:
        if not self.training:
            return y
        shape = [y.shape[0]] + [1] * (y.dim() - 1)
        if k % 2:
            keep = torch.empty(shape, dtype=y.dtype, device=y.device).bernoulli_(1 - self.rate)
            return y * keep.div_(1 - self.rate)
        return y.div(1 - self.rate) * torch.floor(1 - self.rate + torch.rand(shape, dtype=y.dtype, device=y.device))

    def block(self, x: Tensor, k: int) -> Tensor:
        return x + self.dropped(self.layers[k](x), k)

    def forward(self, x: Tensor) -> Tensor:
        for k in range(len(self.layers)):
            x = checkpoint(self.block, x, k, use_reentrant=False) if self.recompute and k % 2 else self.block(x, k)
        return self.head(x).square().mean()


class Masked(Drawing):
    """A masked autoencoder: the order in which places are kept is that of noise (He et al. 2021)."""

    def __init__(self, places: int = 6, kept: int = 2, hidden: int = 4):
        super().__init__()
        self.places, self.kept = places, kept
        self.embed = nn.Linear(1, hidden).double()
        self.head = nn.Linear(hidden, 1).double()
        self.token = nn.Parameter(torch.randn(1, 1, hidden, dtype=torch.float64))
        self.width = places

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x[..., None])
        order = torch.argsort(torch.rand(x.shape[0], self.places, device=x.device), dim=1)
        back = torch.argsort(order, dim=1)
        some = torch.gather(h, 1, order[:, : self.kept, None].expand(-1, -1, h.shape[2]))
        rest = self.token.expand(x.shape[0], self.places - self.kept, -1)
        full = torch.gather(torch.cat([some, rest], 1), 1, back[..., None].expand(-1, -1, h.shape[2]))
        is_hidden = (back >= self.kept).to(x.dtype)
        return ((self.head(full.tanh())[..., 0] - x).square() * is_hidden).mean()


class Gates(Drawing):
    """Noisy gates over a few linear experts, a Gumbel softmax, a randomised leaky ReLU, and one sampled class per row."""

    def __init__(self, experts: int = 3):
        super().__init__()
        self.gate, self.spread = nn.Linear(8, experts).double(), nn.Linear(8, experts).double()
        self.experts = nn.Parameter(torch.randn(experts, 8, 5, dtype=torch.float64) * 0.3)
        self.slope, self.head = nn.RReLU(), nn.Linear(5, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x) + torch.normal(0.0, 1.0, (x.shape[0], self.spread.out_features), dtype=x.dtype, device=x.device) * F.softplus(
            self.spread(x)
        )
        y = self.slope(torch.einsum("be,bi,eio->bo", F.gumbel_softmax(logits, tau=0.7), x, self.experts))
        out = self.head(y + torch.empty_like(y).uniform_(-0.1, 0.1))
        return F.cross_entropy(out, torch.multinomial(out.detach().softmax(-1), 1)[:, 0])


class Static(Drawing):
    """A signal of complex numbers through noise, with phases that are drawn evenly from a square."""

    def __init__(self, hidden: int = 6):
        super().__init__()
        self.real, self.imag = nn.Linear(8, hidden).double(), nn.Linear(8, hidden).double()

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.real(x), self.imag(x))
        received = z * (1 + torch.randn_like(z)) + 0.1 * torch.rand(z.shape, dtype=z.dtype, device=x.device)
        return (received - z).abs().mean() + received.angle().square().mean()


DRAWING: Mapping[str, Callable[[], Drawing]] = {
    "vae": VAE, "diffusion": Diffusion, "stochastic depth": StochasticDepth, "recomputed": partial(StochasticDepth, recompute=True), "masked": Masked,
    "gates": Gates, "static": Static,
}  # fmt: skip
