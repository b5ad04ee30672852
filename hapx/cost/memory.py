"""Memory: what stays allocated between steps, and what forward keeps for backward.

In: tensors, nodes and an optimizer's name. Out: bytes of the single-device tensors, and the names of those that backward needs;
`hapx.cost.model` scales them by placement. Per device:

    parameters + gradients + optimizer state + buffers  (storage)  +  saved activations + gathered parameters that are kept

Invariant: memory is that of storages. A view keeps its base alive, so a saved view counts as its base, once, however many views are saved.
Not counted, because they are transient: cotangents, buckets, workspaces; `RESERVE` of a device's memory is left for them and for the runtime.
"""

from __future__ import annotations

from types import MappingProxyType

from hapx.cluster.spec import DeviceType
from hapx.cost.compute import FACTORS, copied_operands, differentiable, hidden, is_view, needed_factors, tensor
from hapx.cost.once import once
from hapx.cost.saves import SAVES_OF_SMALL
from hapx.cost.strides import ATTENTION, VIEWS, once_per_kind
from hapx.cost.transforms import SPECTRAL, kept_operands
from hapx.errors import HapError
from hapx.ir import COMPLEX, CONTINUOUS, Graph, Kind, Node, Region, TensorRef, iter_refs

# part of a device's memory that is not planned with
RESERVE = 0.1


def usable(kind: DeviceType) -> float:
    """Bytes of a device's memory that plans may fill."""
    return kind.memory * (1.0 - RESERVE)


# fp32 numbers of state per parameter element, by optimizer (the defaults of torch.optim, or of the paper that names it)
STATES = MappingProxyType(
    {
        "sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2, "adamw-amsgrad": 3, "adamax": 2, "nadam": 2, "radam": 2, "adagrad": 1, "adadelta": 2,
        "rmsprop": 1, "lion": 1, "lamb": 2, "lars": 1,
    }
)  # fmt: skip

# how often an update reads or writes each byte of parameter, gradient and state (multi-tensor kernels, one per arithmetic operation)
UPDATE_PASSES = 4.0

# what an operator needs in backward: operands by argument name, or "out"; for products see `saved`. Everything else: all floating operands.
NOTHING_SAVED: tuple[str, ...] = ()
RESAMPLES = (
    *(f"aten.{name}{n}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    "aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_bicubic2d", "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa",
    "aten.upsample_trilinear3d", "aten._pad_circular", "aten.pixel_shuffle", "aten.pixel_unshuffle", "aten.channel_shuffle", "aten.im2col",
    "aten.col2im", "aten.affine_grid_generator", "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout",
)  # fmt: skip
SAVES: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("aten.relu", "aten.sigmoid", "aten.tanh", "aten.exp", "aten.sqrt", "aten.rsqrt", "aten.softmax", "aten.log_softmax",
                         "aten._softmax", "aten._log_softmax", "aten.reciprocal", "aten.hardtanh", "aten.threshold", "aten.elu"), ("out",)),
        **dict.fromkeys(("aten.layer_norm", "aten.rms_norm", "aten.batch_norm", "aten.group_norm", "aten.instance_norm"), ("input",)),
        **dict.fromkeys(("aten.gelu", "aten.silu", "aten.mish", "aten.leaky_relu", "aten.abs", "aten.log"), ("self",)),
        **dict.fromkeys(("aten.add", "aten.sub", "aten.neg", "aten.rsub", "aten.sum", "aten.mean", "aten.clone", "aten.contiguous", "aten.cat",
                         "aten.stack", "aten.to", "aten._to_copy", "aten.type_as", "aten.dropout", "aten.constant_pad_nd", "aten.roll",
                         "aten.flip", "aten.positive", "aten.cumsum", "aten.repeat", "aten.repeat_interleave", "aten.slice_scatter",
                         "aten.select_scatter", *VIEWS), NOTHING_SAVED),  # a view that must copy keeps nothing either
        **dict.fromkeys((f"aten.{name}{n}d" for name in ("max_pool", "avg_pool", "reflection_pad", "replication_pad") for n in (1, 2, 3)), ("self",)),
        **dict.fromkeys((f"aten.{name}" for n in (1, 2, 3) for name in (f"max_pool{n}d_with_indices", f"adaptive_max_pool{n}d")), ("self", "out1")),
        **dict.fromkeys((f"aten.max_unpool{n}d" for n in (2, 3)), ("indices",)),
        **dict.fromkeys(RESAMPLES, NOTHING_SAVED),
        "aten.embedding": ("indices",), "aten.index_select": ("index",), "aten.gather": ("index",), "aten.masked_fill": ("mask",),
        "aten.where": ("condition",), "aten.cross_entropy_loss": ("target",), ATTENTION: ("query", "key", "value", "attn_mask", "out"),
        **SAVES_OF_SMALL,
    }
)  # fmt: skip

