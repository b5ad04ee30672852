"""Which layers are taken to be alike when stages are asked for, and that runs of such layers are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from hapx.planner import key_of
from hapx.put_together import put_together
from hapx.restriction import AUTO
from hapx.setting import Setting
from hapx.stage_prices import Asker
from hapx.stages.costs import ONE_F_ONE_B
from hapx.stages.plain import pipeline_by_hand
from hapx.theory.discover import discover
from support.clusters import slow_devices
from support.staged import micro_graph

CLUSTER = slow_devices(["fast"], ["fast"], ["fast"], ["fast"])


class Calls(nn.Module):
    """A layer per number, equal numbers the same one; those in `again` read the first tensor, too, and those in `others` have another constant."""

    def __init__(self, numbers: tuple[int, ...], again: tuple[int, ...] = (), others: tuple[int, ...] = ()):
        super().__init__()
        torch.manual_seed(0)
        self.numbers, self.again, self.others = numbers, again, others
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(max(numbers) + 1))

    def forward(self, x: Tensor) -> Tensor:
        first = x = x.relu()
        for k, number in enumerate(self.numbers):
            x = self.layers[number](x) * (0.5 if k in self.others else 2.0) + (first if k in self.again else x)
        return x.square().mean()


def asker(model: Calls) -> Asker:
    """Layers: the first node, three for each call, the loss."""
    inputs = (torch.ones(8, 8),)
    graph, whole = micro_graph(model, inputs, 4)
    ends = [0, 1, *(4 + 3 * k for k in range(len(model.numbers))), len(graph.nodes)]
    return Asker(Setting(discover(graph), key_of(whole), CLUSTER, AUTO, "fp32", "sgd", repeats=4), tuple(pairwise(ends)))


def calls(model: Calls) -> str:
    """A letter per call, equal ones for alike calls."""
    own = asker(model).classes[1:-1]
    return "".join("abcdefgh"[list(dict.fromkeys(own)).index(c)] for c in own)


def test_layers_that_share_what_others_use_are_not_like_those_that_do_not() -> None:
    """(What the first one reads has no gradient.)"""
    assert calls(Calls((0, 1, 2, 3, 4))) == "abbbb"
    assert calls(Calls((0, 1, 2, 2, 3))) == "abccb"
    assert calls(Calls((0, 0, 0, 1, 1))) == "abbcc"
    assert calls(Calls((0, 1, 2, 3, 4, 5), again=(2, 4, 5))) == "abcbcc", "far from where it is made a tensor is known by its name"
    assert calls(Calls((0, 1, 2, 3), others=(1, 3))) == "abcb"


def test_near_where_a_tensor_is_made_it_is_known_by_the_distance() -> None:
    assert calls(Calls((0, 1, 2, 3), again=(1, 2))) == "abcd"


ALL = (0, 1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("numbers", "again"), [(ALL, ()), ((0, 1, 2, 3, 4, 4, 5, 6), ()), ((0, 1, 2, 2, 3, 4, 5, 6), ()), (ALL, (3, 5)), (ALL, (3, 4))]
)
def test_a_stage_is_made_from_one_of_alike_layers(numbers: tuple[int, ...], again: tuple[int, ...]) -> None:
    own = asker(Calls(numbers, again))
    pipeline = pipeline_by_hand((0, 3, 5, 7, len(own.layers)), ((0,), (1,), (2,), (3,)), CLUSTER, own.prices(), ONE_F_ONE_B)
    assert pipeline is not None
    made = put_together(own, pipeline, AUTO, {})
    assert made is not None
    made.plan.verify()
    assert [piece.nodes[0] for piece in made.pieces] == [0, 7, 13, 19]
    assert (own.classes[3:5] == own.classes[5:7]) is (numbers == ALL and again in ((), (3, 5)))
