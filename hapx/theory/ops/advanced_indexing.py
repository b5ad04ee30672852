"""Advanced indexing: `self[indices]` with several index tensors, read and written.

Dims that are not indexed pass, and so do the dims of the indices when reading. A dim that is indexed may be split when reading: every device
reads what is its own and takes 0 elsewhere, so that the pieces sum up. Writing that accumulates is the transpose.
"""

from __future__ import annotations

from collections.abc import Iterable

from hapx.ir import OpCall, Ref
from hapx.plan import LocalOffset
from hapx.states import PARTIAL, REPLICATED
from hapx.theory.ops.indexing import ROWS, floating, outers, partial_rule
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, Site, Slot, register


class Advanced:
    """Where the dims of `self[indices]` come from. `kept`: {dim of self: dim of the result}; `start`: first dim of the result that runs over
    the indices, whose broadcast shape is `shape`. `indexed`: {dim of self: position of its index among the operands}."""

    def __init__(self, context: Context):
        source, entries = context.operands[0], context.call["indices"]
        rank = len(source.shape)
        self.indexed: dict[int, int] = {}
        for dim, value in enumerate(entries):
            if isinstance(value, Ref):
                self.indexed[dim] = 1 + len(self.indexed)
        tensors = [context.operands[i] for i in self.indexed.values()]
        self.masks = any(r.dtype in ("bool", "uint8") for r in tensors)
        depth = max((len(r.shape) for r in tensors), default=0)
        self.shape = tuple(max((r.shape[i - depth] for r in tensors if len(r.shape) >= depth - i), default=1) for i in range(depth))
        dims = list(self.indexed)
        together = bool(dims) and dims == list(range(dims[0], dims[0] + len(dims)))
        self.start = dims[0] if together else 0
        rest = [d for d in range(rank) if d not in self.indexed]
        self.kept = {d: i if i < self.start else i + depth for i, d in enumerate(rest)}

    def held(self, context: Context, k: int) -> tuple[tuple[int, int], ...]:
        """(position of the operand, its dim) of the indices that run along dim `k` of their broadcast shape."""
        found = []
        for i in self.indexed.values():
            d = k - (len(self.shape) - len(context.operands[i].shape))
            if d >= 0 and context.operands[i].shape[d] > 1:
                found.append((i, d))
        return tuple(found)


def _slots(context: Context, sites: dict[int, Site], rest: Slot = REPLICATED) -> tuple[Slot, ...]:
    return tuple(sites.get(i, rest) for i in range(len(context.operands)))


def index_rules(context: Context) -> Iterable[Rule]:
    """Dims that are not indexed, dims of the indices; rows of what is read: each device takes its own."""
    source, out = context.operands[0], context.node.outputs[0]
    where = Advanced(context)
    yield from partial_rule(context, "self")
    if where.masks:
        return
    for d, image in where.kept.items():
        for outer in outers(context, [(source, d), (out, image)]):
            yield Rule(_slots(context, {0: Site(d, outer)}), (Site(image, outer),), divides=True)
    for k in range(len(where.shape)):
        held = where.held(context, k)
        for outer in outers(context, [(out, where.start + k), *((context.operands[i], d) for i, d in held)]) if held else ():
            yield Rule(_slots(context, {i: Site(d, outer) for i, d in held}), (Site(where.start + k, outer),), divides=True)
    if floating(context):
        for d in where.indexed:
            if source.shape[d] > 1:
                yield Rule(_slots(context, {0: Site(d)}), (PARTIAL,), f"{ROWS}{d}", divides=True)


def index_body(local: LocalCall) -> OpCall:
    entries = local.node.call["indices"]
    split = {d for d in range(len(entries)) if local.axes(f"{ROWS}{d}")}
    if not split:
        return local.node.call
    offsets = tuple(LocalOffset(d, local.pre[0]) if d in split else None for d in range(len(entries)))
    return OpCall("hapx.index", (*local.node.call.args, ("offsets", offsets), ("sizes", local.operands[0].shape)))


register(OpEntry(("aten.index.Tensor",), index_rules, index_body, linear="self", composites=("hapx.index",)))


def index_put_rules(context: Context) -> Iterable[Rule]:
    """Dims that are not indexed; with accumulate it sums over the indices. A mask that is filled with the same: all dims."""
    source, values, where = context.operands[0], context.operands[-1], Advanced(context)
    yield from partial_rule(context, "self", "values")
    if where.masks:
        yield from _masked_rules(context)
        return
    depth = len(where.shape)
    rank = depth + len(where.kept)

    def value(dim: int) -> int | None:
        """The dim of the values that runs along `dim` of what is written to."""
        d = dim - (rank - len(values.shape))
        return d if d >= 0 and values.shape[d] > 1 else None

    last = len(context.operands) - 1
    for d, image in where.kept.items():
        v = value(image)
        for outer in outers(context, [(source, d), *([(values, v)] if v is not None else [])]):
            sites = {0: Site(d, outer)} | ({last: Site(v, outer)} if v is not None else {})
            yield Rule(_slots(context, sites), (Site(d, outer),), divides=True)
    for k in range(depth) if context.call["accumulate"] and floating(context) else ():
        held, v = where.held(context, k), value(where.start + k)
        for outer in outers(context, [(context.operands[i], d) for i, d in held]) if held else ():
            sites = {i: Site(d, outer) for i, d in held} | ({last: Site(v, outer)} if v is not None else {})
            operands = list(_slots(context, sites))
            operands[0] = PARTIAL
            yield Rule(tuple(operands), (PARTIAL,), divides=True)


def _masked_rules(context: Context) -> Iterable[Rule]:
    """One mask over the first dims, filled with the same values everywhere: pointwise."""
    source, mask, values = context.operands[0], context.operands[1], context.operands[-1]
    masked = len(mask.shape)
    behind = len(source.shape) - masked
    same = len(values.shape) <= behind or all(n == 1 for n in values.shape[: len(values.shape) - behind])
    if len(context.operands) != 3 or context.call["indices"][0] is None or mask.shape != source.shape[:masked] or not same:
        return
    for d in range(len(source.shape)):
        v = d - len(source.shape) + len(values.shape) if d >= masked else -1
        held = [(source, d), *([(mask, d)] if d < masked else []), *([(values, v)] if v >= 0 and values.shape[v] > 1 else [])]
        for outer in outers(context, held):
            of_mask: Slot = Site(d, outer) if d < masked else REPLICATED
            of_values: Slot = Site(v, outer) if (values, v) in held else REPLICATED
            yield Rule((Site(d, outer), of_mask, of_values), (Site(d, outer),), divides=True)


register(OpEntry(("aten.index_put.default",), index_put_rules, sum="the indices, where it accumulates", linear="self values"))
