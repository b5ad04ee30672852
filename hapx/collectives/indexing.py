"""Reading at indices from a tensor of which this device has a part.

In: local rows, global indices. Out: the rows that are here, zeros for the others: Partial over the axes that split the rows. Invariant: the
pieces of all devices sum to what is read from the whole; gradients go to the rows that are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


def gather(self: Tensor, dim: int, index: Tensor, offset: int) -> Tensor:
    """torch.gather along a `dim` of which this device has the elements offset, offset + 1, ..."""
    own = self.shape[dim]
    if not own:  # the sum of nothing: zeros that know their operand
        zeros = self.sum(dim, keepdim=True)
        return zeros[tuple(slice(n) if d != dim else slice(None) for d, n in enumerate(index.shape))].expand(index.shape).contiguous()
    local = index - offset
    mine = (local >= 0) & (local < own)
    return self.gather(dim, local.masked_fill(~mine, 0)).masked_fill(~mine, 0)


def index(self: Tensor, indices: Sequence[Tensor | None], offsets: Sequence[int | None], sizes: Sequence[int]) -> Tensor:
    """self[indices], where this device has the elements offset, offset + 1, ... of the dims with an offset.

    sizes: of all dims of the whole, from whose end negative indices count."""
    local, mine, empty = list(indices), [], False
    for dim, (at, offset) in enumerate(zip(indices, offsets, strict=True)):
        if at is not None and offset is not None:
            own = self.shape[dim]
            moved = torch.where(at < 0, at + sizes[dim], at) - offset
            inside = (moved >= 0) & (moved < own)
            local[dim] = moved.masked_fill(~inside, 0)
            mine.append(inside)
            empty |= own == 0
    if empty:  # one row of zeros that know their operand, in the place of no rows
        dims = [d for d, offset in enumerate(offsets) if offset is not None and self.shape[d] == 0]
        self = self.sum(dims, keepdim=True)
    entries = [slice(None) if at is None else at for at in local]
    found = self[tuple(entries)]
    inside = reduce(torch.logical_and, mine)
    present = [d for d, at in enumerate(indices) if at is not None]
    first = present[0] if present == list(range(present[0], present[0] + len(present))) else 0
    depth = max(at.dim() for at in indices if at is not None)
    behind = found.dim() - first - depth
    return found.masked_fill(~inside.reshape(inside.shape + (1,) * behind), 0)
