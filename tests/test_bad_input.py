"""Bad input: each time one clear error, on every rank, and nothing that hangs.

Plans that somebody changed are the larger part: whatever single value of the file is changed, and its hash computed anew, the plan is refused, or
it is the same plan still (what only people read may differ), or it is another sound plan that trains as one device does.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hapx import codec
from hapx.api import HAP
from hapx.api import plan as make_plan
from hapx.cluster.spec import ClusterSpec
from hapx.errors import CaptureError, HapError, LaunchError, PlanError, UnsupportedOperatorError
from hapx.graph.capture import capture
from hapx.graph.segments import graph_hash
from hapx.ir import Graph, OpCall
from hapx.plan import Instruction, Plan
from hapx.planner import extend, key_of, plan_module
from hapx.predict import predictions
from hapx.restriction import Restriction
from hapx.states import REPLICATED, Placement, Sharded
from support.clusters import FOUR, TWO, TWO_MACHINES, slow_devices
from support.equivalence import assert_equivalent
from support.models import CNN, GPT, MLP
from support.mutations import changes
from support.pool import RankError, pool
from support.small_stages import DEEP, GPT_2, gpt, interleaved
from support.staged import assert_staged
from support.unlike import TwoParts, unlike

WIDTHS = (6, 8, 3)
BATCH = 8


def model() -> MLP:
    return MLP(WIDTHS)


def example(step: int = 0) -> tuple[Tensor, ...]:
    return model().example(BATCH, seed=step)


@cache
def a_plan(strategy: str = "dp-proportional") -> Plan:
    return plan_module(model(), TWO, example(), strategy=strategy)


def text_of(work: Callable[[], Any]) -> str:
    """Type and text of the HapError that `work` raises."""
    try:
        work()
    except HapError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ---- plans that somebody changed ----------------------------------------------------------------------------------------------

# Where a node comes from, what mixes samples and how a mesh and its axes are called: for people. Which cluster and which restriction a plan was made
# for and where layers begin are what the user said, not what follows from it (their numbers must be possible, and fit the predictions as far as
# these depend on them).
FOR_PEOPLE = {("Node", "module"), ("Node", "source"), ("Mesh", "name"), ("Axis", "name"), ("Axis", "kind"), ("MicroBatches", "mixing")}
SAID_BY_THE_USER = {("Plan", "cluster"), ("Plan", "restriction"), ("Graph", "boundaries")}


def essence(value: Any) -> Any:
    """What a plan is, without what is for people and what the user said; predictions as exactly as they are compared."""
    if isinstance(value, tuple | list):
        return tuple(map(essence, value))
    if isinstance(value, float):
        return float(f"{value:.5g}")
    name = type(value).__name__
    if name in codec.CLASSES and not hasattr(value, "value"):
        fields = {f: getattr(value, f) for f in codec._schema(name) if (name, f) not in FOR_PEOPLE | SAID_BY_THE_USER}
        if name == "Plan":
            fields["memory"] = tuple(round(m / 4) for m in value.memory)
            del fields["statistics"]
        return (name, *((f, essence(v)) for f, v in fields.items()))
    if hasattr(value, "items"):
        return frozenset((essence(k), essence(v)) for k, v in value.items())
    return value


def sample(name: str) -> tuple[Callable[[], Any], int, Plan]:
    """(model, batch, plan): shards and an evaluation program, composites and collectives in forms, two axes, two segments, stages."""
    if name in STAGED:
        return STAGED[name][0], 8, STAGED[name][1]()
    if name == "mlp":
        factory, cluster, batch, rule = model, TWO_MACHINES, 32, Restriction("m", mesh="two-level", ratios=(3.0, 1.0))
    elif name == "gpt":
        factory, cluster, batch, rule = partial(GPT, 13, 8, 2, 1, 4), FOUR, 7, Restriction("g", mesh="flat", storage="sharded", ratios="speed")  # type: ignore[assignment]
    elif name == "parts":
        factory, cluster, batch, rule = TwoParts, unlike(["counter", "mover"]), 96, Restriction("p", segments=2)  # type: ignore[assignment]
    else:
        factory, cluster, batch, rule = CNN, FOUR, 7, Restriction("c", mesh="flat", split="model", ratios=(5.0, 2.0, 1.0, 0.0))  # type: ignore[assignment]
    module = factory()
    plan = plan_module(module, cluster, module.example(batch), strategy=rule)
    if name != "gpt":
        graph = capture(module, module.example(3), training=False)
        plan = extend(plan, graph, key_of(graph))
    plan.verify()
    return factory, batch, plan


# a loss that counts before, with a tied head; two stages on each device
STAGED: dict[str, tuple[Any, Callable[[], Plan]]] = {"stages": (GPT_2, gpt), "interleaved": (DEEP, interleaved)}


def other_plans(name: str, count: int, seed: int) -> Counter[str]:
    """What becomes of `count` changed plans. Raises AssertionError for one that is accepted, is another plan, and does not train as one device."""
    factory, batch, plan = sample(name)
    own, found = essence(plan), Counter[str]()
    for what, data in changes(codec.encode(plan), Random(seed), count):
        try:
            changed = codec.decode(data, Plan)
        except PlanError:
            found["no plan"] += 1
            continue
        try:
            changed.verify()  # any other error than PlanError fails the test
        except PlanError:
            found["refused"] += 1
            continue
        if essence(changed) == own:
            found["same"] += 1
            continue
        found["another"] += 1
        print("another sound plan:", what)
        assert changed.graphs[changed.first].hash == plan.graphs[plan.first].hash, what
        check = assert_staged if name in STAGED else assert_equivalent
        check(factory, lambda step: factory().example(batch, seed=step), changed)
    return found


@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn", "parts", *STAGED])
def test_changed_plans_are_refused(name: str) -> None:
    found = other_plans(name, 100, seed=ord(name[0]))
    print(found)
    assert found["refused"] > 40
    assert found["another"] <= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn", "parts", *STAGED])
def test_many_changed_plans_are_refused(name: str, seed: int) -> None:
    found = other_plans(name, 600, seed)
    print(found)
    assert found["another"] <= 0.02 * found["refused"]


def first_call(plan: Plan, change: Callable[[Instruction], Instruction | None]) -> Plan:
    """The plan with the first instruction that can be changed, changed."""
    stage = plan.stages[0]
    program = stage.program
    instructions = list(program.instructions)
    for k, instruction in enumerate(instructions):
        if (new := change(instruction)) is not None:
            instructions[k] = new
            changed = replace(program, instructions=tuple(instructions))
            return replace(plan, stages=(replace(stage, programs={**stage.programs, plan.first: changed}),))
    raise AssertionError("nothing to change")


def longer(plan: Plan) -> Plan:
    stage = plan.stages[0]
    lengths = dict(stage.lengths[plan.first])
    cut, own = next(iter(lengths.items()))
    lengths[cut] = (own[0] + 1, *own[1:])
    return replace(plan, stages=(replace(stage, lengths={plan.first: lengths}),))


def moved(plan: Plan) -> Plan:
    """One unit from the first device to the second: sound, but not what was planned."""
    stage = plan.stages[0]
    lengths = {cut: (own[0] - 1, own[1] + 1, *own[2:]) for cut, own in stage.lengths[plan.first].items()}
    return replace(plan, stages=(replace(stage, lengths={plan.first: lengths}),))


def other_state(instruction: Instruction) -> Instruction | None:
    triple = instruction.triple
    if triple.node is None or not isinstance(triple.post[0].placement.states[0], Sharded):
        return None
    return replace(instruction, triple=replace(triple, post=(replace(triple.post[0], placement=Placement((REPLICATED,))),)))


def other_operator(instruction: Instruction) -> Instruction | None:
    body = instruction.triple.body
    if not isinstance(body, OpCall) or body.op != "aten.gelu":
        return None
    return replace(instruction, triple=replace(instruction.triple, body=OpCall("aten.relu.default", body.args)))


def other_argument(instruction: Instruction) -> Instruction | None:
    body = instruction.triple.body
    if not isinstance(body, OpCall) or body.op != "aten.gelu":
        return None
    return replace(instruction, triple=replace(instruction.triple, body=body.replace(approximate="tanh")))


def in_graph(plan: Plan, change: Callable[[OpCall], OpCall], rehash: bool) -> Plan:
    """The graph's GELU changed; with `rehash`, and its hash and the program as well: consistently."""
    graph = plan.graphs[plan.first]
    nodes = tuple(replace(n, call=change(n.call)) if n.call.op == "aten.gelu" else n for n in graph.nodes)
    other: Graph = replace(graph, nodes=nodes)
    if not rehash:
        return replace(plan, graphs={plan.first: other})
    other = replace(other, hash=graph_hash(other))

    def instruction(i: Instruction) -> Instruction | None:
        body = i.triple.body
        return replace(i, triple=replace(i.triple, body=change(body))) if isinstance(body, OpCall) and body.op == "aten.gelu" else None

    plan = first_call(replace(plan, graphs={plan.first: other}), instruction)
    time, memory, shares = predictions(plan)
    return replace(plan, iteration_time=time, memory=memory, shares=shares)


