"""Pipelines of random programs: the runtime of stages is right whatever a planner would choose; and one device that runs the same micro-batches.

In: a model, inputs, devices of every stage, a schedule, a seed. Out: a `Plan` whose stages are random legal programs with random lengths (zeros, and
parameters stored in shards, among them), cut anywhere. `train_micro` is the oracle: the operators of the graph of a micro-batch on one device, one
micro-batch after another; where masks are drawn, the executor on a mesh of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from hapx.collectives.threads import alone
from hapx.cost.remat import with_blocks
from hapx.ir import Graph, Kind
from hapx.layout import Lengths
from hapx.parts import part
from hapx.pipelines import scheduled
from hapx.plan import VERSION, Copy, Plan, ProgramKey, Stage, Storage
from hapx.planner import key_of
from hapx.restriction import Restriction
from hapx.runtime.counts import Counter
from hapx.runtime.executor import Executor
from hapx.runtime.micro_batches import join, split
from hapx.states import Cut, Placement, Row
from hapx.theory.derive import derive
from hapx.verify import cuts_of
from support.equivalence import MAKING, Trace, compare, make_optimizer, run_ranks
from support.interpret import run_module
from support.plans import cluster, flat, two_level
from support.random_programs import Taste, random_lengths, random_plan, random_program
from support.staged import Inputs, block_cuts, micro_graph, train_staged

Devices = Sequence[Sequence[int]]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """A model, its inputs by step, and the micro-batches it is cut into. draws: it draws masks; autocast: of the calls; remat: blocks are computed
    again in backward."""

    model: Callable[[], nn.Module]
    inputs: Inputs
    number: int
    draws: bool = False
    autocast: str | None = None
    remat: bool = False

    def graphs(self) -> tuple[Graph, Graph]:
        return _graphs(self)


@cache
def _graphs(job: Job) -> tuple[Graph, Graph]:
    """Those of a micro-batch and of the batch: captured once for all pipelines of a job."""
    dtype = getattr(torch, job.autocast or "bfloat16")
    with MAKING, torch.autocast("cpu", dtype, enabled=job.autocast is not None):
        graph, whole = micro_graph(job.model(), job.inputs(0), job.number)
    return (with_blocks(graph) if job.remat else graph), whole


def random_stages(
    job: Job, devices: Devices, style: str = "1f1b", seed: int = 0, *, cuts: Sequence[int] | None = None, taste: Taste | None = None,
    idle: int = 0,
) -> Plan:  # fmt: skip
    """A pipeline of random programs. cuts: node numbers; by default anywhere. idle: devices without a stage."""
    graph, whole = job.graphs()
    rng, key = Random(seed), key_of(whole, job.autocast)
    ends = [0, *(cuts if cuts is not None else sorted(rng.sample(range(1, len(graph.nodes)), len(devices) - 1))), len(graph.nodes)]
    stages: list[Stage] = []
    copies: dict[str, list[Copy]] = {}
    for number, (nodes, own) in enumerate(zip(pairwise(ends), devices, strict=True)):
        stage, placed = _stage(graph, key, nodes, tuple(own), stages, copies, rng, taste)
        stages.append(stage)
        for name, placement in placed.items():
            copies.setdefault(name, []).append(Copy(number, placement))
    aliases = {group[0]: group[1:] for group in graph.tied}
    held = [r.name for r in graph.refs.values() if r.kind in (Kind.PARAMETER, Kind.BUFFER)]
    storage = tuple(Storage(n, tuple(aliases.get(n, ())), tuple(copies[n])) for n in held)
    count = 1 + max(d for own in devices for d in own) + idle
    memory, shares = (0,) * count, (1 / count,) * count
    plan = Plan(VERSION, {key: graph}, cluster([count]), Restriction(), storage, tuple(stages), {}, 0.0, memory, shares, "fp32", "sgd", {})
    return replace(plan, schedules={key: scheduled(plan, key, style)})


def _stage(
    graph: Graph, key: ProgramKey, nodes: tuple[int, int], devices: tuple[int, ...], before: Sequence[Stage], copies: dict[str, list[Copy]],
    rng: Random, taste: Taste | None,
) -> tuple[Stage, dict[str, Placement]]:  # fmt: skip
    """A random program for some nodes. What stages on the same devices share is stored alike."""
    own = part(graph, *nodes)
    mesh = two_level(2, 2) if len(devices) == 4 and rng.random() < 0.5 else flat(len(devices))
    earlier = [(i, s) for i, s in enumerate(before) if s.devices == devices]
    if earlier:
        mesh = earlier[0][1].mesh
    theory = derive(own, replace(mesh, devices=devices))
    same = {n: c.placement for n, cs in copies.items() for c in cs if before[c.stage].devices == devices}
    theory = replace(theory, stored={n: (same[n],) if n in same else ps for n, ps in theory.stored.items()})
    program, storage = random_program(theory, key, rng, taste)
    known: dict[Cut, tuple[int, ...]] = {c: ns for _, s in earlier for c, ns in s.lengths[key].items()}
    cuts = [c for c in cuts_of(program, storage) if c.row.kind != "even"]
    lengths: Lengths = {c: known[c] if c in known else random_lengths(c, mesh.sizes[c.row.axis], rng) for c in cuts}
    rows: dict[Row, tuple[float, ...]] = {c.row: tuple(n / c.units for n in ns) for c, ns in lengths.items()}
    placed = {n: p for n, p in storage.items() if own.refs[n].kind in (Kind.PARAMETER, Kind.BUFFER)}
    return Stage(devices, {key: nodes}, program.mesh, rows, {key: dict(lengths)}, {key: program}), placed


# ---- one device ------------------------------------------------------------------------------------------------------------


def train_micro(job: Job, steps: int, optimizer: str, scaler: torch.amp.GradScaler | None = None) -> Trace:
    """On one device, one micro-batch after another."""
    graph, _ = job.graphs()
    assert graph.micro_batches is not None
    with MAKING:
        module = job.model()
    executor = Executor(random_plan(derive(graph, flat(1)), Random(0)), 0, module, {(0,): alone()}) if job.draws else None

    def run(given: dict[str, Tensor]) -> dict[str, Tensor]:
        if executor is not None:
            return executor.run(executor.plan.first, given)
        return run_module(graph, module, [given[n] for n in graph.input_names])

    steps_of, trace = make_optimizer(optimizer, module.parameters()), Trace()
    for step in range(steps):
        steps_of.zero_grad()
        user = dict(zip(graph.given, job.inputs(step), strict=True))
        counts = Counter(graph, CPU).counts(user, dict(module.named_buffers()))
        done = []
        for own in split(user, graph.micro_batches):
            values = run({**own, **counts})
            (values[graph.loss] if scaler is None else scaler.scale(values[graph.loss])).backward()
            done.append({o.tensor: values[o.tensor].detach() for o in graph.outputs if o.role != "buffer"})
        trace.losses.append(float(join(graph, done)[graph.loss]))
        trace.gradients.append({n: p.grad.clone() for n, p in module.named_parameters(remove_duplicate=False) if p.grad is not None})
        if scaler is None:
            steps_of.step()
        else:
            scaler.step(steps_of)
            scaler.update()
    trace.state.update({n: t.clone() for n, t in module.state_dict().items()})
    return trace


def assert_micro(job: Job, plan: Plan, *, steps: int = 2, optimizer: str = "sgd", tolerance: float = 1e-9, mode: Any = "threads") -> None:
    """Raises AssertionError unless all ranks do what one device does with the same micro-batches."""
    expected = train_micro(job, steps, optimizer)
    for rank, trace in enumerate(run_ranks(plan, train_staged, plan, job.model, job.inputs, steps, optimizer, mode=mode)):
        compare(trace, expected, f"rank {rank}", tolerance)


def at_blocks(job: Job, stages: int) -> list[int]:
    """Cuts between repeated blocks."""
    return block_cuts(job.graphs()[0], stages)
