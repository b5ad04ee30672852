"""Sufficient factor broadcasting (HAP sections 2.2 and 4.3) as rules: one dim of the input and the result split, the parameters Invariant.

In: a product of an input with a parameter. Out: its rules, and the call of the composite (`hapx.collectives.factors`) in whose backward both factors
of the parameter's gradient are gathered. Where devices have unequal shares, a gather has several forms: one call for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from hapx.ir import OpCall, Ref, Value
from hapx.plan import Axes, Form, LocalBlock
from hapx.states import INVARIANT, Placement, Sharded
from hapx.theory.registry import Context, LocalCall, Rule, Site

VARIANT = "sfb"
FORMS = (Form.PADDED, Form.GROUPED, Form.POINT_TO_POINT)

# composites, and the argument that is gathered beside the result's cotangent
INPUTS: Mapping[str, str] = MappingProxyType(
    {
        "hapx.linear_sfb": "input", "hapx.matmul_sfb": "self", "hapx.addmm_sfb": "mat1", "hapx.convolution_sfb": "input",
        "hapx.embedding_sfb": "indices",
    }
)  # fmt: skip


def gathered(body: object) -> str | None:
    """The tensor that a call gathers in backward beside the cotangent of its result; None for any other call, and for conversions."""
    if not isinstance(body, OpCall) or body.target not in INPUTS:
        return None
    value = body[INPUTS[body.target]]
    assert isinstance(value, Ref)
    return value.name


def factor_rules(context: Context, source: int, dims: Iterable[int], aligned: Sequence[int] = ()) -> Iterable[Rule]:
    """Dims of operand number `source` that the result has too, and so have the `aligned` operands; all others are Invariant."""
    out = context.node.outputs[0]
    for dim in dims:
        for outer in context.outers([(context.operands[source], dim), (out, dim)]):
            if out.shape[dim] % outer == 0 and out.shape[dim] > outer:
                slots = (Site(dim, outer) if i == source or i in aligned else INVARIANT for i in range(len(context.operands)))
                yield Rule(tuple(slots), (Site(dim, outer),), VARIANT, divides=True)


def factored(local: LocalCall, target: str, source: int, args: Iterable[tuple[str, Value]]) -> OpCall | None:
    """The call of a composite, None where its factors cannot be gathered in one step."""
    axes = local.axes(VARIANT)
    if len(axes) != 1 or not _gatherable(local.pre[source], axes[0]):
        return None
    block = LocalBlock(axes[0], local.pre[source])
    return OpCall(target, (*args, ("gather", Axes(axes)), ("block", block), ("form", Form.PADDED.value)))


def in_all_forms(body: OpCall) -> tuple[OpCall, ...]:
    """The call with every form of its gathers: between equal shares nothing is padded, so one is as good as any."""
    if gathered(body) is None or _even(body):
        return (body,)
    return tuple(body.replace(form=form.value) for form in FORMS)


def form_allowed(body: object, forms: frozenset[str]) -> bool:
    """Whether a restriction to some forms allows the body of a triple."""
    if not isinstance(body, OpCall) or body.target not in INPUTS:
        return True
    return _even(body) or body["form"] in forms


def _even(body: OpCall) -> bool:
    block = body["block"]
    assert isinstance(block, LocalBlock)
    state = block.placement.states[block.axis]
    return isinstance(state, Sharded) and state.cut.row.kind == "even"


def _gatherable(placement: Placement, axis: int) -> bool:
    """Whether no other axis cuts what `axis` has cut: the outer of two nested axes cannot be gathered while the inner one is cut."""
    mine, order = placement.states[axis], placement.order()
    assert isinstance(mine, Sharded)
    later = (placement.states[b] for b in order[order.index(axis) + 1 :])
    return not any(isinstance(s, Sharded) and s.same_split(mine) for s in later)
