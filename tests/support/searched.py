"""Problems of small models on small clusters, at shares proportional to speed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from hapx.balancer.lp import objective
from hapx.balancer.rounding import per_device, round_ratios
from hapx.cost.model import CostModel
from hapx.cost.terms import Shares
from hapx.graph.capture import capture
from hapx.planner import views
from hapx.restriction import AUTO
from hapx.synth.astar import Statistics
from hapx.synth.domain import State, Synthesis
from hapx.synth.effect import Vector
from hapx.synth.problem import Problem, build
from hapx.synth.search import program_key
from hapx.synth.writer import Solution, solution
from hapx.theory.derive import derive
from hapx.theory.discover import discover
from support.clusters import FOUR, TWO_MACHINES
from support.models import GPT


@dataclass
class Case:
    problem: Problem
    shares: Shares

    def domain(self, prices: Vector | None = None) -> Synthesis:
        return Synthesis(self.problem, self.shares, None, prices=prices)

    def written(self, last: State) -> Solution:
        return solution(self.problem, last, last.estimate, program_key(self.problem.theory), Statistics())

    def agrees(self, last: State, seconds: float) -> None:
        """What a search says of a program, the linear program says too."""
        own = self.written(last)
        goal = objective(own.steps, own.storage, self.problem.terms.kinds)
        assert seconds == pytest.approx(goal.time(self.shares))
        assert last.memory == pytest.approx(goal.memory(self.shares).tolist())


def gpt(view: str, layers: int) -> Case:
    torch.manual_seed(0)
    model = GPT(50, 16, 2, layers, 8)
    return case(model, model.example(8), view)


def case(model: nn.Module, inputs: tuple[Tensor, ...], view: str) -> Case:
    """On four devices of two kinds: in one machine for the flat view, else in two."""
    cluster = FOUR if view == "flat" else TWO_MACHINES
    graph = discover(capture(model, inputs))
    theory = derive(graph, next(m for m in views(cluster, AUTO) if m.name == view))
    costs = CostModel(theory, cluster, "fp32", "adamw", "train")
    problem = build(theory, costs, AUTO)
    rows = {theory.mesh.row(0, kind, 0): per_device(costs.speeds.tolist(), costs.kinds) for kind in ("compute", "storage")}
    return Case(problem, costs.lengths_to_shares(round_ratios(rows, sorted(problem.cuts, key=str))))
