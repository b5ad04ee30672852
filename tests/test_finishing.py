"""Small problems: single units are moved by the simulator, which sees what the additive cost does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planning_cases import case
from hapx.finishing import finished
from hapx.lower import Candidate
from hapx.planner import Counters, Simulated, plan_graphs, plan_spmd
from hapx.restriction import Restriction


def without(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    of = case(seed)
    with monkeypatch.context() as patch:
        patch.setattr("hapx.planner.FEW_NODES", 0)
        return plan_spmd(of.setting, Counters(), [of.mesh])


@pytest.mark.parametrize(("seed", "gain"), [(1040, 0.005), (1067, 0.003), (1097, 0.04)])
def test_units_are_moved_where_the_simulator_says_so(seed: int, gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    of = case(seed)
    best, before = plan_spmd(of.setting, Counters(), [of.mesh])[0], without(seed, monkeypatch)[0]
    assert best.fits
    assert best.time < (1 - gain) * before.time
    plan = plan_graphs([of.graph], replace(of.setting.cluster, mesh=of.mesh.name))
    plan.verify()
    assert plan.iteration_time == best.time


@pytest.mark.parametrize("seed", [2, 5, 13])
def test_it_is_never_slower_and_keeps_what_is_fixed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = without(seed, monkeypatch)
    after = finished(before, Simulated(Counters()), ())
    assert after[0].time <= before[0].time and set(map(id, before)) <= set(map(id, after))
    assert finished(before, Simulated(Counters()), before[0].lengths) == before


def test_given_ratios_are_not_touched() -> None:
    of = case(1097)
    even = plan_graphs([of.graph], of.setting.cluster, strategy=Restriction("even", mesh=of.mesh.name, ratios="even"))
    assert all(max(own) - min(own) <= 1 for own in next(iter(even.stages[0].lengths.values())).values())
