"""Embedding, losses and random operators: where one local operator is not enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from hapx.ir import FLOATING, OpCall, Ref
from hapx.plan import Axes, LocalIndices, LocalOffset
from hapx.states import INVARIANT, PARTIAL, REPLICATED
from hapx.theory.factors import VARIANT, factor_rules, factored
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, Site, Slot, op, register, signature_rules
from hapx.theory.signature import parse

MEAN, SUM = 1, 2
MAX_DIMS = 8  # of a loss

# --- embedding ---------------------------------------------------------------------------------------------------------------


def table_rules(context: Context) -> Iterable[Rule]:
    """Rows of the table split: ids of other devices give zeros, the pieces sum up (Megatron-LM, section 3). With sufficient factors, the ids."""
    table, ids = context.operands
    if context.call.get("sparse"):
        return
    if not context.call.get("scale_grad_by_freq") and table.shape[0] > 1:
        yield Rule((Site(0), REPLICATED), (PARTIAL,), "vocabulary", divides=True)
    if table.requires_grad:
        yield from factor_rules(context, 1, range(len(ids.shape)))


def embedding_body(local: LocalCall) -> OpCall | None:
    call, offset = local.node.call, LocalOffset(0, local.pre[0])
    if local.axes(VARIANT):
        names = ("weight", "indices", "padding_idx", "scale_grad_by_freq")
        return factored(local, "hapx.embedding_sfb", 1, (*((name, call[name]) for name in names), ("offset", offset)))
    if not local.axes("vocabulary"):
        return call
    return OpCall("hapx.embedding", (*((name, call[name]) for name in ("weight", "indices", "padding_idx")), ("offset", offset)))


def embedding_signature(context: Context) -> str:
    """Ids may be split, unless gradients are scaled by how often an id occurs in all of them."""
    ids = " ".join(f"I{d}" for d in range(len(context.operands[1].shape))) if context.call.get("scale_grad_by_freq") else "*"
    return f"weight: V n, indices: {ids} -> {ids} n"


op("aten.embedding", embedding_signature, linear="weight", extra=table_rules, body=embedding_body, composites="hapx.embedding hapx.embedding_sfb")

# --- cross entropy -------------------------------------------------------------------------------------------------------------


def row_rules(context: Context) -> Iterable[Rule]:
    """Losses of (N, C, d1, ...) scores and class targets: rows split give local sums over the global count; linear in the weights of classes."""
    scores, target, *weight = context.operands
    reduction, rank = context.call["reduction"], len(scores.shape)
    probabilities = target.dtype in FLOATING
    for d in (d for d in range(rank) if d != 1 and rank > 1):
        image = d if probabilities else d - (d > 1)
        for outer in context.outers([(scores, d), (target, image)]):
            if scores.shape[d] > outer and scores.shape[d] % outer == 0:
                operands: tuple[Slot, ...] = (Site(d, outer), Site(image, outer), *(REPLICATED for _ in weight))
                if reduction in (MEAN, SUM):
                    yield Rule(operands, (PARTIAL,), "batch", divides=True)
                else:
                    yield Rule(operands, (Site(d - (d > 1), outer),), divides=True)
    if weight and (probabilities or reduction != MEAN):  # the mean over class targets divides by their weights
        yield Rule((REPLICATED, REPLICATED, PARTIAL), (PARTIAL,))


def cross_entropy_rules(context: Context) -> Iterable[Rule]:
    """Samples split: local sums over the global count. Classes split: vocabulary-parallel, with a max and a sum."""
    logits, target, *weight = context.operands
    yield from row_rules(context)
    probabilities = target.dtype in FLOATING
    if probabilities and not context.call["label_smoothing"]:
        yield Rule((REPLICATED, PARTIAL, *(REPLICATED for _ in weight)), (PARTIAL,))
    if not probabilities and len(logits.shape) > 1 and logits.shape[1] > 1:
        yield Rule((Site(1), REPLICATED, *(REPLICATED for _ in weight)), (INVARIANT,), "classes", divides=True)


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

# --- negative log likelihood -----------------------------------------------------------------------------------------------------


def nll_rules(context: Context) -> Iterable[Rule]:
    """Samples split: local sums over the global count. Classes split: every device takes the targets that are its own; linear in the scores."""
    scores, _, *weight = context.operands
    yield from row_rules(context)
    whole: tuple[Slot, ...] = (REPLICATED, *(REPLICATED for _ in weight))
    yield Rule((PARTIAL, *whole), (PARTIAL,))
    class_dim = min(1, len(scores.shape) - 1)
    if scores.shape[class_dim] > 1:
        yield Rule((Site(class_dim), *whole), (PARTIAL,), "classes", divides=True)


def nll_body(local: LocalCall) -> OpCall:
    batch, classes = local.axes("batch"), local.axes("classes")
    if not batch and not classes:
        return local.node.call
    offset = LocalOffset(min(1, len(local.operands[0].shape) - 1), local.pre[0]) if classes else 0
    return OpCall("hapx.nll_loss", (*local.node.call.args, ("batch", Axes(batch)), ("offset", offset)))


register(OpEntry(("aten.nll_loss", "aten.nll_loss2d", "aten.nll_loss_nd"), nll_rules, nll_body, linear="self", composites=("hapx.nll_loss",)))

# --- losses that are computed row by row -------------------------------------------------------------------------------------------

# operator -> (its signature where nothing is reduced, operands in which it is linear)
ROW_BY_ROW: Mapping[str, tuple[str, str]] = {
    "aten.mse_loss": ("self: *, target: * -> *", ""),
    "aten.l1_loss": ("self: *, target: * -> *", ""),
    "aten.smooth_l1_loss": ("self: *, target: * -> *", ""),
    "aten.huber_loss": ("self: *, target: * -> *", ""),
    "aten.kl_div": ("self: *, target: * -> *", ""),
    "aten.soft_margin_loss": ("self: *, target: * -> *", ""),
    "aten.hinge_embedding_loss": ("self: *, target: * -> *", ""),
    "aten.poisson_nll_loss": ("input: *, target: * -> *", ""),
    "aten.margin_ranking_loss": ("input1: *, input2: *, target: * -> *", ""),
    "aten.binary_cross_entropy": ("self: *, target: *, weight: * -> *", "weight"),
    "aten.binary_cross_entropy_with_logits": ("self: *, target: *, weight: *, pos_weight: * -> *", "weight"),
    "aten.cosine_embedding_loss": ("input1: * N, input2: * N, target: * -> *", ""),
    "aten.triplet_margin_loss": ("anchor: * N, positive: * N, negative: * N -> *", ""),
    "aten.multi_margin_loss": ("self: b C, target: b, weight: C -> b", "weight"),
    "aten.multilabel_margin_loss": ("self: b C, target: b C -> b", ""),
}

# torch's kernels of these return uninitialised memory for the sum of no rows
SUMMED_BY_ROWS = frozenset({"aten.multi_margin_loss", "aten.multilabel_margin_loss"})


def _fits(context: Context, text: str) -> bool:
    """Whether the call has the ranks of the signature. (The margin losses also take one sample without a batch.)"""
    return "*" in text or len(context.operands[0].shape) == len(parse(text).operands[0].tokens)


def row_by_row_rules(context: Context) -> Iterable[Rule]:
    """As written; sum: Partial; mean: local sums over the global count."""
    text, linear = ROW_BY_ROW[context.call.op]
    if not _fits(context, text):
        return
    reduction = context.call["reduction"]
    if reduction not in (MEAN, SUM):
        yield from signature_rules(text, linear=linear)(context)
        return
    if "self: *, target: *" in text and context.operands[0].shape != context.operands[1].shape:
        return  # torch's kernels divide the gradient of a mean by the size of what is broadcast
    operands, _, rows = text.partition("->")
    indices = " ".join(f"*{i}" for i in range(1, MAX_DIMS + 1)) if "*" in rows else rows
    variant = "mean" if reduction == MEAN else "sum" if context.call.op in SUMMED_BY_ROWS else ""
    for rule in signature_rules(f"{operands}->", sum=indices, linear=linear)(context):
        yield replace(rule, variant=variant) if rule.divides else rule


def row_by_row_body(local: LocalCall) -> OpCall:
    call = local.node.call
    if local.axes("mean"):
        return OpCall("hapx.mean_loss", (("operator", call.target), ("count", _rows(local)), *call.args))
    return OpCall("hapx.sum_loss", (("operator", call.target), *call.args)) if local.axes("sum") else call


def _rows(local: LocalCall) -> int:
    """Number of rows on all devices: the size of the loss where nothing is reduced, its operands broadcast."""
    signature = parse(ROW_BY_ROW[local.node.call.op][0])
    extent: dict[str, int] = {}
    names = [name for name, value in local.node.call.args if isinstance(value, Ref)]
    for operand in signature.operands:
        if operand.name in names:
            ref = local.operands[names.index(operand.name)]
            for index, size in zip(operand.indices(len(ref.shape)), ref.shape, strict=True):
                extent[index] = max(extent.get(index, 1), size)
    rows = signature.outputs[0].tokens
    return prod(size for index, size in extent.items() if index in rows or (index.startswith("*") and "*" in rows))


register(
    OpEntry(
        tuple(ROW_BY_ROW),
        row_by_row_rules,
        row_by_row_body,
        linear="weight (of those that have one)",
        composites=("hapx.mean_loss", "hapx.sum_loss"),
    )
)

op("hapx_ops.ctc", "log_probs: T n C, targets: n S, input_lengths: n, target_lengths: n -> n")

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
