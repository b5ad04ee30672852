"""FLOPs of products that are not one matrix product, by hand."""

from __future__ import annotations

from hapx.cost.compute import hidden, work
from hapx.cost.memory import saved
from support.theories import GraphBuilder


def test_einsum():
    b = GraphBuilder()
    b.parameter("a", 3, 4, 5)
    b.parameter("b", 5, 6)
    b.call("y", "aten.einsum.default", (3, 4, 6), equation="...k,kn->...n", tensors=("a", "b"), path=None)
    g = b.graph_without_inputs("y")
    assert work(g, g.nodes[0]).forward == 2 * 12 * 5 * 6
    assert work(g, g.nodes[0]).backward == 2 * work(g, g.nodes[0]).forward
    assert saved(g.nodes[0], g) == ("a", "b")


def test_einsum_of_three_goes_from_left_to_right():
    b = GraphBuilder()
    b.tensor("a", (3, 4))
    b.parameter("b", 4, 5)
    b.parameter("c", 5, 6)
    b.call("y", "aten.einsum.default", (3, 6), equation="ij,jk,kl->il", tensors=("a", "b", "c"), path=None)
    g = b.graph("y")
    assert work(g, g.nodes[0]).forward == 2 * 3 * 4 * 5 + 2 * 3 * 5 * 6


def test_a_sum_has_no_flops():
    b = GraphBuilder()
    b.parameter("a", 3, 4)
    b.call("y", "aten.einsum.default", (4,), equation="ij->j", tensors=("a",), path=None)
    g = b.graph_without_inputs("y")
    assert work(g, g.nodes[0]).forward == 0
    assert saved(g.nodes[0], g) == ()


def test_tensordot_and_chains():
    b = GraphBuilder()
    b.tensor("a", (3, 4, 5))
    b.parameter("b", 5, 4, 6)
    b.call("y", "aten.tensordot.default", (3, 6), self="a", other="b", dims_self=(1, 2), dims_other=(1, 0))
    b.call("z", "aten.linalg_multi_dot.default", (3, 7), tensors=("y", b.parameter("c", 6, 100), b.parameter("d", 100, 7)))
    g = b.graph("z")
    first, second = (work(g, n) for n in g.nodes)
    assert first.forward == first.backward == 2 * 3 * 6 * 20
    assert second.forward == min(2 * 3 * 6 * 100 + 2 * 3 * 100 * 7, 2 * 6 * 100 * 7 + 2 * 3 * 6 * 7)
    assert second.backward == 2 * second.forward


def test_a_recurrent_network_multiplies_every_weight_once_per_step():
    b = GraphBuilder()
    b.tensor("x", (5, 3, 4))
    b.tensor("h", (2, 3, 8))
    weights = [("w0", (32, 4)), ("u0", (32, 8)), ("b0", (32,)), ("c0", (32,)), ("w1", (32, 8)), ("u1", (32, 8)), ("b1", (32,)), ("c1", (32,))]
    names = tuple(b.parameter(n, *s) for n, s in weights)
    constants = {"has_biases": True, "num_layers": 2, "dropout": 0.0, "train": True, "bidirectional": False, "batch_first": False}
    b.call("y", "aten.lstm.input", (5, 3, 8), input="x", hx=("h", "h"), params=names, **constants)
    g = b.graph("y")
    node = g.nodes[0]
    assert work(g, node).forward == 2 * 15 * (32 * 4 + 3 * 32 * 8)
    assert work(g, node).backward == 2 * work(g, node).forward
    assert hidden(g, node) == (("y", 6 * 5 * 3 * 8 * 4 * 2),), "four gates and two states of every layer"


def test_functions_of_matrices():
    """A third of a cube for Cholesky's factor of each matrix of a batch; two triangles per number that solves an equation."""
    b = GraphBuilder()
    b.parameter("a", 4, 6, 6)
    b.parameter("r", 4, 6, 5)
    b.call("l", "aten.linalg_cholesky.default", (4, 6, 6), self="a", upper=False)
    b.call("x", "aten.cholesky_solve.default", (4, 6, 5), self="r", input2="l", upper=False)
    b.call("y", "aten.linalg_solve.default", (4, 6, 5), A="a", B="x", left=True)
    g = b.graph_without_inputs("y")
    factor, solved, equation = (work(g, n) for n in g.nodes)
    assert (factor.forward, factor.backward) == (4 * 6**3 / 3, 4 * 6**3 / 3)
    assert solved.forward == 4 * 5 * 6 * 12
    assert equation.forward == 4 * 6**3 * 2 / 3 + 4 * 5 * 6 * 12
