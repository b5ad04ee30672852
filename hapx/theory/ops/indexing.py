"""Reading and writing at indices: gather, scatter, and advanced indexing.

Dims that are not indexed pass. Positions are independent of each other when reading: they may be split. A dim that is read may be split too:
every device reads what is its own and takes 0 elsewhere (as with a vocabulary), so that the pieces sum up. Writing that adds is the transpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hapx.ir import FLOATING, OpCall, Ref, TensorRef
from hapx.plan import LocalOffset
from hapx.states import PARTIAL, REPLICATED
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, Site, Slot, register

ROWS = "rows"  # variants "rows0", "rows1", ...: dim 0, 1, ... of what is read is split


def outers(context: Context, positions: Sequence[tuple[TensorRef, int]]) -> tuple[int, ...]:
    """The ways in which dims that are cut alike are known to be blocked, with more than one element per block."""
    size = positions[0][0].shape[positions[0][1]]
    return tuple(o for o in context.outers(positions) if size > o and size % o == 0)


def floating(context: Context) -> bool:
    return all(r.dtype in FLOATING for r in context.node.outputs)


def partial_rule(context: Context, *names: str, anyway: bool = True) -> Iterable[Rule]:
    """Linear in the named operands together (with `anyway`; a number in the place of one would be added on every device)."""
    positions = {context.position(n) for n in names}
    if anyway and None not in positions and floating(context):
        yield Rule(tuple(PARTIAL if i in positions else REPLICATED for i in range(len(context.operands))), (PARTIAL,))


def _dim(context: Context) -> int:
    return int(context.call["dim"]) % max(len(context.operands[0].shape), 1)


# --- along one dim: index of the same rank ------------------------------------------------------------------------------------


def gather_rules(context: Context) -> Iterable[Rule]:
    """Dims in which index and source are equally long, and the index; rows of the source: each device takes its own."""
    source, index = context.operands
    if not source.shape or not index.shape:
        return
    dim = _dim(context)
    for d, size in enumerate(index.shape):
        if d == dim:
            for outer in outers(context, [(index, d)]):
                yield Rule((REPLICATED, Site(d, outer)), (Site(d, outer),), divides=True)
        elif size == source.shape[d]:
            for outer in outers(context, [(index, d), (source, d)]):
                yield Rule((Site(d, outer), Site(d, outer)), (Site(d, outer),), divides=True)
    if floating(context) and source.shape[dim] > 1:
        yield Rule((Site(dim), REPLICATED), (PARTIAL,), ROWS, divides=True)
    yield from partial_rule(context, "self")


def gather_body(local: LocalCall) -> OpCall:
    call = local.node.call
    if not local.axes(ROWS):
        return call
    dim = call["dim"] % len(local.operands[0].shape)
    return OpCall("hapx.gather", (("self", call["self"]), ("dim", dim), ("index", call["index"]), ("offset", LocalOffset(dim, local.pre[0]))))


register(OpEntry(("aten.gather",), gather_rules, gather_body, linear="self", composites=("hapx.gather",)))


def take_along_rules(context: Context) -> Iterable[Rule]:
    """As gather, broadcast; without a dim the source is flattened and whole."""
    source, index = context.operands
    yield from partial_rule(context, "self")
    if context.call["dim"] is None or not source.shape:
        for outer in outers(context, [(index, 0)]) if len(index.shape) == 1 else ():
            yield Rule((REPLICATED, Site(0, outer)), (Site(0, outer),), divides=True)
        return
    dim = _dim(context)
    out = context.node.outputs[0]
    for d in range(len(out.shape)):
        held = [r.shape[d] > 1 for r in context.operands]
        if d == dim:
            held[0] = False
        positions = [(r, d) for r, h in zip(context.operands, held, strict=True) if h]
        for outer in outers(context, [(out, d), *positions]) if positions else ():
            yield Rule(tuple(Site(d, outer) if h else REPLICATED for h in held), (Site(d, outer),), divides=True)


register(OpEntry(("aten.take_along_dim",), take_along_rules, linear="self"))


def scatter_rules(context: Context) -> Iterable[Rule]:
    """Dims but the indexed one, where all operands are equally long."""
    source, index = context.operands[0], context.operands[1]
    dim = _dim(context)
    for d, size in enumerate(source.shape):
        if d != dim and all(len(r.shape) == len(source.shape) and r.shape[d] == size for r in context.operands):
            for outer in outers(context, [(r, d) for r in (*context.operands, context.node.outputs[0])]):
                yield Rule((Site(d, outer),) * len(context.operands), (Site(d, outer),), divides=True)
    call, adds = context.call, _adds(context.call)
    if adds and floating(context):
        written = context.operands[1:]
        if all(r.shape == index.shape for r in written):
            for outer in outers(context, [(r, dim) for r in written]):
                yield Rule((PARTIAL, *(Site(dim, outer) for _ in written)), (PARTIAL,), divides=True)
    if context.position("src") is not None:
        yield from partial_rule(context, "self", "src", anyway=call.get("reduce") in (None, "add", "sum", "mean"))
        yield from partial_rule(context, "self", anyway=call.get("reduce") in ("multiply", "prod") and call.get("include_self", True))
    elif call.get("reduce") is None:
        yield from partial_rule(context, "self", anyway=call["value"] == 0)
    else:
        yield from partial_rule(context, "self", anyway=call["reduce"] == "multiply" or call["value"] == 0)


def _adds(call: OpCall) -> bool:
    """Whether all that is written at one place is added to what was there."""
    return call.op == "aten.scatter_add" or (call.get("reduce") in ("add", "sum") and call.get("include_self", True))


SCATTERS = """aten.scatter.src aten.scatter.value aten.scatter.reduce aten.scatter.value_reduce aten.scatter_add aten.scatter_reduce.two"""
register(OpEntry(tuple(SCATTERS.split()), scatter_rules, sum="the indexed dim, where it adds", linear="self src, where it adds or writes"))


# --- along one dim: index of rank one -------------------------------------------------------------------------------------------


def along(context: Context, operands: Sequence[int]) -> Iterable[Rule]:
    """Dims but the indexed one, split in all of `operands` (positions); the others are whole."""
    out, dim = context.node.outputs[0], _dim(context)
    for d in range(len(out.shape)):
        if d != dim:
            for outer in outers(context, [(out, d), *((context.operands[i], d) for i in operands)]):
                slots = (Site(d, outer) if i in operands else REPLICATED for i in range(len(context.operands)))
                yield Rule(tuple(slots), (Site(d, outer),), divides=True)


def index_select_rules(context: Context) -> Iterable[Rule]:
    """Other dims and the index; rows of what is read: each device takes its own."""
    source, index = context.operands
    dim = _dim(context)
    if not source.shape:
        return
    yield from along(context, (0,))
    if index.shape:
        for outer in outers(context, [(index, 0), (context.node.outputs[0], dim)]):
            yield Rule((REPLICATED, Site(0, outer)), (Site(dim, outer),), divides=True)
        if floating(context) and source.shape[dim] > 1:
            yield Rule((Site(dim), REPLICATED), (PARTIAL,), f"{ROWS}{dim}", divides=True)
    yield from partial_rule(context, "self")


def index_select_body(local: LocalCall) -> OpCall:
    call = local.node.call
    dim = call["dim"] % max(len(local.operands[0].shape), 1)
    if not local.axes(f"{ROWS}{dim}"):
        return call
    indices = (*(None for _ in range(dim)), call["index"])
    offsets = (*(None for _ in range(dim)), LocalOffset(dim, local.pre[0]))
    return OpCall("hapx.index", (("self", call["self"]), ("indices", indices), ("offsets", offsets), ("sizes", local.operands[0].shape)))


register(OpEntry(("aten.index_select",), index_select_rules, index_select_body, linear="self", composites=("hapx.index",)))


def index_write_rules(context: Context) -> Iterable[Rule]:
    """Other dims; index_add sums over the index."""
    call, source = context.call, context.operands[0]
    value = next((p for n in ("source", "value") if (p := context.position(n)) is not None), None)
    aligned = [0] if value is None or not context.operands[value].shape else [0, value]
    if source.shape:
        yield from along(context, aligned)
    if call.op == "aten.index_add" and floating(context) and source.shape:
        dim = _dim(context)
        for outer in outers(context, [(context.operands[1], 0), (context.operands[2], dim)]) if context.operands[1].shape else ():
            yield Rule((PARTIAL, Site(0, outer), Site(dim, outer)), (PARTIAL,), divides=True)
    if call.op == "aten.index_reduce":
        return
    if value is not None:
        yield from partial_rule(context, "self", "source" if call.get("source") is not None else "value")
    else:
        yield from partial_rule(context, "self", anyway=call["value"] == 0)


WRITES = "aten.index_add aten.index_copy aten.index_fill.int_Scalar aten.index_fill.int_Tensor aten.index_reduce"
register(OpEntry(tuple(WRITES.split()), index_write_rules, sum="the index, where it adds", linear="self source"))


# --- advanced indexing --------------------------------------------------------------------------------------------------------------


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


# --- flat indices --------------------------------------------------------------------------------------------------------------------


def take_rules(context: Context) -> Iterable[Rule]:
    """The index; what is read is flattened and whole."""
    index = context.operands[1]
    for d in range(len(index.shape)):
        for outer in outers(context, [(index, d), (context.node.outputs[0], d)]):
            yield Rule((REPLICATED, Site(d, outer)), (Site(d, outer),), divides=True)
    yield from partial_rule(context, "self")


def put_rules(context: Context) -> Iterable[Rule]:
    """With accumulate, what is written; the target is flattened and whole."""
    index, source = context.operands[1], context.operands[2]
    if context.call["accumulate"] and floating(context) and index.shape == source.shape:
        for d in range(len(index.shape)):
            for outer in outers(context, [(index, d), (source, d)]):
                yield Rule((PARTIAL, Site(d, outer), Site(d, outer)), (PARTIAL,), divides=True)
    yield from partial_rule(context, "self", "source")


def masked_scatter_rules(context: Context) -> Iterable[Rule]:
    """Nothing but Partial: the n-th place of the mask gets the n-th number."""
    yield from partial_rule(context, "self", "source")


register(OpEntry(("aten.take",), take_rules, linear="self"))
register(OpEntry(("aten.put",), put_rules, sum="the index, where it accumulates", linear="self source"))
register(OpEntry(("aten.masked_scatter",), masked_scatter_rules, linear="self source"))
