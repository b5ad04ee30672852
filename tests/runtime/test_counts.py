"""Counts of the whole batch at run time, and micro-batches on several devices: what all micro-batches of all devices add up to is what one device
does with the whole batch."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from hapx.collectives.communicator import create_groups
from hapx.collectives.threads import ThreadCommunicator
from hapx.errors import LaunchError
from hapx.graph.capture import capture
from hapx.ir import Graph
from hapx.plan import Plan
from hapx.runtime.counts import Counter
from hapx.runtime.executor import Executor
from hapx.runtime.micro_batches import join, split
from hapx.states import Sharded
from hapx.theory.derive import derive
from support.equivalence import MAKING, run_ranks
from support.losses import MODELS
from support.micro import Outcome, assert_same, at_once, graph_of_parts
from support.plans import flat, two_level
from support.random_programs import random_plan

CPU = torch.device("cpu")
BATCH, NUMBER = 12, 3


def inputs_of(name: str) -> tuple[Tensor, ...]:
    return MODELS[name]().example(BATCH, 3)  # type: ignore[operator, no-any-return]


def parts(name: str) -> Graph:
    return graph_of_parts(MODELS[name], inputs_of(name), NUMBER)


def named(graph: Graph, name: str) -> dict[str, Tensor]:
    return dict(zip(graph.input_names, inputs_of(name), strict=False))


def test_counts_are_those_of_the_whole_batch() -> None:
    graph = parts("weighted")
    counter = Counter(graph, CPU)
    assert (counter.inputs, counter.buffers) == (("target", "mask"), ("weights",))
    given, weights = named(graph, "weighted"), torch.arange(1.0, 9, dtype=torch.float64)
    counts = counter.counts(given, {"weights": weights})
    target, mask = given["target"].flatten(), given["mask"]
    expected = {
        "cross_entropy_loss_count": weights[target[target != 2]].sum(),
        "nll_loss_nd_count": weights[target[target != 5]].sum(),
        "sum_2_of_all": mask.sum(),
        "clamp_of_all": mask.sum().clamp(min=1),
    }
    assert {n: float(t) for n, t in counts.items()} == {n: float(t) for n, t in expected.items()}
    assert all(t.dtype == getattr(torch, graph.refs[n].dtype) and t.shape == graph.refs[n].shape for n, t in counts.items())


def test_a_stage_counts_what_it_reads() -> None:
    graph = parts("weighted")
    counter = Counter(graph, CPU, wanted=["mask", "sum_2_of_all"])
    assert (counter.inputs, counter.buffers) == (("mask",), ())
    counts = counter.counts(named(graph, "weighted"), {})
    assert set(counts) == {"sum_2_of_all"}


def test_a_loss_without_counts_counts_nothing() -> None:
    graph = parts("recommender")
    assert Counter(graph, CPU).counts({}, {}) == {}


def test_a_missing_buffer_is_named() -> None:
    graph = parts("weighted")
    with pytest.raises(LaunchError, match="need weights"):
        Counter(graph, CPU).counts(named(graph, "weighted"), {})


def train_rank(plan: Plan, name: str, threads: ThreadCommunicator | None = None) -> Outcome:
    """All micro-batches of one step on this rank; gradients add up over them."""
    assert threads is not None
    with MAKING:  # threads share the generator
        module = MODELS[name]()
        given = inputs_of(name)
    executor = Executor(plan, threads.rank, module, create_groups(plan.stages[0].mesh, threads))
    graph = plan.graphs[plan.first]
    assert graph.micro_batches is not None
    user = dict(zip(graph.input_names, given, strict=False))
    buffers = {n: b for n, b in executor.store.full_state_dict().items() if n == "weights"}
    counts = Counter(graph, CPU).counts(user, buffers)
    done = []
    for part in split(user, graph.micro_batches):
        results = executor.run(plan.first, {**part, **counts})
        results[graph.loss].backward()
        done.append({n: t.detach() for n, t in results.items()})
    return Outcome(join(graph, done)[graph.loss], executor.store.full_gradients(), {})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["weighted", "recommender", "indexed"])
def test_micro_batches_on_several_devices(name: str, seed: int) -> None:
    mesh = flat(2) if seed else two_level(2, 2)
    plan = random_plan(derive(parts(name), mesh), Random(seed))
    split_somewhere = any(isinstance(s, Sharded) for i in plan.stages[0].program.instructions for p in i.triple.post for s in p.placement.states)
    assert split_somewhere
    expected = at_once(MODELS[name], inputs_of(name))
    for outcome in run_ranks(plan, train_rank, plan, name):
        assert_same(outcome, expected, 1e-11)


def test_graphs_of_parts_differ_from_those_of_whole_batches() -> None:
    graph = parts("weighted")
    assert graph.hash != capture(MODELS["weighted"](), tuple(t[:4] for t in inputs_of("weighted"))).hash
