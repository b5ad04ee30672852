"""Tensor parallelism is found where it pays, and only there: catalogue devices, models on `meta`, nothing said about how to divide."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hapx.cluster.spec import ClusterSpec
from hapx.ir import OpCall
from hapx.plan import Plan
from hapx.planner import plan_module
from hapx.restriction import Restriction
from hapx.states import PARTIAL, Sharded
from support.clusters import FOUR
from support.division import divisions
from support.equivalence import assert_equivalent, uses_of
from support.models import GPT, MLP

ETHERNET = {"bandwidth": "1 Gbit/s", "latency": "50 us"}
NVLINK = {"bandwidth": "300 GB/s", "latency": "5 us"}
DEVICE = "A100-SXM4-80GB"
WIDTHS = (1024, 8192, 1024)
CONTEXT = 64


def box() -> ClusterSpec:
    """8 A100 in one machine."""
    machine = {"name": "box", "device": DEVICE, "devices": 8}
    return ClusterSpec.load({"name": "box", "machines": [machine], "network": {"inter": ETHERNET, "intra": NVLINK}})


def apart() -> ClusterSpec:
    """8 machines with an A100 each, 1 Gbit/s between them."""
    machine = {"name": "node", "count": 8, "device": DEVICE, "devices": 1}
    return ClusterSpec.load({"name": "apart", "machines": [machine], "network": {"inter": ETHERNET, "intra": NVLINK}})


def model_and_inputs(name: str, batch: int) -> tuple[Any, tuple[Tensor, ...]]:
    """Wide layers; no memory is used."""
    with torch.device("meta"):
        if name == "mlp":
            return MLP(WIDTHS, dtype=torch.float32), (torch.empty(batch, WIDTHS[0]), torch.empty(batch, WIDTHS[-1]))
        ids = torch.empty(batch, CONTEXT, dtype=torch.int64)
        return GPT(512, 2048, 16, 1, CONTEXT, dtype=torch.float32), (ids, ids.clone())


def states_of(plan: Plan, weight: str) -> tuple[Any, Any]:
    """(the weight's state, the product's state) on the first axis."""
    for instruction in plan.stages[0].program.instructions:
        triple = instruction.triple
        if isinstance(triple.body, OpCall) and triple.body.op == "aten.linear" and triple.pre[1].tensor == weight:
            return triple.pre[1].placement.states[0], triple.post[0].placement.states[0]
    raise AssertionError(weight)


def assert_megatron(plan: Plan, first: str, second: str) -> None:
    """The first weight is cut by its rows, so that the hidden dim is sharded; the second by its columns, so that the sum is left open."""
    (weight, hidden), (other, out) = states_of(plan, first), states_of(plan, second)
    assert isinstance(weight, Sharded)
    assert weight.dim == 0
    assert isinstance(hidden, Sharded)
    assert isinstance(other, Sharded)
    assert other.dim == 1
    assert out == PARTIAL


def test_quick_links_and_small_batch_mlp() -> None:
    module, inputs = model_and_inputs("mlp", 4)
    plan = plan_module(module, box(), inputs)
    print(uses_of(plan))
    assert plan.statistics["views"] == ("flat", "2x4", "4x2")
    assert_megatron(plan, "layers.0.weight", "layers.1.weight")
    assert all(set(d) == {"model"} for d in divisions(plan).values())


def test_quick_links_and_small_batch_gpt() -> None:
    module, inputs = model_and_inputs("gpt", 1)
    plan = plan_module(module, box(), inputs, strategy=Restriction(mesh="flat"))  # all views: slow, the last test
    print(uses_of(plan))
    found = divisions(plan)
    assert found["attention"] == ("model",)
    assert_megatron(plan, "blocks.0.qkv.weight", "blocks.0.proj.weight")
    assert_megatron(plan, "blocks.0.up.weight", "blocks.0.down.weight")
    qkv, _ = states_of(plan, "blocks.0.qkv.weight")
    assert (qkv.outer, qkv.cut.units) == (3, 16)  # the same heads of q, k and v


@pytest.mark.parametrize("name, batch", [("mlp", 262144), ("gpt", 4096)])
def test_slow_links_and_large_batch(name: str, batch: int) -> None:
    """Over 1 Gbit/s the batch is divided, which moves no activations; the model never."""
    module, inputs = model_and_inputs(name, batch)
    plan = plan_module(module, apart(), inputs)
    print(uses_of(plan))
    assert divisions(plan)
    assert all(d == ("batch",) for d in divisions(plan).values()), divisions(plan)
    assert uses_of(plan).sharded_flops > 0.9


@pytest.mark.slow
def test_every_view_for_a_gpt() -> None:
    module, inputs = model_and_inputs("gpt", 1)
    plan = plan_module(module, box(), inputs)
    print(uses_of(plan))
    assert len(plan.statistics["views"]) == 3
    found = divisions(plan)
    assert "model" in found["attention"]
    assert all("model" in found[f"blocks.0.{name}.weight"] for name in ("qkv", "proj", "up", "down"))


SMALL = {"mlp": partial(MLP, (8, 16, 8)), "gpt": partial(GPT, 16, 16, 4, 1, 4)}


def small_example(name: str, step: int) -> tuple[Tensor, ...]:
    example: tuple[Tensor, ...] = SMALL[name]().example(2, seed=step)
    return example


@pytest.mark.parametrize("name, ratios", [("mlp", (4.0, 2.0, 1.0, 1.0)), ("mlp", "even"), ("gpt", "even")])
def test_such_plans_train_as_one_device(name: str, ratios: Any) -> None:
    """Scaled down, with the same placements."""
    factory, inputs = SMALL[name], partial(small_example, name)
    plan = plan_module(factory(), FOUR, inputs(0), strategy=Restriction("small", mesh="flat", split="model", ratios=ratios))
    pairs = [("layers.0", "layers.1")] if name == "mlp" else [("blocks.0.qkv", "blocks.0.proj"), ("blocks.0.up", "blocks.0.down")]
    for first, second in pairs:
        assert_megatron(plan, f"{first}.weight", f"{second}.weight")
    if name == "gpt":
        assert divisions(plan)["attention"] == ("model",)
        assert states_of(plan, "blocks.0.qkv.weight")[0].outer == 3
    for optimizer in ("sgd", "adamw"):
        uses = assert_equivalent(factory, inputs, plan, optimizer=optimizer)
    assert uses.sharded_flops > 0.9
    assert uses.unequal == (ratios != "even")
