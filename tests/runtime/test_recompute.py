"""Checkpoint regions at run time: the model's own and the planner's. Same values, same masks, buffers written once, less memory kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hapx.api import HAP
from hapx.collectives.communicator import create_groups
from hapx.cost.memory import kept_bytes
from hapx.cost.remat import chosen_blocks, with_blocks
from hapx.graph.capture import capture
from hapx.ir import Graph
from hapx.plan import Plan
from hapx.planner import plan_graphs
from hapx.restriction import Restriction
from hapx.runtime.executor import Executor
from hapx.runtime.recompute import Recomputed
from hapx.theory.derive import derive
from hapx.theory.triple import Theory
from support.cases import MESHES
from support.clusters import FOUR, ONE
from support.equivalence import Trace, compare, make_optimizer, run_ranks, train_rank, train_single, uses_of
from support.models import CNN, GPT, _initialise
from support.pool import pool
from support.random_programs import random_plan
from support.saved import keeping

STEPS = 2


class Checkpointed(GPT):
    """Every block under `torch.utils.checkpoint`."""

    def logits(self, idx: Tensor) -> Tensor:
        x = self.drop(self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Unit(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x + F.relu(self.bn(self.conv(x))) * (1 + 0.1 * self.seen)  # the value before this step's write counts
        self.seen.add_(1.0)
        return y


class Residual(CNN):
    """Units with batch norm and a buffer that the model reads and writes, between the CNN's two convolutions."""

    def __init__(self, *, checkpointed: bool = False):
        super().__init__()
        self.units = nn.ModuleList(Unit(4) for _ in range(3))
        self.checkpointed = checkpointed
        _initialise(self, 0, torch.float64)

    def logits(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        for unit in self.units:
            x = checkpoint(unit, x, use_reentrant=False) if self.checkpointed else unit(x)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(self.pool(x).flatten(1))


GPT_ARGS = (13, 8, 4, 3, 6)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": partial(GPT, *GPT_ARGS),
    "gpt, dropout": partial(GPT, *GPT_ARGS, dropout=0.2),
    "gpt, checkpointed": partial(Checkpointed, *GPT_ARGS),
    "gpt, checkpointed, dropout": partial(Checkpointed, *GPT_ARGS, dropout=0.2),
    "cnn": Residual,
    "cnn, checkpointed": partial(Residual, checkpointed=True),
}
STRATEGIES: dict[str, str | Restriction] = {
    "dp 5:2:1:0": Restriction("dp", mesh="flat", split="batch", ratios=(5.0, 2.0, 1.0, 0.0)),
    "zero, kept": Restriction("kept", mesh="flat", split="batch", storage="sharded-keep", ratios="speed"),
    "zero, freed": Restriction("freed", mesh="flat", split="batch", storage="sharded-free", ratios="speed"),
    "model 5:2:1:0": Restriction("model", mesh="flat", split="model", ratios=(5.0, 2.0, 1.0, 0.0)),
    "sufficient factors": Restriction("sfb", mesh="flat", split="batch", sfb="always"),
}


def inputs(name: str, step: int) -> tuple[Tensor, ...]:
    example: tuple[Tensor, ...] = MODELS[name]().example(8, seed=step)  # type: ignore[operator]
    return example


@cache
def graph_of(name: str) -> Graph:
    return capture(MODELS[name](), inputs(name, 0))


@cache
def planned(name: str, strategy: str) -> Plan:
    rule = STRATEGIES[strategy]
    assert isinstance(rule, Restriction)
    plan = plan_graphs([graph_of(name)], FOUR, strategy=replace(rule, remat="blocks"))
    plan.verify()
    return plan


