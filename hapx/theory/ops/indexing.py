"""Reading and writing at indices along one dim, or along all of them flattened. (`self[indices]`: see `hapx.theory.ops.advanced_indexing`.)

Dims that are not indexed pass. Positions are independent of each other when reading: they may be split. A dim that is read may be split too:
every device reads what is its own and takes 0 elsewhere (as with a vocabulary), so that the pieces sum up. Writing that adds is the transpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hapx.ir import CONTINUOUS, OpCall, TensorRef
from hapx.plan import LocalOffset
from hapx.states import PARTIAL, REPLICATED
from hapx.theory.registry import Context, LocalCall, OpEntry, Rule, Site, register

ROWS = "rows"  # variants "rows0", "rows1", ...: dim 0, 1, ... of what is read is split


def outers(context: Context, positions: Sequence[tuple[TensorRef, int]]) -> tuple[int, ...]:
    """The ways in which dims that are cut alike are known to be blocked, with more than one element per block."""
    size = positions[0][0].shape[positions[0][1]]
    return tuple(o for o in context.outers(positions) if size > o and size % o == 0)


def floating(context: Context) -> bool:
    return all(r.dtype in CONTINUOUS for r in context.node.outputs)


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
