"""Views and data movement: which factor of which dim becomes which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod

from hapx.ir import CONTINUOUS, OpCall
from hapx.plan import LocalShape
from hapx.states import PARTIAL, REPLICATED
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, Site, op, register


def linear_rule(context: Context) -> list[Rule]:
    """Partial passes through (all operands together)."""
    if all(r.dtype in CONTINUOUS for r in (*context.operands, *context.node.outputs)):
        return [Rule((PARTIAL,) * len(context.operands), (PARTIAL,) * len(context.node.outputs))]
    return []


def local_shape(argument: str) -> Callable[[LocalCall], OpCall]:
    """Body of an operator whose `argument` is the shape of its output."""

    def body(local: LocalCall) -> OpCall:
        return local.node.call.replace(**{argument: LocalShape(local.node.outputs[0].shape, local.post[0])})

    return body


# --- reshape ------------------------------------------------------------------------------------------------------------


def groups(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Dims of `source` and `target` in matching groups of equal product; dims of size 1 are left out."""
    left = [d for d, s in enumerate(source) if s != 1]
    right = [d for d, s in enumerate(target) if s != 1]
    found = []
    while left:
        a, b = [left.pop(0)], [right.pop(0)]
        while (x := prod(source[d] for d in a)) != (y := prod(target[d] for d in b)):
            if x < y:
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        found.append((a, b))
    return found


