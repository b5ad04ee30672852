"""Scans, sorting, searching: whole along one dim, alike for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hapx.ir import CONTINUOUS
from hapx.states import PARTIAL
from hapx.theory.registry import Context, OpEntry, Rule, Site, op, register


def along_others(context: Context, default: int = -1) -> Iterable[Rule]:
    """All dims but the one that is scanned, sorted or searched."""
    source, outputs = context.operands[0], context.node.outputs
    rank = len(source.shape)
    dim = context.call.get("dim", default) % max(rank, 1)
    image = [d - (d > dim) if len(outputs[0].shape) < rank else d for d in range(rank)]
    for d in (d for d in range(rank) if d != dim):
        for outer in context.outers([*((r, d) for r in context.operands), *((o, image[d]) for o in outputs)]):
            if source.shape[d] > outer and source.shape[d] % outer == 0:
                yield Rule((Site(d, outer),) * len(context.operands), (Site(image[d], outer),) * len(outputs), divides=True)


def linear(rules: Callable[[Context], Iterable[Rule]]) -> Callable[[Context], Iterable[Rule]]:
    """The rules, and Partial passes through all operands together."""

    def both(context: Context) -> Iterable[Rule]:
        yield from rules(context)
        if all(r.dtype in CONTINUOUS for r in context.node.outputs):
            yield Rule((PARTIAL,) * len(context.operands), (PARTIAL,) * len(context.node.outputs))

    both.__doc__ = rules.__doc__
    return both


SCANS = """aten.cumprod aten.logcumsumexp aten.cummax aten.cummin aten.sort aten.argsort aten.topk aten.kthvalue aten.median.dim
    aten.nanmedian.dim aten.mode"""
register(OpEntry(tuple(SCANS.split()), along_others))
register(OpEntry(("aten.diff",), linear(along_others), linear="self prepend append"))


def searched_signature(context: Context) -> str:
    """One sorted sequence for all, or one per leading dim, whose values are searched apart."""
    sequence = context.operands[0]
    if len(sequence.shape) == 1:
        return "self: * -> *"
    dims = " ".join(f"d{i}" for i in range(len(sequence.shape) - 1))
    return f"sorted_sequence: {dims} K, sorter: {dims} K, self: {dims} v -> {dims} v"


op("aten.bucketize.Tensor", "self: * -> *")
op("aten.searchsorted.Tensor", searched_signature)


def histogram_rules(context: Context) -> Iterable[Rule]:
    """Counts of pieces sum up, if the range is given. (min = max means the range of the data.)"""
    source = context.operands[0]
    if context.call["min"] != context.call["max"]:
        for d, size in enumerate(source.shape):
            for outer in context.outers([(source, d)]):
                if size > outer and size % outer == 0:
                    yield Rule((Site(d, outer),), (PARTIAL,), divides=True)


register(OpEntry(("aten.histc",), histogram_rules, sum="all dims"))
