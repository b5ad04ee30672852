"""What sums over a whole batch are divided by (`MicroBatches.counts`): computed from the whole batch's inputs, before its parts are run.

In: the graph of a micro-batch, the inputs of the whole batch, the buffers that the counts read (class weights), whole. Out: further inputs, the same
for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from hapx.collectives.rng import Rng
from hapx.errors import LaunchError
from hapx.ir import Graph, Kind, Node
from hapx.plan import Mesh
from hapx.runtime.calls import Arguments, fill_all, find_operator
from hapx.runtime.local import Position

ALONE = Position(Mesh("alone", (), (0,), None), {}, ())


class Counter:
    """Computes the counts of a graph with `micro_batches`.

    Args:
        graph: of a micro-batch, or a part of one.
        wanted: the inputs that are to be computed (those that a stage reads); None: all.
    `inputs`: of the whole batch, that are read. `buffers`: that are read; they never change in training."""

    def __init__(self, graph: Graph, device: torch.device, wanted: Collection[str] | None = None):
        self.device, self.nodes, self.outputs = device, tuple[Node, ...](), {}
        self.constants: dict[str, Tensor] = {}
        self.inputs = self.buffers = tuple[str, ...]()
        counts = graph.micro_batches.counts if graph.micro_batches is not None else None
        if counts is None:
            return
        self.outputs = {o.target: o.tensor for o in counts.outputs if wanted is None or o.target in wanted}
        self.nodes, used = _leading_to(counts, set(self.outputs.values()))
        self.arguments = Arguments(ALONE, {}, Rng(0), device)
        refs = [r for name, r in counts.refs.items() if name in used]
        self.inputs = tuple(r.name for r in refs if r.kind is Kind.INPUT)
        self.buffers = tuple(r.name for r in refs if r.kind is Kind.BUFFER)
        for ref in refs:
            if ref.name in counts.constants:
                values = torch.tensor(counts.constants[ref.name], dtype=getattr(torch, ref.dtype), device=device)
                self.constants[ref.name] = values.reshape(ref.shape)

    @torch.no_grad()
    def counts(self, inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By name, further inputs of every micro-batch. Raises LaunchError where an input or a buffer is missing."""
        missing = [n for n in self.inputs if n not in inputs] + [n for n in self.buffers if n not in buffers]
        if missing:
            raise LaunchError(f"the counts of the whole batch need {', '.join(missing)}", hint="pass the whole batch, and whole buffers")
        values = {n: t.detach().to(self.device) for n, t in {**inputs, **buffers}.items() if n in self.inputs or n in self.buffers} | self.constants
        with torch.autocast(self.device.type, enabled=False):
            for node in self.nodes:
                function = find_operator(node.call.target)
                args, kwargs = fill_all(*self.arguments.of(function, node.call), [values[n] for n in node.call.refs()])
                made = function(*args, **kwargs)
                values |= {o.name: t for o, t in zip(node.outputs, [made] if isinstance(made, Tensor) else made, strict=True)}
        return {name: values[tensor] for name, tensor in self.outputs.items()}


def _leading_to(graph: Graph, tensors: set[str]) -> tuple[tuple[Node, ...], set[str]]:
    """The nodes that lead to some tensors, in order, and all tensors that are used."""
    used, nodes = set(tensors), list[Node]()
    for node in reversed(graph.nodes):
        if any(o.name in used for o in node.outputs):
            nodes.append(node)
            used.update(node.call.refs())
    return tuple(reversed(nodes)), used
