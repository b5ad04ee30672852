"""Convolution and transposed convolution, in groups or not.

With g groups the input has g blocks of channels, the output g blocks, and each group is a convolution of its own. So either whole groups are
split (input, weight and output alike; the local call has fewer groups), or, in every group alike, the channels of the output, or those of
the input, over which it sums. For g = 1 the latter two are the columns and rows of a matrix product; depthwise convolution has only the
first. Dims of the image are split where the windows lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hapx.ir import CONTINUOUS, FLOATING, OpCall, TensorRef, Value
from hapx.plan import LocalShape, LocalSize
from hapx.states import PARTIAL, REPLICATED, Placement, Sharded
from hapx.theory.factors import VARIANT, factor_rules, factored
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, Site, Slot, register

PLAIN = """aten.conv1d.default aten.conv2d.default aten.conv3d.default aten.conv1d.padding aten.conv2d.padding aten.conv3d.padding
    aten.convolution.default"""
TRANSPOSED = "aten.conv_transpose1d.default aten.conv_transpose2d.input aten.conv_transpose3d.input"


def is_transposed(call: OpCall) -> bool:
    return "transpose" in call.op or bool(call.get("transposed"))


def each(value: Value, dim: int) -> Value:
    """The argument's number for one spatial dim: one number stands for all."""
    return value[dim % len(value)] if isinstance(value, tuple) else value


def side_by_side(size: int, count: int, kernel: object, stride: object, padding: object, dilation: object) -> bool:
    """Whether `count` windows (of `kernel` elements, one every `stride`) are each inside of their own part of a dim of `size`."""
    assert isinstance(kernel, int) and isinstance(stride, int) and isinstance(dilation, int)
    width = dilation * (kernel - 1) + 1
    return (padding in (0, "valid") or width == 1 == stride) and width <= stride and size == count * stride


def fits(ref: TensorRef, site: Site) -> bool:
    """Whether a tensor has the site, with more than one unit."""
    return ref.shape[site.dim] % site.outer == 0 and ref.shape[site.dim] > site.outer


def convolution_rules(context: Context) -> Iterable[Rule]:
    """Samples; whole groups; in every group the output channels, or the input channels, which sum up; dims whose windows lie side by side."""
    source, weight, out = *context.operands[:2], context.node.outputs[0]
    channel = len(source.shape) - len(weight.shape) + 1  # 0 without a batch
    for dim in range(channel):
        for outer in context.outers([(source, dim), (out, dim)]):
            yield from _rule(context, Site(dim, outer), REPLICATED, REPLICATED, Site(dim, outer))
    if weight.requires_grad and out.dtype in FLOATING:  # torch has convolutions of complex numbers, but not their backward by itself
        yield from factor_rules(context, 0, range(channel))
    yield from _channels(context, channel)
    for i in range(len(weight.shape) - 2):
        dim = channel + 1 + i
        if _side_by_side(context, dim, i):
            for outer in context.outers([(source, dim), (out, dim)]):
                yield from _rule(context, Site(dim, outer), REPLICATED, REPLICATED, Site(dim, outer))
    if all(r.dtype in CONTINUOUS for r in (*context.operands, out)):
        yield Rule((PARTIAL, REPLICATED, PARTIAL)[: len(context.operands)], (PARTIAL,))
        yield Rule((REPLICATED, PARTIAL, PARTIAL)[: len(context.operands)], (PARTIAL,))


