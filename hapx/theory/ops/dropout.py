"""Dropout of whole channels, and dropout that keeps mean and variance. Masks as those of plain dropout: functions of the global position."""

from __future__ import annotations

from collections.abc import Iterable

from hapx.ir import OpCall
from hapx.plan import LocalIndices
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, register, signature_rules

CHANNELS = 2  # the first dims, samples and channels, of which a feature mask is a function


def active(call: OpCall) -> bool:
    return bool(call["train"]) and call["p"] != 0


def mask_rules(context: Context) -> Iterable[Rule]:
    """All dims; never Partial while it drops anything."""
    return signature_rules("input: * -> *", linear="" if active(context.call) else "input")(context)


def mask_body(local: LocalCall) -> OpCall:
    call = local.node.call
    if not active(call):
        return OpCall("aten.alias.default", (("self", call["input"]),))
    whole = local.operands[0].shape
    shape = whole[:CHANNELS] if "feature" in call.op else whole
    where = (("call", local.index), ("indices", LocalIndices(shape, local.pre[0])), ("shape", shape), ("rng", None))
    return OpCall("hapx.alpha_dropout" if "alpha" in call.op else "hapx.dropout", (("input", call["input"]), ("p", call["p"]), *where))


register(OpEntry(("aten.feature_dropout",), mask_rules, mask_body, composites=("hapx.dropout",)))
register(OpEntry(("aten.alpha_dropout", "aten.feature_alpha_dropout"), mask_rules, mask_body, composites=("hapx.alpha_dropout",)))
