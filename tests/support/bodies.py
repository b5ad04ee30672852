"""A model that does whatever a function says, for what capture refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Forward = Callable[["Model", Tensor], Any]


class Model(nn.Module):
    """`body(self, h)` after a linear layer; body may change `calls` and `seen`."""

    def __init__(self, body: Forward):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.body = body
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Any:
        return self.body(self, self.linear(x))
