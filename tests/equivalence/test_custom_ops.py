"""A model with operators of our own trains as on one device: their rules are found by execution, then planned with and run.

The model has everything at once: an elementwise operator, one whose last dim is whole, a bilinear one (a sum over its split index is
Partial), one that may not be split along the batch, and one without a gradient behind a detach.
"""

from __future__ import annotations

import warnings
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor, nn

from hapx.graph.capture import capture
from hapx.ir import Graph
from hapx.plan import Plan
from hapx.planner import plan_graphs
from hapx.restriction import Restriction
from hapx.states import Partial, Sharded
from hapx.theory.derive import ReplicatedOperatorWarning, derive
from hapx.theory.discover import ProbedOperatorWarning, discover
from hapx.theory.registry import REGISTRY
from hapx.verify import verify
from support import custom_ops as ops
from support.cases import CASES, MESHES, assert_case
from support.clusters import FOUR
from support.equivalence import assert_equivalent
from support.models import _initialise
from support.random_programs import Taste, random_plan


class Net(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(4, 3)
        self.mix = nn.Parameter(torch.empty(8, 4))
        _initialise(self, seed, torch.float64)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = ops.squash(self.first(x), 0.3)
        h = ops.bilinear(h, self.mix, ops.squash(self.gate(x), 0.7))
        h = h + 0.1 * ops.running_sum(h) + ops.quantise(h, 4).detach()
        return ((ops.row_softmax(self.last(h)) - targets) ** 2).mean()


def inputs(step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(10, n, generator=generator, dtype=torch.float64) for n in (6, 3))


@cache
def graph() -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProbedOperatorWarning)
        return discover(capture(Net(), inputs(0)))


def own(plan: Plan) -> set[str]:
    """States of our operators' operands and outputs in the plan's program."""
    triples = [i.triple for i in plan.stages[0].program.instructions if "hapx_tests" in getattr(i.triple.body, "target", "")]
    return {type(s).__name__ for t in triples for p in (*t.pre, *t.post) for s in p.placement.states}


@pytest.mark.parametrize("mesh, seed", [("2", 1), ("3", 2), ("4", 2), ("2x2", 3), ("2x2", 4)])
def test_random_programs(mesh: str, seed: int) -> None:
    plan = random_plan(derive(graph(), MESHES[mesh]), Random(seed), Taste(partial=8.0))
    verify(plan)
    assert own(plan) >= {Sharded.__name__, Partial.__name__}
    assert_equivalent(Net, inputs, plan)


@pytest.mark.parametrize("ratios", [(4.0, 4.0, 1.0, 1.0), (5.0, 0.0, 3.0, 2.0)])
def test_planned_with_uneven_shares(ratios: tuple[float, ...]) -> None:
    plan = plan_graphs([graph()], FOUR, strategy=Restriction("uneven", mesh="flat", ratios=ratios))
    verify(plan)
    uses = assert_equivalent(Net, inputs, plan)
    assert uses.unequal


@pytest.mark.parametrize("case, mesh, seed", [("gpt", "3", 0), ("gpt", "2x2", 1), ("cross entropy", "2", 2), ("phasors", "3", 1)])
def test_a_table_that_lacks_operators(case: str, mesh: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above with operators of torch: the table without a third of what the model uses."""
    known = CASES[case].graph
    targets = sorted({n.call.target for n in known.nodes if not n.tags})[::3]
    for name in {*targets, *(t.rsplit(".", 1)[0] for t in targets)} & set(REGISTRY):
        monkeypatch.delitem(REGISTRY, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProbedOperatorWarning)
        warnings.simplefilter("ignore", ReplicatedOperatorWarning)
        found = discover(known)
        plan = random_plan(derive(found, MESHES[mesh]), Random(seed))
    assert len(targets) >= 2 and {p.target for p in found.probed} == set(targets) and any(p.rules for p in found.probed)
    verify(plan)
    assert_case(CASES[case], plan)
