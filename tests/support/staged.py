"""Plans of several stages by hand, and their equivalence with one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hapx.cluster.spec import ClusterSpec
from hapx.collectives import Messenger, ProcessGroupCommunicator, ThreadMessenger, create_groups, create_messenger
from hapx.collectives.threads import ThreadCommunicator
from hapx.graph.capture import capture
from hapx.ir import Graph
from hapx.pipelines import assemble, extend_stages, plan_piece
from hapx.plan import Plan
from hapx.planner import key_of
from hapx.restriction import AUTO, Restriction
from hapx.runtime.micro_batches import cut_batch
from hapx.runtime.pipeline import Pipeline
from hapx.setting import Counters, Setting
from hapx.theory.normalise import normalised
from support.devices import brought, device, placed
from support.equivalence import MAKING, TOLERANCE, Mode, Trace, compare, make_optimizer, run_ranks, train_single

Inputs = Callable[[int], Sequence[Tensor]]


def micro_graph(model: nn.Module, inputs: Sequence[Tensor], number: int) -> tuple[Graph, Graph]:
    """The graph of a micro-batch, and that of the batch."""
    whole = capture(model, tuple(inputs))
    return normalised(capture(model, cut_batch(tuple(inputs), number)[0]), whole), whole


def block_cuts(graph: Graph, stages: int) -> list[int]:
    """Cuts between repeated blocks, as even as it goes."""
    starts = [i for i in range(1, len(graph.nodes)) if graph.block_of[i] is not None and graph.block_of[i] != graph.block_of[i - 1]]
    starts = starts if len(starts) >= stages - 1 else list(range(1, len(graph.nodes)))
    return [starts[min(len(starts) - 1, round((k + 1) * len(starts) / stages))] for k in range(stages - 1)]


def staged_plan(
    model: nn.Module, inputs: Sequence[Tensor], cluster: ClusterSpec, devices: Sequence[Sequence[int]], number: int = 2, style: str = "1f1b",
    cuts: Sequence[int] | None = None, rule: Restriction = AUTO, optimizer: str = "sgd", graphs: tuple[Graph, Graph] | None = None,
) -> Plan:  # fmt: skip
    """A pipeline of as many stages as there are sets of devices. graphs: what `micro_graph` found, if it is known."""
    graph, whole = graphs or micro_graph(model, inputs, number)
    setting = Setting(graph, key_of(whole), cluster, replace(rule, segments="none"), "fp32", optimizer, repeats=number)
    ends = [0, *(cuts or block_cuts(graph, len(devices))), len(graph.nodes)]
    counters = Counters()
    pieces = [
        plan_piece(replace(setting, in_flight=len(devices) - i), nodes, own, counters)[0]
        for i, (nodes, own) in enumerate(zip(pairwise(ends), devices, strict=True))
    ]
    return assemble(pieces, setting, style, {})


def with_program(plan: Plan, model: nn.Module, inputs: Sequence[Tensor], *, training: bool) -> Plan:
    """The plan with a program for other inputs, which is the last of its programs then."""
    whole = capture(model, tuple(inputs), training=training)

    def part(number: int) -> Graph:
        return normalised(capture(model, cut_batch(tuple(inputs), number)[0], training=training), whole)

    return extend_stages(plan, key_of(whole), whole, part)


def pipeline_on(plan: Plan, model: nn.Module, threads: ThreadCommunicator | None, **options: Any) -> Pipeline:
    """This rank's part of a plan."""
    groups = [create_groups(stage.mesh, threads) for stage in plan.stages]
    options = {"device": device(), **options}
    if threads is None:
        return Pipeline(plan, torch.distributed.get_rank(), model, groups, ProcessGroupCommunicator(), create_messenger, **options)
    messenger: Messenger = ThreadMessenger(threads)
    return Pipeline(plan, threads.rank, model, groups, threads, lambda _: messenger, **options)


def train_staged(
    plan: Plan, model_factory: Callable[[], nn.Module], inputs: Inputs, steps: int, optimizer: str, threads: ThreadCommunicator | None = None
) -> Trace:
    """On this rank of a plan. Single-device tensors are gathered for the trace."""
    with MAKING:  # see there
        module = model_factory()
    pipeline = pipeline_on(plan, module, threads)
    steps_of = make_optimizer(optimizer, pipeline.module.parameters())
    trace, graph = Trace(), plan.graphs[plan.first]
    for step in range(steps):
        steps_of.zero_grad()
        loss = pipeline.run(plan.first, placed(dict(zip(graph.given, inputs(step), strict=True))))[graph.loss]
        loss.backward()
        trace.losses.append(float(loss.detach()))
        trace.gradients.append(brought(pipeline.store.full_gradients()))
        steps_of.step()
    trace.state.update(brought(pipeline.store.full_state_dict()))
    return trace


def assert_staged(
    model_factory: Callable[[], nn.Module], inputs: Inputs, plan: Plan, *, steps: int = 3, optimizer: str = "sgd", mode: Mode = "threads",
    tolerance: float = TOLERANCE,
) -> None:  # fmt: skip
    """Raises AssertionError, naming the tensor, unless all ranks do what one device does with whole batches."""
    expected = train_single(model_factory, inputs, steps, optimizer)
    for rank, trace in enumerate(run_ranks(plan, partial(train_staged, plan, model_factory, inputs, steps, optimizer), mode=mode)):
        compare(trace, expected, f"rank {rank}", tolerance)
