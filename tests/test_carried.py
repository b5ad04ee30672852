"""Programs carried to other meshes and other sizes of the batch are programs there: verification replays them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from hapx.carried import carried
from hapx.cost.model import CostModel
from hapx.ir import Graph
from hapx.lower import Candidate
from hapx.planner import key_of, plan_spmd, views
from hapx.restriction import AUTO
from hapx.setting import Counters, Setting
from hapx.simulate import iteration_time
from hapx.states import Sharded
from hapx.theory.derive import derive
from hapx.theory.discover import discover
from hapx.theory.replay import replay
from support.clusters import slow_devices
from support.models import CNN, GPT
from support.staged import micro_graph

MIXED = slow_devices(["fast", "fast"], ["slow", "slow"])
MORE = slow_devices(["fast", "fast"], ["slow", "slow"], ["slow", "slow"])
RULE = replace(AUTO, segments="none", max_stages=1)
WITHIN = 0.1  # any program is carried, not only the best one
MODELS: dict[str, Callable[[], Any]] = {"gpt": lambda: GPT(13, 32, 4, 2, 8), "cnn": CNN}


@cache
def graphs(name: str) -> tuple[Graph, Graph]:
    """Of 2 and of 4 micro-batches."""
    model = MODELS[name]()
    inputs = model.example(16)
    return discover(micro_graph(model, inputs, 2)[0]), discover(micro_graph(model, inputs, 4)[0])


@cache
def planned(name: str, mesh: int) -> Candidate:
    graph = graphs(name)[0]
    setting = Setting(graph, key_of(graph), MIXED, RULE, "fp32", "adamw", within=WITHIN)
    return plan_spmd(setting, Counters(), [views(MIXED, RULE)[mesh]])[0]


@pytest.mark.parametrize("mesh", [0, 1], ids=["flat", "2x2"])
@pytest.mark.parametrize("name", list(MODELS))
def test_carried_programs_replay(name: str, mesh: int) -> None:
    graph, smaller = graphs(name)
    known = planned(name, mesh)
    there = views(MORE, RULE)[mesh]
    found = carried(known, replace(known.theory, mesh=there), MORE)
    assert found is not None
    replay(found.program, derive(graph, there), found.storage_of)
    assert all(sum(own) == cut.units for cut, own in found.lengths.items())
    assert {c for p in found.storage_of.values() for c in (s.cut for s in p.states if isinstance(s, Sharded)) if c.row.kind != "even"} <= set(
        found.lengths
    )

    theory = derive(smaller, known.mesh)
    less = carried(known, theory, MIXED, CostModel(theory, MIXED, "fp32", "adamw", "train"))
    assert less is not None
    replay(less.program, theory, less.storage_of)
    seconds = [iteration_time(c.program, c.theory.graph, c.costs.at_lengths(c.lengths)) for c in (known, less)]
    assert seconds[1] < seconds[0]


def test_carried_to_itself_is_the_same_program() -> None:
    known = planned("gpt", 1)
    found = carried(known, known.theory, MIXED)
    assert found is not None
    same = found.program == known.program  # their text is long
    assert same
    for row, own in known.shares.items():
        assert found.shares[row] == pytest.approx(own)


def test_other_devices_have_no_shares() -> None:
    known = planned("gpt", 0)
    other = slow_devices(["medium", "medium"])
    assert carried(known, replace(known.theory, mesh=views(other, RULE)[0]), other) is None