# linear in every operand: each is kept if another one needs a gradient
MULTILINEAR = frozenset(
    {"aten.mul", "aten.einsum", "aten.outer", "aten.ger", "aten.tensordot", "aten.kron", "aten.linalg_multi_dot", "aten.chain_matmul"}
)


def states_of(optimizer: str) -> int:
    """fp32 numbers that an optimizer keeps per element of a parameter. Raises HapError for an unknown name."""
    name = optimizer.lower()
    if name not in STATES:
        hint = "take the one with as much state per parameter"
        raise HapError(f"unknown optimizer {optimizer!r}", where="optimizer", allowed=", ".join(STATES), hint=hint)
    return STATES[name]


def storage_bytes(ref: TensorRef, states: int, training: bool) -> float:
    """Bytes of a parameter (with gradient and optimizer state), of a buffer, or of what another stage sends, whole."""
    if not (training and ref.requires_grad) or ref.kind is Kind.RECEIVED:
        return float(ref.bytes)
    return 2.0 * ref.bytes + 4.0 * states * ref.size * (2 if ref.dtype in COMPLEX else 1)


def saved(node: Node, graph: Graph) -> tuple[str, ...]:
    """Names of the operands and outputs that the node keeps for its backward."""
    places = _places(graph, node)
    names = node.names if places else ()
    return tuple([names[place] for place in places])


@once_per_kind
def _places(graph: Graph, node: Node) -> tuple[int, ...]:
    """Of what it keeps, among its operands and outputs."""
    return tuple(map(node.names.index, _saved(graph, node)))


def _saved(graph: Graph, node: Node) -> tuple[str, ...]:
    call = node.call
    if not differentiable(graph, node) or is_view(graph, node):
        return ()
    refs = [graph.refs[name] for name in call.refs()]
    if call.op in FACTORS:
        copies = [name for name, _ in copied_operands(graph, node)]
        return tuple(name for name in needed_factors(graph, node) if name not in copies)
    if call.op in MULTILINEAR:
        return tuple(r.name for i, r in enumerate(refs) if any(o.requires_grad for j, o in enumerate(refs) if j != i))
    if call.op == "aten.div":
        divisor = tensor(graph, call, "other")
        if divisor is None:
            return ()
        return (refs[0].name, divisor.name) if divisor.requires_grad else (divisor.name,)
    if call.op in SPECTRAL:
        return kept_operands(graph, node)
    if call.op == "aten.pad":
        return (refs[0].name,) if call["mode"] in ("reflect", "replicate") else ()
    if call.op.startswith("aten.adaptive_avg_pool"):
        return (refs[0].name,) if set(call["output_size"]) != {1} else ()  # to one pixel, it is a mean
    if (keeps := SAVES.get(call.target, SAVES.get(call.op))) is not None:
        outputs = {"out": node.outputs[0].name, "out1": node.outputs[-1].name}
        return tuple(name for kept in keeps for name in ([outputs[kept]] if kept in outputs else [r.name for r in iter_refs(call.get(kept))]))
    return tuple(r.name for r in refs if r.dtype in CONTINUOUS)


