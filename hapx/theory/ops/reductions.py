"""Reductions, softmax, normalisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

from hapx.ir import FLOATING, OpCall
from hapx.plan import Axes
from hapx.states import PARTIAL, REPLICATED
from hapx.theory.ops.views import linear_rule
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, Site, Slot, op, register


def reduced_dims(context_call: OpCall, rank: int) -> tuple[int, ...]:
    """Dims that a reduction removes, ascending."""
    dim = context_call.get("dim")
    if dim is None or dim == ():
        return tuple(range(rank))
    return tuple(sorted({d % rank for d in (dim if isinstance(dim, tuple) else (dim,))}))


def _kept(call: OpCall, rank: int) -> dict[int, int]:
    """{kept dim: its dim in the output}."""
    gone = reduced_dims(call, rank)
    if call.get("keepdim"):
        return {d: d for d in range(rank) if d not in gone}
    return {d: i for i, d in enumerate(d for d in range(rank) if d not in gone)}


def reduction_rules(context: Context, partial: str | None, linear: bool) -> Iterable[Rule]:
    """Kept dims pass; splitting a reduced one leaves Partial (as `variant` partial) where the reduction is a sum."""
    source, outputs = context.operands[0], context.node.outputs
    rank = len(source.shape)
    for dim, image in _kept(context.call, rank).items():
        for outer in context.outers([(source, dim), *((o, image) for o in outputs)]):
            if source.shape[dim] > outer and source.shape[dim] % outer == 0:
                yield Rule((Site(dim, outer),), (Site(image, outer),) * len(outputs), divides=True)
    if partial is not None:
        for dim in reduced_dims(context.call, rank):
            for outer in context.outers([(source, dim)]):
                if source.shape[dim] > outer and source.shape[dim] % outer == 0:
                    yield Rule((Site(dim, outer),), (PARTIAL,) * len(outputs), partial, divides=True)
    if linear:
        yield from linear_rule(context)


def mean_body(local: LocalCall) -> OpCall:
    """Where a reduced dim is split: the local sum over the global count (the mean of local means is wrong under uneven shares)."""
    call = local.node.call
    if not local.axes("mean"):
        return call
    rank = len(local.operands[0].shape)
    dims = reduced_dims(call, rank)
    count = prod(local.operands[0].shape[d] for d in dims)
    return OpCall(
        "hapx.mean",
        (("self", call["self"]), ("dim", dims), ("keepdim", bool(call.get("keepdim", False))), ("count", count), ("dtype", call.get("dtype"))),
    )


def sum_rules(context: Context) -> Iterable[Rule]:
    """Kept dims pass; a split reduced dim leaves Partial."""
    return reduction_rules(context, "", context.operands[0].dtype in FLOATING)


def mean_rules(context: Context) -> Iterable[Rule]:
    """Kept dims pass; a split reduced dim leaves Partial: local sums over the global count."""
    return reduction_rules(context, "mean", True)


def reduced_whole(context: Context) -> Iterable[Rule]:
    """Kept dims pass; reduced dims are whole."""
    return reduction_rules(context, None, False)


register(OpEntry(("aten.sum",), sum_rules, sum="reduced dims", linear="self"))
register(OpEntry(("aten.mean",), mean_rules, mean_body, sum="reduced dims", linear="self", composites=("hapx.mean",)))
register(
    OpEntry(
        (
            "aten.amax", "aten.amin", "aten.max.dim", "aten.min.dim", "aten.argmax", "aten.argmin", "aten.prod.dim_int", "aten.logsumexp",
            "aten.var.correction", "aten.std.correction", "aten.var.dim", "aten.std.dim", "aten.any.dim", "aten.all.dim", "aten.norm.ScalarOpt_dim",
            "aten.linalg_vector_norm",
        ),
        reduced_whole,
    )
)  # fmt: skip


def softmax_signature(context: Context) -> str:
    """All dims but the one of the softmax."""
    rank = len(context.operands[0].shape)
    dim = context.call["dim"] % rank
    tokens = " ".join(f"D{i}" if i == dim else f"d{i}" for i in range(rank))
    return f"self: {tokens} -> {tokens}"


op("aten.softmax.int aten.log_softmax.int aten._softmax aten._log_softmax", softmax_signature)


def _normalized(context: Context) -> str:
    return " ".join(f"N{i}" for i in range(len(context.call["normalized_shape"])))


def norm_signature(context: Context) -> str:
    """Leading dims; the normalised ones are whole."""
    dims = _normalized(context)
    return f"input: * {dims}, weight: {dims}, bias: {dims} -> * {dims}"


def layer_norm_linear(context: Context) -> Iterable[Rule]:
    """LN(x) w + b is linear in (w, b) together."""
    parameters = [context.position(n) for n in ("weight", "bias")]
    present = [p for p in parameters if p is not None]
    if not present or (context.call.get("bias") is None) != (parameters[1] is None):
        return
    slots: list[Slot] = [REPLICATED] * len(context.operands)
    for p in present:
        slots[p] = PARTIAL
    if parameters[0] is not None:  # a bias alone is added to something that is not Partial
        yield Rule(tuple(slots), (PARTIAL,))


op("aten.layer_norm", norm_signature, extra=layer_norm_linear)


def rms_norm_signature(context: Context) -> str:
    """Leading dims; the normalised ones are whole."""
    dims = _normalized(context)
    return f"input: * {dims}, weight: {dims} -> * {dims}"


op("aten.rms_norm", rms_norm_signature, linear="weight")


# --- batch norm: statistics over the whole batch ---------------------------------------------------------------------------


def batch_norm_rules(context: Context) -> Iterable[Rule]:
    """Channels split everything alike. A split batch or spatial dim needs global statistics when training."""
    source, out = context.operands[0], context.node.outputs[0]
    rank = len(source.shape)
    training = bool(context.call["training"])
    has_statistics = context.call["running_mean"] is not None
    # statistics that are updated in place must be cut as they are stored: a slice of them is a copy, whose update would be lost
    held = [i for n in ("running_mean", "running_var") if (i := context.position(n)) is not None]
    by_channels = not (training and has_statistics) or all(context.operands[i].mutated for i in held)
    for outer in context.outers([(r, 1 if len(r.shape) == rank else 0) for r in (*context.operands, out)]):
        if source.shape[1] > outer and source.shape[1] % outer == 0 and by_channels:
            yield Rule(tuple(Site(1 if len(r.shape) == rank else 0, outer) for r in context.operands), (Site(1, outer),), divides=True)
    variant = "batch" if training or not has_statistics else ""
    for d in range(rank):
        if d != 1:
            for outer in context.outers([(source, d), (out, d)]):
                if source.shape[d] > outer and source.shape[d] % outer == 0:
                    yield Rule((Site(d, outer), *(REPLICATED for _ in context.operands[1:])), (Site(d, outer),), variant, divides=True)


def batch_norm_linear(context: Context) -> Iterable[Rule]:
    """h w + b is linear in (w, b); with fixed statistics, (x - mean) / sigma w + b is so in (x, mean, b)."""
    groups: list[tuple[str, ...]] = [("weight", "bias")]
    if not context.call["training"] and context.call["running_mean"] is not None:
        groups.append(("input", "running_mean", "bias"))
    for group in groups:
        positions = {p for n in group if (p := context.position(n)) is not None}
        if context.position(group[0]) is not None:
            yield Rule(tuple(PARTIAL if i in positions else REPLICATED for i in range(len(context.operands))), (PARTIAL,))


def batch_norm_body(local: LocalCall) -> OpCall | None:
    axes = local.axes("batch")
    if not axes:
        return local.node.call
    args = tuple((k, v) for k, v in local.node.call.args if k != "cudnn_enabled")
    return OpCall("hapx.batch_norm", (*args, ("batch", Axes(axes))))


def batch_norm_all(context: Context) -> Iterable[Rule]:
    """Channels, unless statistics are updated; samples and spatial dims with statistics over all devices."""
    return (*batch_norm_rules(context), *batch_norm_linear(context))


register(
    OpEntry(("aten.batch_norm",), batch_norm_all, batch_norm_body, linear="weight bias | input running_mean bias", composites=("hapx.batch_norm",))
)

# --- pooling -----------------------------------------------------------------------------------------------------------------


def pool_signature(spatial: str) -> Callable[[Context], str]:
    """Samples and channels apart; windows need their dims whole. The batch may be missing."""

    def signature(context: Context) -> str:
        """Samples and channels."""
        batch = "b " if len(context.operands[0].shape) == len(spatial.split()) + 2 else ""
        return f"self: {batch}c {spatial} -> {batch}c {spatial}"

    return signature


op("aten.max_pool1d aten.adaptive_max_pool1d", pool_signature("W"))
op("aten.max_pool2d aten.adaptive_max_pool2d", pool_signature("H W"))
op("aten.avg_pool1d aten.adaptive_avg_pool1d", pool_signature("W"), linear="self")
op("aten.avg_pool2d aten.adaptive_avg_pool2d", pool_signature("H W"), linear="self")
