"""Embedding bags are written out: the same values and gradients, and bags of equal length are seen."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.graph.capture import capture
from hapx.ir import Graph
from support.interpret import run_module

OFFSETS = (0, 3, 3, 5)  # the second bag is empty


class Bags(nn.Module):
    """Pooled rows of a table; `regular`: ids of two dims, else offsets."""

    def __init__(self, mode: str, regular: bool, weighted: bool, padding: int | None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(9, 4, generator=generator, dtype=torch.float64))
        self.weights = nn.Parameter(torch.randn(8, generator=generator, dtype=torch.float64)) if weighted else None
        self.register_buffer("offsets", torch.tensor(OFFSETS))
        self.mode, self.regular, self.padding = mode, regular, padding

    def forward(self, ids: Tensor) -> Tensor:
        offsets, weights = self.offsets, self.weights
        if self.regular:
            ids, offsets = ids.view(2, 4), None
            weights = weights.view(2, 4) if weights is not None else None
        rows = F.embedding_bag(ids, self.table, offsets, mode=self.mode, per_sample_weights=weights, padding_idx=self.padding)
        return (rows * torch.arange(1.0, 5.0, dtype=torch.float64)).sin().sum()


def check(model: Bags) -> Graph:
    ids = torch.tensor([1, 8, 2, 0, 2, 2, 3, 8])
    graph = capture(model, (ids,))
    reference = copy.deepcopy(model)
    expected = reference(ids)
    found = run_module(graph, model, (ids,))[graph.loss]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    expected.backward()
    found.backward()
    for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12, msg=name)
    return graph


@pytest.mark.parametrize("mode,regular,padding", list(product(("sum", "mean"), (True, False), (None, 2, -1))))
def test_bags_are_written_out(mode: str, regular: bool, padding: int | None) -> None:
    graph = check(Bags(mode, regular, False, padding))
    targets = {n.call.op for n in graph.nodes}
    assert "aten.embedding" in targets and "aten.embedding_bag" not in targets
    assert ("aten.searchsorted" in targets) is not regular, "bags of equal length need no search"


@pytest.mark.parametrize("regular", [True, False])
def test_weights_of_samples(regular: bool) -> None:
    graph = check(Bags("sum", regular, True, 2))
    assert "aten.embedding_bag" not in {n.call.op for n in graph.nodes}


def test_a_maximum_stays_as_it_is() -> None:
    graph = check(Bags("max", True, False, None))
    assert "aten.embedding_bag" in {n.call.op for n in graph.nodes}


class OtherResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(9, 4, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        rows, _, sizes, _ = torch.embedding_bag(self.table, ids, torch.arange(0, 8, 4), mode=1)
        return rows.sum() * sizes.sum()


def test_bags_whose_sizes_are_read_stay_as_they_are() -> None:
    graph = capture(OtherResults(), (torch.tensor([1, 8, 2, 0, 2, 2, 3, 8]),))
    assert "aten.embedding_bag" in {n.call.op for n in graph.nodes}