def _move(site: Site, dims: list[int], shape: tuple[int, ...], others: list[int], target: tuple[int, ...]) -> Site | None:
    """The site of the other side of a reshape that is the same split of the same elements."""
    flat = prod(shape[d] for d in dims[: dims.index(site.dim)]) * site.outer
    before = 1
    for d in others:
        if before <= flat < before * target[d]:
            return Site(d, flat // before) if flat % before == 0 and target[d] % (flat // before) == 0 else None
        before *= target[d]
    return None


def reshape_rules(context: Context) -> Iterable[Rule]:
    """Every factor of a dim that is a factor of a dim on the other side, blocks included."""
    source, target = context.operands[0], context.node.outputs[0]
    if 0 in source.shape:
        return
    pairs: dict[tuple[Site, Site], None] = {}
    for a, b in groups(source.shape, target.shape):
        for site in context.sites.get(source.name, ()):
            if site.dim in a and (image := _move(site, a, source.shape, b, target.shape)):
                pairs[site, image] = None
        for site in context.sites.get(target.name, ()):
            if site.dim in b and (image := _move(site, b, target.shape, a, source.shape)):
                pairs[image, site] = None
    for x, y in sorted(pairs, key=lambda p: (p[0].dim, p[0].outer, p[1].dim, p[1].outer)):
        yield Rule((x,), (y,), divides=True)
    yield from linear_rule(context)


register(OpEntry(("aten.view.default", "aten._unsafe_view"), reshape_rules, local_shape("size"), linear="self"))
register(OpEntry(("aten.reshape",), reshape_rules, local_shape("shape"), linear="self"))


def as_view(local: LocalCall) -> OpCall:
    """flatten, unflatten, squeeze...: by their result's shape, so that dims which are 1 only locally stay."""
    return OpCall("aten.reshape.default", (("self", local.node.call["self"]), ("shape", LocalShape(local.node.outputs[0].shape, local.post[0]))))


register(
    OpEntry(("aten.flatten.using_ints", "aten.unflatten.int", "aten.squeeze", "aten.unsqueeze", "aten.ravel"), reshape_rules, as_view, linear="self")
)


# --- permutations -------------------------------------------------------------------------------------------------------


def mapped(mapping: Callable[[Context], dict[int, int]]) -> Callable[[Context], Iterable[Rule]]:
    """Rules of an operator with one tensor operand whose dims keep their elements: {dim of the operand: dim of every output}."""

    def rules(context: Context) -> Iterable[Rule]:
        """All dims that keep their elements."""
        source = context.operands[0]
        for dim, image in mapping(context).items():
            for outer in context.outers([(source, dim), *((o, image) for o in context.node.outputs)]):
                if source.shape[dim] > outer and source.shape[dim] % outer == 0:
                    yield Rule((Site(dim, outer),), (Site(image, outer),) * len(context.node.outputs), divides=True)
        yield from linear_rule(context)

    return rules


def _transpose(context: Context) -> dict[int, int]:
    rank = len(context.operands[0].shape)
    first, second = ("dim0", "dim1") if "dim0" in dict(context.call.args) else ("axis0", "axis1")
    a, b = context.call[first] % rank, context.call[second] % rank
    return {d: {a: b, b: a}.get(d, d) for d in range(rank)}


def _permute(context: Context) -> dict[int, int]:
    rank = len(context.operands[0].shape)
    return {d % rank: i for i, d in enumerate(context.call["dims"])}


def _reverse(context: Context) -> dict[int, int]:
    rank = len(context.operands[0].shape)
    return {d: rank - 1 - d for d in range(rank)}


def _matrix_transpose(context: Context) -> dict[int, int]:
    rank = len(context.operands[0].shape)
    return {d: {rank - 1: rank - 2, rank - 2: rank - 1}.get(d, d) for d in range(rank)}


def _movedim(context: Context) -> dict[int, int]:
    rank = len(context.operands[0].shape)
    source, destination = ((v if isinstance(v, tuple) else (v,)) for v in (context.call["source"], context.call["destination"]))
    placed = {d % rank: s % rank for s, d in zip(source, destination, strict=True)}
    rest = iter(d for d in range(rank) if d not in placed.values())
    return {(placed[i] if i in placed else next(rest)): i for i in range(rank)}


def _except_dim(context: Context) -> dict[int, int]:
    """All dims but the one named `dim`."""
    rank = len(context.operands[0].shape)
    return {d: d for d in range(rank) if d != context.call["dim"] % rank}


def _select(context: Context) -> dict[int, int]:
    rank = len(context.operands[0].shape)
    gone = context.call["dim"] % rank
    return {d: d - (d > gone) for d in range(rank) if d != gone}


def _except_dims(context: Context) -> dict[int, int]:
    rank = len(context.operands[0].shape)
    gone = {d % rank for d in context.call["dims"]}
    if not gone and context.call.op == "aten.roll":  # without dims it rolls the flattened tensor
        return {}
    return {d: d for d in range(rank) if d not in gone}


# views that move or drop dims, by operator: {dim of the operand: dim of the output}
MOVES: Mapping[str, Callable[[Context], dict[int, int]]] = {
    "aten.transpose": _transpose, "aten.swapaxes": _transpose, "aten.permute": _permute, "aten.movedim": _movedim, "aten.t": _reverse,
    "aten.numpy_T": _reverse, "aten.mT": _matrix_transpose, "aten.select": _select, "aten.unbind": _select,
}  # fmt: skip

for targets, mapping in (
    ("aten.transpose.int aten.swapaxes", _transpose),
    ("aten.permute", _permute),
    ("aten.movedim", _movedim),
    ("aten.t aten.numpy_T.default", _reverse),
    ("aten.mT.default", _matrix_transpose),
    ("aten.select.int aten.unbind", _select),
    ("aten.narrow.default", _except_dim),
    ("aten.cumsum", _except_dim),
    ("aten.flip aten.roll", _except_dims),
):
    register(OpEntry(tuple(targets.split()), mapped(mapping), linear="self"))


# --- slices, splits, concatenation ----------------------------------------------------------------------------------------


def slice_rules(context: Context) -> Iterable[Rule]:
    """A slice that takes everything keeps its dim; other slices need it whole."""
    whole = context.operands[0].shape == context.node.outputs[0].shape and context.call["step"] == 1
    yield from mapped(lambda c: {d: d for d in range(len(c.operands[0].shape))} if whole else _except_dim(c))(context)


def slice_body(local: LocalCall) -> OpCall:
    if local.operands[0].shape == local.node.outputs[0].shape:
        return OpCall("aten.alias.default", (("self", local.node.call["self"]),))
    return local.node.call


register(OpEntry(("aten.slice.Tensor",), slice_rules, slice_body, linear="self"))


def _equal_parts(context: Context) -> bool:
    return len({o.shape for o in context.node.outputs}) == 1


def split_rules(context: Context) -> Iterable[Rule]:
    """Other dims pass. The split dim is cut in each of n equal parts alike: n x outer blocks before, `outer` after."""
    source, outputs = context.operands[0], context.node.outputs
    dim = context.call["dim"] % len(source.shape)
    if _equal_parts(context):
        n = len(outputs)
        known = set(context.outers([(r, dim) for r in outputs])) | {s // n for s in context.outers([(source, dim)]) if s % n == 0}
        for outer in sorted(known):
            if outputs[0].shape[dim] > outer and outputs[0].shape[dim] % outer == 0:
                yield Rule((Site(dim, n * outer),), (Site(dim, outer),) * n, divides=True)
    yield from mapped(_except_dim)(context)


def split_body(local: LocalCall) -> OpCall:
    """Equal parts stay equal parts locally."""
    call, dim = local.node.call, local.node.call["dim"] % len(local.operands[0].shape)
    cut_here = any(getattr(s, "dim", None) == dim for s in local.pre[0].states)
    if not cut_here:
        return call
    return OpCall("aten.tensor_split.sections", (("self", call["self"]), ("sections", len(local.node.outputs)), ("dim", dim)))


register(
    OpEntry(
        ("aten.split.Tensor", "aten.chunk", "aten.split_with_sizes", "aten.split.sizes", "aten.tensor_split.sections"),
        split_rules,
        split_body,
        linear="self",
    )
)


def cat_rules(context: Context) -> Iterable[Rule]:
    """Other dims pass; the joined dim is cut in each of n equal operands alike."""
    out = context.node.outputs[0]
    rank = len(out.shape)
    dim = context.call["dim"] % rank
    n = len(context.operands)
    if any(len(r.shape) != rank for r in context.operands):
        return
    for d in range(rank):
        if d != dim:
            for outer in context.outers([(r, d) for r in (*context.operands, out)]):
                if out.shape[d] > outer and out.shape[d] % outer == 0:
                    yield Rule((Site(d, outer),) * n, (Site(d, outer),), divides=True)
    if len({r.shape for r in context.operands}) == 1:
        known = set(context.outers([(r, dim) for r in context.operands])) | {s // n for s in context.outers([(out, dim)]) if s % n == 0}
        for outer in sorted(known):
            if context.operands[0].shape[dim] > outer and context.operands[0].shape[dim] % outer == 0:
                yield Rule((Site(dim, outer),) * n, (Site(dim, n * outer),), divides=True)
    yield from linear_rule(context)


register(OpEntry(("aten.cat", "aten.concat"), cat_rules, linear="tensors"))


def stack_rules(context: Context) -> Iterable[Rule]:
    """All dims of the operands."""
    rank = len(context.node.outputs[0].shape)
    new = context.call["dim"] % rank
    for d in range(rank - 1):
        image = d + (d >= new)
        for outer in context.outers([*((r, d) for r in context.operands), (context.node.outputs[0], image)]):
            size = context.operands[0].shape[d]
            if size > outer and size % outer == 0:
                yield Rule((Site(d, outer),) * len(context.operands), (Site(image, outer),), divides=True)
    yield from linear_rule(context)


register(OpEntry(("aten.stack",), stack_rules, linear="tensors"))


# --- expansion -----------------------------------------------------------------------------------------------------------


def expand_rules(context: Context) -> Iterable[Rule]:
    """Kept dims pass; a dim made by expansion may be made in pieces from a whole operand."""
    source, out = context.operands[0], context.node.outputs[0]
    shift = len(out.shape) - len(source.shape)
    for d, size in enumerate(out.shape):
        before = d - shift
        kept = before >= 0 and source.shape[before] == size
        for outer in context.outers([(out, d), *([(source, before)] if kept else [])]):
            if size > outer and size % outer == 0:
                yield Rule((Site(before, outer) if kept else REPLICATED,), (Site(d, outer),), divides=True)
    yield from linear_rule(context)


register(OpEntry(("aten.expand",), expand_rules, local_shape("size"), linear="self"))


# --- triangles ---------------------------------------------------------------------------------------------------------------


op("aten.tril aten.triu", "self: * R C -> * R C", linear="self")
