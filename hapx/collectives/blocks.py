"""Local tensors and the cut of one of their dims along one axis: slices, gathers and exchanges that respect blocks and grains.

In: a local tensor and a `Block` (dim = outer x units x inner, units dealt out as `lengths`). Out: a new contiguous tensor, never a
view. Not differentiable. Invariant: slice after gather is the identity, gather after slice too; each of the outer blocks is cut alike,
so pieces are put together unit by unit: reshape dim to outer x units x inner, units to the front, and back again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hapx.collectives.communicator import Communicator
from hapx.layout import Block
from hapx.plan import Form


def _units_first(t: Tensor, block: Block, units: int) -> Tensor:
    """(units, ..., outer, inner, ...): what a device has of the dim, unit by unit."""
    d = block.dim
    assert t.shape[d] == block.outer * units * block.inner, (tuple(t.shape), block, units)
    return t.reshape(*t.shape[:d], block.outer, units, block.inner, *t.shape[d + 1 :]).movedim(d + 1, 0)


def _units_back(rows: Tensor, block: Block) -> Tensor:
    """Inverse of `_units_first`."""
    d, units = block.dim, rows.shape[0]
    cube = rows.movedim(0, d + 1)
    return cube.reshape(*cube.shape[:d], block.outer * units * block.inner, *cube.shape[d + 3 :]).contiguous()


def slice_shard(t: Tensor, block: Block, coordinate: int) -> Tensor:
    """The shard of `coordinate` of a tensor that is whole along the axis."""
    d, start = block.dim, sum(block.lengths[:coordinate])
    cube = t.reshape(*t.shape[:d], block.outer, sum(block.lengths), block.inner, *t.shape[d + 1 :])
    piece = cube.narrow(d + 1, start, block.lengths[coordinate])
    return piece.reshape(*t.shape[:d], block.size_of(coordinate), *t.shape[d + 1 :]).clone(memory_format=torch.contiguous_format)


def pad_shard(t: Tensor, block: Block, coordinate: int) -> Tensor:
    """The whole tensor with the shard of `coordinate` in its place and zeros elsewhere."""
    d, start = block.dim, sum(block.lengths[:coordinate])
    own = block.lengths[coordinate]
    whole = t.new_zeros(*t.shape[:d], block.outer, sum(block.lengths), block.inner, *t.shape[d + 1 :])
    whole.narrow(d + 1, start, own).copy_(t.reshape(*t.shape[:d], block.outer, own, block.inner, *t.shape[d + 1 :]))
    return whole.reshape(*t.shape[:d], block.size, *t.shape[d + 1 :])


def gather_shards(t: Tensor, block: Block, comm: Communicator, form: Form) -> Tensor:
    """The whole tensor, from every rank's shard."""
    return _units_back(comm.all_gather(_units_first(t, block, block.lengths[comm.rank]), block.lengths, form), block)


def reduce_scatter_shards(t: Tensor, block: Block, comm: Communicator, form: Form) -> Tensor:
    """The own shard of the sum of the ranks' whole tensors."""
    return _units_back(comm.reduce_scatter(_units_first(t, block, sum(block.lengths)), block.lengths, form), block)


def exchange_shards(t: Tensor, source: Block, target: Block, comm: Communicator) -> Tensor:
    """From shards along source.dim (whole along target.dim) to shards along target.dim (whole along source.dim). Both may be the
    same dim, cut differently."""
    if replace(source, lengths=target.lengths) == target:
        return _cut_again(t, source, target, comm)
    take, put = _routes(source, target, comm.rank, t.device)
    pieces = [t.index_select(target.dim, index) for index in take]
    shape = list(t.shape)
    shape[source.dim] = source.size
    shape[target.dim] = target.size_of(comm.rank)
    rest = 1
    for dim, size in enumerate(shape):
        rest *= 1 if dim == source.dim else size
    receive = [rest * len(index) for index in put]
    flat = comm.all_to_all(torch.cat([p.reshape(-1) for p in pieces]), [p.numel() for p in pieces], receive)
    result = t.new_empty(shape)
    for piece, index in zip(flat.split(receive), put, strict=True):
        result.index_copy_(source.dim, index, piece.reshape(*shape[: source.dim], len(index), *shape[source.dim + 1 :]))
    return result


def _cut_again(t: Tensor, source: Block, target: Block, comm: Communicator) -> Tensor:
    """The same units in other lengths: what goes to the ranks lies in their order, and so does what comes from them."""
    send = _shared(source, comm.rank, target)
    receive = _shared(target, comm.rank, source)
    return _units_back(comm.all_to_all(_units_first(t, source, sum(send)), send, receive), target)


def _shared(one: Block, rank: int, other: Block) -> list[int]:
    """Units that a rank has of `one` and each rank of `other`."""
    starts, others = (list(accumulate(b.lengths, initial=0)) for b in (one, other))
    return [max(0, min(starts[rank + 1], b) - max(starts[rank], a)) for a, b in pairwise(others)]


@lru_cache(maxsize=4096)
def _routes(source: Block, target: Block, rank: int, device: torch.device) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Which local indices along target.dim go to each rank, and where along source.dim the pieces of each rank belong."""
    peers = range(len(source.lengths))
    held, wanted = [_indices(source, k) for k in peers], [_indices(target, k) for k in peers]
    if source.dim == target.dim:
        take = [torch.isin(held[rank], w).nonzero().reshape(-1) for w in wanted]
        put = [torch.isin(wanted[rank], h).nonzero().reshape(-1) for h in held]
    else:
        take, put = wanted, held
    return tuple(i.to(device) for i in take), tuple(i.to(device) for i in put)


def _indices(block: Block, coordinate: int) -> Tensor:
    """Indices along the dim that `coordinate` holds, in local order."""
    start = sum(block.lengths[:coordinate])
    cube = torch.arange(block.size).reshape(block.outer, sum(block.lengths), block.inner)
    return cube[:, start : start + block.lengths[coordinate]].reshape(-1)
