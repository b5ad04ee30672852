"""Reductions and softmax."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from hapx.ir import CONTINUOUS, OpCall
from hapx.states import PARTIAL
from hapx.theory.ops.views import linear_rule
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, Site, op, register


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
    return reduction_rules(context, "", context.operands[0].dtype in CONTINUOUS)


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
