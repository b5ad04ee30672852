"""FLOPs and bytes of operator calls on the single-device graph. No placements here: `hapx.cost.model` scales them.

In: a node of a graph. Out: its floating point operations forward and backward and, per tensor, the bytes it moves. Roofline (Williams et al. 2009): a
kernel takes max(FLOPs / speed, bytes / memory bandwidth) plus a fixed latency.

Invariant: only operators that multiply matrices have FLOPs; for all others the bytes decide. Views cost nothing. Backward, a matrix product costs one
product of the same size per operand that requires a gradient, everything else moves twice the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from hapx.cost.contractions import CONTRACTIONS, STATES_KEPT
from hapx.cost.once import once_per_node
from hapx.cost.saves import KEPT_INSIDE
from hapx.cost.strides import ATTENTION, VIEWS, is_viewed, once_per_kind
from hapx.cost.transforms import SPECTRAL, kept_copies
from hapx.ir import COMPLEX, CONVOLUTIONS, DTYPE_BYTES, Graph, Kind, Node, OpCall, Ref, TensorRef

COPIED_IF_STRIDED = frozenset({"aten.reshape", "aten.flatten", "aten.view_as"})
CASTS = frozenset({"aten.to", "aten._to_copy", "aten.type_as"})

# the two factors of a product, by argument name
FACTORS = {
    "aten.linear": ("input", "weight"), "aten.mm": ("self", "mat2"), "aten.bmm": ("self", "mat2"), "aten.matmul": ("self", "other"),
    "aten.addmm": ("mat1", "mat2"), "aten.baddbmm": ("batch1", "batch2"), "aten.mv": ("self", "vec"), "aten.dot": ("self", "tensor"),
    "aten.inner": ("self", "other"),
    **dict.fromkeys(CONVOLUTIONS, ("input", "weight")),
}  # fmt: skip
FOLDED = frozenset({"aten.linear", "aten.matmul"})  # of tensors of any rank: their leading dims are made one
# operators that draw a mask, and over how many of the first dims (None: all)
MASKED = {"aten.dropout": None, "aten.alpha_dropout": None, "aten.feature_dropout": 2, "aten.feature_alpha_dropout": 2}
RANDOM_TENSORS = frozenset({"aten.rand", "aten.randn", "aten.randint"})
DRAWN = 200.0  # bytes that are read and written for a random word: some 12 operators on 64-bit numbers (`hapx.collectives.rng`)
SPARSE_TABLE = "aten.embedding"
OF_COMPLEX = 4.0  # times the FLOPs of a product of real numbers

# passes over the first operand, beyond reading every operand and writing every result once: (forward, backward, beyond twice that). A softmax reads
# its rows for the maximum, for the sum and for the result; a cross entropy's backward fills the gradient of the log-softmax with zeros first.
# Measured on a CPU (rows of 97 and 1000 classes, GB/s relative to the calibration's chain): cross entropy 0.5, softmax 0.45 forward without them
SOFTMAX = dict.fromkeys(("aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax"), (2.0, 0.0))
MORE_PASSES = {**SOFTMAX, "aten.cross_entropy_loss": (2.0, 1.0)}
# an exponential, a maximum, a sum and a scaling are some 8 operations per score of attention, each as slow as 16 in matrix units (Dao 2023,
# FlashAttention-2, section 3.1); blocks of so many scores are computed whole, also where the mask hides a part of them
PER_SCORE, SCORE_BLOCK = 128.0, 128


@dataclass(frozen=True, slots=True)
class Work:
    """What one call does on a single device. `forward`, `backward`: FLOPs; `of_weight`: the part of `backward` that makes the gradient of the
    second factor. `moved`, `moved_back`: (tensor, bytes) read or written. `kernels_back`: kernels in backward (0: none)."""

    forward: float
    backward: float
    of_weight: float
    moved: tuple[tuple[str, float], ...]
    moved_back: tuple[tuple[str, float], ...]
    kernels_back: int


NOTHING = Work(0.0, 0.0, 0.0, (), (), 0)


def tensor(graph: Graph, call: OpCall, argument: str) -> TensorRef | None:
    """The tensor that an argument names, None when it is absent or a number."""
    value = call.get(argument)
    return graph.refs[value.name] if isinstance(value, Ref) else None


@once_per_kind
def differentiable(graph: Graph, node: Node) -> bool:
    """Whether a gradient flows through the node."""
    return any(o.requires_grad for o in node.outputs) and any(graph.refs[n].requires_grad for n in node.call.refs())


@once_per_kind
def is_view(graph: Graph, node: Node) -> bool:
    """Whether the outputs share the storage of the first operand: no time, no memory."""
    call = node.call
    if call.op in MASKED:
        return not call["train"] or call["p"] == 0
    refs = call.refs()
    if call.op in CASTS:
        return bool(refs) and graph.refs[refs[0]].dtype == node.outputs[0].dtype
    if call.op in COPIED_IF_STRIDED:
        return is_viewed(graph, graph.refs[refs[0]], node.outputs[0].shape)
    return call.op in VIEWS


@once_per_kind
def _copied(graph: Graph, node: Node) -> tuple[tuple[int, float], ...]:
    """As `copied_operands`, by places."""
    call = node.call
    if call.op not in FOLDED:
        return ()
    left, right = (tensor(graph, call, name) for name in FACTORS[call.op])
    assert left is not None and right is not None
    if len(left.shape) > 2 >= len(right.shape):
        rows = left.size // left.shape[-1] if left.size else 0
        return () if is_viewed(graph, left, (rows, left.shape[-1])) else ((call.refs().index(left.name), float(left.bytes)),)
    if min(len(left.shape), len(right.shape)) < 2 or max(len(left.shape), len(right.shape)) < 3:
        return ()
    batch, found = node.outputs[0].shape[:-2], []
    for ref in (left, right):
        matrix = ref.shape[-2:]
        if ref.size and not is_viewed(graph, ref, (prod(batch), *matrix), spread=(*batch, *matrix)):
            found.append((call.refs().index(ref.name), float(prod(batch) * prod(matrix)) * ref.bytes / ref.size))
    return tuple(found)


def copied_operands(graph: Graph, node: Node) -> tuple[tuple[str, float], ...]:
    """Operands that a product copies first, because their leading dims cannot be seen as one, with the bytes of the copies, which it keeps."""
    return tuple((node.call.refs()[place], size) for place, size in _copied(graph, node))


@once_per_kind
def lies(graph: Graph, node: Node) -> tuple[bool, tuple[int, ...]]:
    """What depends on how its operands lie in memory: whether the node is a view, and which operands it copies first."""
    copied = [name for name, _ in copied_operands(graph, node)]
    return is_view(graph, node), tuple(i for i, name in enumerate(node.call.refs()) if name in copied) if copied else ()


@once_per_node
def work(graph: Graph, node: Node) -> Work:
    """FLOPs and bytes of a node. Constants are made once, not in every iteration: they cost nothing. Under an activation checkpoint, backward
    computes the node again."""
    does = _work(graph, node)
    if does is NOTHING or node.outputs[0].name not in graph.recomputed:
        return does
    back = (*does.moved, *does.moved_back)
    return replace(does, backward=does.forward + does.backward, moved_back=back, kernels_back=does.kernels_back + 1)


def _work(graph: Graph, node: Node) -> Work:
    if is_view(graph, node) or all(o.kind is Kind.CONSTANT for o in node.outputs):
        return NOTHING
    operands = [graph.refs[name] for name in node.call.refs()]
    gradient = differentiable(graph, node)
    if node.call.op == SPARSE_TABLE:
        return _embedding(graph, node, gradient)
    moved = [(t.name, float(t.bytes)) for t in (*operands, *node.outputs)]
    copies = copied_operands(graph, node)
    moved += [(name, 2.0 * size) for name, size in copies] if copies else [(name, size) for name, size in hidden(graph, node)]
    moved += [(name, 2.0 * graph.refs[name].size * DTYPE_BYTES[dtype]) for name, dtype in node.casts]
    back = tuple((name, 2 * size) for name, size in moved) if gradient else ()
    if node.call.op in MORE_PASSES:
        first, (ahead, behind) = operands[0], MORE_PASSES[node.call.op]
        moved.append((first.name, ahead * first.bytes))
        back += ((first.name, behind * first.bytes),) if gradient else ()
    if (count := _drawn(graph, node)) > 0:
        moved.append((node.outputs[0].name, DRAWN * count))
    forward, backward, of_weight, kernels = _flops(graph, node)
    if node.outputs[0].dtype in COMPLEX:
        forward, backward, of_weight = OF_COMPLEX * forward, OF_COMPLEX * backward, OF_COMPLEX * of_weight
    if not gradient:
        return Work(forward, 0.0, 0.0, tuple(moved), (), 0)
    return Work(forward, backward, of_weight, tuple(moved), back, kernels)


def _drawn(graph: Graph, node: Node) -> float:
    """How many random words a call draws."""
    call, out = node.call, node.outputs[0]
    if call.op in RANDOM_TENSORS:
        return out.size
    if call.op in MASKED:
        return prod(out.shape[: MASKED[call.op]])
    return _scores(graph, node) if call.op == ATTENTION and call.get("dropout_p") else 0


def _scores(graph: Graph, node: Node) -> float:
    """Of attention: one for every query and key."""
    key, out = tensor(graph, node.call, "key"), node.outputs[0]
    assert key is not None
    return out.size / out.shape[-1] * key.shape[-2]


def _embedding(graph: Graph, node: Node, gradient: bool) -> Work:
    """Only the rows that are looked up are read; the gradient of the table is dense."""
    table, indices, out = tensor(graph, node.call, "weight"), tensor(graph, node.call, "indices"), node.outputs[0]
    assert table is not None and indices is not None
    moved = ((indices.name, float(indices.bytes)), (out.name, 2.0 * out.bytes))
    back = (*moved, (table.name, float(table.bytes))) if gradient else ()
    return Work(0.0, 0.0, 0.0, moved, back, 2 if gradient else 0)


def _flops(graph: Graph, node: Node) -> tuple[float, float, float, int]:
    """(forward, backward, part of backward for the second factor, kernels backward)."""
    call, out = node.call, node.outputs[0]
    if call.op == ATTENTION:
        return _attention(graph, node)
    if call.op in CONTRACTIONS:
        return _contraction(graph, node)
    if call.op not in FACTORS:
        return 0.0, 0.0, 0.0, 1
    left, right = (tensor(graph, call, name) for name in FACTORS[call.op])
    assert left is not None and right is not None
    if call.op in CONVOLUTIONS:
        # every output element sums over one filter; a transposed one spreads every input element over one
        outer = left if call.get("transposed") or "transpose" in call.op else out
        flops = 2.0 * outer.size * right.size / right.shape[0]
    else:
        flops = 2.0 * out.size * left.shape[-1]
    others = sum(graph.refs[n].requires_grad for n in call.refs() if n not in (left.name, right.name))
    of_weight = flops * right.requires_grad
    return flops, flops * left.requires_grad + of_weight, of_weight, left.requires_grad + right.requires_grad + others


def _attention(graph: Graph, node: Node) -> tuple[float, float, float, int]:
    """Two products forward, of queries with keys and of scores with values, and what is done with every score; backward both again per gradient, and
    the scores are recomputed. A causal mask hides half of the scores, but for the blocks on the diagonal."""
    query, key, value = (tensor(graph, node.call, name) for name in ("query", "key", "value"))
    assert query is not None and key is not None and value is not None
    positions, out = key.shape[-2], node.outputs[0]
    seen = min(1.0, 0.5 + 0.5 * SCORE_BLOCK / positions) if node.call.get("is_causal") and positions else 1.0
    count = seen * query.size / query.shape[-1] * positions if query.size else 0.0
    scores, result, softmax = 2.0 * count * query.shape[-1], 2.0 * count * out.shape[-1], PER_SCORE * count
    inner = query.requires_grad or key.requires_grad
    backward = scores * (1 + query.requires_grad + key.requires_grad) + result * (value.requires_grad + inner) + softmax * (1 + inner)
    return scores + result + softmax, backward, 0.0, 1


def _contraction(graph: Graph, node: Node) -> tuple[float, float, float, int]:
    """Backward, every product of a pair costs one per factor that needs a gradient."""
    flops = CONTRACTIONS[node.call.op](graph, node)
    wanted = sum(graph.refs[name].requires_grad for name in node.call.refs())
    return flops, flops * min(wanted, 2), 0.0, max(wanted, 1)


def needed_factors(graph: Graph, node: Node) -> tuple[str, ...]:
    """The factors of a product that its backward needs: each for the gradient of the other one."""
    left, right = (tensor(graph, node.call, name) for name in FACTORS[node.call.op])
    assert left is not None and right is not None
    return tuple(a.name for a, b in ((left, right), (right, left)) if b.requires_grad)


@once_per_node
def hidden(graph: Graph, node: Node) -> tuple[tuple[str, float], ...]:
    """Bytes that an operator keeps for backward beside tensors of the graph: (tensor whose placement they have, bytes)."""
    call, out = node.call, node.outputs[0]
    if not differentiable(graph, node) or is_view(graph, node):
        return ()
    if call.op in MASKED:
        return ((out.name, float(prod(out.shape[: MASKED[call.op]]))),)  # the mask
    if call.op in FOLDED:
        copies = dict(copied_operands(graph, node))
        return tuple((name, copies[name]) for name in needed_factors(graph, node) if name in copies)
    if call.op == "aten.cross_entropy_loss":
        logits = tensor(graph, call, "self")
        assert logits is not None
        return ((logits.name, float(logits.bytes)),)  # log-softmax
    if call.op in SPECTRAL:
        return kept_copies(graph, node)
    if call.op in KEPT_INSIDE:
        argument, factor = KEPT_INSIDE[call.op]
        operand = tensor(graph, call, argument)
        assert operand is not None
        return ((operand.name, factor * operand.bytes),)
    if call.op in ("aten.layer_norm", "aten.rms_norm"):
        return ((out.name, 8.0 * out.size / prod(call["normalized_shape"])),)  # mean and 1 / deviation of every row
    if call.op == ATTENTION:
        # the fused kernel keeps the log-sum-exp of every row; with dropout scores, probabilities and mask are kept
        return ((out.name, _scores(graph, node) * (2 * DTYPE_BYTES[out.dtype] + 1) if call.get("dropout_p") else 4.0 * out.size / out.shape[-1]),)
    if call.op in STATES_KEPT:
        return ((out.name, float(STATES_KEPT[call.op] * out.bytes * call["num_layers"])),)
    if call.op in ("aten.group_norm", "aten.instance_norm"):
        groups = call["num_groups"] if call.op == "aten.group_norm" else out.shape[1]
        return ((out.name, 8.0 * out.shape[0] * groups),)
    if call.op.startswith("aten.max_pool") and len(node.outputs) == 1:
        return ((out.name, 8.0 * out.size),)  # indices
    return ()
