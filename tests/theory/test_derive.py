"""Derivation on graphs made by hand: one axis, two axes, storage, outputs, operators without a rule."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from hapx.errors import UnsupportedOperatorError
from hapx.ir import Graph, Kind, Node, OpCall, Output, Ref, TensorRef
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Sharded
from hapx.theory.derive import ReplicatedOperatorWarning, derive
from support.cases import CASES
from support.claims import text
from support.theories import GraphBuilder, flat, mlp, two_level


def rules(graph: Graph, node: int, axes: int = 1) -> set[str]:
    return {text(t) for t in derive(graph, flat(2) if axes == 1 else two_level(2, 2)).triples[node]}


def test_a_linear_on_one_axis() -> None:
    b = GraphBuilder()
    b.tensor("x", (4, 6))
    b.parameter("w", 8, 6)
    b.parameter("c", 8)
    b.call("y", "aten.linear.default", (4, 8), input="x", weight="w", bias="c")
    b.call("loss", "aten.sum.default", (), self="y", dtype=None)
    assert rules(b.graph("loss"), 0) == {
        "R R R -> R",
        "R I I -> I",
        "S0[4] R R -> S0[4]",
        "S0[4] I I -> S0[4]",  # sufficient factors
        "R S0[8] S0[8] -> S1[8]",
        "S1[6] S1[6] P -> P",
        "P R P -> P",
        "R P P -> P",
    }


def test_work_names_the_cut_that_divides_the_instruction() -> None:
    graph = mlp()
    for triple in derive(graph, flat(2)).triples[0]:
        cuts = [s.cut for p in (*triple.pre, *triple.post) for s in p.placement.states if isinstance(s, Sharded)]
        assert triple.work == ((cuts[0],) if cuts else (None,))


def test_two_axes_combine_the_rules_of_one() -> None:
    one, two = rules(mlp(), 0), rules(mlp(), 0, axes=2)
    assert "S0[8],R R,S0[32] -> S0[8],S1[32]" in two, "data parallel over machines, tensor parallel inside"
    assert "S0[8],S0[8] R,R -> S0[8],S0[8]" in two
    assert len(two) <= len(one) ** 2
    for rule in two:
        left, right = rule.split(" -> ")
        for axis in (0, 1):
            projected = " ".join(p.split(",")[axis] for p in left.split()) + " -> " + right.split(",")[axis]
            assert projected in one, f"{rule} is no rule on axis {axis}"


def test_sufficient_factors_are_gathered_along_one_axis_that_nothing_cuts_again() -> None:
    two = rules(mlp(), 0, axes=2)
    assert "S0[8],S0[8] R,I -> S0[8],S0[8]" in two, "the inner of two axes"
    assert "S0[8],S0[8] I,R -> S0[8],S0[8]" not in two, "the outer one cannot be gathered"
    assert "S0[8],S0[8] I,I -> S0[8],S0[8]" not in two


def test_integers_and_constants_have_no_invariant() -> None:
    b = GraphBuilder()
    b.tensor("ids", (4,), dtype="int64")
    b.parameter("w", 10, 6)
    b.call("e", "aten.embedding.default", (4, 6), weight="w", indices="ids", padding_idx=-1, scale_grad_by_freq=False, sparse=False)
    b.call("loss", "aten.sum.default", (), self="e", dtype=None)
    assert rules(b.graph("loss"), 0) == {
        "R R -> R",
        "I R -> I",
        "R S0[4] -> S0[4]",
        "I S0[4] -> S0[4]",
        "S1[6] R -> S1[6]",
        "S0[10] R -> P",
        "P R -> P",
    }


def test_storage_is_whole_as_used_or_cut_for_keeping() -> None:
    stored = derive(mlp(), flat(2)).stored["w1"]
    states = [p.states[0] for p in stored]
    assert INVARIANT in states
    assert {(s.dim, s.cut.row.kind, s.cut.units) for s in states if isinstance(s, Sharded)} == {
        (0, "compute", 32),
        (1, "compute", 16),
        (0, "storage", 32),
    }


def test_the_loss_is_invariant_buffers_are_whole_results_are_shares_of_the_batch() -> None:
    b = GraphBuilder()
    b.tensor("x", (4, 6))
    b.parameter("w", 8, 6)
    b.tensor("count", (), Kind.BUFFER, "int64")
    b.call("y", "aten.linear.default", (4, 8), input="x", weight="w", bias=None)
    b.call("loss", "aten.sum.default", (), self="y", dtype=None)
    b.call("next", "aten.add.Tensor", (), "int64", self="count", other=1, alpha=1)
    graph = b.graph("loss")
    outputs = (Output("loss", "loss"), Output("next", "buffer", "count"), Output("y", "result"))
    graph = Graph(**{**_fields(graph), "outputs": outputs})
    allowed = {k: {str(p) for p in v} for k, v in derive(graph, flat(2)).outputs.items()}
    assert allowed == {"loss": {"I"}, "next": {"R"}, "y": {"I", "S0[4]"}}


def _fields(graph: Graph) -> dict[str, object]:
    return {name: getattr(graph, name) for name in Graph.__dataclass_fields__}


def test_alike_nodes_get_the_same_triples_under_their_own_names() -> None:
    b = GraphBuilder()
    b.tensor("x", (4, 6))
    for i in range(3):
        b.parameter(f"w{i}", 6, 6)
        b.call(f"y{i}", "aten.linear.default", (4, 6), input=f"y{i - 1}" if i else "x", weight=f"w{i}", bias=None)
    b.call("loss", "aten.sum.default", (), self="y2", dtype=None)
    triples = derive(b.graph("loss"), flat(2)).triples
    assert [text(t) for t in triples[1]] == [text(t) for t in triples[2]]
    assert {p.tensor for t in triples[2] for p in (*t.pre, *t.post)} == {"y1", "w2", "y2"}
    assert all(t.body.refs() == ("y1", "w2") and t.node == 2 for t in triples[2])  # type: ignore[union-attr]


# --- operators without a rule ---------------------------------------------------------------------------------------------------


def unknown(*tags: str) -> Graph:
    b = GraphBuilder()
    b.parameter("x", 4, 6)
    made = TensorRef("y", (4, 6), "float32", Kind.VALUE, True)
    b.refs["y"] = made
    call = OpCall("mylib.twist.default", (("self", Ref("x")),))
    b.nodes.append(Node(call, (made,), "net.block", "net.py:12: y = twist(x)", (0,), tags))
    b.call("loss", "aten.sum.default", (), self="y", dtype=None)
    return b.graph_without_inputs("loss")


def test_an_operator_without_a_rule_is_whole_everywhere_and_named() -> None:
    with pytest.warns(ReplicatedOperatorWarning, match=r"mylib\.twist\.default has no rule.*net\.block, net\.py:12"):
        theory = derive(unknown(), flat(2))
    assert {text(t) for t in theory.triples[0]} == {"R -> R", "I -> I"}


@pytest.mark.parametrize("tags", [("random",), ("in place",), ("data-dependent",), ("random", "data-dependent")])
def test_a_dangerous_operator_without_a_rule_is_refused(tags: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedOperatorError, match=" and ".join(tags)) as caught:
        derive(unknown(*tags), flat(2))
    assert "net.py:12" in str(caught.value) and caught.value.hint


def test_an_operator_with_a_rule_may_have_tags() -> None:
    b = GraphBuilder()
    b.parameter("x", 4, 6)
    b.call("y", "aten.dropout.default", (4, 6), input="x", p=0.1, train=True)
    b.nodes[0] = Node(b.nodes[0].call, b.nodes[0].outputs, "", "", (0,), ("random",))
    b.call("loss", "aten.sum.default", (), self="y", dtype=None)
    assert {p.placement.states[0] for t in derive(b.graph_without_inputs("loss"), flat(2)).triples[0] for p in t.pre}.isdisjoint({PARTIAL})
    assert REPLICATED in {p.placement.states[0] for t in derive(b.graph_without_inputs("loss"), flat(2)).triples[0] for p in t.pre}


@pytest.mark.parametrize("name", ["gpt", "cnn", "mlp"])
def test_a_theory_of_longer_axes_is_made_from_one_of_shorter_ones(name: str) -> None:
    graph = CASES[name].graph
    for short, long in ((flat(2), flat(7)), (two_level(2, 2), two_level(5, 4))):
        made, expected = derive(graph, long, like=derive(graph, short)), derive(graph, long)
        assert made == expected
        assert derive(graph, short).stored != expected.stored  # small parameters are not kept in so many shards
    with pytest.raises(AssertionError, match="another kind of mesh"):
        derive(graph, flat(2), like=derive(graph, two_level(2, 2)))


def test_triples_of_a_node_are_made_when_they_are_asked_for() -> None:
    theory = derive(CASES["mlp"].graph, two_level(2, 2))
    node = next(ts for ts in theory.triples if len(ts) > 3)
    last, every = node[-1], tuple(node)
    assert len(every) == len(node) and node[len(node) - 1] is last and every[-1] is last
    assert node[1:3] == every[1:3] and list(reversed(node)) == [*reversed(every)]
    assert all(triple in node for triple in every)
    assert replace(last, node=last.node + 1) not in node and "no triple" not in node
    for outside in (len(node), -len(node) - 1):
        with pytest.raises(IndexError):
            node[outside]
    again = pickle.loads(pickle.dumps(theory))
    assert again == theory and again.triples[0][0] is again.triples[0][0]
    placements = [p.placement for ts in again.triples for t in ts for p in (*t.pre, *t.post)]
    assert len({id(p) for p in placements}) == len(set(placements))  # equal ones are one object there, too
