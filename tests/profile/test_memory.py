"""Predicted peaks of memory are those that the allocator sees, on every rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hapx.cluster.spec import ClusterSpec
from hapx.collectives.communicator import create_groups
from hapx.plan import Plan
from hapx.planner import plan_module
from hapx.profile.memory import Peak, allocation_peak, training_peak
from support.models import GPT, MLP
from support.pool import pool

CLUSTER = ClusterSpec.load(
    {
        "name": "processors",
        "machines": [{"name": "fast", "devices": ["CPU-fast"]}, {"name": "slow", "devices": ["CPU-slow", "CPU-slow"]}],
        "device_types": {
            "CPU-fast": {"flops": "20e9", "memory": "2 GiB", "memory_bandwidth": "10 GB/s"},
            "CPU-slow": {"flops": "6e9", "memory": "2 GiB", "memory_bandwidth": "4 GB/s"},
        },
        "network": {"inter": {"bandwidth": "8 GB/s", "latency": "10 us"}, "intra": {"bandwidth": "8 GB/s", "latency": "10 us"}},
    }
)


def test_the_peak_of_a_step_on_the_cpu():
    """A temporary counts while it is there, what exists before counts once, and what stays is told."""
    x = torch.zeros(1000, dtype=torch.float64)
    left = []

    def step() -> None:
        first = torch.ones(2000, dtype=torch.float64)
        second = torch.ones(3000, dtype=torch.float64)
        del first
        left.append(torch.ones(500, dtype=torch.float64))
        del second

    peak = allocation_peak(step, [x, x.view(10, 100), x[:5]], torch.device("cpu"), lambda: left)
    assert peak == Peak(before=8000, during=40000, left=4000)
    assert peak.total == 48000


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    if name == "MLP":
        mlp = MLP((256, 1024, 1024, 256), dtype=torch.float32)
        return mlp, mlp.example(1024)
    gpt = GPT(vocab=1024, width=128, heads=4, layers=2, context=64, dtype=torch.float32)
    return gpt, gpt.example(16)


def measure(plan: Plan, name: str) -> Peak:
    module, batch = make(name)
    inputs = dict(zip(plan.graphs[plan.first].input_names, batch, strict=True))
    return training_peak(plan, dist.get_rank(), module, create_groups(plan.stages[0].mesh), inputs, partial(torch.optim.AdamW, lr=1e-4))


@pytest.mark.gloo
@pytest.mark.parametrize("name,strategy", [("MLP", "zero"), ("GPT", "dp-proportional"), ("GPT", "tensor-parallel")])
def test_predicted_is_measured(name: str, strategy: str):
    module, batch = make(name)
    plan = plan_module(module, CLUSTER, batch, strategy=strategy)
    peaks = pool(3).run(measure, plan, name)
    for rank, peak in enumerate(peaks):
        assert plan.memory[rank] == pytest.approx(peak.total, rel=0.1), (rank, plan.memory, peak)
    assert min(plan.memory) > 2**22


@pytest.mark.gloo
def test_a_forgotten_part_would_be_seen():
    """The comparison is sharp: without the optimizer's state the prediction is far off."""
    module, batch = make("MLP")
    peaks = pool(3).run(measure, plan_module(module, CLUSTER, batch, strategy="dp-proportional"), "MLP")
    wrong = plan_module(make("MLP")[0], CLUSTER, batch, strategy="dp-proportional", optimizer="sgd")
    assert all(m < 0.9 * peak.total for m, peak in zip(wrong.memory, peaks, strict=True))
