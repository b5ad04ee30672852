"""Embedding, losses and random operators: where one local operator is not enough."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from hapx.ir import FLOATING, OpCall
from hapx.plan import Axes, LocalIndices, LocalOffset
from hapx.states import INVARIANT, PARTIAL, REPLICATED
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, Site, Slot, op, register, signature_rules

MEAN, SUM = 1, 2

# --- embedding ---------------------------------------------------------------------------------------------------------------


def vocabulary_rules(context: Context) -> Iterable[Rule]:
    """Rows of the table split: ids of other devices give zeros, the pieces sum up (Megatron-LM, section 3)."""
    table = context.operands[0]
    if not context.call.get("sparse") and not context.call.get("scale_grad_by_freq") and table.shape[0] > 1:
        yield Rule((Site(0), REPLICATED), (PARTIAL,), "vocabulary", divides=True)


def embedding_body(local: LocalCall) -> OpCall | None:
    if not local.axes("vocabulary"):
        return local.node.call
    call = local.node.call
    return OpCall(
        "hapx.embedding",
        (("weight", call["weight"]), ("indices", call["indices"]), ("padding_idx", call["padding_idx"]), ("offset", LocalOffset(0, local.pre[0]))),
    )


def embedding_signature(context: Context) -> str:
    """Ids may be split, unless gradients are scaled by how often an id occurs in all of them."""
    ids = " ".join(f"I{d}" for d in range(len(context.operands[1].shape))) if context.call.get("scale_grad_by_freq") else "*"
    return f"weight: V n, indices: {ids} -> {ids} n"


op("aten.embedding", embedding_signature, linear="weight", extra=vocabulary_rules, body=embedding_body, composites="hapx.embedding")

# --- cross entropy -------------------------------------------------------------------------------------------------------------


def cross_entropy_rules(context: Context) -> Iterable[Rule]:
    """Samples split: local sums over the global count. Classes split: vocabulary-parallel, with a max and a sum."""
    logits, target, *weight = context.operands
    reduction, rank = context.call["reduction"], len(logits.shape)
    probabilities = target.dtype in FLOATING
    class_dim = 0 if rank == 1 else 1
    if rank > 1:
        for d in (d for d in range(rank) if d != 1):
            image = d if probabilities else d - (d > 1)
            for outer in context.outers([(logits, d), (target, image)]):
                if logits.shape[d] > outer and logits.shape[d] % outer == 0:
                    operands: tuple[Slot, ...] = (Site(d, outer), Site(image, outer), *(REPLICATED for _ in weight))
                    if reduction in (MEAN, SUM):
                        yield Rule(operands, (PARTIAL,), "batch", divides=True)
                    else:
                        yield Rule(operands, (Site(d - (d > 1), outer),), divides=True)
    if probabilities and not context.call["label_smoothing"]:
        yield Rule((REPLICATED, PARTIAL, *(REPLICATED for _ in weight)), (PARTIAL,))
    if not probabilities and rank > 1 and logits.shape[class_dim] > 1:
        yield Rule((Site(class_dim), REPLICATED, *(REPLICATED for _ in weight)), (INVARIANT,), "classes", divides=True)


def cross_entropy_body(local: LocalCall) -> OpCall | None:
    batch, classes = local.axes("batch"), local.axes("classes")
    call = local.node.call
    if not batch and not classes:
        return call
    if classes and call["reduction"] not in (MEAN, SUM) and any(s not in (INVARIANT, REPLICATED) for s in local.post[0].states):
        return None
    class_dim = 1
    offset = LocalOffset(class_dim, local.pre[0]) if classes else 0
    args = (*call.args, ("batch", Axes(batch)), ("classes", Axes(classes)), ("offset", offset), ("count", local.operands[0].shape[class_dim]))
    return OpCall("hapx.cross_entropy", args)


register(OpEntry(("aten.cross_entropy_loss",), cross_entropy_rules, cross_entropy_body, composites=("hapx.cross_entropy",)))

# --- elementwise losses ------------------------------------------------------------------------------------------------------------

ELEMENTWISE = "self: *, target: * -> *"


def elementwise_loss_rules(context: Context) -> Iterable[Rule]:
    """reduction none: pointwise; sum: Partial; mean: local sum over the global count."""
    reduction = context.call["reduction"]
    if reduction not in (MEAN, SUM):
        yield from signature_rules(ELEMENTWISE)(context)
        return
    source, target = context.operands
    if source.shape != target.shape:
        return
    for d, size in enumerate(source.shape):
        for outer in context.outers([(source, d), (target, d)]):
            if size > outer and size % outer == 0:
                yield Rule((Site(d, outer), Site(d, outer)), (PARTIAL,), "mean" if reduction == MEAN else "", divides=True)


def mse_body(local: LocalCall) -> OpCall | None:
    call = local.node.call
    if not local.axes("mean"):
        return call
    return OpCall("hapx.mse_loss", (*call.args, ("count", prod(local.operands[0].shape))))


register(OpEntry(("aten.mse_loss",), elementwise_loss_rules, mse_body, composites=("hapx.mse_loss",)))

# --- dropout -----------------------------------------------------------------------------------------------------------------------


def dropout_rules(context: Context) -> Iterable[Rule]:
    """Masks depend on the global position only, so that whole and split tensors see the same ones; never Partial."""
    inactive = not context.call["train"] or context.call["p"] == 0
    return signature_rules("input: * -> *", linear="input" if inactive else "")(context)


def dropout_body(local: LocalCall) -> OpCall | None:
    call = local.node.call
    if not call["train"] or call["p"] == 0:
        return OpCall("aten.alias.default", (("self", call["input"]),))
    shape = local.operands[0].shape
    return OpCall(
        "hapx.dropout",
        (
            ("input", call["input"]),
            ("p", call["p"]),
            ("call", local.index),
            ("indices", LocalIndices(shape, local.pre[0])),
            ("shape", shape),
            ("rng", None),
        ),
    )


register(OpEntry(("aten.dropout",), dropout_rules, dropout_body, composites=("hapx.dropout",)))
