"""Parts of a graph: what one stage of a pipeline computes, as a graph of its own. Pure data, no torch.

In: a graph and the nodes [start, stop) of a part. Out: a Graph. What earlier nodes make is received (`Kind.RECEIVED`), what later nodes use are
outputs with role "boundary". What depends on neither inputs nor parameters (tables of positions, causal masks) is made again in
every part that uses it. Invariant: the parts of a partition of the nodes, run one after another, compute what the graph computes; every output of the
graph is an output of exactly one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hapx.ir import Graph, Kind, Output, Region, TensorRef


def part(graph: Graph, start: int, stop: int) -> Graph:
    """The graph of nodes [start, stop); the graph itself if these are all."""
    if (start, stop) == (0, len(graph.nodes)):
        return graph
    numbers = [*_again(graph, start, stop), *range(start, stop)]
    nodes = tuple(graph.nodes[i] for i in numbers)
    made = {o.name for n in nodes for o in n.outputs}
    outputs = _outputs(graph, start, stop)
    used = dict.fromkeys([*(name for n in nodes for name in n.call.refs()), *(o.tensor for o in outputs)])
    refs = _refs(graph, used, made, nodes, first=start == 0)
    at = {number: k for k, number in enumerate(numbers)}
    return Graph(
        refs=refs,
        nodes=nodes,
        outputs=outputs,
        regions=_regions(graph, start, stop, len(numbers) - (stop - start)),
        tied=tuple(group for group in graph.tied if group[0] in refs),
        segment_of=tuple(graph.segment_of[i] for i in numbers),
        block_of=tuple(graph.block_of[i] if i >= start else None for i in numbers),
        input_names=tuple(n for n, r in refs.items() if r.kind in (Kind.INPUT, Kind.RECEIVED)),
        batch=graph.batch,
        mode=graph.mode,
        constants={k: v for k, v in graph.constants.items() if k in refs},
        hash=f"{graph.hash}[{start}:{stop}]",
        probed=tuple(replace(p, nodes=own) for p in graph.probed if (own := tuple(at[i] for i in p.nodes if i in at))),
        first=start - (len(numbers) - (stop - start)),
    )


def parts(graph: Graph, cuts: Sequence[int]) -> tuple[Graph, ...]:
    """The parts between cuts: node numbers, ascending, without the ends."""
    return tuple(part(graph, a, b) for a, b in pairwise((0, *cuts, len(graph.nodes))))


def crossing(graph: Graph, cut: int) -> tuple[TensorRef, ...]:
    """The tensors that earlier nodes make and nodes from `cut` on use."""
    constant = constants(graph)
    names = {o.name: o for i, n in enumerate(graph.nodes[:cut]) if i not in constant for o in n.outputs}
    later = {name for n in graph.nodes[cut:] for name in n.call.refs()}
    return tuple(ref for name, ref in names.items() if name in later)


def constants(graph: Graph) -> frozenset[int]:
    """Nodes whose results depend on neither inputs, parameters nor buffers (and are no random numbers)."""
    fixed = {r.name for r in graph.refs.values() if r.kind is Kind.CONSTANT and r.name not in graph.producer}
    found = set()
    for i, node in enumerate(graph.nodes):
        if not node.tags and all(name in fixed for name in node.call.refs()):
            found.add(i)
            fixed.update(o.name for o in node.outputs)
    return frozenset(found)


def _again(graph: Graph, start: int, stop: int) -> list[int]:
    """Earlier constant nodes that the part needs, ascending."""
    constant, found = constants(graph), set[int]()
    open_nodes = list(range(start, stop))
    while open_nodes:
        for name in graph.nodes[open_nodes.pop()].call.refs():
            i = graph.producer.get(name, stop)
            if i < start and i in constant and i not in found:
                found.add(i)
                open_nodes.append(i)
    return sorted(found)


def _outputs(graph: Graph, start: int, stop: int) -> tuple[Output, ...]:
    """The graph's outputs that are made here (what no node makes: in the last part), then what later parts use."""
    last = len(graph.nodes)
    own = [o for o in graph.outputs if start <= graph.producer.get(o.tensor, last - 1) < stop]
    constant = constants(graph)
    made = [o.name for i in range(start, stop) if i not in constant for o in graph.nodes[i].outputs]
    later = {name for n in graph.nodes[stop:] for name in n.call.refs()}
    return (*own, *(Output(name, "boundary") for name in made if name in later))


def _refs(graph: Graph, used: dict[str, None], made: set[str], nodes: Sequence[object], first: bool) -> dict[str, TensorRef]:
    """Of the tensors that are used or made, in the graph's order; parameters that no node uses are in the first part."""
    found = {}
    for name, ref in graph.refs.items():
        if name in made:
            found[name] = ref
        elif name in used:
            found[name] = replace(ref, kind=Kind.RECEIVED) if name in graph.producer else ref
        elif first and ref.kind in (Kind.PARAMETER, Kind.BUFFER) and not graph.consumers[name]:
            found[name] = ref
    return found


def _regions(graph: Graph, start: int, stop: int, shift: int) -> tuple[Region, ...]:
    """The regions as far as they lie in the part; `shift`: nodes before its own."""
    inside = [(max(r.start, start), min(r.stop, stop), r) for r in graph.regions]
    return tuple(replace(r, start=a - start + shift, stop=b - start + shift) for a, b, r in inside if a < b)
