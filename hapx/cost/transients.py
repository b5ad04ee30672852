"""What one call allocates beside its results: temporaries of kernels forward and backward, what its cotangents are, and buffers of collectives.

In: a node with the call that runs for it, or the local sizes of a communication. Out: bytes per tensor (`hapx.cost.local_sizes` scales them by
placement), or bytes per kind. Invariant: these are the allocations of the runtime's own code (`hapx.collectives`) and of torch's kernels;
workspaces that libraries take without asking the allocator are not known here (a part of each device's memory is left for them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import numpy as np

from hapx.cost.compute import CASTS, is_view, tensor
from hapx.cost.compute import hidden as hidden_of_node
from hapx.cost.memory import saved as saved_by_node
from hapx.cost.strides import PAIRS, VIEWS
from hapx.cost.terms import Vector
from hapx.ir import CONVOLUTIONS, Graph, Node, OpCall
from hapx.plan import Axes, Form

Sizes = tuple[tuple[str, float], ...]  # (tensor whose placement they have, bytes)

# per optimizer: temporaries of an update in numbers per parameter element, (one parameter after the other, all at once as multi-tensor kernels do)
UPDATE_TEMPORARIES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "sgd": (0, 0), "sgd-momentum": (0, 0), "adam": (2, 1), "adamw": (2, 1), "adamw-amsgrad": (2, 1), "adamax": (2, 1), "nadam": (2, 1),
        "radam": (2, 1), "adagrad": (2, 1), "adadelta": (2, 2), "rmsprop": (2, 1), "lion": (1, 1), "lamb": (2, 2), "lars": (1, 1),
    }
)  # fmt: skip

FEW_CHANNELS = 5
FEW_SAMPLES = 16  # with one thread, torch leaves a convolution of single pixels to oneDNN from so many samples on

# views whose backward writes the cotangent into a tensor of the operand's size (of several outputs: puts the cotangents together)
_SPREAD = frozenset(
    {"aten.slice", "aten.select", "aten.narrow", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.diagonal", "aten.unfold"}
)
# operators that hand the cotangent on as it is to operands of the output's shape, or as a view
_HAND_ON = frozenset(
    {"aten.add", "aten.cat", "aten.concat", "aten.stack", "aten.clone", "aten.contiguous", "aten.sum", "aten.positive", "aten.lift_fresh_copy"}
)
_FIRST_ONLY = frozenset({"aten.sub"})  # the second operand's cotangent is a new tensor
# losses whose kernels write the losses of all elements into the result and then sum them up there: the scalar keeps that memory
_LARGE_SCALARS = frozenset({"aten.mse_loss", "aten.smooth_l1_loss", "aten.binary_cross_entropy", "aten.soft_margin_loss"})
_OF_SHAPES = frozenset({"aten.cat", "aten.concat", "aten.stack", "aten.sum"})  # cotangents are views whatever the operand's shape


def passes_cotangent(graph: Graph, node: Node, position: int) -> bool:
    """Whether the cotangent of the operand at `position` shares storage with the output's."""
    op, names = node.call.op, node.call.refs()
    ref, out = graph.refs[names[position]], node.outputs[0]
    if op in _SPREAD:
        return False
    if op in VIEWS or op in CASTS or is_view(graph, node):
        return (ref.dtype == out.dtype or op in PAIRS) and (op != "aten.expand" or ref.size == out.size)
    if op in _HAND_ON:
        return op in _OF_SHAPES or ref.shape == out.shape
    return op in _FIRST_ONLY and position == 0 and ref.shape == out.shape


def kept_names(graph: Graph, node: Node, body: OpCall) -> tuple[str, ...]:
    """Names of the operands and outputs that the call that runs keeps for backward."""
    names = saved_by_node(node, graph)
    if body.target == "hapx.cross_entropy" and _axes(body, "classes"):
        return tuple(dict.fromkeys((*names, node.call["self"].name)))
    return names


def kept_inside(graph: Graph, node: Node, body: OpCall) -> Sizes:
    """What the call that runs keeps for backward beside tensors of the graph."""
    if body.target == "hapx.cross_entropy" and _axes(body, "classes"):
        return ((node.call["target"].name, 8.0 * graph.refs[node.call["target"].name].size),)  # highest logit and log of the sum, per row
    return hidden_of_node(graph, node)


def larger_result(graph: Graph, node: Node, body: OpCall) -> Sizes:
    """What the storage of the result of the call that runs takes, where that is more than the result."""
    return _times(graph, node, "self", 1.0) if body.op in _LARGE_SCALARS and node.outputs[0].shape == () else ()


