"""Forward functions that set attributes when they are called first: captured as they are from then on, and the module stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hapx.errors import CaptureError
from hapx.graph.capture import capture


class Lazy(nn.Module):
    """Notes its input's width, and installs a hook, when it is called first."""

    def __init__(self, *, differs: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.ready = False
        self.widths: dict[str, int] = {"other": 3}
        self.differs = differs

    def forward(self, x: Tensor) -> Tensor:
        fresh = not self.ready
        if fresh:
            self.inner.register_forward_hook(lambda module, args, output: None)
            self.widths["x"] = x.shape[-1]
            self.ready = True
        h = self.inner(x)
        return (h * 2 if fresh and self.differs else h).sum()


class Counting(Lazy):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_forward_that_settles_is_captured() -> None:
    model = Lazy()
    graph = capture(model, torch.ones(2, 4))
    assert [n.call.op for n in graph.nodes] == ["aten.linear", "aten.sum"]
    assert not model.ready
    assert model.widths == {"other": 3}
    assert not model.inner._forward_hooks
    model(torch.ones(2, 4))
    assert capture(model, torch.ones(2, 4)).hash == graph.hash
    assert len(model.inner._forward_hooks) == 1


@pytest.mark.parametrize("model", [Lazy(differs=True), Counting()], ids=["another computation", "never settles"])
def test_a_forward_that_computes_something_else_later_is_refused(model: nn.Module) -> None:
    with pytest.raises(CaptureError, match="forward changes"):
        capture(model, torch.ones(2, 4))
    assert not model.ready
    assert not model.inner._forward_hooks


class Table(nn.Module):
    """Makes a buffer as long as its input when it is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] != x.shape[0]:
            self.table = torch.arange(4.0 * x.shape[0]).view(-1, 4)
        return (self.inner(x) * self.table).sum()


def test_a_buffer_that_gets_another_shape_is_refused_until_it_has_it() -> None:
    model, x = Table(), torch.ones(2, 4)
    told = r"Table: forward makes the buffer 'table' anew, float32 of shape \[2, 4\] where it was float32 of shape \[1, 4\]; call the model once"
    with pytest.raises(CaptureError, match=told):
        capture(model, x)
    assert model.table.shape == (1, 4)
    model(x)
    assert [n.call.op for n in capture(model, x).nodes] == ["aten.linear", "aten.mul", "aten.sum"]


class Filled(nn.Module):
    """Registers a table when it is called first."""

    def __init__(self, *, empty: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        if empty:
            self.inner.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self.inner, "table", None) is None:
            self.inner.register_buffer("table", torch.arange(4.0), persistent=False)
        return (self.inner(x) * self.inner.table).sum()


@pytest.mark.parametrize("empty", [False, True])
def test_a_table_of_the_first_call_is_named_and_refused_until_it_is_there(empty: bool) -> None:
    model, x = Filled(empty=empty), torch.ones(2, 4)
    with pytest.raises(CaptureError, match=r"^Filled: forward changes inner\.table.*if only the first call makes it, call the model once") as refused:
        capture(model, x)
    assert "_buffers" not in str(refused.value)
    model(x)
    assert [n.call.op for n in capture(model, x).nodes] == ["aten.linear", "aten.mul", "aten.sum"]
