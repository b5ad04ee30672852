"""Where a model may be cut into segments, parts with ratios of their own. Pure data, no torch.

In: a graph, and what the user says of segments. Out: a number per node, counted up in the order in which segments begin.

A border between nodes p - 1 and p costs what crosses it: the bytes of values made before p and used from p on. Borders are taken in the order of
these bytes, where each side, up to the next border, reads a parameter of its own; never inside of a run of repeated blocks, which are alike in
everything and share their ratios. So the stem, the blocks and the head of a transformer fall apart, the convolutions of a network
between poolings, and its classifier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import accumulate

from hapx.errors import HapError
from hapx.ir import Graph, Kind

MOST = 16  # parts that a model is looked at in, where it says itself how many ratios pay


def candidate_segments(graph: Graph, wanted: str | int | tuple[str, ...]) -> tuple[int, ...]:
    """Per node, the part that may get ratios of its own. wanted: "auto", "none", how many there may be at most (then the planner ties some of those
    of "auto"), or module paths whose nodes are a part each. Raises HapError for a path that no node has."""
    if wanted in ("none", 1):
        return (0,) * len(graph.nodes)
    return _named(graph, wanted) if isinstance(wanted, tuple) else find_segments(graph, MOST)


def find_segments(graph: Graph, most: int) -> tuple[int, ...]:
    """At most `most` parts of consecutive nodes."""
    crossing, reads = crossing_bytes(graph), _readers(graph)
    inside = {p for p in range(1, len(graph.nodes)) if _one_run(graph, p)}
    borders = [0, len(graph.nodes)]
    for p in sorted(set(range(1, len(graph.nodes))) - inside, key=lambda p: (crossing[p], -p)):
        if len(borders) > most:
            break
        before, after = max(b for b in borders if b <= p), min(b for b in borders if b > p)
        if reads[before] < reads[p] < reads[after]:
            borders.append(p)
    starts = set(borders[2:])
    return tuple(accumulate(int(i in starts) for i in range(len(graph.nodes))))


def crossing_bytes(graph: Graph) -> list[int]:
    """Per position p, the bytes of values that nodes before p make and nodes from p on use."""
    change = [0] * (len(graph.nodes) + 2)
    for name, made in graph.producer.items():
        if graph.consumers[name]:
            change[made + 1] += graph.refs[name].bytes
            change[graph.consumers[name][-1] + 1] -= graph.refs[name].bytes
    return list(accumulate(change))[: len(graph.nodes) + 1]


def _readers(graph: Graph) -> list[int]:
    """Per position p, how many of the nodes before it read a parameter."""
    reads = [0] * len(graph.nodes)
    for ref in graph.of_kind(Kind.PARAMETER):
        for node in graph.consumers[ref.name]:
            reads[node] = 1
    return [0, *accumulate(reads)]


def _one_run(graph: Graph, p: int) -> bool:
    """Whether the nodes on both sides of position p are of one run of repeated blocks."""
    before, after = graph.block_of[p - 1], graph.block_of[p]
    return before is not None and after is not None and before[0] == after[0]


def _named(graph: Graph, paths: tuple[str, ...]) -> tuple[int, ...]:
    """A part per path; nodes under several paths are in that of the longest, those under none in that of the node before."""
    found: list[int] = []
    for node in graph.nodes:
        under = [p for p in paths if node.module == p or node.module.startswith(f"{p}.")]
        found.append(paths.index(max(under, key=len)) if under else found[-1] if found else -1)
    missing = [p for i, p in enumerate(paths) if i not in found]
    if missing:
        modules = sorted({n.module.split(".")[0] for n in graph.nodes if n.module})
        raise HapError(f"no operator is in a module {missing[0]!r}", where="segments", allowed=f"paths of modules, below {', '.join(modules)}")
    return numbered(found)


def numbered(values: Iterable[int]) -> tuple[int, ...]:
    """The same partition, numbered in the order of appearance."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(v, len(numbers)) for v in values)


def is_coarser(segments: Sequence[int], parts: Sequence[int]) -> bool:
    """Whether every part lies in one segment, and segments are numbered in the order of appearance."""
    if len(segments) != len(parts) or tuple(segments) != numbered(segments):
        return False
    of: dict[int, int] = {}
    return all(of.setdefault(part, segment) == segment for segment, part in zip(segments, parts, strict=True))


def carried(first: Graph, graph: Graph) -> tuple[int, ...]:
    """The segments of `first` on another graph of the same model (other sizes, or evaluation): a node is where its counterpart is, or the node before
    it; one that reads parameters is where they are read in `first`."""
    if first.segments == 1:
        return (0,) * len(graph.nodes)
    tokens, others = ([(n.call.target, n.module) for n in g.nodes] for g in (first, graph))
    found: list[int | None] = [None] * len(graph.nodes)
    for a, b, size in SequenceMatcher(None, tokens, others, autojunk=False).get_matching_blocks():
        found[b : b + size] = first.segment_of[a : a + size]
    home = {r.name: own[0] for r in first.of_kind(Kind.PARAMETER) if len(own := first.segments_of[r.name]) == 1}
    result: list[int] = []
    for node, segment in zip(graph.nodes, found, strict=True):
        where = [home[n] for n in node.call.refs() if n in home]
        result.append(where[0] if where else segment if segment is not None else result[-1] if result else 0)
    return tuple(result)