def tanh(call: OpCall) -> OpCall:
    return call.replace(approximate="tanh")


TAMPERED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a length": (longer, "do not sum to"),
    "a moved length": (moved, "by the cost model"),
    "a state": (lambda p: first_call(p, other_state), "is not a triple of the theory"),
    "an operator": (lambda p: first_call(p, other_operator), "is not a triple of the theory"),
    "an argument": (lambda p: first_call(p, other_argument), "is not a triple of the theory"),
    "an argument of the graph": (lambda p: in_graph(p, tanh, rehash=False), "the graph was changed"),
    "the time": (lambda p: replace(p, iteration_time=p.iteration_time / 2), "by the cost model"),
    "the memory": (lambda p: replace(p, memory=(0, *p.memory[1:])), "by the cost model"),
    "the shares": (lambda p: replace(p, shares=tuple(reversed(p.shares))), "by the lengths"),
    "the storage": (lambda p: replace(p, storage=p.storage[1:]), "stored more or less than once"),
    "the optimizer": (lambda p: replace(p, optimizer="magic"), "unknown optimizer"),
    "the precision": (lambda p: replace(p, precision="fp31"), "unknown precision"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_file_is_refused(what: str, tmp_path: Path) -> None:
    """`save` computes the hash of the file anew: only `verify` can find it."""
    change, message = TAMPERED[what]
    path = tmp_path / "plan.json"
    wrong = change(a_plan())
    wrong.save(path)
    with pytest.raises(PlanError, match=message):
        Plan.load(path).verify()


def test_a_plan_with_impossible_devices_is_refused(tmp_path: Path) -> None:
    data = codec.encode(a_plan())
    for entry in data["table"]:
        if entry["$class"] == "DeviceType":
            entry["memory_bandwidth"] = -1.0
    with pytest.raises(PlanError, match=r"memory_bandwidth"):
        codec.decode(json.loads(json.dumps(data)), Plan).verify()


def run_plan(path: str, cluster: ClusterSpec, with_example: bool) -> str:
    """Start with a plan's file and take a step."""

    def work() -> None:
        hap = HAP(model(), cluster, example_inputs=example() if with_example else None, plan=path)
        hap(*example()).backward()

    return text_of(work)


@pytest.mark.gloo
def test_a_consistently_altered_plan_is_refused_by_hap(tmp_path: Path) -> None:
    """It is sound, for another model: HAP captures and compares."""
    path = tmp_path / "plan.json"
    altered = in_graph(a_plan(), tanh, rehash=True)
    altered.verify()
    altered.save(path)
    for with_example in (True, False):
        for text in pool(2).run(run_plan, str(path), TWO, with_example):
            assert text.startswith("PlanError: ")
            assert "another computation than this model's" in text
    a_plan().save(path)
    assert pool(2).run(run_plan, str(path), TWO, True) == ["no error"] * 2


@pytest.mark.gloo
def test_tampered_and_foreign_plans_are_refused_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    longer(a_plan()).save(path)
    assert all("do not sum to" in text for text in pool(2).run(run_plan, str(path), TWO, True))
    a_plan().save(path)
    other = slow_devices(["slow", "fast"])  # the same devices in another order
    for text in pool(2).run(run_plan, str(path), other, True):
        assert "PlanError: " in text
        assert "another cluster" in text
    plan_module(MLP((6, 9, 3)), TWO, MLP((6, 9, 3)).example(BATCH), strategy="dp-even").save(path)
    for text in pool(2).run(run_plan, str(path), TWO, False):
        assert "PlanError: " in text
        assert "another" in text
    path.write_text(path.read_text()[:-40])
    for text in pool(2).run(run_plan, str(path), TWO, False):
        assert "PlanError: " in text
        assert "not JSON" in text


# ---- models that cannot be planned ----------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """A linear layer, then what `body` does."""

    def __init__(self, body: Callable[[Tensor], Tensor]):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x))


