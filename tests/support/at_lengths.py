"""A planning problem on the flat mesh, at lengths that are settled, and what programs need there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hapx.balancer.rounding import Lengths, per_device, round_ratios
from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.fitting import Fitting
from hapx.ir import Graph
from hapx.planner import key_of, views
from hapx.restriction import AUTO
from hapx.synth.problem import Problem, build
from hapx.synth.writer import Solution
from hapx.theory.derive import derive


@dataclass
class AtLengths:
    """exact: the costs at the lengths."""

    problem: Problem
    costs: CostModel
    fitting: Fitting
    lengths: Lengths
    exact: CostModel

    def part(self, own: Solution) -> float:
        """The peak of the fullest device, of what may be used."""
        return float((self.fitting.peak(own, self.lengths)[0] / self.fitting.capacity).max())


def at_lengths(graph: Graph, cluster: ClusterSpec, shares: str, repeats: int = 1) -> AtLengths:
    """shares: "speed", in proportion to it; else even ones. repeats: micro-batches."""
    theory = derive(graph, views(cluster, AUTO)[0])
    costs = CostModel(theory, cluster, "fp32", "adamw", "train", repeats=repeats)
    problem = build(theory, costs, AUTO)
    own = costs.speeds if shares == "speed" else np.full(len(costs.sizes), 1 / sum(costs.sizes))
    rows = [theory.mesh.row(0, kind, 0) for kind in ("compute", "storage")]
    lengths = round_ratios({row: per_device(own.tolist(), costs.kinds) for row in rows}, sorted(problem.cuts, key=str))
    return AtLengths(problem, costs, Fitting(theory, costs, key_of(graph)), lengths, costs.at_lengths(lengths))
