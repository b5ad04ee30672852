"""A graph that is made from another one, node by node.

In: a graph; then calls, each with the number of the node from which it comes, in ascending order. Out: a Graph of those that lead to its outputs or
write a buffer. Invariant: what comes from the nodes of a region lies in the region.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from hapx.graph.segments import find_blocks
from hapx.ir import Graph, Kind, Node, OpCall, Output, Ref, Region, TensorRef, Value


@dataclass(frozen=True, slots=True)
class Step:
    """A node of the new graph. `origin`: number of the node from which it comes. `mixes`: it mixes samples."""

    node: Node
    origin: int
    mixes: bool = False


class Rewriting:
    """The new graph under way. `refs`: all its tensors; those of the old graph keep their names. `taken`: names that are not to be used."""

    def __init__(self, graph: Graph, taken: Collection[str]):
        self.old = graph
        self.steps: list[Step] = []
        self.makes: dict[str, int] = {}  # tensor -> its step
        self.refs = {n: r for n, r in graph.refs.items() if n not in graph.producer}
        self.taken = set(graph.refs) | set(taken)

    # ---- steps --------------------------------------------------------------------------------------------------------

    def add(self, node: Node, origin: int, mixes: bool = False) -> None:
        self.makes |= {o.name: len(self.steps) for o in node.outputs}
        self.refs |= {o.name: o for o in node.outputs}
        self.steps.append(Step(node, origin, mixes))

    def mix(self, name: str) -> None:
        """The node that makes this tensor mixes samples."""
        self.steps[self.makes[name]] = replace(self.steps[self.makes[name]], mixes=True)

    def call(self, i: int, call: OpCall, names: tuple[str, ...], shapes: Sequence[tuple[int, ...]]) -> list[str]:
        """Outputs of a call in the place of node `i`, with other operands (one name per occurrence): those of the node itself if that is its call."""
        node = self.old.nodes[i]
        if call == node.call and names == node.call.refs():
            return [o.name for o in node.outputs]
        renamed = dict(zip(node.call.refs(), names, strict=True))
        casts = tuple((renamed[name], dtype) for name, dtype in node.casts)
        outputs = tuple(replace(o, name=self.fresh(f"{o.name}_part"), shape=s) for o, s in zip(node.outputs, shapes, strict=True))
        self.add(replace(node, call=_with_operands(call, names), outputs=outputs, casts=casts), i)
        return [o.name for o in outputs]

    def after(self, i: int, call: OpCall, like: TensorRef, suffix: str) -> str:
        """One more call behind node `i`; its result is like `like`."""
        out = replace(like, name=self.fresh(f"{like.name}_{suffix}"), kind=Kind.VALUE)
        self.add(Node(call, (out,), self.old.nodes[i].module, self.old.nodes[i].source, (None,)), i)
        return out.name

    def input(self, name: str, shape: tuple[int, ...], dtype: str) -> str:
        """One more input."""
        name = self.fresh(name)
        self.refs[name] = TensorRef(name, shape, dtype, Kind.INPUT, False)
        return name

    def fresh(self, name: str) -> str:
        found = next(n for n in _numbered(name) if n not in self.taken)
        self.taken.add(found)
        return found

    # ---- the graph ----------------------------------------------------------------------------------------------------

    def graph(self, outputs: Sequence[Output]) -> tuple[Graph, tuple[tuple[str, str], ...]]:
        """The new graph, without a hash, with the new inputs that it uses behind the old ones; and (operator, source) of what mixes samples."""
        steps = [self.steps[k] for k in self._reached([o.tensor for o in outputs])]
        nodes, origins = tuple(s.node for s in steps), [s.origin for s in steps]
        used = {n for node in nodes for n in node.call.refs()} | {o.tensor for o in outputs}
        more = tuple(n for n, r in self.refs.items() if r.kind is Kind.INPUT and n not in self.old.refs and n in used)
        given = {n: r for n, r in self.refs.items() if n not in self.makes and (n in self.old.refs or n in more)}
        refs = {n: r for n, r in given.items() if r.kind is not Kind.CONSTANT or n in used} | {o.name: o for node in nodes for o in node.outputs}
        made = replace(
            self.old,
            refs=refs,
            nodes=nodes,
            outputs=tuple(outputs),
            regions=tuple(_moved(self.old.regions, origins)),
            segment_of=tuple(self.old.segment_of[i] for i in origins),
            block_of=find_blocks(nodes, refs),
            input_names=(*self.old.input_names, *more),
            constants={k: v for k, v in self.old.constants.items() if k in refs},
            probed=tuple(
                replace(p, nodes=tuple(k for k, s in enumerate(steps) if s.origin in p.nodes and s.node.call.target == p.target))
                for p in self.old.probed
            ),
            hash="",
        )
        return made, tuple(dict.fromkeys((s.node.call.target, s.node.source) for s in steps if s.mixes))

    def _reached(self, roots: Sequence[str]) -> list[int]:
        """Steps that lead to the roots, or write buffers."""
        writes = [s.node.outputs[0].name for s in self.steps if any(self.refs[n].mutated for n in s.node.call.refs())]
        todo, kept = [*roots, *writes], set[int]()
        while todo:
            k = self.makes.get(todo.pop())
            if k is not None and k not in kept:
                kept.add(k)
                todo += self.steps[k].node.call.refs()
        return sorted(kept)


def _with_operands(call: OpCall, names: Sequence[str]) -> OpCall:
    """The call with other operands, one name per occurrence."""
    remaining = iter(names)

    def value(v: Value) -> Value:
        if isinstance(v, Ref):
            return Ref(next(remaining))
        return tuple(map(value, v)) if isinstance(v, tuple) else v

    return OpCall(call.target, tuple((k, value(v)) for k, v in call.args))


def _moved(regions: Sequence[Region], origins: Sequence[int]) -> Iterator[Region]:
    """Regions over the new nodes."""
    for region in regions:
        inside = [k for k, i in enumerate(origins) if region.start <= i < region.stop]
        if inside:
            yield replace(region, start=inside[0], stop=inside[-1] + 1)


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 1
    while True:
        yield f"{name}_{number}"
        number += 1
