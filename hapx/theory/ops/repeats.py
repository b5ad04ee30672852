"""Repetition: tiles are blocks of the result, repeated elements its grains."""

from __future__ import annotations

from collections.abc import Iterable

from hapx.ir import OpCall
from hapx.plan import LocalShape
from hapx.states import REPLICATED, Placement, Sharded
from hapx.theory.ops.views import linear_rule
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, Site, register


def _counts(call: OpCall, rank: int) -> tuple[int, ...]:
    """How often every dim of the result repeats."""
    given = tuple(call.get("repeats") or call.get("dims"))
    return (1,) * (rank - len(given)) + given


def repeat_rules(context: Context) -> Iterable[Rule]:
    """Every tile is cut alike: blocks of the result. A dim of size 1 or a new one may be made in pieces."""
    source, out = context.operands[0], context.node.outputs[0]
    shift = len(out.shape) - len(source.shape)
    for d, count in enumerate(_counts(context.call, len(out.shape))):
        before = d - shift
        if before >= 0 and source.shape[before] > 1:
            size = source.shape[before]
            known = set(context.outers([(source, before)])) | {s // count for s in context.outers([(out, d)]) if count and s % count == 0}
            for outer in sorted(known):
                if count and size > outer and size % outer == 0:
                    yield Rule((Site(before, outer),), (Site(d, count * outer),), divides=True)
        else:
            for outer in context.outers([(out, d)]):
                if out.shape[d] > outer and out.shape[d] % outer == 0:
                    yield Rule((REPLICATED,), (Site(d, outer),), divides=True)
    yield from linear_rule(context)


def repeat_body(local: LocalCall) -> OpCall:
    """Where a dim is made in pieces, as many repetitions as this device has elements."""
    call, source, out = local.node.call, local.operands[0], local.node.outputs[0]
    shift = len(out.shape) - len(source.shape)
    made = {d for d in range(len(out.shape)) if d < shift or source.shape[d - shift] == 1}
    post = local.post[0]
    states = tuple(s if isinstance(s, Sharded) and s.dim in made else REPLICATED for s in post.states)
    if all(s == REPLICATED for s in states):
        return call
    counts = LocalShape(_counts(call, len(out.shape)), Placement(states, tuple(a for a in post.nest if states[a] != REPLICATED)))
    return OpCall("aten.repeat.default", (("self", call["self"]), ("repeats", counts)))


register(OpEntry(("aten.repeat", "aten.tile"), repeat_rules, repeat_body, linear="self"))


def interleave_rules(context: Context) -> Iterable[Rule]:
    """All dims: an element and its copies stay together. (Without a dim everything is flattened and whole.)"""
    source, out, dim = context.operands[0], context.node.outputs[0], context.call["dim"]
    if dim is not None or len(source.shape) == 1:
        for d in range(len(source.shape)):
            for outer in context.outers([(source, d), (out, d)]):
                if source.shape[d] > outer and source.shape[d] % outer == 0:
                    yield Rule((Site(d, outer),), (Site(d, outer),), divides=True)
    yield from linear_rule(context)


def interleave_body(local: LocalCall) -> OpCall:
    """The size of the result is a global one."""
    return local.node.call.replace(output_size=None)


register(OpEntry(("aten.repeat_interleave.self_int",), interleave_rules, interleave_body, linear="self"))
