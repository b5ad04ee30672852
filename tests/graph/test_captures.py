"""Graphs of micro-batches, some of them captured by a copy of the process meanwhile."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from hapx import processes
from hapx.errors import CaptureError
from hapx.graph.capture import capture
from hapx.graph.captures import Captures, first_rows


class Net(nn.Module):
    """`least`: rows below which its forward fails."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.layer, self.least = nn.Linear(4, 3), least

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[0] < self.least:
            raise ValueError("too few rows")
        return nn.functional.mse_loss(self.layer(x), y)


EXAMPLE = torch.zeros(8, 4), torch.zeros(8, 3)


def test_micro_batches_are_those_of_the_first_rows() -> None:
    captures = Captures(net := Net(), EXAMPLE)
    assert captures.whole().hash == capture(net, EXAMPLE).hash
    assert captures.part(8, 4) == capture(net, first_rows(EXAMPLE, 8, 2))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_copy_captures_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    captures, asked = Captures(net := Net(), EXAMPLE), list[int]()

    def numbers(batch: int) -> tuple[int, ...]:
        asked.append(batch)
        return (4, 2)

    here = capture(net, first_rows(EXAMPLE, 8, 2)), capture(net, first_rows(EXAMPLE, 8, 4)), capture(net, first_rows(EXAMPLE, 8, 1))
    with captures.ahead(numbers):
        assert captures.coming == (4, 2) and asked == [8]
        with monkeypatch.context() as patched:
            patched.setattr("hapx.graph.captures.capture", None)  # of this process: the copy has its own
            assert (captures.part(8, 4), captures.part(8, 2)) == here[:2]
        assert captures.part(8, 8) == here[2], "one that was not expected"
    assert captures.coming == ()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_copy_whose_captures_nobody_wants_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    captures, ended = Captures(Net(), EXAMPLE), list[int]()
    end = processes._Copy.end
    monkeypatch.setattr(processes._Copy, "end", lambda copy: (ended.append(copy.process), end(copy)))
    with captures.ahead(lambda batch: (4, 2)):
        assert captures.coming == (4, 2) and not ended
        assert captures.part(8, 8).batch == 1 and captures.coming == ()
        with pytest.raises(ProcessLookupError):
            os.kill(ended[0], 0)
        assert captures.part(8, 4).batch == 2
    assert len(ended) == 1


def test_without_a_copy_everything_is_captured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_cores", lambda: 1)
    captures = Captures(net := Net(), EXAMPLE)
    with captures.ahead(lambda batch: (4,)):
        assert captures.coming == ()
        assert captures.part(8, 4) == capture(net, first_rows(EXAMPLE, 8, 2))


def test_mistakes_are_told_where_they_are_asked_for() -> None:
    captures = Captures(Net(least=4), EXAMPLE)
    with captures.ahead(lambda batch: (4, 2)):
        captures.whole()
        with pytest.raises(CaptureError, match="too few rows"):
            captures.part(8, 4)
        assert captures.part(8, 2).batch == 4, "though the copy came to nothing"
    with Captures(Net(), ("no tensor",)).ahead(lambda batch: pytest.fail("of no batch")):
        pass