@cache
def expected(name: str) -> Trace:
    """Of one device that keeps everything. With dropout it is the executor on one device, whose masks are ours."""
    name = name.replace(", checkpointed", "")
    if "dropout" not in name:
        return train_single(MODELS[name], partial(inputs, name), STEPS, "sgd")
    alone = plan_graphs([graph_of(name)], ONE, strategy=Restriction(remat="none"))
    (trace,) = run_ranks(alone, train_rank, alone, MODELS[name], partial(inputs, name), STEPS, "sgd")
    assert isinstance(trace, Trace)
    return trace


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_computed_again_is_the_same(name: str, strategy: str) -> None:
    """Exact in float64, with ranks that have nothing; running statistics and other buffers are written once."""
    plan = planned(name, strategy)
    print(uses := uses_of(plan))
    assert uses.sharded_flops > 0.6
    assert len([r for r in plan.graphs[plan.first].regions if r.kind == "checkpoint" and r.chosen != ("checkpointed" in name)]) == 3
    for rank, trace in enumerate(run_ranks(plan, train_rank, plan, MODELS[name], partial(inputs, name), STEPS, "sgd")):
        compare(trace, expected(name), f"rank {rank}")


@pytest.mark.gloo
@pytest.mark.parametrize("name, strategy", [("gpt, dropout", "zero, freed"), ("gpt, checkpointed", "model 5:2:1:0"), ("cnn", "dp 5:2:1:0")])
def test_on_processes(name: str, strategy: str) -> None:
    plan = planned(name, strategy)
    traces = run_ranks(plan, train_rank, plan, MODELS[name], partial(inputs, name), STEPS, "sgd", mode="processes")
    for rank, trace in enumerate(traces):
        compare(trace, expected(name), f"rank {rank}")


def train_hap(name: str, given: Plan | None) -> tuple[Trace, int]:
    hap = HAP(MODELS[name](), FOUR, example_inputs=inputs(name, 0), plan=given, strategy="zero", remat="blocks")
    optimizer, trace = make_optimizer("sgd", hap.parameters()), Trace()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = hap(*inputs(name, step))
        loss.backward()
        trace.losses.append(float(loss.detach()))
        trace.gradients.append(hap.full_gradients())
        optimizer.step()
    trace.state.update(hap.full_state_dict())
    return trace, chosen_blocks(hap.plan.graphs[hap.plan.first])


@pytest.mark.gloo
@pytest.mark.parametrize("given", [False, True], ids=["planned", "plan given"])
def test_hap_takes_remat(given: bool) -> None:
    """A plan with chosen blocks fits the model that it was made for."""
    plan = planned("cnn", "zero, freed") if given else None
    for rank, (trace, blocks) in enumerate(pool(4).run(train_hap, "cnn", plan)):
        compare(trace, expected("cnn"), f"rank {rank}")
        assert blocks == 3


# ---- memory --------------------------------------------------------------------------------------------------------------------


def saved_bytes(plan: Plan, name: str, threads: Any = None) -> int:
    """Bytes of the different storages that this rank's forward pass keeps for backward, those of parameters, buffers and inputs left out."""
    executor = Executor(plan, threads.rank, MODELS[name](), create_groups(plan.stages[0].mesh, threads))
    graph = plan.graphs[plan.first]
    given = dict(zip(graph.input_names, inputs(name, 0), strict=True))
    known = {t.untyped_storage().data_ptr() for t in (*executor.module.parameters(), *executor.module.buffers(), *given.values())}
    assert not executor.program(plan.first).frees  # whose hooks would be asked instead
    with keeping() as kept:
        loss = executor.run(plan.first, given)[graph.loss]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    loss.backward()
    return sum(size for address, size in sizes.items() if address not in known)


@pytest.mark.parametrize("name, left", [("gpt", 0.15), ("gpt, dropout", 0.15), ("cnn", 0.8)])
def test_less_is_kept_for_backward(name: str, left: float) -> None:
    """The measured bytes drop by about what the memory model says (which counts one region as if it were none)."""
    rule = Restriction("dp", mesh="flat", split="batch", ratios="even", sfb="never", storage="as-used")
    without, blocks = (plan_graphs([graph_of(name)], FOUR, strategy=replace(rule, remat=r)) for r in ("none", "blocks"))
    before, after = (run_ranks(p, saved_bytes, p, name)[0] for p in (without, blocks))
    print(before, after, without.memory[0], blocks.memory[0])
    assert after < left * before
    assert blocks.memory[0] < without.memory[0]
    # all of three equal regions are forgotten, the model counts two
    predicted = 1.5 * (kept_bytes(without.graphs[without.first]) - kept_bytes(blocks.graphs[blocks.first])) / 4
    assert before - after == pytest.approx(predicted, rel=0.25)


