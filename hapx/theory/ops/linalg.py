"""Matrix products and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hapx.ir import CONTINUOUS, OpCall, TensorRef
from hapx.plan import LocalIndices
from hapx.states import PARTIAL, REPLICATED
from hapx.theory.factors import VARIANT, factor_rules, factored
from hapx.theory.registry import Context, LocalCall, Rule, op

# --- products with sufficient factors -----------------------------------------------------------------------------------


def linear_factors(context: Context) -> Iterable[Rule]:
    """Leading dims of the input."""
    if context.operands[1].requires_grad:
        yield from factor_rules(context, 0, range(len(context.operands[0].shape) - 1))


def linear_body(local: LocalCall) -> OpCall | None:
    if not local.axes(VARIANT):
        return local.node.call
    return factored(local, "hapx.linear_sfb", 0, local.node.call.args)


def matmul_factors(context: Context) -> Iterable[Rule]:
    """Leading dims of what is multiplied with a matrix."""
    left, right = context.operands
    if right.requires_grad and len(right.shape) == 2:
        yield from factor_rules(context, 0, range(len(left.shape) - 1))


def matmul_body(local: LocalCall) -> OpCall | None:
    if not local.axes(VARIANT):
        return local.node.call
    call = local.node.call
    return factored(local, "hapx.matmul_sfb", 0, (("self", call["self"]), ("other", call.get("other", call.get("mat2")))))


def addmm_factors(context: Context) -> Iterable[Rule]:
    """Rows of the first factor, and of what is added if it has as many."""
    if context.operands[2].requires_grad:
        yield from factor_rules(context, 1, (0,), (0,) if _has_rows(context.operands[0]) else ())


def addmm_body(local: LocalCall) -> OpCall | None:
    if not local.axes(VARIANT):
        return local.node.call
    args = [(name, local.node.call[name]) for name in ("self", "mat1", "mat2", "beta", "alpha")]
    return factored(local, "hapx.addmm_sfb", 1, (*args, ("rows", _has_rows(local.operands[0]))))


def _has_rows(added: TensorRef) -> bool:
    return len(added.shape) == 2 and added.shape[0] > 1


op(
    "aten.linear",
    "input: * k, weight: n k, bias: n -> * n",
    sum="k",
    linear="input bias | weight bias",
    addend="bias",
    extra=linear_factors,
    body=linear_body,
    composites="hapx.linear_sfb",
)
op(
    "aten.mm.default",
    "self: m k, mat2: k n -> m n",
    sum="k",
    linear="self | mat2",
    extra=matmul_factors,
    body=matmul_body,
    composites="hapx.matmul_sfb",
)
op("aten.bmm.default", "self: b m k, mat2: b k n -> b m n", sum="k", linear="self | mat2")


def added_signature(left: str, right: str, result: str) -> Callable[[Context], str]:
    """A product to which `self` is added, broadcast: its dims are the last ones of the result."""

    def signature(context: Context) -> str:
        """As a product; what is added is broadcast."""
        rank = len(context.operands[0].shape)
        return f"self: {' '.join(result.split()[len(result.split()) - rank :])}, {left}, {right} -> {result}"

    return signature


op(
    "aten.addmm.default", added_signature("mat1: m k", "mat2: k n", "m n"), sum="k", linear="self mat1 | self mat2", addend="self",
    extra=addmm_factors, body=addmm_body, composites="hapx.addmm_sfb",
)  # fmt: skip
op("aten.baddbmm.default", added_signature("batch1: b m k", "batch2: b k n", "b m n"), sum="k", linear="self batch1 | self batch2", addend="self")
op("aten.mv", "self: m k, vec: k -> m", sum="k", linear="self | vec")
op("aten.dot", "self: k, tensor: k -> ", sum="k", linear="self | tensor")


def matmul_signature(context: Context) -> str:
    """torch.matmul by the ranks of its operands."""
    left, right = (len(r.shape) for r in context.operands)
    first = "k" if left == 1 else "* m k"
    second = "k" if right == 1 else ("k n" if right == 2 else "* k n")
    result = f"{'*' if max(left, right) > 2 or (left > 1 and right == 1) else ''} {'m' if left > 1 else ''} {'n' if right > 1 else ''}"
    return f"self: {first}, other: {second} -> {result}"


op("aten.matmul", matmul_signature, sum="k", linear="self | other", extra=matmul_factors, body=matmul_body, composites="hapx.matmul_sfb")

# --- attention ----------------------------------------------------------------------------------------------------------


def attention_signature(context: Context) -> str:
    """Queries may be split too where no causal mask ties them to their position (the composite with dropout knows the position)."""
    q = "Q" if context.call.get("is_causal") and not context.call.get("dropout_p") else "q"
    mask = f", attn_mask: * {q} K" if context.position("attn_mask") is not None else ""
    return f"query: * {q} D, key: * K D, value: * K e{mask} -> * {q} e"


def attention_body(local: LocalCall) -> OpCall | None:
    """With dropout, masks are functions of the global position (never the device's generator)."""
    call = local.node.call
    if not call.get("dropout_p"):
        return call
    query, key = local.operands[0], local.operands[1]
    if call.get("enable_gqa"):
        scores = (*query.shape[:-1], key.shape[-2])
    else:
        scores = (*local.node.outputs[0].shape[:-1], key.shape[-2])
    where = local.post[0]
    if any(getattr(s, "dim", None) == len(scores) - 1 for s in where.states):
        return None  # a split head width has no score dim
    args = (*call.args, ("call", local.index), ("indices", LocalIndices(scores, where)), ("shape", scores), ("rng", None))
    return OpCall("hapx.attention_dropout", args)


def attention_linear(context: Context) -> Iterable[Rule]:
    """Linear in the values; with dropout it is random, and nothing random is Partial."""
    if not context.call.get("dropout_p") and context.node.outputs[0].dtype in CONTINUOUS:
        value = context.position("value")
        yield Rule(tuple(PARTIAL if i == value else REPLICATED for i in range(len(context.operands))), (PARTIAL,))


op("aten.scaled_dot_product_attention", attention_signature, extra=attention_linear, body=attention_body, composites="hapx.attention_dropout")
