"""Tensors made from numbers. Their sizes are literal and global."""

from __future__ import annotations

from collections.abc import Iterable

from hapx.states import PARTIAL, REPLICATED
from hapx.theory.ops.views import local_shape
from hapx.theory.registry import Context, OpEntry, Rule, Site, op, register


def nothing(context: Context) -> Iterable[Rule]:
    """Nothing: made whole on every device (slicing is free)."""
    return ()


CREATION = """aten.arange.default aten.arange.start aten.arange.start_step aten.zeros.default aten.ones.default aten.full.default
    aten.empty.memory_format aten.eye aten.scalar_tensor aten.linspace.default aten.logspace.default aten.range.default aten.range.step
    aten.tril_indices aten.triu_indices aten.hann_window aten.hamming_window.default aten.hamming_window.periodic aten.bartlett_window
    aten.blackman_window aten.kaiser_window aten.fft_fftfreq aten.fft_rfftfreq"""
register(OpEntry(tuple(CREATION.split()), nothing, reason="made whole on every device; slicing is free"))


def new_rules(context: Context) -> Iterable[Rule]:
    """new_zeros and the like take only dtype and device from their operand, whatever its state."""
    out = context.node.outputs[0]
    yield Rule((PARTIAL,), (REPLICATED,))
    for d, size in enumerate(out.shape):
        if size > 1:
            yield Rule((REPLICATED,), (Site(d),), divides=True)
            yield Rule((PARTIAL,), (Site(d),), divides=True)


register(OpEntry(("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty"), new_rules, local_shape("size")))

# only shape and dtype count
op("aten.empty_like", "self: * -> *", extra=lambda c: [Rule((PARTIAL,), (REPLICATED,))])
