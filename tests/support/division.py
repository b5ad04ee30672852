"""What a plan divides: per product and axis of the mesh, the batch, the sequence or the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hapx.ir import Kind, OpCall
from hapx.plan import Plan
from hapx.states import Placement, Property, Sharded, State

Divided = Literal["batch", "sequence", "model"] | None
ATTENTION = "aten.scaled_dot_product_attention"
PRODUCTS = ("aten.linear", "aten.conv2d", ATTENTION)


def divisions(plan: Plan) -> Mapping[str, tuple[Divided, ...]]:
    """Per product of the first program, by its weight (attention: "attention", "attention 1", ...), what each axis divides: the batch (dim 0),
    the sequence (another dim that is not multiplied), the model (heads, or rows or columns of the weight), or nothing."""
    found: dict[str, tuple[Divided, ...]] = {}
    graph = plan.graphs[plan.first]
    for instruction in plan.stages[0].program.instructions:
        triple = instruction.triple
        if not isinstance(triple.body, OpCall) or triple.node is None:
            continue
        call = graph.nodes[triple.node].call
        if call.op == ATTENTION:
            name = "attention" if "attention" not in found else f"attention {sum(n.startswith('attention') for n in found)}"
            found[name] = tuple(_of_attention(s) for s in triple.pre[0].placement.states)
        elif call.op in PRODUCTS:
            weight = call["weight"].name
            assert graph.refs[weight].kind is Kind.PARAMETER
            pairs = zip(_of(triple.pre, weight).states, triple.pre[0].placement.states, strict=True)
            found[weight] = tuple("model" if isinstance(w, Sharded) else _leading(x) for w, x in pairs)
    return found


def _leading(state: State) -> Divided:
    if not isinstance(state, Sharded):
        return None
    return "batch" if state.dim == 0 else "sequence"


def _of(properties: tuple[Property, ...], name: str) -> Placement:
    return next(p.placement for p in properties if p.tensor == name)


def _of_attention(query: State) -> Divided:
    if not isinstance(query, Sharded):
        return None
    return ("batch", "model", "sequence")[query.dim]  # type: ignore[return-value]
