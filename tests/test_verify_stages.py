"""Plans of several stages that somebody changed: each time the PlanError that says what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.collectives.threads import ThreadCommunicator
from hapx.cost.remat import with_blocks, without_blocks
from hapx.errors import PlanError
from hapx.graph.segments import graph_hash
from hapx.ir import Graph, MicroBatches
from hapx.plan import Copy, Plan, Stage
from hapx.predict import predictions
from hapx.states import PARTIAL, REPLICATED, Placement, Property
from support.clusters import TWO
from support.equivalence import run_ranks
from support.small_stages import DEEP, deep_gpt, gpt, idle, interleaved, mlp
from support.staged import micro_graph, pipeline_on, staged_plan, with_program


def with_stage(plan: Plan, number: int, **changes: Any) -> Plan:
    stages = list(plan.stages)
    stages[number] = replace(stages[number], **changes)
    return replace(plan, stages=tuple(stages))


def with_graph(plan: Plan, change: Callable[[Graph], Graph]) -> Plan:
    """The plan with a changed graph, hashed anew."""
    graph = change(plan.graphs[plan.first])
    return replace(plan, graphs={plan.first: replace(graph, hash=graph_hash(graph))})


def with_micro(plan: Plan, **changes: Any) -> Plan:
    def change(graph: Graph) -> Graph:
        assert isinstance(graph.micro_batches, MicroBatches)
        return replace(graph, micro_batches=replace(graph.micro_batches, **changes))

    return with_graph(plan, change)


def other_cut(plan: Plan) -> Plan:
    """One node more in the first stage than its program runs."""
    (start, stop), (_, last) = (s.nodes[plan.first] for s in plan.stages)
    plan = with_stage(plan, 0, nodes={plan.first: (start, stop + 1)})
    return with_stage(plan, 1, nodes={plan.first: (stop + 1, last)})


def on_devices(plan: Plan, number: int, devices: tuple[int, ...]) -> Plan:
    stage = plan.stages[number]
    mesh = replace(stage.mesh, devices=devices)
    programs = {key: replace(program, mesh=mesh) for key, program in stage.programs.items()}
    return with_stage(plan, number, devices=devices, mesh=mesh, programs=programs)


def with_schedule(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, schedules={plan.first: replace(plan.schedules[plan.first], **changes)})


def swapped(plan: Plan) -> Plan:
    """The first two backward runs of the last group the other way round."""
    *others, last = plan.schedules[plan.first].actions
    runs = [i for i, a in enumerate(last) if a.kind == "backward"]
    order = list(last)
    order[runs[0]], order[runs[1]] = order[runs[1]], order[runs[0]]
    return with_schedule(plan, actions=(*others, tuple(order)))


def late_free(plan: Plan) -> Plan:
    """All `free` at the end: it can be carried out."""
    *others, last = plan.schedules[plan.first].actions
    order = (*(a for a in last if a.kind != "free"), *(a for a in last if a.kind == "free"))
    return with_schedule(plan, actions=(*others, order), name="gpipe")


def received_elsewhere(plan: Plan) -> Plan:
    """The second stage takes what it receives as Replicated: its cotangents would be sums."""
    stage = plan.stages[1]
    received = plan.boundaries(plan.first)[0].target[1]
    other = Property(received.tensor, Placement((REPLICATED,)))
    program = replace(stage.program, needs=tuple(other if p == received else p for p in stage.program.needs))
    return with_stage(plan, 1, programs={plan.first: program})


def given_as_sums(plan: Plan) -> Plan:
    stage = plan.stages[0]
    made = plan.boundaries(plan.first)[0].source[1]
    other = Property(made.tensor, Placement((PARTIAL,)))
    program = replace(stage.program, gives=tuple(other if p == made else p for p in stage.program.gives))
    return with_stage(plan, 0, programs={plan.first: program})


def other_lengths(stage: Stage) -> dict[Any, Any]:
    return {key: {cut: (own[0] + 1, *own[1:]) for cut, own in lengths.items()} for key, lengths in stage.lengths.items()}


def copies(plan: Plan, *stages: int) -> Plan:
    """The tied weight is stored by these stages."""
    storage = [replace(s, copies=tuple(Copy(n, s.copies[0].placement) for n in stages)) if s.name == "tok.weight" else s for s in plan.storage]
    return replace(plan, storage=tuple(storage))


def remat_in(plan: Plan, *stages: int) -> Plan:
    """Blocks of some stages are computed again in backward."""
    graph, found = plan.graphs[plan.first], []
    for number in stages:
        part = plan.part(plan.first, number)
        found += [replace(r, start=r.start + part.first, stop=r.stop + part.first) for r in with_blocks(without_blocks(part)).regions]
    plan = replace(plan, graphs={plan.first: replace(graph, regions=tuple(found))})
    time, memory, shares = predictions(plan)
    return replace(plan, iteration_time=time, memory=memory, shares=shares)


def half_a_block(plan: Plan) -> Plan:
    plan = remat_in(plan, 1)
    graph = plan.graphs[plan.first]
    first, *others = graph.regions
    return replace(plan, graphs={plan.first: replace(graph, regions=(replace(first, stop=first.stop - 1), *others))})


CHANGED: dict[str, tuple[Callable[[], Plan], Callable[[Plan], Plan], str]] = {
    "a stage less": (gpt, lambda p: replace(p, stages=p.stages[:1]), "the stages end with node"),
    "nodes": (mlp, other_cut, "runs nodes|copies in stages"),
    "a gap": (gpt, lambda p: with_stage(p, 1, nodes={p.first: (p.stages[0].nodes[p.first][1] + 1, len(p.graphs[p.first].nodes))}), "in order"),
    "one device in two groups": (mlp, lambda p: on_devices(p, 1, (1,)), "stages on the same devices, or on other ones"),
    "a device that is none": (mlp, lambda p: on_devices(p, 1, (3,)), "devices of the cluster"),
    "a device twice": (mlp, lambda p: on_devices(p, 0, (0, 0)), "each once"),
    "no schedule": (gpt, lambda p: replace(p, schedules={}), "stages without a schedule"),
    "sizes of micro-batches": (gpt, lambda p: with_schedule(p, micro_batches=(2, 2, 3, 1)), r"allowed: \(2, 2, 2, 2\)"),
    "a micro-batch less": (gpt, lambda p: with_schedule(p, micro_batches=(2, 2, 2)), r"allowed: \(2, 2, 2, 2\)"),
    "a run less": (gpt, lambda p: with_schedule(p, actions=(p.schedules[p.first].actions[0][1:], *p.schedules[p.first].actions[1:])), "is missing"),
    "the order of backward": (gpt, swapped, "schedule 1f1b"),
    "another schedule's order": (gpt, late_free, "another order than that of its name"),
    "an unknown schedule": (gpt, lambda p: with_schedule(p, name="1f2b"), "no schedule is named '1f2b'.*did you mean"),
    "evaluation in training": (gpt, lambda p: with_schedule(p, name="forward"), "forward for evaluation"),
    "what is received": (mlp, received_elsewhere, "cannot be stored as R|reads"),
    "what is given": (mlp, given_as_sums, "which nothing makes|must be"),
    "lengths": (mlp, lambda p: with_stage(p, 0, lengths=other_lengths(p.stages[0])), "stage 0, program train .*do not sum to"),
    "a copy less": (gpt, lambda p: copies(p, 0), r"copies in stages \[0\]; allowed: \[0, 1\], which use it"),
    "copies out of order": (gpt, lambda p: copies(p, 1, 0), "copies in stages"),
    "the whole batch": (mlp, lambda p: with_micro(p, number=4), "the graph is for train"),
    "what is counted": (gpt, lambda p: with_micro(p, number=2), "what is counted over the whole batch does not fit"),
    "inputs that are cut": (gpt, lambda p: with_micro(p, cut=("idx",)), "what is counted|the graph is for train"),
    "nothing counted": (gpt, lambda p: with_micro(p, counts=None), "the graph is for train"),
    "results": (gpt, lambda p: with_micro(p, results=(("view", PARTIAL),)), "1 results of micro-batches are put together, of 0"),
    "a whole batch's graph": (gpt, lambda p: with_graph(p, lambda g: replace(g, micro_batches=None)), "the graph is of a whole batch"),
    "half a block again": (deep_gpt, half_a_block, "other blocks are computed again"),
    "the time": (gpt, lambda p: replace(p, iteration_time=p.iteration_time / 2), "by the cost model"),
    "the memory": (gpt, lambda p: replace(p, memory=(0, *p.memory[1:])), "by the cost model"),
    "the shares": (gpt, lambda p: replace(p, shares=tuple(reversed(p.shares))), "by the lengths"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_plan_of_stages_is_refused(what: str) -> None:
    make, change, message = CHANGED[what]
    with pytest.raises(PlanError, match=message):
        change(make()).verify()


@pytest.mark.parametrize("make", [gpt, mlp, interleaved])
def test_plans_of_stages_are_sound(make: Callable[[], Plan]) -> None:
    make().verify()


def test_devices_may_be_idle() -> None:
    plan = idle()
    plan.verify()
    assert (plan.memory[1], plan.shares[1]) == (0, 0.0)


@pytest.mark.parametrize("stages", [(0,), (1,), (0, 1)])
def test_blocks_may_be_computed_again_in_some_stages(stages: tuple[int, ...]) -> None:
    plan = remat_in(deep_gpt(), *stages)
    assert plan.iteration_time > deep_gpt().iteration_time
    assert all((plan.memory[d] < deep_gpt().memory[d]) == (d // 2 in stages) for d in range(4))
    plan.verify()


@pytest.mark.parametrize("batch, training", [(6, True), (3, False), (8, False), (5, True)])
def test_further_programs_of_stages_are_sound(batch: int, training: bool) -> None:
    model = DEEP()
    plan = with_program(mlp(), model, model.example(batch), training=training)
    key = list(plan.graphs)[-1]
    plan.verify()
    assert plan.schedules[key].micro_batches == {6: (3, 3), 3: (3,), 8: (4, 4), 5: (1,) * 5}[batch], "none is larger than before"
    assert [s.name for s in plan.schedules.values()] == ["1f1b", "1f1b" if training else "forward"]
    wrong = {**plan.schedules, key: plan.schedules[plan.first]}
    with pytest.raises(PlanError, match=r"micro-batches of|forward for evaluation"):
        replace(plan, schedules=wrong).verify()


class Shared(nn.Module):
    """One layer that is called four times: where a stage ends, its parameters do not say. Dropout in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.drop(F.gelu(self.layer(x)))
        return x.square().mean()


