"""Diagonals, grids and mirror images."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from hapx.ir import CONTINUOUS
from hapx.states import INVARIANT, PARTIAL, REPLICATED
from hapx.theory.ops.views import linear_rule, mapped
from hapx.theory.registry import Context, OpEntry, Rule, Site, Slot, op, register

STATES: tuple[Slot, ...] = (REPLICATED, INVARIANT, PARTIAL)
MAX_MIXED = 3  # operands of a grid that may be in different states


def _diagonal(context: Context) -> dict[int, int]:
    rank = len(context.operands[0].shape)
    gone = {context.call["dim1"] % rank, context.call["dim2"] % rank}
    return {d: i for i, d in enumerate(d for d in range(rank) if d not in gone)}


def _diag_embed(context: Context) -> dict[int, int]:
    rank = len(context.node.outputs[0].shape)
    new = {context.call["dim1"] % rank, context.call["dim2"] % rank}
    return dict(enumerate(d for d in range(rank) if d not in new))


def _rotated(context: Context) -> dict[int, int]:
    """A quarter turn moves one of the two dims as it is, and mirrors the other."""
    rank, turns = len(context.operands[0].shape), context.call["k"] % 4
    a, b = (d % rank for d in context.call["dims"])
    others = {d: d for d in range(rank) if turns == 0 or d not in (a, b)}
    return others | {1: {a: b}, 3: {b: a}}.get(turns, {})


def _fliplr(context: Context) -> dict[int, int]:
    return {d: d for d in range(len(context.operands[0].shape)) if d != 1}


def _flipud(context: Context) -> dict[int, int]:
    return {d: d for d in range(1, len(context.operands[0].shape))}


for target, mapping in (
    ("aten.diagonal.default", _diagonal),
    ("aten.diag_embed", _diag_embed),
    ("aten.rot90", _rotated),
    ("aten.fliplr", _fliplr),
    ("aten.flipud", _flipud),
):
    register(OpEntry((target,), mapped(mapping), linear="self"))

op("aten.trace", "self: R C -> ", linear="self")


def diag_rules(context: Context) -> Iterable[Rule]:
    """Nothing but Partial: rows and columns belong together."""
    return linear_rule(context)


register(OpEntry(("aten.diag",), diag_rules, linear="self"))


def meshgrid_rules(context: Context) -> Iterable[Rule]:
    """The dim that runs over an operand, in all grids."""
    outputs = context.node.outputs
    swapped = context.call.get("indexing") == "xy" and len(context.operands) > 1
    for i, ref in enumerate(context.operands):
        image = 1 - i if swapped and i < 2 else i
        if not ref.shape:
            continue
        for outer in context.outers([(ref, 0), *((o, image) for o in outputs)]):
            if ref.shape[0] > outer and ref.shape[0] % outer == 0:
                operands = tuple(Site(0, outer) if k == i else REPLICATED for k in range(len(context.operands)))
                yield Rule(operands, (Site(image, outer),) * len(outputs), divides=True)
    if all(r.dtype in CONTINUOUS for r in context.operands):
        mixed = product(STATES, repeat=len(outputs)) if len(outputs) <= MAX_MIXED else [(s,) * len(outputs) for s in STATES]
        yield from (Rule(states, states) for states in mixed)  # every grid is made of one operand


register(OpEntry(("aten.meshgrid",), meshgrid_rules, linear="tensors"))
