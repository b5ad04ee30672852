"""Repeated blocks, the hash, regions: pure data."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from hapx.graph.regions import Mark, find_regions
from hapx.graph.segments import find_blocks, graph_hash
from hapx.ir import Graph, Kind, Node, OpCall, Output, Ref, Region, TensorRef, TorchConst


class Builder:
    """Writes small graphs: `add(op, *arguments)` makes a value of shape (4, 4)."""

    def __init__(self) -> None:
        self.refs: dict[str, TensorRef] = {}
        self.nodes: list[Node] = []

    def root(self, name: str, kind: Kind = Kind.PARAMETER, shape: tuple[int, ...] = (4, 4)) -> str:
        self.refs[name] = TensorRef(name, shape, "float32", kind, kind is Kind.PARAMETER)
        return name

    def add(self, op: str, *arguments: object) -> str:
        ref = TensorRef(f"v{len(self.nodes)}", (4, 4), "float32", Kind.VALUE, True)
        values = tuple((f"a{i}", Ref(a) if isinstance(a, str) else a) for i, a in enumerate(arguments))
        self.nodes.append(Node(OpCall(f"aten.{op}.default", values), (ref,), f"m{len(self.nodes)}", "", (None,)))
        self.refs[ref.name] = ref
        return ref.name

    def blocks(self) -> str:
        """One character per node: its repetition, upper case names of kinds are left out; '.' where there is none."""
        return "".join("." if b is None else str(b[1] % 10) for b in find_blocks(self.nodes, self.refs))

    def layer(self, x: str, i: int) -> str:
        h = self.add("linear", x, self.root(f"{i}.w"))
        h = self.add("relu", h)
        h = self.add("linear", h, self.root(f"{i}.u"))
        return self.add("add", x, h)


def test_layers() -> None:
    b = Builder()
    x = b.add("embedding", b.root("x", Kind.INPUT), b.root("table"))
    for i in range(5):
        x = b.layer(x, i)
    b.add("mean", x)
    assert b.blocks() == "." + "".join(str(i) * 4 for i in range(5)) + "."


def test_the_border_is_where_fewest_values_cross() -> None:
    b = Builder()
    x = b.add("add", b.root("x", Kind.INPUT), b.root("y", Kind.INPUT))
    x = b.add("add", x, b.add("cos", x))  # like the last node of a layer
    for i in range(4):
        x = b.layer(x, i)
    b.add("mean", x)
    assert b.blocks() == "..." + "".join(str(i) * 4 for i in range(4)) + "."


def test_two_kinds_and_an_odd_one() -> None:
    b = Builder()
    x = b.add("cos", b.root("x", Kind.INPUT))
    for i in range(3):
        x = b.layer(x, i)
    x = b.add("pool", x)
    for i in range(3, 6):
        x = b.layer(b.add("sin", x), i)
    found = find_blocks(b.nodes, b.refs)
    assert [f and f[0] for f in found] == [None] + [0] * 12 + [None] + [1] * 15


def test_constants_shapes_and_wiring_matter() -> None:
    b = Builder()
    x = b.add("cos", b.root("x", Kind.INPUT))
    for i in range(4):
        x = b.add("relu", b.add("scale", x, 2.0 if i < 2 else 2))  # 2 is not 2.0
    assert b.blocks() == ".00110011"
    assert [f and f[0] for f in find_blocks(b.nodes, b.refs)] == [None] + [0] * 4 + [1] * 4
    c = Builder()
    x = start = c.add("cos", c.root("x", Kind.INPUT))
    for i in range(4):
        x = c.add("add", c.add("sin", x), start if i != 2 else x)
    assert c.blocks() == ".0011....", "the third is wired differently, the fourth is alone"


def test_shared_values_and_parameters() -> None:
    b = Builder()
    mask = b.add("tril", b.root("m", Kind.BUFFER))
    x = b.add("cos", b.root("x", Kind.INPUT))
    shared = b.root("shared")
    for i in range(4):
        x = b.add("linear", b.add("add", b.add("mul", x, mask), shared), b.root(f"{i}.w"))
    assert b.blocks() == "..000111222333"
    c = Builder()
    x = c.add("cos", c.root("x", Kind.INPUT))
    for name in (c.root("a"), c.root("b"), "a", "b"):  # neither one parameter for all nor one for each
        x = c.add("relu", c.add("linear", x, name))
    assert c.blocks() == ".00110011" or c.blocks() == ".00001111"


def test_independent_repetitions_are_no_blocks() -> None:
    b = Builder()
    x = b.add("cos", b.root("x", Kind.INPUT))
    for _ in range(3):
        b.add("transpose", b.add("view", x))
    assert b.blocks() == "......."


def test_many_nodes() -> None:
    """Thousands of them, repeated, and with a long period."""
    b = Builder()
    x = b.add("cos", b.root("x", Kind.INPUT))
    for i in range(1250):
        x = b.layer(x, i)
    assert find_blocks(b.nodes, b.refs)[-1] == (0, 1249)
    c = Builder()
    x = c.add("cos", c.root("x", Kind.INPUT))
    for i in range(5000):
        x = c.add(f"op{i * i % 97}", x)  # periodic, but with a long period
    assert len(find_blocks(c.nodes, c.refs)) == 5001


def small_graph() -> Graph:
    b = Builder()
    x = b.add("mul", b.root("x", Kind.INPUT), b.root("c", Kind.CONSTANT, (1,)))
    y = b.add("mean", x)
    return Graph(b.refs, tuple(b.nodes), (Output(y, "loss"),), (), (), (0, 0), (None, None), ("x",), 4, "train", {"c": (1.0,)}, "")


def test_hash() -> None:
    graph = small_graph()
    assert graph_hash(graph) == graph_hash(small_graph()) and len(graph_hash(graph)) == 64
    moved = replace(graph, nodes=tuple(replace(n, source="other.py:1: x", module="z", batch_dims=(0,)) for n in graph.nodes), hash="h")
    assert graph_hash(moved) == graph_hash(graph)
    first = graph.nodes[0]
    changed = [
        replace(graph, constants={"c": (2.0,)}),
        replace(graph, mode="eval"),
        replace(graph, nodes=(replace(first, call=replace(first.call, target="aten.add.default")), graph.nodes[1])),
        replace(graph, nodes=(replace(first, call=first.call.replace(a1=Ref("x"))), graph.nodes[1])),
        replace(graph, refs={**graph.refs, "x": replace(graph.refs["x"], shape=(8, 4))}),
        replace(graph, outputs=(Output("v0", "loss"),)),
        replace(graph, regions=(Region("checkpoint", 0, 1),)),
    ]
    assert len({graph_hash(g) for g in [graph, *changed]}) == len(changed) + 1


def test_regions() -> None:
    marks = [
        Mark(checkpoint=c, grad=g, autocast=a) for c, g, a in [(0, True, "bfloat16"), (0, False, "bfloat16"), (1, False, None), (None, True, None)]
    ]
    options = (("dtype", TorchConst("dtype", "bfloat16")),)
    assert find_regions(marks) == (
        Region("autocast", 0, 2, options), Region("checkpoint", 0, 2), Region("no_grad", 1, 3), Region("checkpoint", 2, 3),
    )  # fmt: skip
    assert find_regions([Mark(), Mark()]) == ()
    assert Mark("/a/b/c.py", 3, "x = y").source == "c.py:3: x = y" and Mark().source == ""


def test_no_torch() -> None:
    code = "import sys, hapx.graph.segments, hapx.graph.regions; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
