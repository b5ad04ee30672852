"""FLOPs of what is not one matrix product: einsum and what is like it, chains, bilinear forms, recurrent networks, functions of whole matrices.

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


# FLOPs of a function of a matrix of m rows and n columns, m >= n, as multiples of m n^2 and of n^3 (Golub, Van Loan 2013, Matrix Computations,
# chapters 3, 4, 5 and 8; the exponential is about ten products)
CUBES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "aten.linalg_cholesky": (0.0, 1 / 3),
        **{f"aten.{name}": (0.0, 2 / 3) for name in ("det", "linalg_det", "logdet", "slogdet", "linalg_slogdet", "linalg_solve")},
        **{f"aten.{name}": (0.0, 2.0) for name in ("inverse", "linalg_inv")},
        **{f"aten.{name}": (0.0, 20.0) for name in ("matrix_exp", "linalg_matrix_exp")},
        **{f"aten.{name}": (6.0, 20.0) for name in ("linalg_svd", "linalg_pinv", "pinverse")},
        "aten.cholesky_inverse": (0.0, 1.0), "aten.linalg_eigh": (0.0, 9.0), "aten.linalg_eigvalsh": (0.0, 4 / 3), "aten.linalg_svdvals": (2.0, 2.0),
        "aten.linalg_qr": (4.0, 0.0),
    }
)  # fmt: skip
# per number of the result of an equation: products with so many triangles
TRIANGLES = MappingProxyType({"aten.linalg_solve": 2.0, "aten.linalg_solve_triangular": 1.0, "aten.cholesky_solve": 2.0})


def _of_matrix(graph: Graph, node: Node) -> float:
    """Of every matrix of the batch, and of every number that solves an equation."""
    shapes = _shapes(graph, node)
    *batch, rows, columns = shapes[1] if node.call.op == "aten.cholesky_solve" else shapes[0]
    m, n = max(rows, columns), min(rows, columns)
    thin, square = CUBES.get(node.call.op, (0.0, 0.0))
    return prod(batch) * n * n * (thin * m + square * n) + TRIANGLES.get(node.call.op, 0.0) * n * node.outputs[0].size


CONTRACTIONS: Mapping[str, Callable[[Graph, Node], float]] = MappingProxyType(
    {
        "aten.einsum": _einsum, "aten.tensordot": _tensordot, "aten.linalg_multi_dot": _chain, "aten.chain_matmul": _chain,
        "aten.bilinear": _bilinear, **dict.fromkeys(STATES_KEPT, _recurrent), **dict.fromkeys((*CUBES, *TRIANGLES), _of_matrix),
    }
)  # fmt: skip
