"""Models that compute with complex numbers train as on one device: planned programs, random legal ones, pipelines, clipped and summed gradients."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hapx.collectives.communicator import create_groups
from hapx.plan import Plan
from hapx.planner import plan_graphs
from hapx.restriction import BASELINES
from hapx.runtime.executor import Executor
from hapx.verify import verify
from support.cases import CASES, MESHES, assert_case
from support.clusters import FOUR, TWO_MACHINES
from support.devices import brought, device, placed
from support.equivalence import run_ranks, uses_of
from support.random_programs import random_plan
from support.spectral import SPECTRAL, Fourier
from support.staged import assert_staged, micro_graph, staged_plan

RATIOS = (4.0, 2.0, 1.0, 0.0)


def planned(model: str, strategy: str) -> Plan:
    rule = replace(BASELINES[strategy], name=f"{strategy}, 4:2:1:0", mesh="flat", ratios=RATIOS, max_stages=1)
    plan = plan_graphs([CASES[model].graph], FOUR, strategy=rule)
    plan.verify()
    return plan


@pytest.mark.parametrize("strategy", ["auto", "zero", "tensor-parallel"])
@pytest.mark.parametrize("model", SPECTRAL)
def test_planned(model: str, strategy: str) -> None:
    plan = planned(model, strategy)
    uses = uses_of(plan)
    assert uses.unequal and uses.zero_length and uses.sharded_flops > 0
    assert bool(uses.stored_sharded) or strategy != "zero"
    assert_case(CASES[model], plan, steps=2)


@pytest.mark.parametrize("mesh, seed", [("3", 0), ("2x2", 1)])
@pytest.mark.parametrize("model", SPECTRAL)
def test_random_programs(model: str, mesh: str, seed: int) -> None:
    plan = random_plan(CASES[model].theory(MESHES[mesh]), Random(seed))
    verify(plan)
    assert_case(CASES[model], plan, steps=2)


@pytest.mark.gloo
@pytest.mark.parametrize("model", ["fourier", "phasors"])
def test_on_processes(model: str) -> None:
    assert_case(CASES[model], random_plan(CASES[model].theory(MESHES["2x2"]), Random(2)), steps=2, mode="processes")


def inputs(model: str, step: int) -> tuple[Tensor, ...]:
    return CASES[model].inputs(step)


@pytest.mark.parametrize("model, crossing", [("phasors", "complex128"), ("rotary", "float64")])
def test_complex_numbers_cross_stages(model: str, crossing: str) -> None:
    """Every number of the first stage that the second one needs is sent as it is, and its cotangent comes back."""
    case = replace(CASES[model], batch=8)
    graph, whole = micro_graph(case.model(), case.inputs(0), 2)
    made = [i + 1 for i, n in enumerate(graph.nodes) if n.outputs[0].dtype == crossing and n.outputs[0].requires_grad]
    plan = staged_plan(case.model(), case.inputs(0), TWO_MACHINES, ((0, 1), (2, 3)), 2, cuts=[made[len(made) // 2]], graphs=(graph, whole))
    crossed = {plan.graphs[plan.first].refs[b.tensor].dtype for b in plan.boundaries(plan.first)}
    assert crossing in crossed
    assert_staged(case.model, case.inputs, plan, steps=2)


def clipped(plan: Plan, dtype: torch.dtype | None, threads: Any = None) -> dict[str, Tensor]:
    """The norm of all gradients, and what clipping leaves of them."""
    executor = Executor(plan, threads.rank, Fourier(), create_groups(plan.stages[0].mesh, threads), device=device(), gradient_dtype=dtype)
    graph = plan.graphs[plan.first]
    executor.run(plan.first, placed(dict(zip(graph.input_names, inputs("fourier", 0), strict=True))))[graph.loss].backward()
    norm = executor.clip_grad_norm_(0.01)
    return brought({"norm": norm, **executor.store.full_gradients()})


@pytest.mark.parametrize("strategy", ["dp-even", "zero"])
def test_clipped_and_summed_as_complex_numbers(strategy: str) -> None:
    """Complex gradients are summed as they are, whatever dtype was chosen for sums; their norm is that of torch."""
    plan = plan_graphs([CASES["fourier"].graph], FOUR, strategy=strategy)
    module = Fourier()
    module(*inputs("fourier", 0)).backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.01)
    exact, low = (run_ranks(plan, clipped, plan, dtype)[0] for dtype in (None, torch.bfloat16))
    assert float(exact["norm"]) == pytest.approx(float(norm), rel=1e-9) and exact["norm"].dtype == torch.float64
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(exact[name], parameter.grad, rtol=1e-9, atol=1e-12), name
        assert low[name].dtype == parameter.dtype
    assert torch.allclose(low["low"], exact["low"], rtol=1e-2)
