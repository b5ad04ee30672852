"""Batches are cut into micro-batches and results put together again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hapx.errors import LaunchError
from hapx.ir import Graph, MicroBatches, Output
from hapx.rules import Site
from hapx.runtime.micro_batches import cut_batch, join, split
from hapx.states import PARTIAL, REPLICATED
from support.theories import mlp

MICRO = MicroBatches(3, ("x",), None, (("rows", Site(0)), ("blocks", Site(1, 2)), ("number", PARTIAL), ("same", REPLICATED)))


def test_tensors_with_the_batch_are_cut_and_others_are_whole() -> None:
    x, table, scale = torch.arange(6), torch.arange(4), torch.tensor(2.0)
    pieces = cut_batch((x, table, scale), 3)
    assert [p[0].tolist() for p in pieces] == [[0, 1], [2, 3], [4, 5]]
    assert all(p[1] is table and p[2] is scale for p in pieces)
    assert [p[0].tolist() for p in cut_batch((x, x), 2, (False, True))] == [x.tolist()] * 2


def test_the_graph_says_which_inputs_are_cut() -> None:
    x, table = torch.arange(6), torch.arange(6)
    pieces = split({"x": x, "table": table}, MICRO)
    assert [p["x"].tolist() for p in pieces] == [[0, 1], [2, 3], [4, 5]] and all(p["table"] is table for p in pieces)
    assert pieces[1]["x"].data_ptr() == x[2:].data_ptr(), "micro-batches are views"


def test_unequal_parts_are_refused() -> None:
    with pytest.raises(LaunchError, match="a batch of 7 has no 3 equal micro-batches; allowed: a number that divides the batch"):
        cut_batch((torch.arange(7),), 3)
    with pytest.raises(LaunchError, match="input 'x': a batch of 7"):
        split({"x": torch.arange(7)}, MICRO)
    with pytest.raises(LaunchError, match="no input has a batch dim"):
        cut_batch((torch.tensor(1.0),), 2)
    with pytest.raises(LaunchError, match="has no 0 equal micro-batches"):
        cut_batch((torch.arange(4),), 0)


def graph() -> Graph:
    made = mlp()
    return replace(made, micro_batches=MICRO, outputs=(Output(made.loss, "loss"),))


def test_results_are_joined_summed_or_the_same() -> None:
    loss = graph().loss
    whole = torch.arange(24).reshape(2, 12)  # two blocks of 6 columns
    pieces = whole.unflatten(1, (2, 6)).split(2, 2)
    parts = [
        {loss: torch.tensor(1.0 + m), "rows": torch.tensor([m]), "blocks": pieces[m].flatten(1), "number": torch.tensor(m), "same": torch.tensor(7)}
        for m in range(3)
    ]
    joined = join(graph(), parts)
    assert joined[loss].item() == 6.0 and joined["rows"].tolist() == [0, 1, 2]
    assert joined["blocks"].equal(whole) and joined["number"].item() == 3 and joined["same"].item() == 7
