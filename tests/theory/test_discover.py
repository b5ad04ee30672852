"""Unknown operators of a graph: what is written into it, what the user is told, and what is proved again where a plan is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hapx.errors import PlanError, UnsupportedOperatorError
from hapx.graph.capture import capture
from hapx.graph.segments import find_blocks, graph_hash
from hapx.ir import Graph
from hapx.plan import Plan
from hapx.planner import plan_graphs
from hapx.rules import Probed, Rule, Site
from hapx.theory import discover as module
from hapx.theory.derive import ReplicatedOperatorWarning, derive
from hapx.theory.discover import ProbedOperatorWarning, discover, verify_probed
from hapx.verify import verify
from support import custom_ops as ops
from support.clusters import THREE
from support.plans import flat


class Net(nn.Module):
    """A linear layer, then `body`, twice."""

    def __init__(self, body: Callable[[Tensor], Tensor], repeat: int = 1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(repeat))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.body(layer(x))
        return (x * x).mean()


def graph_of(body: Callable[[Tensor], Tensor], repeat: int = 1) -> Graph:
    return capture(Net(body, repeat), (torch.zeros(10, 6, dtype=torch.float64),))


def squashed(repeat: int = 1) -> Graph:
    return graph_of(lambda x: ops.squash(x, 0.5), repeat)


def found(graph: Graph) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProbedOperatorWarning)
        return discover(graph)


def test_a_graph_of_known_operators_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(torch.tanh)
    assert discover(graph) is graph
    verify_probed(graph, "")


def test_the_user_is_told_in_one_line() -> None:
    with pytest.warns(ProbedOperatorWarning) as caught:
        graph = discover(squashed(2))
    (told,) = [str(w.message) for w in caught]
    assert told.startswith("hapx_tests.squash.default has no entry; by execution it has the rules S0 -> S0; S1 -> S1 (in model (")
    assert "test_discover.py:" in told and "ops.squash(x, 0.5)" in told
    (probed,) = graph.probed
    assert probed.nodes == (1, 3) and [graph.nodes[i].call.target for i in probed.nodes] == [probed.target] * 2
    assert graph.hash == squashed(2).hash, "what was found is no part of the computation"


def test_triples_and_grains_use_what_was_found() -> None:
    graph, mesh = found(squashed()), flat(2)
    texts = {" ".join(str(p.placement) for p in (*t.pre, *t.post)) for t in derive(graph, mesh).triples[1]}
    assert texts == {"R R", "I I", "S0[10] S0[10]", "S1[6] S1[6]"}
    assert any(cut.row.axis == 0 and t.work for t in derive(graph, mesh).triples[1] for cut in t.work if cut)


def test_what_cannot_be_split_is_replicated_with_the_reason() -> None:
    graph = discover(graph_of(lambda x: x + ops.nothing(x.detach())))
    with pytest.warns(ReplicatedOperatorWarning, match=r"nothing\.default has no rule \(its values do not depend.*whole on every device.*test_disc"):
        theory = derive(graph, flat(2))
    index = next(i for i, n in enumerate(graph.nodes) if "nothing" in n.call.target)
    assert {str(t.pre[0].placement) for t in theory.triples[index]} <= {"R", "I"}


def test_without_a_gradient() -> None:
    """Refused where the loss needs one, split where it does not."""
    with pytest.raises(UnsupportedOperatorError, match=r"quantise\.default has no gradient, and the loss needs one.*register_autograd") as caught:
        discover(graph_of(lambda x: ops.quantise(x, 8)))
    assert "test_discover.py:" in str(caught.value)
    graph = found(graph_of(lambda x: x * ops.quantise(x, 8).detach()))
    assert {str(r) for p in graph.probed for r in p.rules} == {"S0 -> S0", "S1 -> S1"}
    evaluated = capture(Net(lambda x: ops.quantise(x, 8)), (torch.zeros(10, 6, dtype=torch.float64),), training=False)
    assert found(evaluated).probed[0].rules


def test_random_operators_are_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"jitter.*other values each time"):
        discover(graph_of(ops.jitter))


# ---- plans -----------------------------------------------------------------------------------------------------------------


def planned(graph: Graph) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProbedOperatorWarning)
        return plan_graphs([graph], THREE)


def test_rules_are_saved_and_proved_again(tmp_path: Path) -> None:
    plan = planned(squashed())
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.graphs[loaded.first].probed == plan.graphs[plan.first].probed != ()
    assert loaded.digest != replace(plan, graphs={plan.first: replace(plan.graphs[plan.first], probed=())}).digest
    verify(loaded)


def changed(plan: Plan, *probed: Probed) -> Plan:
    return replace(plan, graphs={plan.first: replace(plan.graphs[plan.first], probed=probed)})


def test_a_rule_that_does_not_hold_is_refused() -> None:
    plan = planned(graph_of(ops.running_sum))
    (own,) = plan.graphs[plan.first].probed
    rule = Rule((Site(0),), (Site(0),), divides=True)
    with pytest.raises(PlanError, match=r"running_sum\.default does not have the recorded rule here: S0 -> S0: output 0 is not"):
        verify(changed(plan, replace(own, rules=(*own.rules, rule))))


@pytest.mark.parametrize("nodes, target", [((), ""), ((0,), ""), ((1, 2), ""), ((99,), ""), ((1,), "aten.mm.default")])
def test_rules_of_other_nodes_are_refused(nodes: tuple[int, ...], target: str) -> None:
    plan = planned(squashed())
    (own,) = plan.graphs[plan.first].probed
    with pytest.raises(PlanError, match="not all its calls of one kind"):
        verify(changed(plan, replace(own, nodes=nodes, target=target or own.target)))
    with pytest.raises(PlanError, match="not all its calls of one kind"):
        verify(changed(plan, own, own))


@pytest.mark.parametrize(
    "rule", [Rule((Site(2),), (Site(0),)), Rule((Site(0, 2),), (Site(0, 2),)), Rule((), (Site(0),)), Rule((Site(0),), (Site(0),), "x")]
)
def test_rules_that_do_not_fit_are_refused(rule: Rule) -> None:
    plan = planned(squashed())
    (own,) = plan.graphs[plan.first].probed
    with pytest.raises(PlanError, match="do not fit its tensors"):
        verify(changed(plan, replace(own, rules=(rule,))))


def test_an_operator_that_this_process_does_not_have_is_named() -> None:
    plan = planned(squashed())
    graph = plan.graphs[plan.first]
    nodes = tuple(replace(n, call=replace(n.call, target="another.squash.default")) if "squash" in n.call.target else n for n in graph.nodes)
    odd = replace(graph, nodes=nodes, block_of=find_blocks(nodes, graph.refs), probed=())
    odd = replace(odd, hash=graph_hash(odd))
    with pytest.raises(
        PlanError, match=r"operator 'another\.squash\.default' of .*test_discover\.py.* is not registered in this process; import"
    ) as caught:
        verify(replace(plan, graphs={plan.first: odd}))
    assert "program train" in str(caught.value)


def test_torch_is_loaded_only_where_something_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(*args: Any) -> Any:
        raise AssertionError("probed")

    monkeypatch.setattr(module, "_probe", probe)
    assert discover(graph_of(torch.tanh)).probed == ()
    with pytest.raises(AssertionError, match="probed"):
        discover(squashed())
