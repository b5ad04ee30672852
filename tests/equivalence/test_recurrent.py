"""Recurrent networks train as on one device: in both directions, in layers, projected, from initial states that are inputs."""

from __future__ import annotations

from functools import partial

import pytest
from torch import Tensor

from hapx.planner import plan_module
from hapx.restriction import Restriction
from support.clusters import FOUR
from support.equivalence import assert_equivalent
from support.recurrent import RECURRENT

BATCH = 7
PLANS: dict[str, Restriction | str] = {
    "even": Restriction("even", mesh="flat", ratios="even", split="batch"),
    "4:2:1:0": Restriction("zero length", mesh="flat", ratios=(4.0, 2.0, 1.0, 0.0), split="batch"),
    "in shards": Restriction("freed", mesh="flat", ratios=(4.0, 2.0, 1.0, 0.0), split="batch", storage="sharded-free"),
}


def example(model: str, step: int) -> tuple[Tensor, ...]:
    return RECURRENT[model]().example(BATCH, seed=step)


@pytest.mark.parametrize("strategy", PLANS)
@pytest.mark.parametrize("model", RECURRENT)
def test_trains_as_one_device(model: str, strategy: str) -> None:
    inputs = partial(example, model)
    plan = plan_module(RECURRENT[model](), FOUR, inputs(0), strategy=PLANS[strategy])
    targets = {i.triple.body.target for i in plan.stages[0].program.instructions if hasattr(i.triple.body, "target") and any(i.triple.work)}
    assert any(t.endswith(".input") for t in targets), targets
    uses = assert_equivalent(RECURRENT[model], inputs, plan, optimizer="adamw")
    assert uses.zero_length == (strategy != "even")
    assert (uses.freed > 0) == (strategy == "in shards")
