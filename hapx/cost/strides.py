"""How tensors lie in memory, as far as it decides what is a view and what is copied.

In: a graph. Out: the strides of every tensor that is not contiguous. Transposing, slicing and splitting only change strides; a kernel that computes
element by element keeps the order of its first operand's dims, and so does fused attention with its query; all others write contiguous results. A
reshape is a view where runs of dims that lie one behind the other are split or joined, else it copies (torch's own condition); a product copies an
operand whose leading dims do not lie so, and keeps the copy.

Invariant: strides are those of the single-device tensors; shards of them lie alike, but for what a collective has put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from hapx.cost.once import once, once_per
from hapx.cost.transforms import FRAMED
from hapx.ir import COMPLEX, Graph, Node, TensorRef
from hapx.theory.ops.pointwise import POINTWISE
from hapx.theory.ops.views import MOVES
from hapx.theory.registry import Context

Strides = tuple[int, ...]  # in elements, per dim; of a dim of size 1 it means nothing
ATTENTION = "aten.scaled_dot_product_attention"
RESHAPES = frozenset({"aten.reshape", "aten.flatten", "aten.unflatten", "aten.view", "aten.view_as", "aten.unsqueeze", "aten.squeeze"})
_SAME = frozenset({"aten.alias", "aten.detach", "aten._conj", "aten.conj"})
_SPLITS = frozenset({"aten.split", "aten.split_with_sizes", "aten.chunk"})
_WRITTEN = frozenset({"aten.slice_scatter", "aten.select_scatter"})  # copies of their operand that lie as it does
_CUTS = frozenset({"aten.slice", "aten.narrow"})
_EXPANDS = frozenset({"aten.expand", "aten.expand_as", "aten.broadcast_to"})
_SCATTERED = frozenset({"aten.diagonal", "aten.unfold"})  # views whose elements lie in no simple order
PAIRS = frozenset({"aten.view_as_real", "aten.view_as_complex"})
_PARTS = frozenset({"aten.real", "aten.imag"})  # of complex numbers: every second real one
_STRIDING = frozenset(MOVES) | _SPLITS | _CUTS | _EXPANDS | _SCATTERED | PAIRS | _PARTS  # may make other strides of contiguous ones
VIEWS = _STRIDING | RESHAPES | _SAME  # outputs share the storage of their operand (of a reshape, see `is_viewed`)


def contiguous(shape: tuple[int, ...]) -> Strides:
    """Strides of a tensor whose last dim lies closest."""
    return tuple(accumulate(shape[:0:-1], lambda a, b: a * b, initial=1))[::-1] if shape else ()


def viewed(shape: tuple[int, ...], strides: Strides, target: tuple[int, ...]) -> Strides | None:
    """Strides of the same elements in another shape, None where that is no view."""
    if 0 in shape:
        return contiguous(target)
    runs: list[tuple[int, int]] = []  # (elements, stride) of dims that lie one behind the other
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = runs[-1][0] * size, stride
        else:
            runs.append((size, stride))
    found, (left, stride) = [], (1, 1)
    rest = iter(runs)
    for size in target:
        if size > 1 and left == 1:
            left, stride = next(rest)
        if left % size:
            return None
        left = left // size if size > 1 else left
        found.append(left * stride)
    return tuple(found)


@once
def _lying(graph: Graph) -> tuple[dict[str, Strides | None], list[int]]:
    """`strides` and `kinds`. What alike nodes make of operands that lie alike is found once."""
    odd: dict[str, Strides | None] = {}
    made: dict[object, tuple[int, dict[int, Strides | None]]] = {}  # the kind, and strides of the outputs that are not contiguous
    found = []
    for number, node in zip(graph.alike, graph.nodes, strict=True):
        key = (number, *[(i, odd[n]) for i, n in enumerate(node.call.refs()) if n in odd])
        if key not in made:
            own = _made(graph, node, odd) if node.call.op in _STRIDING or node.call.op == FRAMED or len(key) > 1 else []
            others = {i: s for i, s in enumerate(own) if s is None or not _alike(shape := node.outputs[i].shape, s, contiguous(shape))}
            made[key] = len(made), others
        kind, others = made[key]
        found.append(kind)
        for i, lies in others.items():
            odd[node.outputs[i].name] = lies
    return odd, found


def strides(graph: Graph) -> Mapping[str, Strides | None]:
    """Those of the tensors that are not contiguous, by name; None: scattered."""
    return _lying(graph)[0]


def kinds(graph: Graph) -> list[int]:
    """Per node a number that alike nodes share whose operands lie alike."""
    return _lying(graph)[1]


once_per_kind = once_per(kinds)


def is_viewed(graph: Graph, ref: TensorRef, target: tuple[int, ...], spread: tuple[int, ...] | None = None) -> bool:
    """Whether a tensor in another shape is a view. spread: a shape to which it is broadcast before."""
    found = strides(graph)
    if ref.name not in found and spread is None:
        return True
    own = found.get(ref.name, contiguous(ref.shape))
    if own is None:
        return False
    return viewed(spread or ref.shape, _spread(ref.shape, own, spread or ref.shape), target) is not None


def _spread(shape: tuple[int, ...], own: Strides, target: tuple[int, ...]) -> Strides:
    """Strides after broadcasting."""
    new = len(target) - len(shape)
    return (*(0,) * new, *(0 if n != m else s for n, m, s in zip(shape, target[new:], own, strict=True)))


def _made(graph: Graph, node: Node, found: Mapping[str, Strides | None]) -> list[Strides | None]:
    """Strides of a node's outputs."""
    op, operands = node.call.op, [graph.refs[n] for n in node.call.refs()]
    usual: list[Strides | None] = [contiguous(o.shape) for o in node.outputs]
    if op in _SCATTERED:
        return [None] * len(node.outputs)
    if not operands:
        return usual
    source = operands[0]
    own = found.get(source.name, contiguous(source.shape))
    if op in VIEWS:
        return usual if own is None and op in RESHAPES else [_seen(node, source, own, o) for o in node.outputs]
    if op == ATTENTION and not node.call.get("dropout_p") and own is not None:
        return [_dense(node.outputs[0].shape, _order(own))]
    if op == FRAMED:  # frames of frequencies, with these dims exchanged
        return [_dense(o.shape, (*range(len(o.shape) - 2), len(o.shape) - 1, len(o.shape) - 2)) for o in node.outputs]
    if op in _WRITTEN:
        return [own]
    if (node.call.target in POINTWISE or op in POINTWISE) and op != "aten.contiguous":
        return [_kept_order(o, operands, found) for o in node.outputs]
    return usual


