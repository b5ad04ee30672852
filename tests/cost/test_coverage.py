"""What of a model the operator table does not cover: named, with its share of FLOPs and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hapx.cost.coverage import Coverage, coverage
from hapx.ir import Graph
from hapx.plan import Plan
from hapx.planner import plan_graphs
from hapx.report.table import coverage_lines, plan_table
from hapx.theory.derive import ReplicatedOperatorWarning
from support.clusters import TWO
from support.plans import mlp_batch_split

WIDTHS = (8, 16, 4)


def graph(**renamed: str) -> Graph:
    """An MLP's graph with operators called by other names."""
    plan = mlp_batch_split(WIDTHS, (6, 2))
    found = plan.graphs[plan.first]
    nodes = [
        replace(n, call=replace(n.call, target=f"aten.{renamed[name]}.default")) if (name := n.call.op.split(".")[1]) in renamed else n
        for n in found.nodes
    ]
    return replace(found, nodes=tuple(nodes))


def test_every_operator_is_known() -> None:
    found = coverage(graph())
    assert found == Coverage(())
    assert (found.flops, found.bytes) == (0, 0)
    assert coverage_lines(found.as_dict()) == ["every operator is covered by a rule"]


def test_unknown_operators_have_their_shares() -> None:
    found = coverage(graph(gelu="mystery"))
    (own,) = found.operators
    assert own.target == "aten.mystery.default"
    assert own.flops == found.flops == 0  # it multiplies no matrices
    # elements read and written forward, each three times in all: two linear layers, the unknown operator, the loss
    moved = 8 * (8 + 16) + 16 * 9 + 8 * (16 + 16) + 8 * (16 + 4) + 4 * 17 + 8 * (4 + 4) + 1
    assert own.bytes == pytest.approx(8 * 32 / moved)
    head, line = coverage_lines(found.as_dict())
    assert head.startswith("without a rule, so whole on every device: 0.0% of the FLOPs, ")
    assert line == f"  aten.mystery.default 0.0% of the FLOPs, {own.bytes:.1%} of the bytes"


def test_the_plan_says_so() -> None:
    def made(g: Graph) -> Plan:
        return plan_graphs([g], TWO, strategy="dp-even")

    known = made(graph())
    assert known.statistics["coverage"] == {"flops": 0.0, "bytes": 0.0, "operators": {}}
    assert "every operator is covered by a rule" in plan_table(known).splitlines()
    with pytest.warns(ReplicatedOperatorWarning, match=r"aten\.mystery\.default has no rule"):
        plan = made(graph(gelu="mystery"))
    assert set(plan.statistics["coverage"]["operators"]) == {"aten.mystery.default"}
    assert any(line.startswith("  aten.mystery.default 0.0% of the FLOPs, ") for line in str(plan).splitlines())
