"""Pooling: samples and channels apart, dims of the image where the windows lie side by side; and back (unpooling)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hapx.ir import CONTINUOUS, TensorRef
from hapx.states import PARTIAL, REPLICATED
from hapx.theory.ops.convolution import each, fits, side_by_side
from hapx.theory.registry import Context, OpEntry, Rule, Site, op, register

Positions = list[tuple[TensorRef, int]]


def _alike(context: Context, dim: int) -> Iterable[Rule]:
    """All operands and outputs split along `dim`."""
    tensors = (*context.operands, *context.node.outputs)
    for outer in context.outers([(r, dim) for r in tensors]):
        if all(fits(r, Site(dim, outer)) for r in tensors):
            yield Rule((Site(dim, outer),) * len(context.operands), (Site(dim, outer),) * len(context.node.outputs), divides=True)


def pool_rules(spatial: int, windows: bool = False) -> Callable[[Context], Iterable[Rule]]:
    """Rules of a pooling over the last `spatial` dims. `windows`: it has a kernel and its results do not know where in the image they are."""

    def rules(context: Context) -> Iterable[Rule]:
        """Samples and channels; dims of the image where the windows lie side by side."""
        rank = len(context.operands[0].shape)
        for dim in range(rank - spatial):
            yield from _alike(context, dim)
        for i in range(spatial if windows else 0):
            if _side_by_side(context, rank - spatial + i, i):
                yield from _alike(context, rank - spatial + i)

    return rules


def _side_by_side(context: Context, dim: int, i: int) -> bool:
    call = context.call
    kernel = each(call["kernel_size"], i)
    stride = each(call["stride"], i) if call["stride"] != () else kernel
    return side_by_side(
        context.operands[0].shape[dim], context.node.outputs[0].shape[dim], kernel, stride, each(call["padding"], i), each(call.get("dilation", 1), i)
    )


def and_linear(rules: Callable[[Context], Iterable[Rule]]) -> Callable[[Context], Iterable[Rule]]:
    """The rules, and Partial passes."""

    def more(context: Context) -> Iterable[Rule]:
        """Samples and channels; dims of the image where the windows lie side by side."""
        yield from rules(context)
        if context.operands[0].dtype in CONTINUOUS:
            yield Rule((PARTIAL,), (PARTIAL,))

    return more


def whole_image(spatial: int) -> Callable[[Context], str]:
    """Signature of an operator of one tensor that needs the last `spatial` dims whole."""

    def signature(context: Context) -> str:
        """Samples and channels."""
        letters = " ".join(f"W{i}" for i in range(spatial))
        name = next(iter(dict(context.call.args)))
        return f"{name}: * {letters} -> * {letters}"

    return signature


for n in (1, 2, 3):
    register(OpEntry((f"aten.max_pool{n}d",), pool_rules(n, windows=True)))
    register(OpEntry((f"aten.avg_pool{n}d",), and_linear(pool_rules(n, windows=True)), linear="self"))
    # positions are those in the whole image
    op(f"aten.max_pool{n}d_with_indices aten.adaptive_max_pool{n}d", whole_image(n))
    op(f"aten.adaptive_avg_pool{n}d", whole_image(n), linear="self")


def unpool_rules(spatial: int) -> Callable[[Context], Iterable[Rule]]:
    def rules(context: Context) -> Iterable[Rule]:
        """Samples and channels, of values and positions alike."""
        for dim in range(len(context.operands[0].shape) - spatial):
            yield from _alike(context, dim)
        yield Rule((PARTIAL, REPLICATED), (PARTIAL,))

    return rules


register(OpEntry(("aten.max_unpool2d",), unpool_rules(2), linear="self"))
register(OpEntry(("aten.max_unpool3d",), unpool_rules(3), linear="self"))
