"""Matrix products and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hapx.ir import FLOATING, OpCall
from hapx.plan import Axes, LocalBlock, LocalIndices
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Placement, Sharded
from hapx.theory.registry import Context, LocalCall, Rule, Site, Slot, op

# --- sufficient factor broadcasting (HAP section 2.2) ---------------------------------------------------------------


def linear_sfb_rules(context: Context) -> Iterable[Rule]:
    """Rows of the input split, parameters Invariant: backward gathers input and output cotangent instead of reducing gradients."""
    source, weight, bias = context.operands[0], context.operands[1], context.operands[2:]
    if not (weight.requires_grad and all(b.requires_grad for b in bias) and len(source.shape) > 1):
        return
    for dim in range(len(source.shape) - 1):
        for outer in context.outers([(source, dim), (context.node.outputs[0], dim)]):
            if source.shape[dim] % outer == 0 and source.shape[dim] // outer > 1:
                parameters: tuple[Slot, ...] = (INVARIANT,) * (1 + len(bias))
                yield Rule((Site(dim, outer), *parameters), (Site(dim, outer),), "sfb", divides=True)


def linear_body(local: LocalCall) -> OpCall | None:
    axes = local.axes("sfb")
    if not axes:
        return local.node.call
    if len(axes) > 1:
        return None  # one gather per instruction
    (axis,) = axes
    if not _gatherable(local.pre[0], axis):
        return None
    for other in range(len(local.variants)):
        # an Invariant parameter on another axis would need its own gather
        if other != axis and local.pre[1].states[other] == INVARIANT and local.pre[0].states[other] != INVARIANT:
            return None
    block = LocalBlock(axis, local.pre[0])
    return OpCall("hapx.linear_sfb", (*local.node.call.args, ("gather", Axes(axes)), ("block", block)))


def _gatherable(placement: Placement, axis: int) -> bool:
    """Whether no other axis cuts what `axis` has cut: the outer of two nested axes cannot be gathered while the inner one is cut."""
    mine, order = placement.states[axis], placement.order()
    assert isinstance(mine, Sharded)
    later = (placement.states[b] for b in order[order.index(axis) + 1 :])
    return not any(isinstance(s, Sharded) and s.same_split(mine) for s in later)


op(
    "aten.linear",
    "input: * k, weight: n k, bias: n -> * n",
    sum="k",
    linear="input bias | weight bias",
    addend="bias",
    extra=linear_sfb_rules,
    body=linear_body,
    composites="hapx.linear_sfb",
)
op("aten.mm.default", "self: m k, mat2: k n -> m n", sum="k", linear="self | mat2")
op("aten.bmm.default", "self: b m k, mat2: b k n -> b m n", sum="k", linear="self | mat2")


def added_signature(left: str, right: str, result: str) -> Callable[[Context], str]:
    """A product to which `self` is added, broadcast: its dims are the last ones of the result."""

    def signature(context: Context) -> str:
        """As a product; what is added is broadcast."""
        rank = len(context.operands[0].shape)
        return f"self: {' '.join(result.split()[len(result.split()) - rank :])}, {left}, {right} -> {result}"

    return signature


op("aten.addmm.default", added_signature("mat1: m k", "mat2: k n", "m n"), sum="k", linear="self mat1 | self mat2", addend="self")
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


op("aten.matmul", matmul_signature, sum="k", linear="self | other")

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
    if not context.call.get("dropout_p") and context.node.outputs[0].dtype in FLOATING:
        value = context.position("value")
        yield Rule(tuple(PARTIAL if i == value else REPLICATED for i in range(len(context.operands))), (PARTIAL,))


op("aten.scaled_dot_product_attention", attention_signature, extra=attention_linear, body=attention_body, composites="hapx.attention_dropout")
