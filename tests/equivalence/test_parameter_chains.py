"""Parameters that reach their use over several conversions, and sufficient factors without width: found by random programs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hapx.collectives.composites import linear_sfb
from hapx.collectives.threads import ThreadCommunicator, run_threads
from hapx.layout import Block
from hapx.plan import Plan
from hapx.states import Placement
from support.equivalence import assert_equivalent
from support.models import MLP
from support.plans import Draft, cut, flat, mlp_graph, mse_sum, place, sharded

WIDTHS = (5, 8, 3)
model = partial(MLP, WIDTHS)
MESH = flat(2)
ROWS = place(sharded(MESH, 0, 8))
LENGTHS = {cut(MESH, 0, 8): (6, 2)}


def inputs(step: int) -> tuple[Tensor, ...]:
    return model().example(8, seed=step)


def batch_split(stored: Placement, *chain: Placement) -> Plan:
    """The first weight goes through `chain` to Replicated; the other parameters from Invariant to Replicated at once."""
    graph = mlp_graph(WIDTHS, 8)
    draft = Draft(graph, MESH, LENGTHS, {"layers.0.weight": stored})
    for at in (*chain, place("R")):
        draft.convert("layers.0.weight", at)
    for name in ("layers.0.bias", "layers.1.weight", "layers.1.bias"):
        draft.convert(name, place("R"))
    for name in ("x", "targets"):
        draft.convert(name, ROWS)
    for node in range(3):
        draft.call(node, ROWS, work=(cut(MESH, 0, 8),))
    draft.call(3, place("P"), body=mse_sum(graph), work=(cut(MESH, 0, 8),))
    draft.convert("mse_loss", place("I"))
    return draft.plan()


@pytest.mark.parametrize(
    "chain",
    [("I",), ("I", ROWS, "I"), ("I", "R", "I"), ("I", "P", "I"), (ROWS, "I"), (ROWS, "P", "I")],
    ids=lambda chain: "-".join(p if isinstance(p, str) else "S" for p in chain),
)
def test_gradients_flow_back_through_every_conversion(chain: tuple[str | Placement, ...]) -> None:
    """Only a parameter as it is stored enters the synchroniser; a copy's cotangent goes on to the conversions before it."""
    stored, *rest = (place(p) if isinstance(p, str) else p for p in chain)
    assert_equivalent(model, inputs, batch_split(stored, *rest))


@pytest.mark.parametrize("width, out", [(0, 3), (4, 0), (0, 0)])
def test_sufficient_factors_without_width(width: int, out: int) -> None:
    """A device that has no columns of the weight takes part in the gathers."""

    def train(communicator: ThreadCommunicator) -> tuple[Tensor, ...]:
        x = torch.ones(2 - communicator.rank, width, dtype=torch.float64, requires_grad=True)
        weight = torch.ones(out, width, dtype=torch.float64, requires_grad=True)
        bias = torch.ones(out, dtype=torch.float64, requires_grad=True)
        linear_sfb(x, weight, bias, communicator, Block(0, 1, (2, 1), 1)).sum().backward()
        assert x.grad is not None and weight.grad is not None and bias.grad is not None
        return x.grad, weight.grad, bias.grad

    for rank, (of_x, of_weight, of_bias) in enumerate(run_threads(2, train)):
        assert of_x.shape == (2 - rank, width)
        assert of_weight.shape == (out, width)
        assert of_bias.tolist() == [3.0] * out
