"""A model of two characters and devices that are unlike in more than speed, so that one ratio for all of the model is a compromise.

`TwoParts`: products, few numbers in between, then chains of small operators on many numbers. "counter" devices multiply quickly and move bytes
slowly, "mover" devices the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hapx.cluster.spec import ClusterSpec
from support.models import _initialise


class TwoParts(nn.Module):
    """`products`: linear layers with bottleneck 4. `waves`: norms of (batch, 4, spread). Mean of squares."""

    def __init__(self, width: int = 16, hidden: int = 64, spread: int = 24, dropout: float = 0.0, *, seed: int = 0):
        super().__init__()
        self.width = width
        last = [nn.Dropout(dropout)] if dropout else []
        self.products = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), *last, nn.Linear(hidden, 4))
        self.scale = nn.Parameter(torch.ones(spread))
        self.waves = nn.ModuleList(nn.LayerNorm(spread) for _ in range(3))
        _initialise(self, seed, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.products(x).unsqueeze(-1) * self.scale)
        for norm in self.waves:
            h = torch.tanh(norm(h))
        return (h * h).mean()

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor]:
        return (torch.randn(batch, self.width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),)


def unlike(*machines: Sequence[str], inter: str = "1 GB/s", memory: str = "1 GiB") -> ClusterSpec:
    """A machine per list of "counter" and "mover" devices. memory: of the counters."""
    return ClusterSpec.load(
        {
            "name": "unlike",
            "machines": [{"name": f"m{i}", "devices": list(devices)} for i, devices in enumerate(machines)],
            "device_types": {
                "counter": {"flops": 8e6, "memory": memory, "memory_bandwidth": "4 MB/s"},
                "mover": {"flops": 2e6, "memory": "1 GiB", "memory_bandwidth": "16 MB/s"},
            },
            "network": {"inter": {"bandwidth": inter, "latency": "1 us"}, "intra": {"bandwidth": "10 GB/s", "latency": "1 us"}},
        }
    )
