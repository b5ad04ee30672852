"""Complex numbers and Fourier transforms: what is done number by number, pairs of real numbers, and which dims a transform needs whole.

What is linear here is linear over the real numbers: sums of what devices have ask for no more. So conjugates and real parts are, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from hapx.ir import OpCall
from hapx.states import REPLICATED
from hapx.theory.ops.pointwise import linear_where
from hapx.theory.ops.views import mapped
from hapx.theory.registry import Context, OpEntry, Rule, Site, register


def _of_pairs(context: Context) -> dict[int, int]:
    """All dims that both sides have: that of the pair comes last, on one of them."""
    rank = min(len(context.operands[0].shape), len(context.node.outputs[0].shape))
    return {d: d for d in range(rank)}


def transformed(call: OpCall, rank: int) -> tuple[int, ...]:
    """The dims that a Fourier transform mixes. Where none are named these are all, or the last ones, as many as it has sizes."""
    dim, sizes = call["dim"], call.get("s")
    if dim is None:
        dim = tuple(range(rank))[-len(sizes) :] if sizes is not None else tuple(range(rank))
    return tuple(d % rank for d in (dim if isinstance(dim, tuple) else (dim,)))


def transform_rules(context: Context) -> Iterable[Rule]:
    """Dims that are not transformed."""
    rank = len(context.operands[0].shape)
    mixed = transformed(context.call, rank)
    return mapped(lambda _: {d: d for d in range(rank) if d not in mixed})(context)


TRANSFORMS = tuple(f"aten.fft_{name}{n}" for n in ("", "2", "n") for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"))

register(OpEntry(("aten.view_as_complex", "aten.view_as_real"), mapped(_of_pairs), linear="self"))
register(OpEntry((*TRANSFORMS, "aten.fft_fftshift", "aten.fft_ifftshift"), transform_rules, linear="self"))


def stft_rules(context: Context) -> Iterable[Rule]:
    """Signals of a batch are transformed each for itself, in the same window."""
    (signals, *window), out = context.operands, context.node.outputs[0]
    if len(signals.shape) == 2:
        for outer in context.outers([(signals, 0), (out, 0)]):
            if signals.shape[0] > outer and signals.shape[0] % outer == 0:
                yield Rule((Site(0, outer), *(REPLICATED for _ in window)), (Site(0, outer),), divides=True)
    yield from linear_where(context, "self", True)
    yield from linear_where(context, "window", True)


register(OpEntry(("aten.stft",), stft_rules, linear="self | window"))
