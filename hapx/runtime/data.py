"""Batches for ranks that get unequal shares of them.

In: the size of a data set and of the global batch, and how a global batch of n samples is shared out. Out: this rank's indices, batch
by batch. Invariant: per epoch every index is in exactly one share of one batch; the global batches do not depend on the sharing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sized

import torch
from torch.utils.data import Sampler


class ShareSampler(Sampler[list[int]]):
    """A `batch_sampler` for a DataLoader: each rank's share of the same global batches; the last batch may be short.

    A rank without a share gets empty lists, for which the DataLoader needs a `collate_fn` that accepts them.
    """

    def __init__(self, dataset: Sized, batch_size: int, sizes_for: Callable[[int], tuple[int, ...]], rank: int, shuffle: bool, seed: int):
        self.dataset, self.batch_size, self.sizes_for, self.rank, self.shuffle, self.seed = dataset, batch_size, sizes_for, rank, shuffle, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Another order for another epoch; the same on all ranks."""
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(len(self.dataset))
        if self.shuffle:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for batch in order.split(self.batch_size):
            sizes = self.sizes_for(len(batch))
            start = sum(sizes[: self.rank])
            yield batch[start : start + sizes[self.rank]].tolist()