@pytest.mark.parametrize("training", [True, False])
def test_further_programs_are_cut_where_the_first_one_is(training: bool) -> None:
    model = Shared()
    graphs = micro_graph(model, (torch.ones(8, 8),), 2)
    assert [n.call.op for n in graphs[0].nodes[6:8]] == ["aten.linear", "aten.gelu"]
    plan = staged_plan(model, (torch.ones(8, 8),), TWO, ((0,), (1,)), 2, cuts=[6], graphs=graphs)
    longer = with_program(plan, model, (torch.ones(4, 8),), training=training)
    longer.verify()
    key = list(longer.graphs)[-1]
    assert [stage.nodes[key][0] for stage in longer.stages] == [0, 6 if training else 4]


def test_a_stage_that_is_only_dropout_has_nothing_to_do_in_evaluation() -> None:
    model, inputs = Shared(), (torch.ones(8, 8),)
    graphs = micro_graph(model, inputs, 2)
    assert [n.call.op for n in graphs[0].nodes[2:3]] == ["aten.dropout"]
    plan = staged_plan(model, inputs, TWO, ((0,), (1,), (0,)), 2, "gpipe", cuts=[2, 3], graphs=graphs)
    longer = with_program(plan, model, inputs, training=False)
    longer.verify()
    key = list(longer.graphs)[-1]
    assert [stage.nodes[key] for stage in longer.stages] == [(0, 2), (2, 2), (2, len(longer.graphs[key].nodes))]
    module = Shared().eval()

    def evaluated(threads: ThreadCommunicator) -> float:
        pipeline = pipeline_on(longer, copy.deepcopy(module), threads)
        with torch.no_grad():
            return float(pipeline.run(key, {longer.graphs[key].given[0]: inputs[0]})[longer.graphs[key].loss])

    assert run_ranks(longer, evaluated, mode="threads") == [pytest.approx(float(module(*inputs).detach()), rel=1e-6)] * 2
