"""The planner's own pipelines of random models against one device: blocks of several kinds in any order, some of them called again, tied heads,
tensors that later blocks read; on two or three machines, half of the cases with too little memory for the first plan. Evaluation and a short batch
are planned, too. 100 of them (minutes; deselected by default):

    python -m pytest tests/equivalence/test_planned_pipelines.py -m slow
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.batches import Batches
from hapx.cluster.spec import ClusterSpec
from hapx.graph.captures import Captures
from hapx.inter_op import pipelines
from hapx.plan import Plan
from hapx.planner import key_of
from hapx.restriction import AUTO
from hapx.setting import Setting
from hapx.theory.discover import discover
from support.clusters import slow_devices
from support.staged import assert_staged, with_program

LENGTH = 5
QUICK = [2, 8, 67, 84, 206, 363]  # of two stages, interleaved, of unlike periods, with a last layer that is no work, with shared layers


class Block(nn.Module):
    def __init__(self, width: int, kind: str):
        super().__init__()
        self.kind = kind
        self.norm, self.first = nn.LayerNorm(width), nn.Linear(width, width)
        self.wide, self.back = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        h = self.norm(x)
        if self.kind == "attention":
            query = self.first(h)
            known = (query if memory is None else memory).unsqueeze(1)
            return x + F.scaled_dot_product_attention(query.unsqueeze(1), known, known).squeeze(1)
        return x + (self.back(F.gelu(self.wide(h))) if self.kind == "feed-forward" else torch.tanh(self.first(h)))


class Model(nn.Module):
    """memory_from: the block before which everything so far becomes what later attention reads, and perhaps a decoder begins."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        rng = random.Random(seed)
        width, self.vocabulary, number = rng.choice([8, 12, 16]), rng.choice([11, 24, 40]), rng.randint(3, 9)
        self.table = nn.Embedding(self.vocabulary, width)
        blocks = [Block(width, rng.choice(["attention", "feed-forward", "plain"])) for _ in range(number)]
        if rng.random() < 0.6:
            for i in range(1, number):
                blocks[i] = blocks[rng.randrange(i)] if rng.random() < 0.35 else blocks[i]
        self.blocks = nn.ModuleList(blocks)
        self.memory_from = rng.randrange(number) if rng.random() < 0.5 else None
        self.tied, self.decodes = rng.random() < 0.6, rng.random() < 0.4
        self.head = nn.Linear(width, self.vocabulary, bias=False)
        if self.tied:
            self.head.weight = self.table.weight
        self.ignored = 2 if rng.random() < 0.5 else -100
        self.double()

    def forward(self, tokens: Tensor, targets: Tensor, others: Tensor) -> Tensor:
        x, memory = self.table(tokens), None
        for i, block in enumerate(self.blocks):
            if i == self.memory_from:
                memory, x = x, self.table(others) if self.decodes else x
            x = block(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=self.ignored)


def inputs(seed: int, batch: int, step: int) -> Sequence[Tensor]:
    generator = torch.Generator().manual_seed(step + 100 * seed)
    return torch.randint(0, Model(seed).vocabulary, (3, batch, LENGTH), generator=generator).unbind()


def planned(seed: int, batch: int, number: int, cluster: ClusterSpec, more: bool) -> list[Plan]:
    """Pipelines of several stages, best first."""
    captures = Captures(Model(seed), inputs(seed, batch, 0), None)
    graph = discover(captures.whole())
    batches = Batches(captures, graph, number, in_parts=True)
    asked = Setting(graph, key_of(graph), cluster, AUTO, "fp32", "adamw")
    return [p for p in pipelines(asked, batches.part, (number,), one_stage=False, more=more) if len(p.stages) > 1]


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100) if seed not in QUICK)])
def test_pipelines_train_as_one_device(seed: int) -> None:
    rng = random.Random(seed * 7 + 1)
    batch, kinds = rng.choice([4, 8, 12]), ("fast", "medium", "slow")
    machines = [[rng.choice(kinds)] * rng.choice([1, 2, 2]) for _ in range(rng.choice([2, 2, 3]))]
    cluster = slow_devices(*machines, inter=rng.choice(["1 Mbit/s", "20 Mbit/s", "1 Gbit/s"]), speed=rng.choice([1e6, 1e7]))
    number, scarce, more = rng.choice([2, 4]), rng.random() < 0.5, rng.random() < 0.3
    found = planned(seed, batch, number, cluster, more)
    if found and scarce:
        memory = round(max(found[0].memory) * rng.choice([0.85, 0.95, 1.05]) / 0.9)
        cluster = replace(cluster, device_types={name: replace(kind, memory=memory) for name, kind in cluster.device_types.items()})
        found = planned(seed, batch, number, cluster, more)
    assert found or (seed not in QUICK), "these have pipelines"
    steps = partial(inputs, seed, batch)
    for plan in found[:1]:
        plan.verify()
        assert_staged(partial(Model, seed), steps, plan, steps=2, optimizer="adamw", tolerance=1e-8)
        with_program(plan, Model(seed), steps(0), training=False).verify()
        with_program(plan, Model(seed), inputs(seed, batch - 2, 0), training=True).verify()
