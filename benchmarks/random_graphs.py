"""Random small training graphs over registered operators, as `ir.Graph`s (no torch): for comparing searches with their oracles."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hapx.graph.segments import graph_hash
from hapx.ir import Graph, Kind, Node, OpCall, Output, Ref, TensorRef


@dataclass
class GraphMaker:
    """Builds a graph node by node; every method returns the name of the new tensor."""

    batch: int
    refs: dict[str, TensorRef] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: Kind, gradient: bool) -> str:
        self.refs[name] = TensorRef(name, shape, "float32", kind, gradient)
        return name

    def input(self, *shape: int) -> str:
        return self._tensor(f"x{len(self.refs)}", shape, Kind.INPUT, False)

    def parameter(self, *shape: int) -> str:
        return self._tensor(f"w{len(self.refs)}", shape, Kind.PARAMETER, True)

    def call(maker, target: str, shape: tuple[int, ...], /, **args: object) -> str:
        named = tuple((k, Ref(v) if isinstance(v, str) and v in maker.refs else v) for k, v in args.items())
        call = OpCall(target, named)
        gradient = any(maker.refs[r].requires_grad for r in call.refs())
        name = maker._tensor(f"v{len(maker.nodes)}", shape, Kind.VALUE, gradient)
        maker.nodes.append(Node(call, (maker.refs[name],), "model", "model.py:1", (None,)))
        return name

    def linear(self, x: str, width: int, with_bias: bool = True) -> str:
        shape = self.refs[x].shape
        weight = self.parameter(width, shape[-1])
        bias = self.parameter(width) if with_bias else None
        return self.call("aten.linear.default", (*shape[:-1], width), input=x, weight=weight, bias=bias)

    def unary(self, x: str, op: str) -> str:
        extra = {"approximate": "none"} if op == "gelu" else {}
        return self.call(f"aten.{op}.default", self.refs[x].shape, self=x, **extra)

    def binary(self, x: str, y: str, op: str) -> str:
        extra = {"alpha": 1} if op == "add" else {}
        return self.call(f"aten.{op}.Tensor", self.refs[x].shape, self=x, other=y, **extra)

    def finish(self, x: str) -> Graph:
        loss = self.call("aten.sum.default", (), self=x, dtype=None)
        return _hashed(
            Graph(
                refs=self.refs,
                nodes=tuple(self.nodes),
                outputs=(Output(loss, "loss"),),
                regions=(),
                tied=(),
                segment_of=(0,) * len(self.nodes),
                block_of=(None,) * len(self.nodes),
                input_names=tuple(r.name for r in self.refs.values() if r.kind is Kind.INPUT),
                batch=self.batch,
                mode="train",
                constants={},
                hash="",
            )
        )


def random_graph(
    seed: int, operators: int = 6, batch: int = 6, widths: tuple[int, ...] = (4, 6, 12), linears: int = 99, biases: bool = True
) -> Graph:
    """A graph of `operators` operators (the final sum included), at most `linears` of them linear, with skips and shared values."""
    rng = random.Random(seed)
    maker = GraphMaker(batch)
    values = [maker.linear(maker.input(batch, rng.choice(widths)), rng.choice(widths), biases)]
    while len(maker.nodes) < operators - 1:
        x = values[-1] if rng.random() < 0.75 else rng.choice(values)
        kind = rng.random()
        alike = [v for v in values if maker.refs[v].shape == maker.refs[x].shape and v != x]
        if kind < 0.45 and linears > 1:
            linears -= 1
            values.append(maker.linear(x, rng.choice(widths), biases))
        elif kind < 0.65 or not alike:
            values.append(maker.unary(x, rng.choice(("gelu", "relu", "neg"))))
        else:
            values.append(maker.binary(x, rng.choice(alike), rng.choice(("add", "mul"))))
    return maker.finish(values[-1])


def branching_graph(seed: int, batch: int = 2, widths: tuple[int, ...] = (24, 36, 48)) -> Graph:
    """Two or three branches of two or three operators from one value, written one after the other, joined by sums and products. The batch is so small
    that channels are what is worth splitting: there are communications whose order can matter."""
    rng = random.Random(seed)
    maker = GraphMaker(batch)
    width = rng.choice(widths)
    x = maker.linear(maker.input(batch, rng.choice(widths)), width, False)
    ends = []
    for _ in range(rng.choice((2, 2, 3))):
        at = maker.linear(x, rng.choice(widths), False)
        if rng.random() < 0.5:
            at = maker.unary(at, rng.choice(("gelu", "relu")))
        ends.append(maker.linear(at, width, False))
    joined = ends[0]
    for end in ends[1:]:
        joined = maker.binary(joined, end, rng.choice(("add", "mul")))
    return maker.finish(joined)


def reordered(graph: Graph, order: Sequence[int]) -> Graph:
    """The same computation with its nodes in another topological order."""
    assert not graph.regions and sorted(order) == list(range(len(graph.nodes)))
    nodes, segments, blocks = ([values[i] for i in order] for values in (graph.nodes, graph.segment_of, graph.block_of))
    return _hashed(replace(graph, nodes=tuple(nodes), segment_of=tuple(segments), block_of=tuple(blocks)))


def _hashed(graph: Graph) -> Graph:
    return replace(graph, hash=graph_hash(graph))


def two_characters(batch: int = 120, width: int = 64, wide: int = 256) -> Graph:
    """Products with a bottleneck, then small operators on many numbers."""
    maker = GraphMaker(batch)
    h = maker.unary(maker.linear(maker.input(batch, width), width, False), "relu")
    h = maker.linear(maker.linear(h, 4, False), wide, False)
    for op in ("gelu", "neg", "gelu", "neg"):
        h = maker.unary(h, op)
    return maker.finish(h)
