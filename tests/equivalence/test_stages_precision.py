"""Pipelines under autocast, with a gradient scaler, and with blocks that are computed again in backward, against one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import hapx
from hapx.plan import Plan
from hapx.runtime.recompute import Recomputed
from support.devices import brought, device, placed
from support.equivalence import MAKING, Trace, compare, run_ranks
from support.models import GPT, MLP
from support.random_stages import Job, assert_micro, at_blocks, random_stages, train_micro
from support.staged import pipeline_on

SPLIT = ((0, 1), (2,))
TOLERANCE = {"bfloat16": 4e-2, "float16": 5e-3}
SINGLE = partial(GPT, 11, 8, 2, 2, 4, dtype=torch.float32)
DEEP = partial(GPT, 11, 8, 2, 4, 4)
DROPS = partial(GPT, 11, 8, 2, 4, 4, 0.3)


def example(model: Callable[[], Any], step: int) -> Sequence[Tensor]:
    found: Sequence[Tensor] = model().example(8, step)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_autocast(dtype: str) -> None:
    """Tensors cross in the dtype in which they are; rounding differs with the order of sums."""
    work = Job(SINGLE, partial(example, SINGLE), 4, autocast=dtype)
    plan = random_stages(work, SPLIT, seed=1, cuts=at_blocks(work, 2))
    assert plan.first.autocast == dtype
    assert_micro(work, plan, steps=1, tolerance=TOLERANCE[dtype])


def test_callers_autocast_does_not_reach_backward() -> None:
    """The program was made without: what it computes does not change with the caller's."""
    work = Job(partial(MLP, (6, 8, 8, 3), dtype=torch.float32), partial(example, partial(MLP, (6, 8, 8, 3), dtype=torch.float32)), 4)
    plan = random_stages(work, SPLIT, seed=2, cuts=[3])

    def gradients(autocast: bool, threads: Any = None) -> dict[str, Tensor]:
        pipeline = pipeline_on(plan, work.model(), threads)
        graph = plan.graphs[plan.first]
        with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
            loss = pipeline.run(plan.first, placed(dict(zip(graph.given, work.inputs(0), strict=True))))[graph.loss]
        loss.backward()
        return brought(pipeline.store.full_gradients())

    plain, under = (run_ranks(plan, partial(gradients, on))[0] for on in (False, True))
    assert all(torch.equal(under[n], g) for n, g in plain.items())


def overflowing(step: int) -> Sequence[Tensor]:
    """In step 1, one micro-batch has numbers that float16 has not."""
    x, y = MLP((6, 8, 8, 3), dtype=torch.float32).example(8, step)
    if step == 1:
        x[5] = 1e6
    return x, y


def train_scaled(plan: Plan, work: Job, threads: Any = None) -> tuple[Trace, float, list[int]]:
    with MAKING:
        module = work.model()
    pipeline = pipeline_on(plan, module, threads)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    scaler = hapx.GradScaler(pipeline, init_scale=2.0**10)
    trace, graph, skipped = Trace(), plan.graphs[plan.first], []
    for step in range(3):
        optimizer.zero_grad()
        loss = pipeline.run(plan.first, placed(dict(zip(graph.given, work.inputs(step), strict=True))))[graph.loss]
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.losses.append(float(loss.detach()))
        skipped += [step] if scaler.get_scale() < before else []
    trace.state.update(brought(pipeline.store.full_state_dict()))
    return trace, scaler.get_scale(), skipped


def test_an_overflow_in_one_micro_batch_skips_the_step_everywhere() -> None:
    work = Job(partial(MLP, (6, 8, 8, 3), dtype=torch.float32), overflowing, 4, autocast="float16")
    plan = random_stages(work, SPLIT, seed=3, cuts=[3], idle=1)
    single = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    expected = replace(train_micro(work, 3, "adamw", single), losses=[], gradients=[])
    assert single.get_scale() == 2.0**9
    for trace, scale, skipped in run_ranks(plan, partial(train_scaled, plan, work)):
        assert skipped == [1] and scale == 2.0**9
        compare(replace(trace, losses=[]), expected, "state", 5e-3)


@pytest.mark.parametrize("model, draws", [(DEEP, False), (DROPS, True)], ids=["plain", "dropout"])
@pytest.mark.parametrize("seed", range(2))
def test_blocks_that_are_computed_again(model: Callable[[], Any], draws: bool, seed: int) -> None:
    """Also where a cut goes through a block."""
    work = Job(model, partial(example, model), 2, draws, remat=True)
    plan = random_stages(work, ((0, 1), (2,), (3,)), "1f1b", seed)
    graph = plan.graphs[plan.first]
    assert any(r.kind == "checkpoint" for i in range(3) for r in plan.part(plan.first, i).regions) and graph.recomputed

    def regions(threads: Any = None) -> int:
        pipeline = pipeline_on(plan, model(), threads)
        return sum(isinstance(m, Recomputed) for program in pipeline.programs(plan.first) for m in program.module.modules())

    assert sum(run_ranks(plan, regions)) >= 3
    assert_micro(work, plan)
