"""Writes into slices, as new tensors: capture makes them of `y[:, 1:] = x`."""

from __future__ import annotations

from collections.abc import Iterable

from hapx.ir import CONTINUOUS
from hapx.states import PARTIAL
from hapx.theory.registry import Context, OpEntry, Rule, Site, register


def written_rules(context: Context) -> Iterable[Rule]:
    """All dims but the one that is written in part, in both operands alike."""
    call, (target, source) = context.call, context.operands
    rank = len(target.shape)
    dim = call["dim"] % rank
    gone = call.op == "aten.select_scatter"
    for d, size in enumerate(target.shape):
        if d == dim:
            continue
        image = d - (gone and d > dim)
        for outer in context.outers([(target, d), (source, image), (context.node.outputs[0], d)]):
            if size > outer and size % outer == 0:
                yield Rule((Site(d, outer), Site(image, outer)), (Site(d, outer),), divides=True)
    if all(r.dtype in CONTINUOUS for r in (target, source)):
        yield Rule((PARTIAL, PARTIAL), (PARTIAL,))


register(OpEntry(("aten.slice_scatter.default", "aten.select_scatter.default"), written_rules, linear="self src"))
