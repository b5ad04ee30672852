"""Ways to have a step's operands: those that others cover may be left out on the way, and a step of many operands has few."""

from __future__ import annotations

from itertools import product
from math import prod
from random import Random

import pytest
import torch

from benchmarks.memory import Tagger
from benchmarks.planning_cases import case
from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.graph.capture import capture
from hapx.planner import key_of, views
from hapx.restriction import AUTO, restriction
from hapx.synth import moves
from hapx.synth.effect import Effect, cheaper
from hapx.synth.problem import build
from hapx.synth.search import solve
from hapx.theory.derive import derive
from support.clusters import FOUR
from support.theories import deep


def random_option(random: Random, bits: int) -> moves.Option:
    """With few different numbers, so that many cover others."""

    def vector() -> tuple[float, ...]:
        return tuple(float(random.randint(0, 2)) for _ in range(2))

    effect = Effect(float(random.randint(0, 3)), random.choice((None, vector())), vector(), random.choice((None, vector())), vector(), vector())
    return moves.Option(effect, random.getrandbits(bits) | random.getrandbits(bits) | 1, None, None)


def covers(a: moves.Option, b: moves.Option, memory: bool) -> bool:
    return a.place & b.place == b.place and cheaper(a.effect, b.effect, memory)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_what_others_cover_is_left_out_and_nothing_else(seed: int, memory: bool) -> None:
    random = Random(seed)
    options = [random_option(random, random.choice((3, 80))) for _ in range(random.randint(1, 120))]
    kept = moves.undominated(options, memory)
    assert all(any(covers(a, b, memory) for a in kept) for b in options)
    assert not any(covers(a, b, memory) for i, b in enumerate(kept) for a in kept[:i])
    assert [o.effect.weight for o in kept] == sorted(o.effect.weight for o in kept)


LONG = (9, 54)  # of these seeds: seconds


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) if seed in LONG else seed for seed in range(0, 60, 3)])
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


@pytest.mark.parametrize("strategy", ["auto", "tensor-parallel", "zero", "dp-even"])
def test_what_is_used_of_what_is_available_has_the_same_moves(strategy: str) -> None:
    """Strategies by name cannot reach every placement of a parameter that is stored already: it is not stored once more then."""
    graph, rule, (mesh, *_) = deep(3, "one weight"), restriction(strategy), views(FOUR, AUTO)
    theory = derive(graph, mesh)
    model = CostModel(theory, FOUR, "fp32", "adamw", "train")
    problem = build(theory, model, rule)
    found = moves.Moves(problem, dict.fromkeys(problem.cuts, model.speeds), memory=False)
    none, several = 0, 0
    for kind in problem.classes:
        available = [[s.fixed] if s.fixed is not None else [s.table.closure(p) for p in range(len(s.table.placements))] for s in kind.slots]
        for masks in product(*available):
            for choice in range(len(kind.choices)):
                moved = [(m.effect, m.uses) for m in found.at(kind, masks, choice)]
                assert [(m.effect, m.uses) for m in found.at(kind, found.used(kind, masks, choice), choice)] == moved
                assert all(use.kept is None for _, uses in moved for use in uses if masks[use.slot])
                none, several = none + (not moved), several + bool(moved)
    print(f"{strategy}: {several} with moves, {none} without")
    assert several > 10
    assert (none > 0) is (strategy in ("tensor-parallel", "dp-even"))
