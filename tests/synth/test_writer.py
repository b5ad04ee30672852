"""What the writer makes of choices: instructions, those of a kind of one form, which is the one that the cost model would find; and outputs."""

from __future__ import annotations

import pytest

from benchmarks.planner import roomy
from benchmarks.workloads import paper_cluster, workload
from hapx.cost.model import CostModel
from hapx.planner import Counters, Setting, key_of, plan_spmd, views
from hapx.restriction import AUTO
from hapx.synth.search import program_key, solve
from hapx.theory.replay import replay
from support.models import CNN
from support.problems import problem_of


@pytest.mark.parametrize(("model", "view"), [("VGG19", 0), ("BERT", 0), ("BERT", 1), ("BERT-MoE", 0)])
def test_forms_are_those_that_the_cost_model_finds(model: str, view: int) -> None:
    graph, cluster = workload(model, 16, 4), roomy(paper_cluster(16))
    mesh = views(cluster, AUTO)[view]
    for candidate in plan_spmd(Setting(graph, key_of(graph), cluster, AUTO, "fp32", "adamw"), Counters(), [mesh]):
        fresh = CostModel(candidate.theory, cluster, "fp32", "adamw", "train")
        triples = [i.triple for i in candidate.program.instructions]
        pairs = {(candidate.costs.form(t), fresh.form(t)) for t in triples}
        assert len(pairs) == len({said for said, _ in pairs}) == len({found for _, found in pairs}) < len(triples)


@pytest.mark.parametrize("view", ["flat", "2x2"])
def test_counters_of_batch_norms_are_given_without_a_step(view: str) -> None:
    """They are whole everywhere: nothing of them is tracked or chosen."""
    model = CNN()
    problem, costs = problem_of(model, model.example(8), "a100x2_p100x2", view)
    outputs = problem.theory.graph.outputs
    counters = {o.tensor for o in outputs if o.role == "buffer" and problem.tables[o.tensor].ref.dtype == "int64"}
    assert len(counters) == 2
    assert [outputs[i].tensor for i in problem.outputs] == [o.tensor for o in outputs if o.tensor not in counters]
    assert not any(name in counters for step in problem.steps for name, _, _ in step.live)
    found = solve(problem, dict.fromkeys(problem.cuts, costs.speeds), None, program_key(problem.theory))
    assert [p.tensor for p in found.program.gives] == [o.tensor for o in outputs]
    replay(found.program, problem.theory, found.storage_of)
