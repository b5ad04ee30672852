"""Inputs of which every rank passes its own share.

In: local tensors, in rank order pieces of the global batch along dim 0. Out: what the program takes: the share itself where the program
would cut the input in just that way, else the whole input, gathered. Tensors whose first dim is not the batch are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hapx.errors import LaunchError
from hapx.plan import Form, ProgramKey
from hapx.runtime.executor import Executor
from hapx.runtime.launch import World
from hapx.states import Placement


class LocalInputs:
    """The inputs of one call. `sizes`: samples per rank. `shapes`: global shapes (a collective call)."""

    def __init__(self, world: World, tensors: Sequence[Tensor]):
        self.world, self.tensors = world, tuple(tensors)
        first = next((t for t in tensors if t.dim() > 0), None)
        if first is None:
            raise LaunchError('inputs="local" without a tensor that has a batch dim')
        own = first.shape[0]
        batched = [t.dim() > 0 and t.shape[0] == own for t in tensors]
        told = world.gather((own, batched))
        self.sizes = tuple(n for n, _ in told)
        # an input is batched if it follows the batch on every rank (a table may have as many rows as one rank has samples)
        self.batched = tuple(all(flags[i] for _, flags in told) for i in range(len(self.tensors)))
        self.shapes = tuple((sum(self.sizes), *t.shape[1:]) if b else tuple(t.shape) for t, b in zip(self.tensors, self.batched, strict=True))

    def whole_on_meta(self) -> tuple[Tensor, ...]:
        """Tensors with the global shapes and no values, to capture with."""
        return tuple(torch.empty(s, dtype=t.dtype, device="meta") for s, t in zip(self.shapes, self.tensors, strict=True))

    def arrange(self, executor: Executor, key: ProgramKey) -> tuple[dict[str, Tensor], dict[str, Placement]]:
        """The program's inputs by name, and the placements of those that are cut already (a collective call)."""
        graph = executor.plan.graphs[key]
        given = {p.tensor: p.placement for p in executor.plan.stages[0].programs[key].gives}
        result: dict[str, Tensor] = {}
        cut: dict[str, Placement] = {}
        for name, tensor, batched, shape in zip(graph.input_names, self.tensors, self.batched, self.shapes, strict=True):
            tensor = tensor.to(self.world.device)
            placement = executor.cut_placement(key, name) if batched else None
            if placement != given.get(name, placement):  # a result of the model, too, and in another placement
                placement = None
            if placement is not None and self._fits(executor, key, placement, shape):
                cut[name] = placement
            elif batched:
                tensor = self._gathered(executor, tensor)
            result[name] = tensor
        return result, cut

    def _fits(self, executor: Executor, key: ProgramKey, placement: Placement, shape: tuple[int, ...]) -> bool:
        """Whether every rank's share is what the program would cut for it."""
        start = 0
        for rank, size in enumerate(self.sizes):
            index = executor.position(key).at(rank).indices(shape, placement)[0]
            if index is None or not np.array_equal(index, np.arange(start, start + size)):
                return False
            start += size
        return True

    def _gathered(self, executor: Executor, tensor: Tensor) -> Tensor:
        """The global batch, in rank order."""
        devices = executor.plan.stages[0].mesh.devices
        lengths = [self.sizes[d] for d in devices]
        pieces = executor.everyone.all_gather(tensor.contiguous(), lengths, Form.GROUPED).split(lengths)
        return torch.cat([pieces[devices.index(rank)] for rank in range(len(devices))])
