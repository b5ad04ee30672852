"""Products and distances of vectors."""

from __future__ import annotations

from collections.abc import Callable

from hapx.ir import OpCall
from hapx.theory.ops.linalg import added_signature
from hapx.theory.registry import Context, LocalCall, op


def addmv_signature(context: Context) -> str:
    """As a product; what is added is broadcast."""
    if not context.operands[0].shape:  # torch's kernel returns a number where there is nothing to sum
        return "mat: m K, vec: K -> m"
    return "self: m, mat: m k, vec: k -> m"


op("aten.addmv", addmv_signature, sum="k", linear="self mat | self vec", addend="self")
op("aten.addr", added_signature("vec1: m", "vec2: n", "m n"), linear="self vec1 | self vec2")
op("aten.addbmm", added_signature("batch1: b m k", "batch2: b k n", "m n"), sum="b k", linear="self batch1 | self batch2", addend="self")
op("aten.vdot", "self: k, other: k -> ", sum="k", linear="self | other")


def _tokens(context: Context, operand: int, dim: int, token: str) -> str:
    """One token per dim of an operand, aligned from the right as numpy broadcasts; `dim` (negative) is called `token`."""
    rank = len(context.operands[operand].shape)
    return " ".join(token if d == dim else f"d{-d}" for d in range(-rank, 0))


def _vectors(first: str, second: str, token: str, default: int, kept: bool = False) -> Callable[[Context], str]:
    """Two tensors of vectors along a dim, broadcast."""

    def signature(context: Context) -> str:
        """All dims but that of the vectors."""
        full = max(len(r.shape) for r in context.operands)
        dim = context.call.get("dim", default) % full - full
        longest = max((0, 1), key=lambda i: len(context.operands[i].shape))
        result = _tokens(context, longest, dim, token)
        if not kept:
            result = " ".join(t for t in result.split() if t != token)
        return f"{first}: {_tokens(context, 0, dim, token)}, {second}: {_tokens(context, 1, dim, token)} -> {result}"

    return signature


op("aten.linalg_vecdot", _vectors("x", "y", "k", -1), sum="k", linear="x | y")
op("aten.cosine_similarity", _vectors("x1", "x2", "K", 1))
op("aten.linalg_cross", _vectors("self", "other", "K", -1, kept=True), linear="self | other")


def cross_signature(context: Context) -> str:
    """As linalg_cross; without a dim it takes the first of size 3, which a local one could be by chance: whole."""
    if context.call["dim"] is None:
        return f"-> {' '.join(f'O{i}' for i in range(len(context.node.outputs[0].shape)))}"
    return _vectors("self", "other", "K", -1, kept=True)(context)


op("aten.cross", cross_signature, linear="self | other")


def pairwise_signature(context: Context) -> str:
    """Leading dims, broadcast; absolute differences (p = 1) sum up over the vectors."""
    return f"x1: * {_summed(context)}, x2: * {_summed(context)} -> *{' O' if context.call['keepdim'] else ''}"


def _summed(context: Context) -> str:
    return "k" if context.call["p"] == 1 else "K"


op("aten.pairwise_distance", pairwise_signature, sum="k")

# torch computes Euclidean distances by a product, less exactly, if there are more rows than this
ROWS_FOR_PRODUCT = 25
AS_PRODUCT, EXACTLY = 1, 2


def cdist_body(local: LocalCall) -> OpCall:
    """The way in which one device would compute it, whatever the number of local rows."""
    call = local.node.call
    if call["compute_mode"] not in (None, 0):
        return call
    many = any(r.shape[-2] > ROWS_FOR_PRODUCT for r in local.operands)
    return call.replace(compute_mode=AS_PRODUCT if many else EXACTLY)


def cdist_signature(context: Context) -> str:
    """Rows of both; absolute differences (p = 1) sum up over the vectors."""
    return f"x1: * p {_summed(context)}, x2: * r {_summed(context)} -> * p r"


op("aten.cdist", cdist_signature, sum="k", body=cdist_body)
