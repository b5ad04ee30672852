"""Schedules as pictures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hapx.schedules import Seconds, grid, make
from support.pipelines import Pipeline, chain, pipelines


def test_1f1b() -> None:
    expected = """
1f1b: 2 groups, 2 stages, 4 micro-batches
group 0  F0 F1 ..... B0--- F2 B1--- F3 B2--- .. B3---
group 1  .. F0 B0--- F1 B1--- F2 B2--- F3 B3--- .....
bubbles by group  0: 20%  1: 20%
micro-batches kept at once, by stage  2 1
"""
    drawn = grid(make("1f1b", (0, 1), chain(2), (1,) * 4))
    assert drawn == expected.strip(), drawn


def test_interleaved_names_stages() -> None:
    drawn = grid(make("interleaved", (0, 1, 0, 1), chain(4), (1,) * 2))
    assert "group 0  F0@0 F1@0 F0@2 F1@2" in drawn and "2 groups, 4 stages, 2 micro-batches" in drawn


def test_real_seconds_in_so_many_columns() -> None:
    drawn = grid(make("gpipe", (0, 1), chain(2), (1,) * 2), Seconds((1.0, 1.0), (1.0, 3.0)), columns=40)
    assert drawn.splitlines()[1:3] == ["group 0  F0- F1- ............... B0- ....... B1-", "group 1  ... F0- F1- B0--------- B1--------- ..."], drawn


@given(pipelines(), st.integers(30, 200), st.one_of(st.none(), st.integers(1, 150)))
def test_fits(pipeline: Pipeline, width: int, columns: int | None) -> None:
    """Plain ASCII in lines of the given width; every run is there where there is room."""
    schedule = pipeline.make()
    drawn = grid(schedule, columns=columns, width=width)
    rows = [line for line in drawn.splitlines() if line.startswith("group ")]
    assert drawn.isascii() and max(map(len, rows)) <= width
    assert len(rows) % len(schedule.actions) == 0
    if columns is None:
        text = " ".join(rows)
        assert all(f"F{m}" in text for m in range(len(schedule.micro_batches)))


def test_nothing_takes_time() -> None:
    assert "group 1" in grid(make("forward", (0, 1), chain(2), (1,)), Seconds((0.0, 0.0), (0.0, 0.0)))
