"""A part of the devices that is faster than all of them is named."""

from __future__ import annotations

import pytest

import hapx
from hapx.fewer import WORTH, parts
from support.clusters import slow_devices
from support.models import MLP

WIDTHS = (16, 64, 64, 8)


def test_parts_are_machines_their_types_and_single_devices() -> None:
    cluster = slow_devices(["fast", "slow", "fast"], ["slow", "slow"], ["slow", "slow"])
    assert list(parts(cluster)) == [(0, 1, 2), (0, 2), (1,), (0,), (3, 4)]
    assert list(parts(slow_devices(["fast", "slow"]))) == [(0,), (1,)]
    assert list(parts(slow_devices(["fast"]))) == []


def test_one_device_is_named_where_the_link_is_very_slow() -> None:
    model, cluster = MLP(WIDTHS), slow_devices(["fast"], ["slow"], inter="10 kbit/s", speed=1e8)
    plan = hapx.plan(model, cluster, model.example(16))
    alone = hapx.plan(model, cluster.part([0]), model.example(16))
    assert plan.statistics["fewer"] == {"devices": (0,), "seconds": pytest.approx(alone.iteration_time)}
    assert alone.iteration_time < (1 - WORTH) * plan.iteration_time
    assert "FASTER WITH FEWER: device 0: 1 fast alone would take" in str(plan)
    assert "fewer" not in alone.statistics


def test_a_machine_of_several_devices_is_named_as_one() -> None:
    model, cluster = MLP(WIDTHS), slow_devices(["slow", "slow"], ["fast", "fast"], inter="10 kbit/s", speed=1e6)
    plan = hapx.plan(model, cluster, model.example(16))
    assert plan.statistics["fewer"]["devices"] == (2, 3)
    assert "devices 2-3: 2 fast alone" in str(plan)


def test_nothing_is_said_where_all_devices_are_of_use_or_asked_for() -> None:
    model = MLP(WIDTHS)
    quick = slow_devices(["fast"], ["slow"], inter="100 Gbit/s", speed=1e6)
    assert "fewer" not in hapx.plan(model, quick, model.example(16)).statistics
    slow = slow_devices(["fast"], ["slow"], inter="10 kbit/s", speed=1e8)
    assert "fewer" not in hapx.plan(model, slow, model.example(16), strategy="dp-even").statistics
