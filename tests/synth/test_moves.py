"""Ways to have a step's operands: those that others cover may be left out on the way, and a step of many operands has few."""

from __future__ import annotations

from math import prod

import pytest
import torch

from benchmarks.memory import Tagger
from benchmarks.planning_cases import case
from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.graph.capture import capture
from hapx.planner import key_of, views
from hapx.restriction import AUTO
from hapx.synth import moves
from hapx.synth.problem import build
from hapx.synth.search import solve
from hapx.theory.derive import derive


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_the_best_program_does_not_depend_on_when_covered_ways_are_left_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case(seed)
    costs = {}
    for many in (0, 10**9):
        monkeypatch.setattr(moves, "MANY", many)
        setting = problem.setting
        theory = derive(setting.graph, problem.mesh)
        model = CostModel(theory, setting.cluster, setting.precision, setting.optimizer, setting.key.mode)
        coded = build(theory, model, setting.rule)
        shares = dict.fromkeys(coded.cuts, model.speeds)
        costs[many] = solve(coded, shares, None, setting.key).cost
    assert costs[0] == pytest.approx(costs[10**9], rel=1e-12)


def test_a_step_of_many_parameters_has_few_moves() -> None:
    """16 parameters are read by one."""
    graph = capture(Tagger(80, 32, 9), (torch.randint(0, 80, (32, 15)), torch.randint(0, 9, (32, 15))))
    speeds = {"fast": ("3e9", "1 GB/s"), "middle": ("2e9", "0.6 GB/s"), "weak": ("1e9", "0.5 GB/s")}
    cluster = ClusterSpec.load(
        {
            "name": "three kinds",
            "machines": [{"name": "a", "devices": ["fast", "middle"]}, {"name": "b", "devices": ["weak", "weak"]}],
            "device_types": {n: {"flops": f, "memory": "1 GiB", "memory_bandwidth": b, "kernel_latency": "0.1 us"} for n, (f, b) in speeds.items()},
            "network": {"inter": {"bandwidth": "4 Gbit/s", "latency": "1 us"}, "intra": {"bandwidth": "20 GB/s", "latency": "1 us"}},
        }
    )
    (mesh,) = [m for m in views(cluster, AUTO) if m.name == "flat"]
    theory = derive(graph, mesh)
    model = CostModel(theory, cluster, "fp32", "adamw", "train")
    problem = build(theory, model, AUTO)
    found = moves.Moves(problem, dict.fromkeys(problem.cuts, model.speeds), memory=False)
    (step,) = [s for s in problem.steps[: problem.num_nodes] if len(s.tensors) > 10]
    masks = tuple(slot.fixed if slot.fixed is not None else slot.table.full for slot in step.kind.slots)
    (choice, *_) = step.kind.choices
    slots = step.kind.slots
    ways = prod(len(found.options(slots[slot].table, masks[slot], target, slots[slot].live)) for slot, target in choice.needs)
    counts = [len(found.at(step.kind, masks, k)) for k in range(len(step.kind.choices))]
    assert ways > 10**6 > 500 > max(counts) > 0
    assert solve(problem, dict.fromkeys(problem.cuts, model.speeds), None, key_of(graph)).cost > 0
