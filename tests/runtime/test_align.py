"""Copies of a parameter on different kinds of devices are made equal again every so often."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hapx.cluster.spec import ClusterSpec
from hapx.collectives.communicator import create_groups
from hapx.collectives.threads import ThreadCommunicator
from hapx.plan import Plan
from hapx.runtime.executor import ALIGN_EVERY, Executor
from support.equivalence import run_ranks
from support.models import MLP
from support.plans import mlp_batch_split

WIDTHS = (6, 8, 3)


def plan_on(kinds: list[str]) -> Plan:
    types = {k: {"flops": 1e10, "memory": "1 GiB", "memory_bandwidth": "10 GB/s"} for k in ("fast", "slow")}
    link = {"bandwidth": "1 Gbit/s", "latency": "10 us"}
    machine = {"name": "box", "devices": kinds}
    cluster = ClusterSpec.load(
        {"name": "c", "machines": [machine], "device_types": {k: types[k] for k in set(kinds)}, "network": {"inter": link, "intra": link}}
    )
    return replace(mlp_batch_split(WIDTHS, (3, 1)), cluster=cluster)


def drift(plan: Plan, passes: int, threads: ThreadCommunicator | None = None) -> torch.Tensor:
    """Disturbs this rank's copies, then runs `passes` forward passes; returns the first parameter."""
    assert threads is not None
    model = MLP(WIDTHS)
    inputs = dict(zip(plan.graphs[plan.first].input_names, model.example(4), strict=True))
    executor = Executor(plan, threads.rank, model, create_groups(plan.stages[0].mesh, threads))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(threads.rank * 1e-3)
    for _ in range(passes):
        executor.run(plan.first, inputs)
    return next(model.parameters()).detach().clone()


@pytest.mark.parametrize(
    ("kinds", "passes", "equal"),
    [(["fast", "slow"], ALIGN_EVERY, True), (["fast", "slow"], ALIGN_EVERY - 1, False), (["fast", "fast"], ALIGN_EVERY, False)],
)
def test_copies_on_different_kinds_are_aligned(kinds: list[str], passes: int, equal: bool) -> None:
    first, second = run_ranks(plan_on(kinds), drift, plan_on(kinds), passes)
    assert torch.equal(first, second) is equal
