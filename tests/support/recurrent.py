"""Recurrent networks for equivalence tests: in both directions, in layers, projected, from initial states that are inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from support.models import _initialise

STEPS, WIDTH = 4, 6


class Network(nn.Module):
    """A recurrent module on sequences; a linear layer reads its outputs and its last states."""

    def __init__(self, kind: type[nn.RNNBase], *, states: int = 0, **options: Any):
        super().__init__()
        self.network = kind(WIDTH, 8, **options)
        self.states = states
        self.read = nn.Linear(self.width(), 3)
        _initialise(self, 0, torch.float64)

    def width(self) -> int:
        net = self.network
        return (net.proj_size or net.hidden_size) * (2 if net.bidirectional else 1)

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        source = x if self.network.batch_first else x.transpose(0, 1)
        out, last = self.network(source, states[0] if len(states) == 1 else states or None)
        h = last[0] if isinstance(last, tuple) else last
        return self.read(out).square().mean() + h.sin().sum()

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(batch, STEPS, WIDTH), *[(self.network.num_layers, batch, 8)] * self.states]
        return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


RECURRENT: dict[str, Callable[[], Network]] = {
    "lstm": partial(Network, nn.LSTM, num_layers=2, bidirectional=True, batch_first=True),
    "lstm, projected": partial(Network, nn.LSTM, proj_size=3),
    "lstm, given states": partial(Network, nn.LSTM, states=2, batch_first=True),
    "gru": partial(Network, nn.GRU, num_layers=2, bias=False, batch_first=True),
    "rnn": partial(Network, nn.RNN, nonlinearity="relu", bidirectional=True),
    "rnn, given state": partial(Network, nn.RNN, states=1),
}
