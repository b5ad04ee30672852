"""What sums over a whole batch are divided by, computed from the whole batch's inputs before its parts are.

In: the whole batch's graph and what is wanted of it: values that depend on inputs only, and the counts of mean losses. Out: a Graph over the whole
batch's inputs (and buffers that never change). With targets t, weights w of the classes (1 if there are none) and the rows that are not ignored,

    count = sum of w[t] over these rows, added up in float64 (or in integers), in the dtype in which the loss is divided
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hapx.graph.segments import graph_hash
from hapx.ir import Graph, Kind, Node, OpCall, Output, Ref, TensorRef, TorchConst, Value


@dataclass(frozen=True, slots=True)
class Whole:
    """The value of a tensor of the whole batch's graph."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Count:
    """The divisor of a mean loss."""

    target: str
    weight: str | None
    ignored: int
    dtype: str


def from_inputs(graph: Graph) -> frozenset[str]:
    """Tensors that depend on nothing but inputs, constants and buffers that are never written."""
    found = {r.name for r in graph.refs.values() if r.kind in (Kind.INPUT, Kind.CONSTANT, Kind.BUFFER) and not (r.mutated or r.requires_grad)}
    found -= graph.written.keys() | graph.producer.keys()
    for node in graph.nodes:
        if not {"random", "in place"} & set(node.tags) and all(name in found for name in node.call.refs()):
            found.update(o.name for o in node.outputs)
    return frozenset(found)


def counts_graph(whole: Graph, wanted: Mapping[str, Whole | Count]) -> Graph | None:
    """A graph with one output per wanted value; its `target` is the name under which it is wanted. None if nothing is."""
    if not wanted:
        return None
    builder = _Builder(whole)
    outputs = []
    for name, what in wanted.items():
        tensor = what.tensor if isinstance(what, Whole) else builder.count(name, what)
        outputs.append(Output(builder.need(tensor), "result", name))
    return builder.graph(tuple(outputs))


class _Builder:
    def __init__(self, whole: Graph):
        self.whole = whole
        self.kept: set[int] = set()
        self.more: list[Node] = []
        self.refs: dict[str, TensorRef] = {}

    def need(self, tensor: str) -> str:
        """Marks everything that leads to `tensor`."""
        todo = [tensor]
        while todo:
            i = self.whole.producer.get(name := todo.pop())
            if i is None:
                if name in self.whole.refs:
                    self.refs[name] = self.whole.refs[name]
            elif i not in self.kept:
                self.kept.add(i)
                todo += self.whole.nodes[i].call.refs()
        return tensor

    def count(self, name: str, what: Count) -> str:
        target = self.whole.refs[self.need(what.target)]
        if what.weight is None:
            valid = self._call((name, target.shape, "bool"), calling("aten.ne.Scalar", self=Ref(target.name), other=what.ignored))
            total = self._call((name, (), "int64"), calling("aten.sum.default", self=Ref(valid), dtype=None))
        else:
            self.need(what.weight)
            ignored = self._call((name, target.shape, "bool"), calling("aten.eq.Scalar", self=Ref(target.name), other=what.ignored))
            known = self._call(
                (name, target.shape, target.dtype), calling("aten.masked_fill.Scalar", self=Ref(target.name), mask=Ref(ignored), value=0)
            )
            weights = self._cast(name, what.weight, self.whole.refs[what.weight].shape, "float64")
            picked = self._call((name, target.shape, "float64"), calling("aten.index.Tensor", self=Ref(weights), indices=(Ref(known),)))
            kept = self._call((name, target.shape, "float64"), calling("aten.masked_fill.Scalar", self=Ref(picked), mask=Ref(ignored), value=0))
            total = self._call((name, (), "float64"), calling("aten.sum.default", self=Ref(kept), dtype=None))
        return self._cast(name, total, (), what.dtype)

    def _cast(self, name: str, tensor: str, shape: tuple[int, ...], dtype: str) -> str:
        return self._call((name, shape, dtype), casting(tensor, dtype))

    def _call(self, like: tuple[str, tuple[int, ...], str], call: OpCall) -> str:
        name, shape, dtype = like
        made = TensorRef(f"{name}.{len(self.more)}", shape, dtype, Kind.VALUE, False)
        self.more.append(Node(call, (made,), "", "", (None,)))
        return made.name

    def graph(self, outputs: tuple[Output, ...]) -> Graph:
        nodes = tuple(_plain(self.whole.nodes[i]) for i in sorted(self.kept)) + tuple(self.more)
        refs = {name: ref for name, ref in self.whole.refs.items() if name in self.refs} | {o.name: o for n in nodes for o in n.outputs}
        graph = Graph(
            refs=refs,
            nodes=nodes,
            outputs=outputs,
            regions=(),
            tied=(),
            segment_of=(0,) * len(nodes),
            block_of=(None,) * len(nodes),
            input_names=tuple(n for n in self.whole.input_names if n in refs),
            batch=self.whole.batch,
            mode=self.whole.mode,
            constants={k: v for k, v in self.whole.constants.items() if k in refs},
            hash="",
        )
        return replace(graph, hash=graph_hash(graph))


def _plain(node: Node) -> Node:
    """The node, of no block or module."""
    return replace(node, module="")


def calling(target: str, /, **args: Value) -> OpCall:
    """A call."""
    return OpCall(target, tuple(args.items()))


def casting(tensor: str, dtype: str) -> OpCall:
    """A cast."""
    return calling("aten.to.dtype", self=Ref(tensor), dtype=TorchConst("dtype", dtype), non_blocking=False, copy=False, memory_format=None)