def forward_temporaries(graph: Graph, node: Node, body: OpCall) -> Sizes:
    """Bytes that the call needs beyond its operands, its results and what it keeps."""
    out = node.outputs[0]
    if is_view(graph, node):
        return ()
    if body.target == "hapx.cross_entropy" and _axes(body, "classes"):
        return _times(graph, node, "self", 2.0)  # logits relative to the highest, and their exponentials
    if body.target in ("hapx.mean_loss", "hapx.sum_loss"):
        first = node.call.refs()[0]
        return ((first, float(graph.refs[first].bytes)),)  # the losses of all elements
    if body.target in ("hapx.batch_norm", "hapx.instance_norm") and _axes(body, "batch"):
        return ((out.name, float(out.bytes)),)
    if body.target in ("hapx.embedding", "hapx.gather", "hapx.index"):
        return ((out.name, float(out.bytes)),)  # before rows of other devices are masked
    if body.target in ("hapx.dropout", "hapx.alpha_dropout", "hapx.rand", "hapx.randn", "hapx.randint"):
        return ((out.name, max(16.0 * out.size - out.bytes, float(out.bytes))),)  # 64-bit words from which the mask or the numbers are made
    if node.call.op == "aten.einsum":
        return tuple((name, float(graph.refs[name].bytes)) for name in node.call.refs())  # operands made contiguous for the product
    return _times(graph, node, "input", 1.0) if node.call.op == "aten.rms_norm" else ()  # squares


def backward_temporaries(graph: Graph, node: Node, body: OpCall) -> Sizes:
    """Bytes that the call's backward needs beyond the cotangents of its results and of its operands, and what it kept."""
    out = node.outputs[0]
    if node.call.op == "aten.cross_entropy_loss":
        return _times(graph, node, "self", 1.0)  # the cotangent of the log-softmax, or of the logits before it is scaled
    if body.target in ("hapx.batch_norm", "hapx.instance_norm") and _axes(body, "batch"):
        return ((out.name, 3.0 * out.bytes),)
    if body.target in ("hapx.embedding", "hapx.gather", "hapx.index", "hapx.dropout", "hapx.alpha_dropout"):
        return ((out.name, float(out.bytes)),)
    if node.call.op == "aten.einsum":
        return ((out.name, float(out.bytes)),)
    if node.call.op == "aten.rms_norm":
        return ((out.name, 2.0 * out.bytes),)
    return ()


@dataclass(frozen=True, slots=True)
class Reordered:
    """A tensor that the kernel of a convolution copies into a layout of its own. channels: dims that CPUs round up to whole vectors there.
    unless_few: the images of a convolution of single pixels, which CPUs make in place where they are few (`FEW_SAMPLES`)."""

    name: str
    channels: tuple[int, ...]
    unless_few: str | None


def reordered(graph: Graph, node: Node) -> tuple[Reordered, ...]:
    """What a convolution copies so, forward and backward. Images of few channels are read as they are."""
    if node.call.op not in CONVOLUTIONS:
        return ()
    source, weight = (tensor(graph, node.call, name) for name in ("input", "weight"))
    assert source is not None and weight is not None
    pointwise = max(weight.shape[2:]) == 1 and max(each(node.call.get("stride", 1))) == 1 and max(each(node.call.get("groups", 1))) == 1
    unless_few = source.name if pointwise else None
    found = {source.name: (1,), weight.name: (0, 1), node.outputs[0].name: (1,)}
    if source.shape[1] < FEW_CHANNELS:
        found = {weight.name: (0,), node.outputs[0].name: (1,)}
    return tuple(Reordered(name, channels, unless_few) for name, channels in found.items())


def each(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def _times(graph: Graph, node: Node, argument: str, factor: float) -> Sizes:
    operand = tensor(graph, node.call, argument)
    assert operand is not None
    return ((operand.name, factor * operand.bytes),)


def _axes(body: OpCall, argument: str) -> tuple[int, ...]:
    value = body.get(argument)
    return value.axes if isinstance(value, Axes) else ()


# ---- collectives -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shards:
    """Bytes per kind of the shards of one axis: own; whole: of all of them; largest: the largest on the axis of `size` devices. uneven: whether
    lengths differ, so that padding is dropped; strided: the cut dim is not the first, so pieces are copied before and the whole after."""

    own: Vector
    whole: Vector
    largest: Vector
    uneven: Vector
    size: int
    strided: bool


def gather_buffers(s: Shards, form: Form) -> Vector:
    """Bytes beyond own and whole while shards are gathered."""
    copy, copies = (s.own, s.whole) if s.strided else (0.0 * s.own, 0.0 * s.whole)
    if form is not Form.PADDED:
        return np.maximum(copy, copies)
    padded = s.size * s.largest
    during = copy + np.where(s.own < s.largest, s.largest, 0.0) + np.where(s.uneven, padded, padded - s.whole)
    return np.maximum(during, copies)


def scatter_buffers(s: Shards, form: Form) -> Vector:
    """Bytes beyond whole and own while tensors are summed and scattered."""
    copy, copies = (s.whole, s.own) if s.strided else (0.0 * s.whole, 0.0 * s.own)
    if form is Form.PADDED:
        pieces = np.where(s.uneven, 2.0 * s.size * s.largest - s.own, s.largest)  # padded, then put together
    else:
        pieces = s.whole - s.own if form is Form.GROUPED else (s.size - 1) * s.own
    return np.maximum(copy + pieces, copies)


def exchange_buffers(held: Vector, wanted: Vector) -> Vector:
    """Bytes beyond held and wanted while shards are exchanged: pieces, the pieces in one row, and what is received."""
    return np.maximum(2.0 * held, held + wanted)


def rows_of(shape: tuple[int, ...], dim: int) -> int:
    """Elements before a dim: a cut of it is strided unless there is one."""
    return prod(shape[:dim])
