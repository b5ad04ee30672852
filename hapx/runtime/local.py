"""Where one device stands: its coordinates in the mesh, and with them its piece of every tensor.

In: a plan's stage and program key. Out: shapes, indices and blocks of local tensors (all arithmetic is `hapx.layout`'s), and the
whole tensor from its pieces. Invariant: `gather(take(t))` is `t` for every placement of Replicated, Invariant and Sharded states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hapx.collectives.blocks import gather_shards
from hapx.collectives.communicator import Communicator
from hapx.layout import Block, Lengths, block, followers, joint_block, local_indices, local_shape
from hapx.plan import Form, Mesh, ProgramKey, Stage
from hapx.states import REPLICATED, Placement, Sharded

Communicators = Mapping[tuple[int, ...], Communicator]


@dataclass(frozen=True)
class Position:
    """One device in the mesh of a program."""

    mesh: Mesh
    lengths: Lengths
    coordinates: tuple[int, ...]

    @classmethod
    def of(cls, stage: Stage, key: ProgramKey, device: int) -> Position:
        return cls(stage.mesh, stage.lengths[key], stage.mesh.coordinates(device))

    def at(self, device: int) -> Position:
        """The position of another device of the mesh."""
        return Position(self.mesh, self.lengths, self.mesh.coordinates(device))

    def shape(self, shape: Sequence[int], placement: Placement) -> tuple[int, ...]:
        """Local shape of a tensor of global `shape`."""
        return local_shape(shape, placement, self.mesh.sizes, self.lengths, self.coordinates)

    def indices(self, shape: Sequence[int], placement: Placement) -> tuple[np.ndarray | None, ...]:
        """Per dim the global indices of the local elements; None where the dim is whole."""
        split = {s.dim for s in placement.states if isinstance(s, Sharded)}
        return tuple(
            local_indices(n, d, placement, self.mesh.sizes, self.lengths, self.coordinates) if d in split else None for d, n in enumerate(shape)
        )

    def block(self, placement: Placement, axis: int) -> Block | None:
        """The cut of `axis`, None if the axis does not cut."""
        if not isinstance(placement.states[axis], Sharded):
            return None
        return block(placement, axis, self.mesh.sizes, self.lengths, self.coordinates)

    def recut(self, before: Placement, after: Placement, axis: int) -> tuple[tuple[int, ...], Block, Block]:
        """The axes along which a re-cut of `axis` moves data, and the cuts of all of them together."""
        axes = (axis, *followers(before, axis))
        cuts = (joint_block(p, axes, self.mesh.sizes, self.lengths, self.coordinates) for p in (before, after))
        return axes, *cuts

    def take(self, whole: Tensor, placement: Placement) -> Tensor:
        """The local piece of a whole tensor: a new tensor, or `whole` itself where nothing is cut."""
        piece = whole
        for dim, index in enumerate(self.indices(whole.shape, placement)):
            if index is None:
                continue
            if len(index) == 0 or index[-1] - index[0] + 1 == len(index):  # one run of consecutive elements: no index tensor needed
                piece = piece.narrow(dim, int(index[0]) if len(index) else 0, len(index))
            else:
                piece = piece.index_select(dim, torch.from_numpy(index).to(piece.device))
        return piece if piece is whole else piece.clone(memory_format=torch.contiguous_format)

    def gather(self, piece: Tensor, placement: Placement, communicators: Communicators) -> Tensor:
        """The whole tensor from the pieces of all devices (a collective call): the axes undo their cuts, the last one first."""
        states = list(placement.states)
        whole = piece.detach()
        for axis in reversed(placement.order()):
            cut = self.block(Placement(tuple(states), placement.nest), axis)
            if cut is not None:
                whole = gather_shards(whole, cut, communicators[(axis,)], Form.GROUPED)
                states[axis] = REPLICATED
        return whole