# ---- the ways to run a program -------------------------------------------------------------------------------------------------


def procedures(plan: Plan, name: str, threads: Any = None) -> dict[str, list[Tensor]]:
    """Gradients after several ways to use forward and backward."""
    results: dict[str, list[Tensor]] = {}
    for what in ("two forwards", "twice", "no sync", "dropped"):
        executor = Executor(plan, threads.rank, MODELS[name](), create_groups(plan.stages[0].mesh, threads))
        graph = plan.graphs[plan.first]

        def loss(step: int, executor: Executor = executor, graph: Graph = graph) -> Tensor:
            return executor.run(plan.first, dict(zip(graph.input_names, inputs(name, step), strict=True)))[graph.loss]

        if what == "two forwards":
            (loss(0) + 2 * loss(1)).backward()  # the first one's masks are drawn again after the second one's
        elif what == "twice":
            value = loss(0)
            value.backward(retain_graph=True)
            value.backward()
        elif what == "no sync":
            with executor.no_sync():
                loss(0).backward()
            loss(1).backward()
        else:
            loss(1)
            with torch.no_grad():
                loss(2)
            loss(0).backward()
        results[what] = list(executor.store.full_gradients().values())
    return results


@pytest.mark.parametrize("name", ["gpt, dropout", "cnn"])
def test_every_way_to_use_backward(name: str) -> None:
    plan = planned(name, "dp 5:2:1:0")
    alone = plan_graphs([graph_of(name)], ONE, strategy=Restriction(remat="none"))
    (wanted,) = run_ranks(alone, procedures, alone, name)
    for found in run_ranks(plan, procedures, plan, name):
        for what, gradients in wanted.items():
            largest = max(float(g.abs().max()) for g in gradients)
            for a, b in zip(found[what], gradients, strict=True):
                assert torch.allclose(a, b, rtol=0, atol=1e-10 * largest), what


def regions_of(plan: Plan, name: str, threads: Any = None) -> tuple[str, int]:
    executor = Executor(plan, threads.rank, MODELS[name](), create_groups(plan.stages[0].mesh, threads))
    program = executor.program(plan.first)
    return program.code, sum(isinstance(m, Recomputed) for m in program.module.modules())


def test_regions_can_be_read() -> None:
    code, count = run_ranks(planned("gpt", "zero, freed"), regions_of, planned("gpt", "zero, freed"), "gpt")[0]
    assert count == 3
    top, first = code.split("# recomputed\n")[0], code.split("# recomputed\n")[1]
    assert "recomputed_2 = self.recomputed_2(" in top
    assert "all_gather_blocks_0_up_weight" not in top  # gathered inside, and again in backward
    assert "all_gather_blocks_0_up_weight" in first


# ---- random programs: regions under any legal placements -----------------------------------------------------------------------

RANDOM = partial(GPT, 11, 12, 3, 2, 4)


def random_inputs(step: int) -> tuple[Tensor, ...]:
    example: tuple[Tensor, ...] = RANDOM().example(5, seed=step)
    return example


@cache
def random_theory(mesh: str) -> Theory:
    return derive(with_blocks(capture(RANDOM(), random_inputs(0))), MESHES[mesh])


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 12))])
@pytest.mark.parametrize("mesh", ["3", "2x2"])
def test_random_programs_with_regions(mesh: str, seed: int) -> None:
    plan = random_plan(random_theory(mesh), Random(seed))
    plan.verify()
    single = train_single(RANDOM, random_inputs, STEPS, "sgd")
    for rank, trace in enumerate(run_ranks(plan, train_rank, plan, RANDOM, random_inputs, STEPS, "sgd")):
        compare(trace, single, f"rank {rank}")
