"""Normalisation: of rows (layer, RMS), of channels over the whole batch (batch), of samples by groups of channels (group, instance), of weights."""

from __future__ import annotations

from collections.abc import Iterable

from hapx.ir import OpCall
from hapx.plan import Axes
from hapx.states import PARTIAL, REPLICATED
from hapx.theory.ops.convolution import fits, local_groups
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, Site, Slot, op, register

# --- rows --------------------------------------------------------------------------------------------------------------------


def _normalized(context: Context) -> str:
    return " ".join(f"N{i}" for i in range(len(context.call["normalized_shape"])))


def norm_signature(context: Context) -> str:
    """Leading dims; the normalised ones are whole."""
    dims = _normalized(context)
    return f"input: * {dims}, weight: {dims}, bias: {dims} -> * {dims}"


def affine_linear(context: Context) -> Iterable[Rule]:
    """norm(x) w + b is linear in (w, b) together."""
    parameters = [context.position(n) for n in ("weight", "bias")]
    if parameters[0] is None:  # a bias alone is added to something that is not Partial
        return
    yield Rule(tuple(PARTIAL if i in parameters else REPLICATED for i in range(len(context.operands))), (PARTIAL,))


op("aten.layer_norm", norm_signature, extra=affine_linear)


def rms_norm_signature(context: Context) -> str:
    """Leading dims; the normalised ones are whole."""
    dims = _normalized(context)
    return f"input: * {dims}, weight: {dims} -> * {dims}"


op("aten.rms_norm", rms_norm_signature, linear="weight")

# --- channels: statistics over the whole batch, or of every sample -----------------------------------------------------------


def channel_rules(context: Context, updates: bool, of_samples: str | None, of_image: str | None) -> Iterable[Rule]:
    """Channels split everything alike. Samples and dims of the image are split with the given variants (None: not at all).
    `updates`: the call changes its running statistics."""
    source, out = context.operands[0], context.node.outputs[0]
    rank = len(source.shape)
    # statistics that are updated in place must be cut as they are stored: a slice of them is a copy, whose update would be lost
    held = [i for n in ("running_mean", "running_var") if (i := context.position(n)) is not None]
    if not updates or all(context.operands[i].mutated for i in held):
        for outer in context.outers([(r, 1 if len(r.shape) == rank else 0) for r in (*context.operands, out)]):
            if fits(source, Site(1, outer)):
                yield Rule(tuple(Site(1 if i == 0 else 0, outer) for i in range(len(context.operands))), (Site(1, outer),), divides=True)
    for d in range(rank):
        variant = of_image if d else of_samples
        if d != 1 and variant is not None:
            for outer in context.outers([(source, d), (out, d)]):
                if fits(source, Site(d, outer)):
                    yield Rule((Site(d, outer), *(REPLICATED for _ in context.operands[1:])), (Site(d, outer),), variant, divides=True)


def fixed_linear(context: Context) -> Iterable[Rule]:
    """With fixed statistics, (x - mean) / sigma w + b is linear in (x, mean, b)."""
    positions = {p for n in ("input", "running_mean", "bias") if (p := context.position(n)) is not None}
    yield Rule(tuple(PARTIAL if i in positions else REPLICATED for i in range(len(context.operands))), (PARTIAL,))


def batch_norm_rules(context: Context) -> Iterable[Rule]:
    """Channels; samples and dims of the image with statistics over all devices."""
    training, has_statistics = bool(context.call["training"]), context.call["running_mean"] is not None
    measures = training or not has_statistics
    variant = "batch" if measures else ""
    yield from channel_rules(context, training and has_statistics, variant, variant)
    yield from affine_linear(context)
    if not measures:
        yield from fixed_linear(context)


def instance_norm_rules(context: Context) -> Iterable[Rule]:
    """Samples (running statistics are means over all of them) and channels; dims of the image where the statistics are given."""
    measures, has_statistics = bool(context.call["use_input_stats"]), context.call["running_mean"] is not None
    updates = measures and has_statistics
    yield from channel_rules(context, updates, "batch" if updates else "", None if measures else "")
    yield from affine_linear(context)
    if not measures:
        yield from fixed_linear(context)


def over_batch(local: LocalCall) -> OpCall:
    """Body of a norm that needs to know of the samples of other devices."""
    axes = local.axes("batch")
    if not axes:
        return local.node.call
    args = tuple((k, v) for k, v in local.node.call.args if k != "cudnn_enabled")
    return OpCall(local.node.call.op.replace("aten.", "hapx."), (*args, ("batch", Axes(axes))))


LINEAR = "weight bias | input running_mean bias"
register(OpEntry(("aten.batch_norm",), batch_norm_rules, over_batch, linear=LINEAR, composites=("hapx.batch_norm",)))
register(OpEntry(("aten.instance_norm",), instance_norm_rules, over_batch, linear=LINEAR, composites=("hapx.instance_norm",)))

# --- groups of channels ------------------------------------------------------------------------------------------------------


def group_norm_rules(context: Context) -> Iterable[Rule]:
    """Samples; channels in whole groups."""
    source, out, groups = context.operands[0], context.node.outputs[0], context.call["num_groups"]
    for outer in context.outers([(source, 0), (out, 0)]):
        if fits(source, Site(0, outer)):
            yield Rule((Site(0, outer), *(REPLICATED for _ in context.operands[1:])), (Site(0, outer),), divides=True)
    for outer in context.outers([(source, 1), (out, 1), *((r, 0) for r in context.operands[1:])]):
        if groups % outer == 0 and groups > outer:
            operands: tuple[Slot, ...] = (Site(1, outer), *(Site(0, outer) for _ in context.operands[1:]))
            yield Rule(operands, (Site(1, outer),), "groups", groups // outer, divides=True)
    yield from affine_linear(context)


def group_norm_body(local: LocalCall) -> OpCall:
    axes = local.axes("groups")
    if not axes:
        return local.node.call
    return local.node.call.replace(num_groups=local_groups(local.node.call["num_groups"], local.pre[0], axes))


register(OpEntry(("aten.group_norm",), group_norm_rules, group_norm_body, linear="weight bias"))

# --- weights -----------------------------------------------------------------------------------------------------------------


def weight_norm_signature(context: Context) -> str:
    """The dim of the norms: each of its slices has one. (dim -1: the whole tensor has one.)"""
    direction, norms = context.operands
    dims = [f"{'n' if d == context.call['dim'] else f'D{d}'}" for d in range(len(direction.shape))]
    return f"v: {' '.join(dims)}, g: {' '.join(dims) if norms.shape else ''} -> {' '.join(dims)}"


def weight_norm_body(local: LocalCall) -> OpCall:
    """Never the fused kernel: it reads beyond the end of tensors that do not fit together."""
    return OpCall("hapx.weight_norm", local.node.call.args)


op("aten._weight_norm", weight_norm_signature, linear="g", body=weight_norm_body, composites="hapx.weight_norm")
