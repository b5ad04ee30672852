"""A batch as micro-batches, and the results of micro-batches as those of the batch. All micro-batches have the same size.

In: the tensors of a whole batch. Out: those of each micro-batch, as views: cut along dim 0, or whole where they have no samples. Results come back
joined, summed up, or as they are: `MicroBatches` says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hapx.errors import LaunchError
from hapx.ir import Graph, MicroBatches
from hapx.rules import Site
from hapx.states import Partial


def cut_batch(tensors: Sequence[Tensor], number: int, batched: Sequence[bool] | None = None) -> list[tuple[Tensor, ...]]:
    """The inputs of `number` micro-batches, to capture a model at their shapes: the first tensor that has dims has the batch along dim 0, and so has
    every tensor of that length, or those that `batched` says (`hapx.theory.normalise.batch_inputs`). Raises LaunchError where the batch cannot be
    cut so."""
    batch = next((t.shape[0] for t in tensors if t.dim() > 0), None)
    if batch is None:
        raise LaunchError("no input has a batch dim, so there are no micro-batches")
    size = _size(batch, number)
    cut = batched if batched is not None else [t.dim() > 0 and t.shape[0] == batch for t in tensors]
    return [tuple(t.narrow(0, m * size, size) if c else t for t, c in zip(tensors, cut, strict=True)) for m in range(number)]


def split(inputs: Mapping[str, Tensor], micro: MicroBatches) -> list[dict[str, Tensor]]:
    """The user's inputs of every micro-batch, by name. Raises LaunchError where an input has no equal parts."""
    sizes = {name: _size(inputs[name].shape[0] if inputs[name].dim() else 0, micro.number, name) for name in micro.cut}
    return [{n: t.narrow(0, m * sizes[n], sizes[n]) if n in sizes else t for n, t in inputs.items()} for m in range(micro.number)]


def join(graph: Graph, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The loss and the results of the whole batch, by tensor, from those of its micro-batches in order."""
    micro = graph.micro_batches
    assert micro is not None and len(parts) == micro.number
    joined = {graph.loss: torch.stack([p[graph.loss] for p in parts]).sum(0)}
    return joined | {name: rejoin(graph, name, [p[name] for p in parts]) for name, _ in micro.results}


def rejoin(graph: Graph, name: str, pieces: Sequence[Tensor]) -> Tensor:
    """A result of the whole batch from those of its micro-batches, or of what is left of them."""
    slot = _slot(graph, name)
    if isinstance(slot, Site):
        blocks = [p.unflatten(slot.dim, (slot.outer, -1)) for p in pieces]
        return torch.cat(blocks, slot.dim + 1).flatten(slot.dim, slot.dim + 1)
    return torch.stack(list(pieces)).sum(0) if isinstance(slot, Partial) and len(pieces) > 1 else pieces[-1]


def unjoin(graph: Graph, name: str, whole: Tensor) -> tuple[Tensor, ...]:
    """What `rejoin` makes the same again: the micro-batches of a result that has them, else the result alone."""
    slot, micro = _slot(graph, name), graph.micro_batches
    assert micro is not None
    if not isinstance(slot, Site):
        return (whole,)
    size = whole.shape[slot.dim] // (slot.outer * micro.number)
    blocks = whole.unflatten(slot.dim, (slot.outer, micro.number, size))
    return tuple(blocks.select(slot.dim + 1, m).flatten(slot.dim, slot.dim + 1).contiguous() for m in range(micro.number))


def joined_shape(graph: Graph, name: str) -> tuple[int, ...]:
    """Of a result of the whole batch."""
    slot, shape, micro = _slot(graph, name), graph.refs[name].shape, graph.micro_batches
    assert micro is not None
    return tuple(n * micro.number if isinstance(slot, Site) and d == slot.dim else n for d, n in enumerate(shape))


def _slot(graph: Graph, name: str) -> object:
    assert graph.micro_batches is not None
    return next(slot for result, slot in graph.micro_batches.results if result == name)


def _size(batch: int, number: int, name: str = "") -> int:
    if number < 1 or batch % number:
        raise LaunchError(
            f"{f'input {name!r}: ' if name else ''}a batch of {batch} has no {number} equal micro-batches", allowed="a number that divides the batch"
        )
    return batch // number
