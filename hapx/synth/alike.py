"""Conversions that cost the same at any shares: most do, so that the price of one is that of many.

In: of every pair of placements the number of its price; the sets of placements that conversions come from. Out: `Alike`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hapx.cost.edges import Array, Numbers, mixed


class Block(NamedTuple):
    """Tables of so many placements: their entries, one per source and target, and their rows, one entry per target. firsts: where in `sources` those
    begin from which each of the rows `ones` may come; left, right: the two rows of which each of `both` is the least. (Numbered in the block.)"""

    placements: int
    entries: slice
    rows: slice
    sources: Numbers
    firsts: Numbers
    ones: Numbers
    left: Numbers
    right: Numbers
    both: Numbers

    def lines(self, rows: Numbers) -> Numbers:
        """The block's part of what all rows have: (row, target)."""
        return rows[self.rows].reshape(-1, self.placements)

    def sums(self, values: Numbers) -> Numbers:
        """For each of `ones` and each target, the sum over the sources of what entries have."""
        lines = values[self.entries].reshape(-1, self.placements)
        found: Numbers = np.add.reduceat(lines[self.sources], self.firsts).ravel()
        return found

    def came_from(self, groups: Numbers) -> tuple[Numbers, Numbers]:
        """Of some of these sums, the entries, one group after the other, and how many each has."""
        row, target = np.divmod(groups, self.placements)
        counts = np.diff(self.firsts, append=len(self.sources))[row]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        sources = self.sources[np.repeat(self.firsts[row], counts) + within]
        return self.entries.start + sources * self.placements + np.repeat(target, counts), counts


class Alike:
    """direct: of every entry, the number of its price. `rows`: the same of every entry of all rows. Prices of rows are the least of some of entries
    (`groups`: their numbers, of the first group, then of the next; `firsts`: where each begins), then the least of two of these (`left`, `right`);
    last, of what comes from anywhere, nothing."""

    def __init__(self, direct: Numbers, blocks: Sequence[Block], length: int):
        self.direct, self.rows = direct, np.full(length, -1)
        one, which = _alike_groups(direct, blocks)
        begin = np.cumsum([0, *(len(b.ones) * b.placements for b in blocks[:-1])])
        parts = np.split(one, np.searchsorted(one, begin[1:]))
        came = [b.came_from(own - first) for b, own, first in zip(blocks, parts, begin.tolist(), strict=True)]
        self.groups, counts = direct[np.concatenate([entries for entries, _ in came])], np.concatenate([own for _, own in came])
        self.firsts = np.cumsum(counts) - counts
        for block, own in zip(blocks, np.split(which, begin[1:]), strict=True):
            block.lines(self.rows)[block.ones] = own.reshape(-1, block.placements)
        pairs = [(block.lines(self.rows)[block.left].ravel(), block.lines(self.rows)[block.right].ravel()) for block in blocks]
        left, right = (np.concatenate(own) for own in zip(*pairs, strict=True))
        one, which = numbered(mixed(np.minimum(left, right), np.maximum(left, right)))
        self.left, self.right = left[one], right[one]
        for block, own in zip(blocks, np.split(which + len(counts), np.cumsum([len(own) for own, _ in pairs])[:-1]), strict=True):
            block.lines(self.rows)[block.both] = own.reshape(-1, block.placements)
        self.rows[self.rows < 0] = len(counts) + len(one)

    def of_rows(self, direct: Array) -> Array:
        """The prices of rows, by those of entries."""
        ones = np.minimum.reduceat(direct.take(self.groups, axis=0), self.firsts)
        return np.concatenate([ones, np.minimum(ones.take(self.left, axis=0), ones.take(self.right, axis=0)), np.zeros((1, direct.shape[1]))])


def _alike_groups(direct: Numbers, blocks: Sequence[Block]) -> tuple[Numbers, Numbers]:
    """As `numbered`, of all groups of sources: equal ones have equal sums of random numbers, one for each price; two such sums tell others apart."""
    random = np.random.default_rng(0).integers(-(2**62), 2**62, (2, int(direct.max(initial=-1)) + 1))
    first, second = (np.concatenate([b.sums(own[direct]) for b in blocks]) for own in random)
    one, which = numbered(first)
    if (second != second[one][which]).any():
        one, which = numbered(mixed(which, numbered(second)[1]))
    return one, which


def numbered(values: Numbers) -> tuple[Numbers, Numbers]:
    """Numbers of equal values, as they come: where each comes first, and of every value its number."""
    _, one, which = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(one)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return one[order], number[which]
