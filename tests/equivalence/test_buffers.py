"""Buffers that the loss reads and that get new values in the same pass: backward needs what they had."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

import hapx
from hapx.collectives.communicator import create_groups
from hapx.collectives.threads import ThreadCommunicator
from hapx.runtime.executor import Executor
from hapx.states import REPLICATED, Placement
from support.clusters import TWO
from support.devices import device, placed
from support.equivalence import MAKING, assert_equivalent, run_ranks


class Projected(nn.Module):
    """What the models begin with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(5, 4)


class Queue(Projected):
    """As in MoCo: contrast with what is in a queue, then put the keys there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(8, 4))

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        z, k = functional.normalize(self.project(x), dim=1), functional.normalize(key, dim=1)
        logits = torch.cat([(z * k).sum(1, keepdim=True), z @ self.queue.clone().detach().t()], 1)
        loss = functional.cross_entropy(logits / 0.2, torch.zeros(x.shape[0], dtype=torch.long, device=x.device))
        with torch.no_grad():
            self.queue[:] = torch.cat([k, self.queue])[:8]
        return loss


class Running(Projected):
    """A norm by hand: divides by what it knew, then learns; the old value by way of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(1.0, 2.0, 4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        z = self.project(x)
        loss = (z / self.scale.unsqueeze(0) - key).square().mean()
        self.scale = 0.9 * self.scale + 0.1 * z.detach().abs().mean(0)
        self.steps += 1
        return loss


class Written(Projected):
    """In place, after a copy was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(1.0, 2.0, 4))

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        old, z = self.scale.clone(), self.project(x)
        with torch.no_grad():
            self.scale.mul_(0.5)
        return (z * old - key).square().mean()


class Spectral(nn.Module):
    """A discriminator's layers: power iteration writes buffers with `out=`, and the loss reads what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(spectral_norm(nn.Linear(5, 8)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(8, 4)))

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        return (self.layers(x) - key).square().mean()


def inputs(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 5, dtype=torch.float64, generator=generator), torch.randn(8, 4, dtype=torch.float64, generator=generator)


def test_buffers_that_are_written_whole_are_kept_whole() -> None:
    """The rows of the queue could be kept in shards like those of a batch; what is put there is not."""
    for strategy in ("dp-even", "zero", "auto"):
        plan = hapx.plan(Queue().double(), TWO, inputs(0), strategy=strategy)
        assert plan.storage_of["queue"].copies[0].placement == Placement((REPLICATED,))


@pytest.mark.parametrize("strategy", ["dp-even", "zero", "tensor-parallel", "auto"])
@pytest.mark.parametrize("make", [Queue, Running, Written, Spectral])
def test_backward_has_what_the_buffers_had(make: type[nn.Module], strategy: str) -> None:
    plan = hapx.plan(make().double(), TWO, inputs(0), strategy=strategy)
    assert_equivalent(lambda: make().double(), inputs, plan)


def test_only_buffers_that_backward_may_read_are_copied() -> None:
    plan = hapx.plan(Running().double(), TWO, inputs(0), strategy="dp-even")

    def copied(threads: ThreadCommunicator) -> frozenset[str]:
        with MAKING:
            model = Running().double()
        return Executor(plan, threads.rank, model, create_groups(plan.stages[0].mesh, threads), device=device()).program(plan.first).snapshots

    assert run_ranks(plan, copied) == [frozenset({"scale"})] * 2


class Deep(nn.Module):
    """Backward through the second product needs its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        return (self.second(self.first(x)) - key).square().mean()


def test_what_is_changed_before_backward_is_refused() -> None:
    """As plain PyTorch does: the gradient would be that of another model. (Where backward has a gathered copy, nothing is wrong.)"""
    plan = hapx.plan(Deep().double(), TWO, inputs(0), strategy="dp-even")
    graph = plan.graphs[plan.first]

    def step_too_early(threads: ThreadCommunicator) -> None:
        executor = Executor(plan, threads.rank, Deep().double(), create_groups(plan.stages[0].mesh, threads), device=device())
        loss = executor.run(plan.first, placed(dict(zip(graph.input_names, inputs(0), strict=True))))[graph.loss]
        with torch.no_grad():
            executor.module.get_parameter("second.weight").add_(1.0)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_ranks(plan, step_too_early)