def _seen(node: Node, source: TensorRef, own: Strides | None, out: TensorRef) -> Strides | None:
    """Strides of a view; of a reshape that is none, of the copy."""
    op, call = node.call.op, node.call
    if own is None:
        return None
    if op in RESHAPES:
        return viewed(source.shape, own, out.shape) or contiguous(out.shape)
    if op in MOVES:
        seen = [1] * len(out.shape)
        for dim, image in MOVES[op](Context(node, (source,), {})).items():
            seen[image] = own[dim]
        return tuple(seen)
    if op in _CUTS:
        dim = call["dim"] % len(source.shape)
        return (*own[:dim], own[dim] * call.get("step", 1), *own[dim + 1 :])
    if op in _EXPANDS:
        return _spread(source.shape, own, out.shape)
    if op == "aten.view_as_complex":
        return tuple(stride // 2 for stride in own[:-1])
    if source.dtype in COMPLEX and op in PAIRS | _PARTS:
        return (*(2 * stride for stride in own), *(1 for _ in out.shape[len(own) :]))
    return own


def _kept_order(out: TensorRef, operands: list[TensorRef], found: Mapping[str, Strides | None]) -> Strides | None:
    """Of a result that is made element by element: the first operand of its shape decides the order of dims."""
    for operand in operands:
        if operand.shape == out.shape:
            own = found.get(operand.name, contiguous(operand.shape))
            return contiguous(out.shape) if own is None else _dense(out.shape, _order(own))
    return contiguous(out.shape)


def _order(own: Strides) -> tuple[int, ...]:
    """Dims, the outermost first."""
    return tuple(sorted(range(len(own)), key=lambda d: -own[d]))


def _dense(shape: tuple[int, ...], order: tuple[int, ...]) -> Strides:
    """Dims lie one inside the other, the outermost first in `order`."""
    own = dict(zip(order, contiguous(tuple(shape[d] for d in order)), strict=True))
    return tuple(own[d] for d in range(len(shape)))


def _alike(shape: tuple[int, ...], one: Strides, other: Strides) -> bool:
    return all(a == b for n, a, b in zip(shape, one, other, strict=True) if n > 1)
