"""Recurrent networks train as on one device: in both directions, in layers, projected, from initial states that are inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hapx.planner import plan_module
from hapx.restriction import Restriction
from support.clusters import FOUR
from support.equivalence import assert_equivalent
from support.models import _initialise

BATCH, STEPS, WIDTH = 7, 4, 6


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


MODELS: dict[str, Callable[[], Network]] = {
    "lstm": partial(Network, nn.LSTM, num_layers=2, bidirectional=True, batch_first=True),
    "lstm, projected": partial(Network, nn.LSTM, proj_size=3),
    "lstm, given states": partial(Network, nn.LSTM, states=2, batch_first=True),
    "gru": partial(Network, nn.GRU, num_layers=2, bias=False, batch_first=True),
    "rnn": partial(Network, nn.RNN, nonlinearity="relu", bidirectional=True),
    "rnn, given state": partial(Network, nn.RNN, states=1),
}
PLANS: dict[str, Restriction | str] = {
    "even": Restriction("even", mesh="flat", ratios="even", split="batch"),
    "4:2:1:0": Restriction("zero length", mesh="flat", ratios=(4.0, 2.0, 1.0, 0.0), split="batch"),
    "in shards": Restriction("freed", mesh="flat", ratios=(4.0, 2.0, 1.0, 0.0), split="batch", storage="sharded-free"),
}


def example(model: str, step: int) -> tuple[Tensor, ...]:
    return MODELS[model]().example(BATCH, seed=step)


@pytest.mark.parametrize("strategy", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_trains_as_one_device(model: str, strategy: str) -> None:
    inputs = partial(example, model)
    plan = plan_module(MODELS[model](), FOUR, inputs(0), strategy=PLANS[strategy])
    targets = {i.triple.body.target for i in plan.stages[0].program.instructions if hasattr(i.triple.body, "target") and any(i.triple.work)}
    assert any(t.endswith(".input") for t in targets), targets
    uses = assert_equivalent(MODELS[model], inputs, plan, optimizer="adamw")
    assert uses.zero_length == (strategy != "even")
    assert (uses.freed > 0) == (strategy == "in shards")
