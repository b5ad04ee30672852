"""The calls of one micro-batch: what a node of the whole batch's graph becomes where the batch is cut into equal parts.

Micro-batches behave as a mesh axis whose coordinates run one after another, so a one-axis rule says what a node may do with parts, and the body of
its operator's entry is the local call. No part can talk to another: a body is usable here only if it is a plain call that is the same for every
part, or one of a few composites of which it is known what a single part can do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from hapx.ir import FLOATING, Graph, Node, OpCall, TensorRef, Value
from hapx.layout import local_shape
from hapx.plan import Axes, LocalBlock, LocalIndices, LocalOffset, LocalShape, LocalSize
from hapx.states import Cut, Placement, Row, Sharded
from hapx.theory.grains import Grains, operands
from hapx.theory.ops.losses import MEAN
from hapx.theory.registry import LocalCall, Rule, Site, Slot, lookup

# calls that are determined by their operand and the shape of their result, however it is written
VIEWS = frozenset({"aten.reshape.default", "aten.view.default", "aten._unsafe_view.default", "aten.expand.default", "aten.alias.default"})


class Way(Enum):
    """What the call does with the parts. PLAIN: just what the rule says. MIXES: it does what the rule says with statistics of its own part. DRAWS:
    it does so with random numbers of its own part. SHARES: it gives the mean of its part. COUNTS: a mean whose divisor is data."""

    PLAIN = "plain"
    DRAWS = "draws"
    MIXES = "mixes"
    SHARES = "shares"
    COUNTS = "counts"


WAYS: Mapping[str, Way] = {
    "hapx.mean": Way.SHARES, "hapx.mean_loss": Way.SHARES, "hapx.sum_loss": Way.PLAIN, "hapx.batch_norm": Way.MIXES, "hapx.instance_norm": Way.PLAIN,
    "hapx.dropout": Way.DRAWS, "hapx.alpha_dropout": Way.DRAWS, "hapx.attention_dropout": Way.DRAWS, "hapx.weight_norm": Way.PLAIN,
    "hapx.rand": Way.DRAWS, "hapx.randn": Way.DRAWS, "hapx.randint": Way.DRAWS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartCall:
    """The call for one part, its operands not yet renamed."""

    call: OpCall
    way: Way


class Cutting:
    """The whole batch's graph, cut into `number` equal parts."""

    def __init__(self, whole: Graph, grains: Grains, number: int):
        self.whole, self.grains, self.number = whole, grains, number

    def placement(self, ref: TensorRef, slot: Slot) -> Placement | None:
        """A slot of a tensor as a placement; None for a site that cannot be cut into equal parts."""
        if not isinstance(slot, Site):
            return Placement((slot,))
        units = self.grains.units.get((ref.name, slot), 0)
        if not units or units % self.number:
            return None
        return Placement((Sharded(slot.dim, slot.outer, ref.shape[slot.dim] // (slot.outer * units), Cut(Row("even", 0, 0), units)),))

    def shape(self, ref: TensorRef, slot: Slot) -> tuple[int, ...]:
        """The shape of a part of a tensor."""
        placement = self.placement(ref, slot)
        assert placement is not None, (ref, slot)
        return self._local_shape(ref.shape, placement)

    def call(self, index: int, rule: Rule, own: Node) -> PartCall | None:
        """The call of a part under a rule; None where there is none that needs no other part. `own`: the node as it was captured at the part's
        shapes. Its call is kept wherever it is the right one."""
        node = self.whole.nodes[index]
        tensors = operands(self.whole, node)
        pre = [self.placement(r, s) for r, s in zip(tensors, rule.operands, strict=True)]
        post = [self.placement(r, s) for r, s in zip(node.outputs, rule.outputs, strict=True)]
        if any(p is None for p in (*pre, *post)):
            return None
        entry = lookup(node.call)
        local: OpCall | None = node.call
        if entry is not None and entry.body is not None:
            local = entry.body(LocalCall(node, index, tensors, tuple(filter(None, pre)), tuple(filter(None, post)), (rule.variant,)))
        if local is None:
            return None
        same = all(o.shape == self.shape(w, s) for o, w, s in zip(own.outputs, node.outputs, rule.outputs, strict=True))
        if local.target.startswith("hapx."):
            known = own.call == node.call or (same and without_size(own.call) == without_size(node.call))
            way = self._way(local) if known else None
            return PartCall(own.call, way) if way is not None else None
        resolved = self._resolved(local)
        if resolved is None or (same and resolved.target in VIEWS):
            return PartCall(own.call, Way.PLAIN) if resolved is not None else None
        return PartCall(resolved, Way.PLAIN)

    def _way(self, local: OpCall) -> Way | None:
        """What a composite's call is for a single part."""
        if local.target not in ("hapx.cross_entropy", "hapx.nll_loss"):
            return WAYS.get(local.target)
        if local["offset"] != 0:
            return None  # classes are split
        probabilities = self.whole.refs[local["target"].name].dtype in FLOATING
        return Way.PLAIN if local["reduction"] != MEAN else Way.SHARES if probabilities else Way.COUNTS

    def _resolved(self, call: OpCall) -> OpCall | None:
        try:
            return OpCall(call.target, tuple((k, self._value(v)) for k, v in call.args))
        except _Differs:
            return None

    def _value(self, value: Value) -> Value:
        if isinstance(value, LocalShape):
            return self._local_shape(value.shape, value.placement)
        if isinstance(value, LocalSize):
            return self._local_shape((value.size,), value.placement)[0]
        if isinstance(value, LocalOffset | LocalIndices | LocalBlock | Axes):
            raise _Differs
        return tuple(map(self._value, value)) if isinstance(value, tuple) else value

    def _local_shape(self, shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
        return local_shape(shape, placement, (self.number,), {}, (0,))


def without_size(call: OpCall) -> OpCall:
    """What a call that makes a tensor says beside its size."""
    return OpCall(call.target, tuple((k, v) for k, v in call.args if k != "size"))


class _Differs(Exception):
    """An argument that is not the same for all parts."""
