"""What the search is given: problems of models on the clusters of `cluster_specs`, at full size on the meta device, not restricted."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.graph.capture import capture
from hapx.planner import views
from hapx.restriction import AUTO
from hapx.synth.problem import Problem, build
from hapx.theory.derive import derive

SPECS = Path(__file__).parents[2] / "cluster_specs"


def problem_of(model: nn.Module, inputs: tuple[Tensor, ...], cluster: str, view: str) -> tuple[Problem, CostModel]:
    """Of training on one view of a cluster, by its file's name, with its costs."""
    spec = ClusterSpec.load(str(SPECS / f"{cluster}.yaml"))
    theory = derive(capture(model, inputs), next(m for m in views(spec, AUTO) if m.name == view))
    costs = CostModel(theory, spec, "fp32", "adamw", "train")
    return build(theory, costs, AUTO), costs
