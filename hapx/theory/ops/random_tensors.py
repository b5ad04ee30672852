"""Random tensors. What they hold is a function of the global position, so any device can make any piece; capture writes all other random
operators as these three (`hapx.graph.normalize_random`)."""

from __future__ import annotations

from hapx.ir import OpCall
from hapx.plan import LocalIndices
from hapx.theory.registry import LocalCall, op

OF_TORCH = ("layout", "device", "pin_memory", "size")


def drawn_body(local: LocalCall) -> OpCall:
    """The numbers of the device's own elements."""
    call, shape = local.node.call, local.node.outputs[0].shape
    own = tuple((name, value) for name, value in call.args if name not in OF_TORCH)
    where = (("shape", shape), ("call", local.index), ("indices", LocalIndices(shape, local.post[0])), ("rng", None), ("local_device", None))
    return OpCall(call.op.replace("aten.", "hapx."), (*own, *where))


op("aten.rand.default", "-> *", body=drawn_body, composites="hapx.rand")
op("aten.randn.default", "-> *", body=drawn_body, composites="hapx.randn")
op("aten.randint.low", "-> *", body=drawn_body, composites="hapx.randint")