def counts(h: Tensor) -> Tensor:
    return (h * torch.poisson(h.sigmoid())).mean()


def heads(h: Tensor) -> Tensor:
    return (h + torch.binomial(torch.full_like(h, 5.0), h.sigmoid())).mean()


def attempts(h: Tensor) -> Tensor:
    return (h * torch.empty_like(h).geometric_(0.5)).mean()


def in_place(h: Tensor) -> Tensor:
    return (h * torch.empty_like(h).cauchy_()).mean()


def positions(h: Tensor) -> Tensor:
    return (torch.nonzero(h) * h.mean()).sum()


def distinct(h: Tensor) -> Tensor:
    return torch.unique(h).mean()


@pytest.mark.parametrize("body", [counts, heads, attempts, in_place], ids=lambda f: f.__name__)
def test_a_random_operator_without_a_rule_is_refused(body: Callable[[Tensor], Tensor]) -> None:
    """Run whole on every device it would differ between them."""
    with pytest.raises(UnsupportedOperatorError, match=r"test_bad_input\.py:\d+") as caught:
        make_plan(Noisy(body), TWO, (torch.zeros(4, 4),))
    assert "random" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("body", [positions, distinct, in_place], ids=lambda f: f.__name__)
def test_a_data_dependent_or_in_place_operator_is_refused(body: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises((CaptureError, UnsupportedOperatorError), match="test_bad_input") as caught:
        make_plan(Noisy(body), TWO, (torch.zeros(4, 4),))
    assert caught.value.hint


@pytest.mark.parametrize(
    "body", [lambda h: h, lambda h: h.mean(0), lambda h: (h > 0).sum(), lambda h: None], ids=["a batch", "a vector", "a count", "nothing"]
)
def test_a_loss_that_is_no_scalar_is_refused(body: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError) as caught:
        make_plan(Noisy(body), TWO, (torch.zeros(4, 4),))
    assert "loss" in str(caught.value)


@pytest.mark.parametrize(
    "options, message",
    [({"strategy": "dp-evn"}, "did you mean dp-even"), ({"optimizer": "adan"}, "unknown optimizer"), ({"precision": "fp31"}, "unknown precision")],
)
def test_unknown_names_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(HapError, match=message):
        make_plan(model(), TWO, example(), **options)  # type: ignore[arg-type]


# ---- ranks --------------------------------------------------------------------------------------------------------------------------


def wrong_start(case: str) -> str:
    rank = dist.get_rank()
    if case == "world":
        return text_of(lambda: HAP(model(), FOUR, example()))
    if case == "clusters":
        return text_of(lambda: HAP(model(), TWO if rank else slow_devices(["fast", "fast"]), example()))
    if case == "models":
        module = model() if rank else MLP((6, 9, 3))
        return text_of(lambda: HAP(module, TWO, example(), strategy="dp-even"))
    assert case == "no loss"
    return text_of(lambda: HAP(Noisy(torch.sin), TWO, (torch.zeros(4, 4),)))


@pytest.mark.gloo
@pytest.mark.parametrize(
    "case, message",
    [
        ("world", "2 processes for a cluster of 4 devices"),
        ("clusters", "different cluster files"),
        ("models", "the ranks have different models: layers.0.weight is rank 0: float64[9, 6]; rank 1: float64[8, 6]"),
        ("no loss", "loss"),
    ],
)
def test_a_wrong_start_is_one_error_on_all_ranks(case: str, message: str) -> None:
    for text in pool(2).run(wrong_start, case, timeout=25.0):
        assert message in text
        assert text.split(":")[0] in ("LaunchError", "PlanError", "CaptureError")
    assert pool(2).run(dist.get_rank) == [0, 1]


def shapes_differ() -> tuple[list[str], float]:
    """Different batches, then different widths, then a step as it should be."""
    rank = dist.get_rank()
    hap = HAP(model(), TWO, example(), strategy="dp-proportional")
    x, y = example()
    said = [
        text_of(lambda: hap(*(t[: BATCH - rank] for t in (x, y)))),
        text_of(lambda: hap(x[:, : 6 - rank], y)),
        text_of(lambda: hap(x.to(torch.float64 if rank else torch.float32), y)),
        text_of(lambda: hap.eval()(x, y) if rank else hap(x, y)),
    ]
    hap.train()
    return said, float(hap(x, y).detach())


@pytest.mark.gloo
def test_ranks_with_different_shapes_are_told() -> None:
    expected = float(model()(*example()).detach())
    for said, loss in pool(2).run(shapes_differ):
        for text in said:
            assert text.startswith("LaunchError: the ranks are about to run different steps"), text
        assert loss == pytest.approx(expected, rel=1e-12)


def dies(where: str, note: str) -> None:
    """Rank 2 of 3 ends without a word: between forward and backward, or in the middle of backward."""
    cluster = slow_devices(["fast", "fast", "fast"])
    hap = HAP(model(), cluster, model().example(9), strategy="zero")
    loss = hap(*model().example(9))
    loss.backward()
    loss = hap(*model().example(9))

    def die(*_: Any) -> None:
        Path(note).write_text(str(time.time()))
        os._exit(7)

    if dist.get_rank() == 2:
        if where == "before backward":
            die()
        for p in hap.parameters():
            p.register_hook(die)
    loss.backward()
    hap.clip_grad_norm_(1.0)


@pytest.mark.gloo
@pytest.mark.parametrize("where", ["before backward", "in backward"])
def test_a_rank_that_dies_ends_the_others_soon(where: str, tmp_path: Path) -> None:
    note = tmp_path / "died at"
    with pytest.raises(RankError) as error:
        pool(3).run(dies, where, str(note))
    assert time.time() - float(note.read_text()) < 30
    assert "status 7" in error.value.failures[2]
    for rank in (0, 1):
        assert f"{LaunchError.__name__}: another rank has ended" in error.value.failures[rank], error.value.failures[rank]
    assert pool(3).run(dist.get_rank) == [0, 1, 2]
