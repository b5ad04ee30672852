"""Recurrent networks: the batch is split, time is not; what draws its own masks is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hapx.errors import UnsupportedOperatorError
from hapx.graph.capture import capture
from hapx.theory.grains import find_grains
from hapx.theory.samples import samples_of
from support.claims import claims


class Dropping(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].square().mean()


def test_dropout_between_layers_is_refused_with_a_way_out() -> None:
    graph = capture(Dropping(), (torch.randn(3, 2, 4),))
    with pytest.raises(UnsupportedOperatorError, match=r"^lstm \(.*aten.lstm.input draws dropout masks.*; use one recurrent module per layer"):
        find_grains(graph)


def test_without_training_there_is_no_dropout() -> None:
    assert find_grains(capture(Dropping().eval(), (torch.randn(3, 2, 4),))).rules


@pytest.mark.parametrize("target", ["aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input"])
def test_only_the_batch_is_split(target: str) -> None:
    for s in samples_of(target):
        split = [rule for rule in claims(s) if "S" in rule]
        dim = 0 if s.call["batch_first"] else 1
        assert split
        assert all(rule.startswith(f"S{dim}[3]") for rule in split), split
