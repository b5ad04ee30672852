"""FLOPs of products that are not one matrix product: einsum and what is like it, chains, bilinear forms, recurrent networks.

In: a node. Out: its FLOPs forward, two per multiplication and addition. Sums over one operand alone have none: their bytes decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from types import MappingProxyType

from hapx.ir import Graph, Node
from hapx.theory.ops.einsum import einsum_terms

# numbers kept for backward per hidden unit and step: gates, candidates and states
STATES_KEPT = MappingProxyType({"aten.lstm": 6, "aten.gru": 6, "aten.rnn_tanh": 1, "aten.rnn_relu": 1})


def _shapes(graph: Graph, node: Node) -> list[tuple[int, ...]]:
    return [graph.refs[name].shape for name in node.call.refs()]


def _einsum(graph: Graph, node: Node) -> float:
    """Pairs from left to right; an index lives until nobody needs it. The ellipsis counts as one index."""
    terms, result = einsum_terms(str(node.call["equation"]))
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, _shapes(graph, node), strict=True):
        head, dots, tail = term.partition("...")
        middle = shape[len(head) : len(shape) - len(tail)] if dots else ()
        back = shape[len(shape) - len(tail) :] if tail else ()
        for index, size in [*zip(head, shape, strict=False), *zip(tail, back, strict=True), (".", prod(middle))]:
            sizes[index] = max(sizes.get(index, 1), size)
    alive, flops = set(terms[0]), 0.0
    for i, term in enumerate(terms[1:], 2):
        alive |= set(term)
        flops += 2.0 * prod(sizes[index] for index in alive)
        alive &= set(result).union(*terms[i:])
    return flops


def _tensordot(graph: Graph, node: Node) -> float:
    left, _ = _shapes(graph, node)
    contracted: int = prod(left[d] for d in node.call["dims_self"])
    return 2.0 * node.outputs[0].size * contracted


def _chain(graph: Graph, node: Node) -> float:
    """In the cheapest order, as the kernel does it."""
    shapes = _shapes(graph, node)
    first = (1, *shapes[0]) if len(shapes[0]) == 1 else shapes[0]
    return _cheapest((*first, *(s[1] if len(s) > 1 else 1 for s in shapes[1:])))


@cache
def _cheapest(sizes: Sequence[int]) -> float:
    if len(sizes) < 3:
        return 0.0
    last = len(sizes) - 1
    return min(_cheapest(sizes[: k + 1]) + _cheapest(sizes[k:]) + 2.0 * sizes[0] * sizes[k] * sizes[last] for k in range(1, last))


def _bilinear(graph: Graph, node: Node) -> float:
    weight = _shapes(graph, node)[2]
    return 2.0 * node.outputs[0].size * weight[1] * (weight[2] + 1)


def _recurrent(graph: Graph, node: Node) -> float:
    """Every weight matrix once per step and sequence."""
    steps = prod(graph.refs[node.call["input"].name].shape[:-1])
    weights = (graph.refs[p.name] for p in node.call["params"])
    return 2.0 * steps * sum(w.size for w in weights if len(w.shape) == 2)


CONTRACTIONS: Mapping[str, Callable[[Graph, Node], float]] = MappingProxyType(
    {
        "aten.einsum": _einsum, "aten.tensordot": _tensordot, "aten.linalg_multi_dot": _chain, "aten.chain_matmul": _chain,
        "aten.bilinear": _bilinear, **dict.fromkeys(STATES_KEPT, _recurrent),
    }
)  # fmt: skip
