"""Pipelines in time: every device does its stages' programs, micro-batch by micro-batch, within the timetable of its group."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hapx.plan import Plan
from hapx.predict import Staged
from hapx.restriction import Restriction
from hapx.schedules import received_ahead
from hapx.simulate import simulate
from support.clusters import TWO_MACHINES
from support.models import GPT
from support.small_stages import deep_gpt, gpt, idle, interleaved, mlp
from support.staged import staged_plan

PLANS = [gpt, deep_gpt, mlp, idle, interleaved]


@pytest.mark.parametrize("make", PLANS)
def test_the_total_is_the_iteration(make: Callable[[], Plan]) -> None:
    plan = make()
    found = simulate(plan)
    assert found.total == plan.iteration_time
    assert list(found.spans) == list(range(plan.cluster.num_devices))
    assert max(s.stop for spans in found.spans.values() for s in spans) <= found.total * (1 + 1e-9)
    assert found.busy() == {d: pytest.approx(_computes(plan, d), rel=1e-6) for d in found.spans}


def _computes(plan: Plan, device: int) -> float:
    """Seconds of the instructions of a device's stages, for all micro-batches, and of its updates."""
    staged, total = Staged(plan), 0.0
    number = len(plan.schedules[plan.first].micro_batches)
    for stage in plan.stages_of(device):
        exact, best = staged.exact(stage), staged.candidates[stage]
        kind = next(k for k, devices in enumerate(exact.view.devices) if device in devices)
        for i in best.program.instructions:
            cost = exact.step(i.triple)  # conversions have copies around their communication
            total += number * sum(float(t.at({})[kind]) for t in (cost.forward, cost.backward) if t is not None)
        refs = best.theory.graph.refs
        needs = [(refs[p.tensor], p.placement) for p in best.program.needs if refs[p.tensor].requires_grad and p.tensor in plan.storage_of]
        total += sum(float(exact.update(ref, placement).at({})[kind]) for ref, placement in needs)
    return total


@pytest.mark.parametrize("make", PLANS)
def test_runs_lie_in_the_timetable(make: Callable[[], Plan]) -> None:
    """What a device computes of a micro-batch lies in its group's run of it; transfers are those of the timetable."""
    plan = make()
    found, times = simulate(plan), Staged(plan).timetable
    for group, devices in enumerate(plan.groups):
        runs = {s.name: s for s in times.spans[group] if s.stream == "compute"}
        moved = {s.name for s in times.spans[group] if s.stream in ("send", "receive")}
        for device in devices:
            own = [s for s in found.spans[device] if s.stream == "compute" and not s.name.startswith("update")]
            assert {s.name for s in own} == set(runs)
            assert all(runs[s.name].start - 1e-12 <= s.start <= s.stop <= runs[s.name].stop + 1e-12 for s in own)
            assert {s.name for s in found.spans[device] if s.stream == "communication"} == moved


def test_gradients_are_synchronised_once_in_the_last_backward() -> None:
    synchronised = 0
    model = GPT(13, 8, 2, 4, 4)
    rule = Restriction("dp", split="batch", storage="as-used", sfb="never")
    for plan in (deep_gpt(), staged_plan(model, model.example(8), TWO_MACHINES, ((0, 1), (2, 3)), 4, rule=rule)):
        last = len(plan.schedules[plan.first].micro_batches) - 1
        for device, spans in simulate(plan).spans.items():
            names = [s.name for s in spans if "bucket" in s.name]
            synchronised += len(names)
            assert all(n.startswith(f"B{last}@") for n in names)
            assert not spans or spans[-1].name.startswith("update") or device not in {d for s in plan.stages for d in s.devices}
    assert synchronised


def test_a_trace_shows_the_bubbles(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    simulate(interleaved()).save_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"device 0, stages 0, 2", "device 1, stages 1, 3"}
    slices = [e for e in events if e["ph"] == "X"]
    assert {"F3@2", "B0@1", "F0 0>1", "B3 1>0", "update 2"} <= {e["name"] for e in slices}
    for where in {(e["pid"], e["tid"]) for e in slices}:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == where)
        assert all(a[1] <= b[0] + 1e-5 for a, b in pairwise(own))


def test_buffers_of_micro_batches_received_ahead_are_in_the_memory() -> None:
    """Warm-up of one micro-batch less ahead: as much less as is received for one."""
    plan = gpt()
    staged = Staged(plan)
    (ahead,) = received_ahead(plan.schedules[plan.first])[1:]
    without = replace(plan, schedules={plan.first: replace(plan.schedules[plan.first], actions=_without_receives(plan))})
    received = sum(plan.graphs[plan.first].refs[b.tensor].bytes for b in plan.boundaries(plan.first))
    assert ahead > 0
    assert staged.memory[1] - Staged(without).memory[1] == ahead * received


def _without_receives(plan: Plan) -> tuple[tuple[object, ...], ...]:
    return tuple(tuple(a for a in actions if a.kind != "receive") for actions in plan.schedules[plan.first].actions)
