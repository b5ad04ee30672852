"""Ratio rows as people see them."""

from __future__ import annotations

import pytest

from hapx.plan import Plan
from hapx.planner import plan_module
from hapx.report.compare import compare_table
from hapx.report.segments import rows_table
from hapx.report.table import plan_table
from hapx.restriction import Restriction
from support.unlike import TwoParts, unlike


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    on, model = unlike(["counter", "counter"], ["mover", "mover"]), TwoParts()
    return {str(s): plan_module(model, on, model.example(96), strategy=Restriction(mesh="flat", segments=s)) for s in ("none", 2)}


def test_a_line_per_row(plans: dict[str, Plan]) -> None:
    plan = plans["2"]
    lines = rows_table(plan).splitlines()
    used = {c.row for c in plan.stages[0].lengths[plan.first]}
    assert lines[0].split() == ["segment", "ratios", "for", "shares,", "device", "by", "device"] and len(lines) == 2 + len(used)
    (first, last) = (line for line in lines if "computing" in line)
    assert first.startswith("products.0 .. products.4 ") and last.startswith("waves.0 .. waves.2 ")
    assert all(line.count(" x2") == 2 and " : " in line for line in (first, last))
    assert rows_table(plan) in plan_table(plan)


def test_one_row_needs_no_table(plans: dict[str, Plan]) -> None:
    plan = plans["none"]
    used = {c.row for c in plan.stages[0].lengths[plan.first]}
    assert len(rows_table(plan).splitlines()) == (2 + len(used) if len(used) > 1 else 0)
    assert all(line.startswith("all ") for line in rows_table(plan).splitlines()[2:])


def test_comparison_names_segments(plans: dict[str, Plan]) -> None:
    lines = compare_table(plans).splitlines()
    assert "flat, 2 segments" in next(line for line in lines if line.startswith("2 "))
    assert "segments" not in next(line for line in lines if line.startswith("none"))
