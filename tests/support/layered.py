"""Graphs for tests of the clustering into layers: random ones, and ways to cut them found by trying all. No torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from hapx.cost.compute import work
from hapx.ir import Graph, Kind, Node, OpCall, Output, Ref, Region, TensorRef


class Writer:
    """Writes a graph call by call; values are float32 vectors of a given size."""

    def __init__(self) -> None:
        self.refs: dict[str, TensorRef] = {}
        self.nodes: list[Node] = []

    def root(self, name: str, kind: Kind = Kind.PARAMETER, size: int = 4, *, mutated: bool = False) -> str:
        self.refs[name] = TensorRef(name, (size,), "float32", kind, kind is Kind.PARAMETER, mutated)
        return name

    def add(self, op: str, *operands: str, size: int = 4, kind: Kind = Kind.VALUE, casts: tuple[str, ...] = ()) -> str:
        """A call of an operator without FLOPs, but "mm", which has 2 * size * (size of its first operand)."""
        ref = TensorRef(f"v{len(self.nodes)}", (size,), "float32", kind, kind is Kind.VALUE)
        names = ("self", "mat2") if op == "mm" else tuple(f"a{i}" for i in range(len(operands)))
        call = OpCall(f"aten.{op}.default", tuple(zip(names, map(Ref, operands), strict=True)))
        self.nodes.append(Node(call, (ref,), "", f"model.py:{len(self.nodes)}", (None,), (), tuple((n, "bfloat16") for n in casts)))
        self.refs[ref.name] = ref
        return ref.name

    def graph(self, regions: Sequence[Region] = (), buffers: Sequence[tuple[str, str]] = (), boundaries: tuple[int, ...] = ()) -> Graph:
        """`buffers`: (new value, buffer)."""
        outputs = (Output(self.nodes[-1].outputs[0].name, "loss"), *(Output(value, "buffer", name) for value, name in buffers))
        n = len(self.nodes)
        return Graph(
            self.refs, tuple(self.nodes), outputs, tuple(regions), (), (0,) * n, (None,) * n, (), 4, "train", {}, "layered", boundaries=boundaries
        )  # fmt: skip


def random_graph(seed: int, nodes: int) -> Graph:
    """A chain with skips: products of some FLOPs, elementwise operators, transposed weights, constants; every tensor of its own size."""
    rng = random.Random(seed)
    w = Writer()
    values, weights, constants = [w.root("x", Kind.INPUT)], [w.root("w")], [w.root("c", Kind.CONSTANT)]
    while len(w.nodes) < nodes:
        size, here = rng.choice([1, 2, 3, 4, 6, 8, 12]), values[-1] if rng.random() < 0.8 else rng.choice(values)
        match rng.randrange(6):
            case 0 | 1 | 2:
                values.append(w.add("mm", here, rng.choice(weights), size=size))
            case 3:
                values.append(w.add("add", here, rng.choice([*values[-4:], rng.choice(constants)]), size=size))
            case 4:
                weights.append(w.add("t", w.root(f"w{len(w.nodes)}", size=size), size=size))
            case 5:
                constants.append(w.add("cos", rng.choice(constants), size=size, kind=Kind.CONSTANT))
    w.add("sum", values[-1], size=1)
    regions = []
    if rng.random() < 0.5:
        a, b = sorted(rng.sample(range(len(w.nodes)), 2))
        regions = [Region("checkpoint", a, min(b, a + 4))]
    return w.graph(regions)


def received(graph: Graph, start: int, stop: int) -> int:
    """What a layer receives, counted tensor by tensor."""
    used = {name for node in graph.nodes[start:stop] for name in node.call.refs()}
    return sum(graph.refs[n].bytes for n in used if graph.producer.get(n, start) < start and graph.refs[n].kind is not Kind.CONSTANT)


def flops(graph: Graph, start: int, stop: int) -> float:
    return sum(w.forward + w.backward for w in (work(graph, n) for n in graph.nodes[start:stop]))


def clusterings(graph: Graph, number: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """All ways to cut a graph into layers, but through checkpoints, and behind transposed weights and constants that are used later only."""
    inside = {p for r in graph.regions if r.kind == "checkpoint" for p in range(r.start + 1, r.stop)}
    for p in range(len(graph.nodes) - 1, 0, -1):
        node = graph.nodes[p - 1]
        serves = all(i >= p for i in graph.consumers[node.outputs[0].name])
        if serves and (node.call.op == "aten.t" or node.outputs[0].kind is Kind.CONSTANT) and p > 1 and p - 1 not in inside:
            inside.add(p)
    places = [p for p in range(1, len(graph.nodes)) if p not in inside]
    for cuts in combinations(places, number - 1):
        ends = (0, *cuts, len(graph.nodes))
        yield tuple(pairwise(ends))
