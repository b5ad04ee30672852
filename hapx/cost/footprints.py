"""What one call and one conversion do to memory, whatever comes before and after them.

In: a triple, or a path of communications from a placement, and local sizes at exact lengths. Out: bytes per kind, forward and backward. Over a
program they are added up by `hapx.cost.liveness`, exactly, and by `hapx.synth.lean` as one is put together.
"""

from __future__ import annotations

from dataclasses import dataclass

from hapx.cost.compute import differentiable, is_view
from hapx.cost.local_sizes import LocalSizes
from hapx.cost.on_cpu import kept_on_cpu, temporaries_on_cpu
from hapx.cost.terms import Vector
from hapx.cost.transients import (
    Sizes,
    backward_temporaries,
    forward_temporaries,
    kept_inside,
    kept_names,
    larger_result,
    passes_cotangent,
    reordered,
)  # fmt: skip
from hapx.ir import Node, OpCall, TensorRef
from hapx.plan import Communication, Triple
from hapx.states import REPLICATED, Invariant, Placement, Replicated
from hapx.transposes import TRANSPOSES


@dataclass(frozen=True, slots=True)
class Call:
    """What a call does to memory, by places among its outputs and operands, in that order; bytes per kind. view: its outputs share the storage of the
    first operand. keeps: places of what autograd keeps, None where no gradient flows; inside: what it keeps beside them. forward, backward:
    temporaries. hands_on: of each operand, whether its cotangent is that of the output. wanted: operands that need a cotangent. result: what
    holds the first output, where it is larger than the output."""

    view: bool
    keeps: tuple[int, ...] | None
    inside: Vector | None
    forward: Vector | None
    backward: Vector | None
    hands_on: tuple[bool, ...]
    wanted: tuple[int, ...]
    result: Vector | None


@dataclass(frozen=True, slots=True)
class Hop:
    """A step of a conversion: the operations of its two directions ("none": nothing is done), what they make, and their buffers. freed: backward
    gathers again what forward makes."""

    forward: str
    made: Vector
    buffers: Vector
    freed: bool
    backward: str
    made_back: Vector
    buffers_back: Vector


@dataclass(frozen=True, slots=True)
class Route:
    """How a conversion goes. axes: those along which a stored parameter enters the synchroniser; hops: the other steps."""

    axes: tuple[int, ...]
    hops: tuple[Hop, ...]


def call_of(triple: Triple, body: OpCall, node: Node, local: LocalSizes) -> Call:
    """Of the triple of a node."""
    graph, places = local.graph, triple.placements
    keeps, inside = None, None
    if differentiable(graph, node):
        at = {p.tensor: place for place, p in enumerate((*triple.post, *triple.pre))}
        keeps = tuple(at[name] for name in dict.fromkeys(kept_names(graph, node, body)) if name in at)
        size = local.sum(kept_inside(graph, node, body), places) + local.cpu * local.sum(kept_on_cpu(graph, node, places), places)
        inside = size if size.any() else None
    copied = reordered(graph, node)

    def temporaries(sizes: Sizes, on_cpu: Sizes) -> Vector | None:
        return local.temporaries(sizes, on_cpu, copied, places) if sizes or on_cpu or copied else None

    return Call(
        is_view(graph, node), keeps, inside,
        temporaries(forward_temporaries(graph, node, body), temporaries_on_cpu(graph, node, backward=False)),
        temporaries(backward_temporaries(graph, node, body), temporaries_on_cpu(graph, node, backward=True)),
        tuple(passes_cotangent(graph, node, i) for i in range(len(triple.pre))),
        tuple(i for i, p in enumerate(triple.pre) if graph.refs[p.tensor].requires_grad),
        local.sum(larger, places) if (larger := larger_result(graph, node, body)) else None,
    )  # fmt: skip


def route_of(ref: TensorRef, at: Placement, path: tuple[Communication, ...], local: LocalSizes, *, enters: bool) -> Route:
    """Of a path from a placement on. enters: it begins where a parameter is stored (see `hapx.runtime.build`)."""
    axes: tuple[int, ...] = ()
    if enters:
        axes = tuple(sorted(c.axis for c in path if c.gradient and isinstance(c.source, Invariant) and isinstance(c.target, Replicated)))
    for axis in axes:
        at = at.with_state(axis, REPLICATED)
    hops, size, training = [], float(ref.bytes), local.exact.mode == "train"
    for step in path:
        if step.axis not in axes:
            after = at.with_state(step.axis, step.target)
            forward, backward = TRANSPOSES[type(step.source), type(step.target)]
            ahead, back = local.buffers(forward, ref, step, at, after), local.buffers(backward, ref, step, after, at)
            freed = training and step.free and step.gradient and forward == "all_gather"
            hops.append(Hop(forward, local.part(after, size), ahead, freed, backward, local.part(at, size), back))
            at = after
    return Route(axes, tuple(hops))
