"""Models of images and signals train on unlike devices as on one: equal, unequal and empty shares; what the plan splits is asserted.

Planned programs of four models, then random legal programs of the same (`tests/equivalence/test_random_programs.py` runs more of them).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from random import Random

import pytest
from torch import Tensor

from hapx.graph.capture import capture
from hapx.ir import Graph, OpCall
from hapx.plan import LocalSize, Plan, Triple
from hapx.planner import plan_graphs, plan_module
from hapx.restriction import BASELINES
from hapx.verify import verify
from support.cases import CASES, MESHES, assert_case
from support.clusters import FOUR
from support.equivalence import assert_equivalent, uses_of
from support.random_programs import Taste, random_plan
from support.vision import VISION, VISION_WITH_MASKS

STEPS = 2
BATCH = 10
RATIOS: dict[str, tuple[float, ...]] = {"even": (1.0, 1.0, 1.0, 1.0), "4:4:1:1": (4.0, 4.0, 1.0, 1.0), "5:3:2:0": (5.0, 3.0, 2.0, 0.0)}
# least share of the FLOPs that some axis divides
DIVIDED = {"auto": 0.9, "tensor-parallel": 0.7, "zero": 0.9}


def inputs(model: str, step: int) -> tuple[Tensor, ...]:
    example: tuple[Tensor, ...] = VISION[model]().example(BATCH, seed=step)  # type: ignore[operator]
    return example


@cache
def graph_of(model: str) -> Graph:
    return capture(VISION[model](), inputs(model, 0))


def planned(model: str, strategy: str, ratios: str) -> Plan:
    """Rules without pipelines share a graph, which `plan_module` would capture for each."""
    rule = replace(BASELINES[strategy], name=f"{strategy}, {ratios}", mesh="flat", ratios=RATIOS[ratios])
    if rule.max_stages == 1:
        plan = plan_graphs([graph_of(model)], FOUR, strategy=rule)
    else:
        plan = plan_module(VISION[model](), FOUR, inputs(model, 0), strategy=rule)
    plan.verify()
    return plan


@pytest.mark.parametrize("ratios", RATIOS)
@pytest.mark.parametrize("strategy", DIVIDED)
@pytest.mark.parametrize("model", VISION)
def test_planned(model: str, strategy: str, ratios: str) -> None:
    plan = planned(model, strategy, ratios)
    uses = uses_of(plan)
    assert uses.sharded_flops >= DIVIDED[strategy]
    assert uses.unequal or ratios == "even"
    assert uses.zero_length or ratios != "5:3:2:0"
    assert bool(uses.stored_sharded) or strategy != "zero"
    assert_equivalent(VISION[model], partial(inputs, model), plan, steps=STEPS)


@pytest.mark.gloo
@pytest.mark.parametrize("model, strategy, ratios", [("unet", "zero", "5:3:2:0"), ("signal", "tensor-parallel", "4:4:1:1")])
def test_planned_on_processes(model: str, strategy: str, ratios: str) -> None:
    uses = assert_equivalent(VISION[model], partial(inputs, model), planned(model, strategy, ratios), steps=STEPS, mode="processes")
    assert uses.unequal and uses.sharded_flops >= DIVIDED[strategy]


RANDOM = [(model, mesh, 1) for model in (*VISION, *VISION_WITH_MASKS, "signal, eval mode", "resnet, eval mode") for mesh in ("3", "2x2")]


@pytest.mark.parametrize("model, mesh, seed", RANDOM)
def test_random_programs(model: str, mesh: str, seed: int) -> None:
    plan = random_plan(CASES[model].theory(MESHES[mesh]), Random(seed))
    verify(plan)
    assert uses_of(plan).sharded_flops > 0
    assert_case(CASES[model], plan, steps=STEPS)


def fewer_groups(triple: Triple) -> bool:
    """Whether channels are split in whole groups, of which each device has its own."""
    return isinstance(triple.body, OpCall) and any(isinstance(v, LocalSize) for _, v in triple.body.args)


@pytest.mark.parametrize("mesh, seed", [("4", 0), ("2x2", 0)])
@pytest.mark.parametrize("model, operators", [
    ("resnet", {"aten.conv2d"}), ("unet", {"aten.group_norm"}), ("signal", {"aten.conv1d", "aten.conv_transpose1d"}),
], ids=["resnet", "unet", "signal"])  # fmt: skip
def test_split_in_groups(model: str, operators: set[str], mesh: str, seed: int) -> None:
    plan = random_plan(CASES[model].theory(MESHES[mesh]), Random(seed), Taste(wanted=fewer_groups))
    split = {i.triple.body.op for i in plan.stages[0].program.instructions if fewer_groups(i.triple)}  # type: ignore[union-attr]
    assert split and split <= operators | {"hapx.convolution_sfb"}
    assert_case(CASES[model], plan, steps=STEPS)