def _channels(context: Context, channel: int) -> Iterable[Rule]:
    source, weight, *bias = context.operands
    out, groups, turned = context.node.outputs[0], context.call["groups"], is_transposed(context.call)
    added = [(b, 0) for b in bias]
    # dims of the weight: one has the groups and, in each, the channels of one side; the other the channels of a group of the other side
    for k in _in_groups(context, [(out, channel), *added, *([] if turned else [(weight, 0)])], [(weight, 1)] if turned else [], groups):
        of_weight = Site(1, k) if turned else Site(0, groups * k)
        yield from _rule(context, REPLICATED, of_weight, Site(0, groups * k), Site(channel, groups * k))
    for k in _in_groups(context, [(source, channel), *([(weight, 0)] if turned else [])], [] if turned else [(weight, 1)], groups):
        of_weight = Site(0, groups * k) if turned else Site(1, k)
        yield from _rule(context, Site(channel, groups * k), of_weight, PARTIAL, PARTIAL)
    if groups > 1:
        for outer in context.outers([(source, channel), (weight, 0), *added, (out, channel)]):
            if groups % outer == 0 and groups > outer:
                split = Site(channel, outer), Site(0, outer), Site(0, outer), Site(channel, outer)
                yield from _rule(context, *split, variant="groups", limit=groups // outer)


def _in_groups(context: Context, fused: Sequence[tuple[TensorRef, int]], single: Sequence[tuple[TensorRef, int]], groups: int) -> tuple[int, ...]:
    """In how many blocks the channels of one group are known to be cut; `fused` dims are those of all groups."""
    found = {1, *context.outers(single)} | {s // groups for s in context.outers(fused) if s % groups == 0}
    return tuple(sorted(found))


def _rule(context: Context, source: Slot, weight: Slot, bias: Slot, out: Slot, variant: str = "", limit: int = 0) -> Iterable[Rule]:
    """The rule, if all tensors have its sites."""
    operands = (source, weight, bias)[: len(context.operands)]
    slots = zip((*operands, out), (*context.operands, context.node.outputs[0]), strict=True)
    if all(fits(r, s) for s, r in slots if isinstance(s, Site)):
        yield Rule(operands, (out,), variant, limit, divides=True)


def _side_by_side(context: Context, dim: int, spatial: int) -> bool:
    call, kernel = context.call, context.operands[1].shape[2 + spatial]
    sizes = context.operands[0].shape[dim], context.node.outputs[0].shape[dim]
    size, count = reversed(sizes) if is_transposed(call) else sizes
    return side_by_side(size, count, kernel, *(each(call[n], spatial) for n in ("stride", "padding", "dilation")))


def local_groups(groups: int, placement: Placement, axes: Iterable[int]) -> LocalSize:
    """The local number of groups, where `axes` split channels in whole groups."""
    states = [REPLICATED] * len(placement.states)
    for axis in axes:
        state = placement.states[axis]
        assert isinstance(state, Sharded) and groups % (state.outer * state.cut.units) == 0, (groups, state)
        states[axis] = Sharded(0, state.outer, groups // (state.outer * state.cut.units), state.cut)  # type: ignore[call-overload]
    return LocalSize(groups, Placement(tuple(states), placement.nest))


def convolution_body(local: LocalCall) -> OpCall | None:
    axes, call = local.axes("groups"), local.node.call
    if axes:
        call = call.replace(groups=local_groups(call["groups"], local.pre[0], axes))
    return factored(local, "hapx.convolution_sfb", 0, _written_out(local, call)) if local.axes(VARIANT) else call


def _written_out(local: LocalCall, call: OpCall) -> Iterable[tuple[str, Value]]:
    """The arguments of any convolution as those of the composite: a number per dim of the image, and no names of paddings."""
    kernel, out = local.operands[1].shape[2:], local.node.outputs[0]
    numbers = {name: tuple(each(call.get(name, 0), i) for i in range(len(kernel))) for name in ("stride", "dilation", "output_padding")}
    padding, excess = call["padding"], (0,) * len(kernel)
    if isinstance(padding, str):
        both = [int(d) * (k - 1) if padding == "same" else 0 for d, k in zip(numbers["dilation"], kernel, strict=True)]
        padding, excess = tuple(n // 2 for n in both), tuple(n % 2 for n in both)
    yield from ((name, call[name]) for name in ("input", "weight", "bias"))
    yield from (("stride", numbers["stride"]), ("padding", tuple(each(padding, i) for i in range(len(kernel)))), ("dilation", numbers["dilation"]))
    yield from (("transposed", is_transposed(call)), ("output_padding", numbers["output_padding"]), ("groups", call["groups"]))
    yield from (("excess", excess), ("shape", LocalShape(out.shape, local.post[0])))


register(
    OpEntry(
        (*PLAIN.split(), *TRANSPOSED.split()),
        convolution_rules,
        convolution_body,
        sum="input channels",
        linear="input bias | weight bias",
        composites=("hapx.convolution_sfb",),
    )
)
