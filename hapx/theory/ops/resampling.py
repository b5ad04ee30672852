"""Images in another size or order: interpolation, padding, shuffled pixels and channels, windows as columns, sampling at given points.

All are linear in the image. Samples and channels go apart; dims of the image are whole unless nothing happens to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hapx.ir import OpCall
from hapx.plan import LocalShape
from hapx.states import PARTIAL
from hapx.theory.ops.convolution import fits, local_groups
from hapx.theory.ops.pooling import whole_image
from hapx.theory.ops.views import linear_rule
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, Site, op, register


def dimwise(context: Context, dims: Iterable[int]) -> Iterable[Rule]:
    """Dims that keep their order and their units, though not always their size; and Partial passes."""
    source, out = context.operands[0], context.node.outputs[0]
    for d in dims:
        for outer in context.outers([(source, d), (out, d)]):
            if fits(source, Site(d, outer)) and fits(out, Site(d, outer)):
                yield Rule((Site(d, outer),), (Site(d, outer),), divides=True)
    yield from linear_rule(context)


# --- interpolation -------------------------------------------------------------------------------------------------------------

INTERPOLATIONS = {
    1: "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    2: """upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa""",
    3: "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
}
for spatial, names in INTERPOLATIONS.items():
    op(" ".join(f"aten.{n}" for n in names.split()), whole_image(spatial), linear="self | input")

# --- padding -------------------------------------------------------------------------------------------------------------------


def padding_rules(context: Context) -> Iterable[Rule]:
    """Dims that are not padded; linear unless something else than 0 is filled in."""
    call, rank = context.call, len(context.operands[0].shape)
    widths = call.get("pad") or call.get("padding") or ()
    padded = {rank - 1 - i // 2 for i, width in enumerate(widths) if width}
    constant = call.get("mode", "constant") == "constant" and bool(call.get("value"))
    for rule in dimwise(context, [d for d in range(rank) if d not in padded]):
        if not (constant and rule.operands == (PARTIAL,)):
            yield rule


register(
    OpEntry(
        (
            "aten.pad",
            "aten.constant_pad_nd",
            "aten._pad_circular",
            *(f"aten.{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)),
        ),
        padding_rules,
        linear="self",
    )
)

# --- pixels and channels -------------------------------------------------------------------------------------------------------


def shuffle_rules(context: Context) -> Iterable[Rule]:
    """All dims: a channel or row of the one side is a run of channels or rows of the other."""
    return dimwise(context, range(len(context.operands[0].shape)))


register(OpEntry(("aten.pixel_shuffle", "aten.pixel_unshuffle"), shuffle_rules, linear="self"))


def channel_shuffle_rules(context: Context) -> Iterable[Rule]:
    """All dims: g groups of k channels become k groups of g, whole groups are split, or every group alike."""
    source, out, g = context.operands[0], context.node.outputs[0], context.call["groups"]
    k = source.shape[1] // g
    yield from dimwise(context, [d for d in range(len(source.shape)) if d != 1])
    for outer in sorted({1} | {s // k for s in context.outers([(out, 1)]) if s % k == 0} | set(context.outers([(source, 1)]))):
        if g % outer == 0 and g > outer and fits(out, Site(1, k * outer)):
            yield Rule((Site(1, outer),), (Site(1, k * outer),), "groups", g // outer, divides=True)
    for outer in sorted({1} | {s // g for s in context.outers([(source, 1)]) if s % g == 0} | set(context.outers([(out, 1)]))):
        if k % outer == 0 and k > outer:
            yield Rule((Site(1, g * outer),), (Site(1, outer),), divides=True)


def channel_shuffle_body(local: LocalCall) -> OpCall:
    axes = local.axes("groups")
    if not axes:
        return local.node.call
    return local.node.call.replace(groups=local_groups(local.node.call["groups"], local.pre[0], axes))


register(OpEntry(("aten.channel_shuffle", "aten.native_channel_shuffle"), channel_shuffle_rules, channel_shuffle_body, linear="self"))

# --- windows as columns ----------------------------------------------------------------------------------------------------------


def columns_signature(left: str, right: str) -> Callable[[Context], str]:
    """Samples and channels, each with all places of its window."""

    def signature(context: Context) -> str:
        """Samples and channels, each with all places of its window."""
        return f"self: * c {left} -> * c {right}"

    return signature


op("aten.im2col", columns_signature("H W", "L"), linear="self")
op("aten.col2im", columns_signature("L", "H W"), linear="self")


def unfold_rules(context: Context) -> Iterable[Rule]:
    """Other dims; the unfolded one where the windows lie side by side."""
    source, out, call = context.operands[0], context.node.outputs[0], context.call
    dim = call["dimension"] % max(len(source.shape), 1)
    apart = call["size"] <= call["step"] and source.shape[dim] == out.shape[dim] * call["step"]
    yield from dimwise(context, [d for d in range(len(source.shape)) if d != dim or apart])


register(OpEntry(("aten.unfold",), unfold_rules, linear="self"))

# --- sampling at points ------------------------------------------------------------------------------------------------------------


def grid_signature(context: Context) -> str:
    """Samples and channels of the image; samples and points of the grid."""
    points = " ".join(f"p{i}" for i in range(len(context.operands[1].shape) - 2))
    image = " ".join(f"W{i}" for i in range(len(context.operands[0].shape) - 2))
    return f"input: b c {image}, grid: b {points} X -> b c {points}"


op("aten.grid_sampler aten.grid_sampler_2d aten.grid_sampler_3d", grid_signature, linear="input")


def affine_grid_rules(context: Context) -> Iterable[Rule]:
    """Samples."""
    return dimwise(context, [0])


def affine_grid_body(local: LocalCall) -> OpCall:
    return local.node.call.replace(size=LocalShape(local.node.call["size"], local.post[0]))


register(OpEntry(("aten.affine_grid_generator",), affine_grid_rules, affine_grid_body, linear="theta"))
