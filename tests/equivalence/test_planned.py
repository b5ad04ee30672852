"""Plans of the planner train as one device does: loss, every gradient, parameter and buffer of three steps, in float64.

Every case says what its plan must use (work that is divided, unequal or empty shares, forms of collectives, sufficient factors, parameters in
shards), so that a plan which does everything everywhere cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hapx.api import HAP
from hapx.cluster.spec import ClusterSpec
from hapx.plan import Form, Plan
from hapx.planner import plan_module
from hapx.restriction import Restriction
from hapx.states import Sharded
from support.clusters import FOUR, ONE, THREE, TWO, TWO_MACHINES
from support.devices import brought
from support.division import divisions
from support.equivalence import Trace, Uses, assert_equivalent, compare, make_optimizer, run_ranks, train_rank, train_single, uses_of
from support.models import CNN, GPT, MLP
from support.pool import pool

MODELS: dict[str, Callable[[], Any]] = {
    "mlp": partial(MLP, (6, 8, 3)),
    "gpt": partial(GPT, vocab=13, width=8, heads=4, layers=1, context=6),
    "cnn": CNN,
}
OPTIMIZERS = ("sgd", "adamw")
GROUPED, POINT_TO_POINT = frozenset({"grouped"}), frozenset({"point_to_point"})
Expectation = Callable[[Uses, Plan], object]


@dataclass(frozen=True)
class Case:
    """A strategy on a cluster, and what its plan must use. `batch`: 7 cannot be divided by 4, 3 or 2; `batches`: of some models."""

    cluster: ClusterSpec
    strategy: str | Restriction
    expect: Expectation
    batch: int = 7
    divided: float = 0.9
    batches: Mapping[str, int] = field(default_factory=dict)

    def inputs(self, model: str) -> Callable[[int], tuple[Tensor, ...]]:
        return partial(one_example, model, self.batches.get(model, self.batch))


def flat(name: str, **options: Any) -> Restriction:
    """On one axis of all devices."""
    return Restriction(name, mesh="flat", **options)


def data_parallel(name: str, **options: Any) -> Restriction:
    return Restriction(name, mesh="flat", split="batch", **options)


def batch_lengths(plan: Plan) -> tuple[int, ...]:
    """Samples per device."""
    graph = plan.graphs[plan.first]
    shares = [s * graph.batch for s in plan.shares]
    assert all(abs(s - round(s)) < 1e-9 for s in shares), shares
    return tuple(map(round, shares))


def divides_batch(plan: Plan) -> bool:
    return all(d == ("batch",) for d in divisions(plan).values())


def divides_model(plan: Plan) -> bool:
    return any("model" in d for d in divisions(plan).values()) and not any("batch" in d for d in divisions(plan).values())


def all_stored(plan: Plan) -> bool:
    """Every parameter with a unit for each device is kept in shards."""
    refs, sharded = plan.graphs[plan.first].refs, set()
    for stored in plan.storage:
        if any(hasattr(s, "cut") for s in stored.copies[0].placement.states):
            sharded.add(stored.name)
    large = {r.name for r in refs.values() if r.kind.value == "parameter" and r.shape[0] >= plan.cluster.num_devices}
    return large <= sharded and bool(sharded)


def model_inside_batch(uses: Uses, plan: Plan) -> bool:
    """Machines share the batch 3:1, the devices of a machine share the model, or in part the sequence."""
    found = divisions(plan)
    b = plan.graphs[plan.first].batch
    lengths = plan.stages[0].lengths[plan.first].values()
    inside = set(found.values())
    shared = ("batch", "model") in inside and inside <= {("batch", "model"), ("batch", "sequence")}
    return plan.stages[0].mesh.sizes == (2, 2) and shared and (3 * b // 4, b // 4) in lengths


def stored_inside_machines(_: Uses, plan: Plan) -> bool:
    """Parameters are in shards inside of machines, whole between them."""
    found = [s.copies[0].placement.states for s in plan.storage]
    return any(isinstance(inside, Sharded) for _, inside in found) and not any(isinstance(between, Sharded) for between, _ in found)


CASES: dict[str, Case] = {
    "even": Case(FOUR, data_parallel("even", ratios="even"), lambda u, p: batch_lengths(p) == (2, 2, 2, 2) and not u.unequal, batch=8),
    "4:4:1:1": Case(FOUR, data_parallel("4:4:1:1", ratios=(4.0, 4.0, 1.0, 1.0)), lambda u, p: batch_lengths(p) == (4, 4, 1, 1), batch=10),
    "4:4:1:1, model": Case(
        FOUR, flat("shares", split="model", ratios=(4.0, 4.0, 1.0, 1.0)), lambda u, p: u.unequal and divides_model(p), divided=0.75
    ),
    "zero length": Case(FOUR, data_parallel("zero length", ratios=(5.0, 2.0, 1.0, 0.0)), lambda u, p: batch_lengths(p) == (5, 2, 1, 0), batch=8),
    "zero length, model": Case(
        FOUR, flat("empty", split="model", ratios=(5.0, 2.0, 1.0, 0.0)), lambda u, p: u.zero_length and divides_model(p), divided=0.75
    ),
    "indivisible": Case(FOUR, data_parallel("indivisible", ratios="even"), lambda u, p: batch_lengths(p) == (2, 2, 2, 1)),
    "auto": Case(FOUR, "auto", lambda u, p: u.unequal),
    "dp-even": Case(FOUR, "dp-even", lambda u, p: divides_batch(p) and batch_lengths(p) == (2, 2, 2, 1) and u.stored_sharded == 0),
    "dp-proportional": Case(FOUR, "dp-proportional", lambda u, p: divides_batch(p) and batch_lengths(p) == (3, 3, 1, 0)),
    "zero": Case(FOUR, "zero", lambda u, p: divides_batch(p) and all_stored(p) and u.forms == {Form.PADDED}),
    "tensor-parallel": Case(FOUR, "tensor-parallel", lambda u, p: divides_model(p), divided=0.75),
    "sufficient factors": Case(THREE, data_parallel("sfb", sfb="always"), lambda u, p: u.sfb >= 1 and divides_batch(p)),
    "kept": Case(FOUR, data_parallel("kept", storage="sharded-keep", ratios="speed"), lambda u, p: all_stored(p) and not u.freed),
    "freed": Case(FOUR, data_parallel("freed", storage="sharded-free", ratios="speed"), lambda u, p: all_stored(p) and u.freed > 1),
    "grouped": Case(FOUR, data_parallel("grouped", storage="sharded", forms=GROUPED), lambda u, p: u.forms == {Form.GROUPED} and all_stored(p)),
    "point to point": Case(THREE, data_parallel("p2p", storage="sharded", forms=POINT_TO_POINT), lambda u, p: u.forms == {Form.POINT_TO_POINT}),
    "two ranks": Case(TWO, flat("two"), lambda u, p: u.unequal),
    "three ranks": Case(THREE, flat("three", ratios="speed"), lambda u, p: u.unequal),
    "inside machines": Case(
        TWO_MACHINES, Restriction("inside", mesh="two-level", storage="sharded-inside", split="batch"), stored_inside_machines, batch=8
    ),
    "two machines": Case(
        TWO_MACHINES, Restriction("two machines", mesh="two-level", ratios=(3.0, 1.0)), model_inside_batch, batch=8, batches={"mlp": 64}
    ),
}


def one_example(model: str, batch: int, step: int) -> tuple[Tensor, ...]:
    example: tuple[Tensor, ...] = MODELS[model]().example(batch, seed=step)
    return example


@cache
def planned(model: str, case: str) -> Plan:
    chosen = CASES[case]
    plan = plan_module(MODELS[model](), chosen.cluster, chosen.inputs(model)(0), strategy=chosen.strategy)
    plan.verify()
    return plan


def check_uses(case: Case, uses: Uses, plan: Plan) -> None:
    assert uses.sharded_flops >= case.divided, uses
    assert case.expect(uses, plan), f"{uses}; {divisions(plan)}; shares {plan.shares}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_planned(model: str, case: str) -> None:
    plan = planned(model, case)
    check_uses(CASES[case], uses_of(plan), plan)
    for optimizer in OPTIMIZERS:
        assert_equivalent(MODELS[model], CASES[case].inputs(model), plan, optimizer=optimizer)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "model, case",
    [("mlp", "two ranks"), ("cnn", "three ranks"), ("gpt", "sufficient factors"), ("gpt", "freed"), ("gpt", "grouped"), ("cnn", "zero length"),
     ("mlp", "two machines")],
)  # fmt: skip
def test_planned_on_processes(model: str, case: str) -> None:
    plan = planned(model, case)
    uses = assert_equivalent(MODELS[model], CASES[case].inputs(model), plan, optimizer="adamw", mode="processes")
    check_uses(CASES[case], uses, plan)


# ---- dropout: one mask for all plans ------------------------------------------------------------------------------------------


class Dropping(MLP):
    """With dropout on the input (a global mask), the hidden layer, and again on the same values."""

    def features(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.layers[0](nn.functional.dropout(x, 0.3, self.training)))
        return self.layers[1](nn.functional.dropout(h, 0.5, self.training) + nn.functional.dropout(h, 0.5, self.training))


DROPPING: dict[str, Callable[[], Any]] = {
    "mlp": partial(Dropping, (6, 8, 3)),
    "gpt": partial(GPT, vocab=13, width=8, heads=4, layers=1, context=6, dropout=0.2),
}


def dropping_example(model: str, step: int) -> tuple[Tensor, ...]:
    example: tuple[Tensor, ...] = DROPPING[model]().example(7, seed=step)
    return example


@pytest.mark.parametrize(
    "strategy", ["dp-even", "zero", pytest.param(Restriction("model", mesh="flat", split="model", ratios=(4.0, 2.0, 1.0)), id="model")]
)
@pytest.mark.parametrize("model", DROPPING)
def test_dropout_is_that_of_one_device(model: str, strategy: str | Restriction) -> None:
    """Masks depend on the seed, the step and the call, not on the plan."""
    module, inputs = DROPPING[model](), partial(dropping_example, model)
    alone = plan_module(module, ONE, inputs(0))
    plan = plan_module(module, THREE, inputs(0), strategy=strategy)
    print(uses := uses_of(plan))
    assert uses.sharded_flops > 0.7
    assert uses.unequal
    (expected,) = run_ranks(alone, train_rank, alone, DROPPING[model], inputs, 3, "sgd")
    for rank, trace in enumerate(run_ranks(plan, train_rank, plan, DROPPING[model], inputs, 3, "sgd")):
        compare(trace, expected, f"rank {rank}")
    without = train_single(partial(_evaluating, model), inputs, 1, "sgd")
    assert abs(without.losses[0] - expected.losses[0]) > 1e-4  # something was dropped


def _evaluating(model: str) -> nn.Module:
    module: nn.Module = DROPPING[model]().eval()
    return module


# ---- the whole way: evaluation and a short last batch, with programs that the planner adds --------------------------------------------

BATCHES = (8, 5, 8)
EVALUATED = 3


def train_hap(model: str, cluster: ClusterSpec, strategy: str | Restriction, local: bool) -> tuple[Trace, float, list[tuple[str, int]], Plan]:
    """Three batches, the second one short, then an evaluation."""
    rank = dist.get_rank()
    hap = HAP(MODELS[model](), cluster, example_inputs=one_example(model, BATCHES[0], 0), strategy=strategy, inputs="local" if local else "global")

    def own(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        sizes = hap.batch_sizes_for(len(batch[0]))
        assert sum(sizes) == len(batch[0])
        return tuple(t.split(sizes)[rank] for t in batch) if local else batch

    optimizer, trace = make_optimizer("adamw", hap.parameters()), Trace()
    for step, n in enumerate(BATCHES):
        optimizer.zero_grad()
        loss = hap(*own(one_example(model, n, step)))
        loss.backward()
        trace.losses.append(float(loss.detach()))
        trace.gradients.append(brought(hap.full_gradients()))
        optimizer.step()
    hap.eval()
    with torch.no_grad():
        evaluated = float(hap(*own(one_example(model, EVALUATED, 9))))
    hap.plan.verify()
    trace.state.update(brought(hap.full_state_dict()))
    return trace, evaluated, [(k.mode, k.shapes[0][0]) for k in hap.plan.graphs], hap.plan


def train_alone(model: str) -> tuple[Trace, float]:
    module = MODELS[model]()
    optimizer, trace = make_optimizer("adamw", module.parameters()), Trace()
    for step, n in enumerate(BATCHES):
        optimizer.zero_grad()
        loss = module(*one_example(model, n, step))
        loss.backward()
        trace.losses.append(float(loss.detach()))
        trace.gradients.append({name: p.grad.clone() for name, p in module.named_parameters(remove_duplicate=False)})
        optimizer.step()
    trace.state.update(module.state_dict())
    module.eval()
    with torch.no_grad():
        return trace, float(module(*one_example(model, EVALUATED, 9)))


@pytest.mark.gloo
@pytest.mark.parametrize(
    "model, strategy, local",
    [("gpt", data_parallel("speed", ratios="speed"), True), ("cnn", "zero", True), ("cnn", data_parallel("speed", ratios="speed"), False),
     ("mlp", flat("model", split="model"), True), ("gpt", "zero", False)],
    ids=["gpt, local", "cnn in shards, local", "cnn", "mlp by columns, local", "gpt in shards"],
)  # fmt: skip
def test_short_batch_and_evaluation(model: str, strategy: str | Restriction, local: bool) -> None:
    expected, evaluated = train_alone(model)
    for rank, (trace, found, programs, plan) in enumerate(pool(3).run(train_hap, model, THREE, strategy, local)):
        compare(trace, expected, f"rank {rank}")
        assert found == pytest.approx(evaluated, rel=1e-9)
        assert programs == [("train", 8), ("train", 5), ("eval", 3)]
        if rank == 0:
            print(uses_of(plan))
            assert uses_of(plan).sharded_flops > 0.7
