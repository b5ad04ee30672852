"""Communication over two axes trains as one device does: gradients of parameters that all devices use in their own way, and activations that are
summed over both axes, are scattered inside of machines, sent between them in parts and gathered again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from torch import Tensor

from hapx.ir import Kind
from hapx.plan import Plan
from hapx.planner import plan_module
from hapx.restriction import Restriction
from hapx.states import Invariant, Replicated
from support.clusters import TWO_MACHINES, slow_devices
from support.equivalence import assert_equivalent
from support.models import CNN, GPT

MODELS: dict[str, Callable[[], Any]] = {"gpt": partial(GPT, vocab=13, width=8, heads=4, layers=1, context=6), "cnn": CNN}
BOTH = Restriction("batch on both axes", mesh="two-level", split="batch", ratios=(3.0, 1.0), sfb="never", storage="as-used")
MODEL = Restriction("model on both axes", mesh="two-level", split="model", ratios=(3.0, 1.0), sfb="never", storage="as-used")
FAR_APART = slow_devices(["medium", "medium"], ["slow", "slow"], inter="1 Mbit/s")


def example(model: str, step: int) -> tuple[Tensor, ...]:
    batch: tuple[Tensor, ...] = MODELS[model]().example(8, seed=step)
    return batch


@cache
def data_parallel(model: str) -> Plan:
    plan = plan_module(MODELS[model](), TWO_MACHINES, example(model, 0), strategy=BOTH)
    plan.verify()
    return plan


@cache
def tensor_parallel(model: str) -> Plan:
    plan = plan_module(MODELS[model](), FAR_APART, example(model, 0), strategy=MODEL)
    plan.verify()
    return plan


def through_shards(plan: Plan) -> list[str]:
    """Values that are converted through shards of the inner axis."""
    triples = (i.triple for i in plan.stages[0].program.instructions)
    return [t.pre[0].tensor for t in triples if isinstance(t.body, tuple) and [c.axis for c in t.body] == [1, 0, 1]]


def synchronised(plan: Plan) -> set[str]:
    """Parameters whose gradients are summed over both axes."""
    refs, found = plan.graphs[plan.first].refs, set()
    for triple in (i.triple for i in plan.stages[0].program.instructions):
        if isinstance(triple.body, tuple) and refs[triple.pre[0].tensor].kind is Kind.PARAMETER:
            summed = [c for c in triple.body if isinstance(c.source, Invariant) and isinstance(c.target, Replicated)]
            if len(summed) == 2:
                found.add(triple.pre[0].tensor)
    return found


@pytest.mark.parametrize("mode", ["threads", pytest.param("processes", marks=pytest.mark.gloo)])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_summed_over_two_levels(model: str, mode: Any) -> None:
    plan = data_parallel(model)
    parameters = {r.name for r in plan.graphs[plan.first].of_kind(Kind.PARAMETER)}
    assert len(synchronised(plan)) >= len(parameters) - 1
    assert_equivalent(MODELS[model], partial(example, model), plan, optimizer="adamw", mode=mode)


@pytest.mark.parametrize("mode", ["threads", pytest.param("processes", marks=pytest.mark.gloo)])
def test_activations_go_through_shards_of_the_inner_axis(mode: Any) -> None:
    plan = tensor_parallel("cnn")
    assert through_shards(plan)
    assert_equivalent(MODELS["cnn"], partial(example, "cnn"), plan, mode=mode)