def base_of(graph: Graph, name: str) -> str | None:
    """The tensor of which `name` is a view, None when it has a storage of its own."""
    producer = graph.producer.get(name)
    if producer is None or not is_view(graph, graph.nodes[producer]):
        return None
    return graph.nodes[producer].call.refs()[0]


@once
def kept(graph: Graph) -> frozenset[str]:
    """Names of all tensors whose storage somebody keeps for backward: the saved ones and everything they are views of. A checkpoint region
    keeps its inputs instead of what its nodes would save (see `forgotten`)."""
    return _kept(graph, forgotten(graph))


@once
def kept_without_regions(graph: Graph) -> frozenset[str]:
    """As `kept`, if nothing were computed again."""
    return _kept(graph, frozenset())


@once
def kept_between_regions(graph: Graph) -> frozenset[str]:
    """As `kept`, of what stays there while no checkpoint region is computed again."""
    return _kept(graph, frozenset(o.name for r in checkpoints(graph) for n in graph.nodes[r.start : r.stop] for o in n.outputs))


def _kept(graph: Graph, skipped: frozenset[str]) -> frozenset[str]:
    names: set[str] = set()
    needed = [name for node in graph.nodes if node.outputs[0].name not in skipped for name in saved(node, graph)]
    for region in checkpoints(graph) if skipped else ():
        inside = {o.name for n in graph.nodes[region.start : region.stop] for o in n.outputs}
        used = {name for n in graph.nodes[region.start : region.stop] for name in n.call.refs()}
        needed += [name for name in used - inside if graph.refs[name].kind is Kind.VALUE]
    for first in needed:
        name: str | None = first
        while name is not None and name not in names:
            names.add(name)
            name = base_of(graph, name)
    return frozenset(names)


def checkpoints(graph: Graph) -> list[Region]:
    return [r for r in graph.regions if r.kind == "checkpoint"]


@once
def forgotten(graph: Graph) -> frozenset[str]:
    """Outputs of the nodes that keep nothing for backward because a checkpoint region computes them again: those of all regions but the
    one that saves most. While a region is computed again its tensors are there; one region at a time, so that one counts as if it were none."""
    regions = checkpoints(graph)
    if not regions:
        return frozenset()
    plain = _kept(graph, frozenset())
    bytes_of = [sum(_node_bytes(graph, n, plain) for n in graph.nodes[r.start : r.stop]) for r in regions]
    largest = bytes_of.index(max(bytes_of))
    return frozenset(o.name for k, r in enumerate(regions) if k != largest for n in graph.nodes[r.start : r.stop] for o in n.outputs)


def kept_bytes(graph: Graph) -> float:
    """Bytes that forward keeps for backward on a single device."""
    names, skipped = kept(graph), forgotten(graph)
    return sum(_node_bytes(graph, n, names, n.outputs[0].name in skipped) for n in graph.nodes)


def _node_bytes(graph: Graph, node: Node, kept_names: frozenset[str], skipped: bool = False) -> float:
    made = sum(o.bytes for o in node.outputs if allocates(graph, o.name, kept_names))
    return made + (0.0 if skipped else sum(size for _, size in hidden(graph, node)))


@once
def converted_again(graph: Graph) -> frozenset[str]:
    """Tensors that only nodes of checkpoint regions use: their conversions are part of the regions, and carried out again in backward."""
    given = {o.tensor for o in graph.outputs}
    inside = {i for r in checkpoints(graph) for i in range(r.start, r.stop)}
    return frozenset(name for name, users in graph.consumers.items() if users and inside.issuperset(users) and name not in given)


def allocates(graph: Graph, name: str, kept_names: frozenset[str]) -> bool:
    """Whether making `name` allocates a storage that is kept until backward (and is not a parameter, buffer, input or constant)."""
    return graph.refs[name].kind is Kind.VALUE and base_of(graph, name) is None and name in kept_names
