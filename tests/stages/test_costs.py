"""What a pipeline costs, against the simulator."""

from __future__ import annotations

import pytest

from hapx.schedules import Crossing, Seconds, make, timetable
from hapx.stages.costs import Discipline, eager, latency


@pytest.mark.parametrize("way, discipline", [(0.08, eager(2)), (0.1, eager(2)), (0.19, eager(3)), (0.3, eager(4))])
def test_hidden_crossings_go_both_ways_at_once(way: float, discipline: Discipline) -> None:
    """Two equal stages, enough micro-batches in flight: only a way that takes longer than a stage counts."""
    n = 24
    schedule = make(f"1f1b-warm:{discipline.in_flight(n, 2) - 2}", (0, 1), [Crossing(0, 1)], (1,) * n)
    seconds = Seconds((0.1, 0.1), (0.1, 0.1), (), {(0, 1): way, (1, 0): way})
    simulated = timetable(schedule, seconds).total
    assert latency(n, discipline, [(0.2, 2 * way, 0.0), (0.2, 0.0, 0.0)]) == pytest.approx(simulated, rel=0.06)
