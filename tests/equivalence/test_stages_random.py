"""Pipelines of random programs, cut anywhere, against one device that runs the same micro-batches: activations, integer tensors, masks and skip
connections that cross, unequal and empty shares, parameters stored in shards, tied ones, buffers that every micro-batch writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.ir import Kind
from hapx.plan import Plan
from hapx.states import Sharded
from support.losses import MODELS
from support.models import CNN, GPT, MLP, _initialise
from support.random_programs import Taste
from support.random_stages import Job, assert_micro, at_blocks, random_stages
from support.staged import assert_staged
from support.zoo import TINY


class Branches(nn.Module):
    """An embedding that skips all layers, a mask and positions that all layers use, a tensor that two later layers use, batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 9)
        _initialise(self, 0, torch.float64)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        mask, order = tokens > 2, tokens.argsort(dim=1)
        first = x = self.table(tokens)
        for layer in self.layers:
            x = x + torch.gather(F.gelu(layer(x)), 1, order.unsqueeze(-1).expand_as(x)).masked_fill(~mask.unsqueeze(-1), 0.5)
        x = self.norm((x + first).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.masked_fill(mask, -100).flatten())

    def example(self, batch: int, seed: int) -> tuple[Tensor, ...]:
        made = torch.randint(0, 9, (2, batch, 4), generator=torch.Generator().manual_seed(seed))
        made[0, :, 0] = 0  # something is a target in every batch
        made[0, : batch // 4] = 5  # and nothing in the first micro-batch of four
        return made[0], made[1]


class Skips(nn.Module):
    """A little U-net: what goes down is met again on the way up; batch norm on both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down, self.up = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 2, 2)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(8), nn.BatchNorm2d(4)])
        self.leave = nn.Conv2d(8, 3, 1)
        _initialise(self, 0, torch.float64)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        a = F.relu(self.norms[0](self.enter(x)))
        b = F.relu(self.norms[1](self.down(a)))
        c = F.relu(self.norms[2](self.up(b)))
        return F.cross_entropy(self.leave(torch.cat([a, c], 1)), targets)

    def example(self, batch: int, seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, 2, 4, 4, generator=generator, dtype=torch.float64), torch.randint(0, 3, (batch, 4, 4), generator=generator)


def example(model: Callable[[], Any], batch: int, step: int) -> Sequence[Tensor]:
    found: Sequence[Tensor] = model().example(batch, step)
    return found


def job(model: Callable[[], Any], number: int = 4, batch: int = 8, draws: bool = False) -> Job:
    return Job(model, partial(example, model, batch), number, draws)


def zoo_inputs(name: str, step: int) -> Sequence[Tensor]:
    return TINY[name].inputs(8, step)


SMALL_GPT = partial(GPT, 11, 8, 2, 2, 4)
JOBS = {
    "mlp": job(partial(MLP, (6, 8, 8, 3)), 8),
    "gpt, tied head": job(SMALL_GPT),
    "gpt, dropout": job(partial(GPT, 11, 8, 2, 2, 4, 0.3), 2, draws=True),
    "cnn, batch norm": job(CNN),
    "skip connections": job(Skips, 2),
    "masks and integers": job(Branches),
    "mixture of experts": Job(TINY["bert_moe"].model, partial(zoo_inputs, "bert_moe"), 2),
    **{name: job(MODELS[name], 3, 6) for name in ("weighted", "recommender", "indexed")},
}
SHAPES: dict[str, tuple[tuple[tuple[int, ...], ...], str]] = {
    "2+1": (((0, 1), (2,)), "gpipe"),
    "1+3": (((0,), (1, 2, 3)), "1f1b"),
    "1+2+1": (((0,), (1, 2), (3,)), "1f1b-warm:1"),
    "4+2": (((2, 3, 4, 5), (0, 1)), "1f1b"),
    "2+2, twice": (((0, 1), (2, 3), (0, 1), (2, 3)), "interleaved"),
    "2+1+2, the last is the first": (((0, 1), (2,), (0, 1)), "gpipe"),
}
TURNS = [(name, shape) for i, name in enumerate(JOBS) for k, shape in enumerate(SHAPES) if k % 2 == i % 2 or name == "mlp"]


def kinds_that_cross(plan: Plan) -> set[str]:
    refs = plan.graphs[plan.first].refs
    return {refs[b.tensor].dtype for b in plan.boundaries(plan.first)}


@pytest.mark.parametrize("name, shape", TURNS, ids=[f"{n}, {s}" for n, s in TURNS])
def test_random_pipelines(name: str, shape: str) -> None:
    devices, style = SHAPES[shape]
    plan = random_stages(JOBS[name], devices, style, seed=len(name) + len(shape))
    assert len(plan.stages) == len(devices)
    assert_micro(JOBS[name], plan)


def test_integers_masks_and_floats_cross() -> None:
    """From the first to both later stages; a micro-batch of ignored targets only."""
    work = JOBS["masks and integers"]
    graph, _ = work.graphs()
    cuts = [i for i, n in enumerate(graph.nodes) if n.call.op == "aten.linear"]
    plan = random_stages(work, ((0, 1), (2,), (3, 4)), "1f1b", 3, cuts=cuts[1:3])
    assert kinds_that_cross(plan) == {"float64", "int64", "bool"}
    used = [b.tensor for b in plan.boundaries(plan.first)]
    assert any(used.count(name) == 2 for name in used), "something crosses to two later stages"
    assert_micro(work, plan, optimizer="adamw")


@pytest.mark.parametrize("number", [1, 2, 8])
def test_micro_batches_together_are_the_batch(number: int) -> None:
    """Nothing of the model mixes samples: the whole batch at once gives the same."""
    work = job(SMALL_GPT, number)
    plan = random_stages(work, ((0, 1), (2,)), "1f1b", number, cuts=at_blocks(work, 2))
    assert_staged(work.model, work.inputs, plan, steps=2)


def test_parameters_stored_in_shards_and_unequal_lengths() -> None:
    work = JOBS["mlp"]
    taste = Taste(wanted=lambda triple: any(triple.work))
    found = [random_stages(work, ((0, 1, 2), (3, 4)), "1f1b", seed, taste=taste) for seed in range(6)]

    def cut(plan: Plan) -> bool:
        return sum(any(isinstance(s, Sharded) for s in c.placement.states) for st in plan.storage for c in st.copies) >= 3

    plan = next(p for p in found if cut(p) and any(0 in ns for s in p.stages for ns in s.lengths[p.first].values()))
    assert_micro(work, plan, optimizer="adamw")


def test_buffers_are_written_micro_batch_by_micro_batch() -> None:
    work = JOBS["cnn, batch norm"]
    graph, _ = work.graphs()
    norms = [i for i, n in enumerate(graph.nodes) if "batch_norm" in n.call.op]
    plan = random_stages(work, ((0, 1), (2, 3)), "1f1b", 1, cuts=[norms[0] + 1])
    homes = {s.name: [c.stage for c in s.copies] for s in plan.storage if graph.refs[s.name].kind is Kind.BUFFER}
    assert homes["bn1.running_mean"] == [0] and homes["bn2.running_mean"] == [1]
    assert_micro(work, plan, steps=3)


@pytest.mark.gloo
def test_on_processes() -> None:
    work = JOBS["skip connections"]
    assert_micro(work, random_stages(work, ((0, 1), (2,), (3,)), "1f1b", 5), mode="processes")
