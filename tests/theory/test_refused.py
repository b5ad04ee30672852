"""What models use and cannot be distributed is refused before anything runs, with the line that does it; what is only repeated is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.errors import CaptureError, UnsupportedOperatorError
from hapx.graph.capture import capture
from hapx.theory.derive import ReplicatedOperatorWarning, check_operators

Body = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """`body(rows, labels)` after a linear layer."""

    def __init__(self, body: Body):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.body = body

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.body(self.linear(x), labels).sum()


def check(body: Body) -> None:
    check_operators(capture(Model(body), (torch.ones(8, 6, dtype=torch.float64), torch.arange(8) % 6)))


RANDOM: dict[str, Body] = {
    "poisson": lambda h, y: h * torch.poisson(torch.ones(8, 6, dtype=torch.float64)),
    "binomial": lambda h, y: h * torch.binomial(torch.full((8, 6), 5.0), torch.full((8, 6), 0.5)),
    "cauchy": lambda h, y: h * torch.empty(8, 6, dtype=torch.float64).cauchy_(),
    "random": lambda h, y: h * torch.empty(8, 6, dtype=torch.float64).random_(),
}
BY_VALUE: dict[str, Body] = {
    "masked_select": lambda h, y: torch.masked_select(h, h > 0),
    "boolean indexing": lambda h, y: h[h > 0],
    "nonzero": lambda h, y: h * h.nonzero().sum(),
    "unique": lambda h, y: h * y.unique().sum(),
    "bincount": lambda h, y: h * torch.bincount(y).sum(),
    "repeat_interleave by a tensor": lambda h, y: h.repeat_interleave(y, 0),
    "istft": lambda h, y: torch.istft(torch.complex(h.T, h.T), 6, onesided=False, return_complex=True).abs(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_values_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=rf"test_refused\.py.*aten\.{name}.* is random and has no rule"):
        check(RANDOM[name])


@pytest.mark.parametrize("name", BY_VALUE)
def test_shapes_and_branches_that_depend_on_values_are_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)test_refused\.py.*the computation depends on the values of a tensor.*use torch.where or a mask"):
        check(BY_VALUE[name])


def test_targets_without_rows_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)targets of ctc_loss lie one behind the other.*pass rows, padded"):
        check(lambda h, y: F.ctc_loss(h.view(4, 2, 6).log_softmax(-1), y[1:4], torch.tensor([4, 4]), torch.tensor([2, 1])))


def test_an_operator_without_a_rule_is_named() -> None:
    with pytest.warns(ReplicatedOperatorWarning, match=r"aten\.block_diag\.default has no rule: it runs whole on every device.*test_refused\.py"):
        check(lambda h, y: torch.block_diag(h, h))
