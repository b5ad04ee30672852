"""What the writer says of instructions that it makes: those of a kind have one form, which is the one that the cost model would find."""

from __future__ import annotations

import pytest

from benchmarks.planner import roomy
from benchmarks.workloads import paper_cluster, workload
from hapx.cost.model import CostModel
from hapx.planner import Counters, Setting, key_of, plan_spmd, views
from hapx.restriction import AUTO


@pytest.mark.parametrize(("model", "view"), [("VGG19", 0), ("BERT", 0), ("BERT", 1), ("BERT-MoE", 0)])
def test_forms_are_those_that_the_cost_model_finds(model: str, view: int) -> None:
    graph, cluster = workload(model, 16, 4), roomy(paper_cluster(16))
    mesh = views(cluster, AUTO)[view]
    for candidate in plan_spmd(Setting(graph, key_of(graph), cluster, AUTO, "fp32", "adamw"), Counters(), [mesh]):
        fresh = CostModel(candidate.theory, cluster, "fp32", "adamw", "train")
        triples = [i.triple for i in candidate.program.instructions]
        pairs = {(candidate.costs.form(t), fresh.form(t)) for t in triples}
        assert len(pairs) == len({said for said, _ in pairs}) == len({found for _, found in pairs}) < len(triples)
