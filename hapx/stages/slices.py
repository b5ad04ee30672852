"""Slices of one machine: aligned runs of a power of two of its devices, as a buddy allocator deals them out.

In: the types of a machine's devices in their own order, and a mask of those that are free (bit i: device i). Out: the slices that can be taken.
A slice of 2^k devices begins at a multiple of 2^k. Whatever is free is then a set of aligned *blocks*, and two free sets with the same blocks (up to
exchanging the halves of a block, again and again) allow the same slices for ever after: `key` names them.

Lemma (packing). In a machine of equal devices with r of them free, a slice of 2^k <= r devices can always be taken: taken from the smallest block
that holds it, what is free stays the binary representation of r, so some block has at least 2^k devices. Hence any order of slices that sums to the
number of devices packs, whatever that number is. (Alpa's appendix proves it of clusters whose machines have a power of two, all slices at once.)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

Types = tuple[str, ...]


class Take(NamedTuple):
    """A slice: mask of its devices, their types (sorted), what is free afterwards."""

    devices: int
    types: Types
    rest: int


def members(mask: int) -> tuple[int, ...]:
    """The numbers of the bits that are set."""
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


def full(types: Types) -> int:
    """The mask of a machine of which everything is free."""
    return (1 << len(types)) - 1


def places(types: Types, free: int) -> Iterator[tuple[int, int]]:
    """Every (start, width) of a slice that is free; a whole machine is no slice."""
    width = 1
    while width < len(types):
        for start in range(0, len(types) - width + 1, width):
            if _is_free(free, start, width):
                yield start, width
        width *= 2


def takes(types: Types, free: int) -> tuple[Take, ...]:
    """The slices that can be taken, one for each (types, key of what is left)."""
    return _takes(types, free)


@cache
def _takes(types: Types, free: int) -> tuple[Take, ...]:
    found: dict[tuple[Types, str], Take] = {}
    fit: dict[Types, tuple[int, Take]] = {}
    for start, width in places(types, free):
        take = _take(types, free, start, width)
        block_start, block_width = _block(types, free, start, width)
        if len({*types[block_start : block_start + block_width]}) > 1:
            found.setdefault((take.types, key(types, take.rest)), take)
        elif take.types not in fit or block_width < fit[take.types][0]:
            fit[take.types] = block_width, take  # of equal devices the smallest block: what it leaves can be divided into what any other leaves
    for _, take in fit.values():
        found.setdefault((take.types, key(types, take.rest)), take)
    return tuple(found.values())


def same_take(types: Types, free: int, wanted: Types, left: str | None) -> Take:
    """The last slice of types `wanted` after which the key of what is left is `left` (None: any). There must be one."""
    for start, width in sorted(places(types, free), reverse=True):
        take = _take(types, free, start, width)
        if take.types == wanted and left in (None, key(types, take.rest)):
            return take
    raise AssertionError(f"no slice {wanted} of {types} that leaves {left}")


@cache
def key(types: Types, free: int) -> str:
    """What is free, as a sorted list of its largest aligned blocks; "" where nothing is."""
    return " ".join(sorted(_form(types, start, width) for start, width in _blocks(types, free)))


def _take(types: Types, free: int, start: int, width: int) -> Take:
    mask = ((1 << width) - 1) << start
    return Take(mask, tuple(sorted(types[start : start + width])), free & ~mask)


def _is_free(free: int, start: int, width: int) -> bool:
    mask = ((1 << width) - 1) << start
    return free & mask == mask


def _block(types: Types, free: int, start: int, width: int) -> tuple[int, int]:
    """The largest aligned free block around a slice."""
    while True:
        wider = start - start % (2 * width)
        if wider + 2 * width > len(types) or not _is_free(free, wider, 2 * width):
            return start, width
        start, width = wider, 2 * width


def _blocks(types: Types, free: int) -> Iterator[tuple[int, int]]:
    while free:
        start, width = _block(types, free, (free & -free).bit_length() - 1, 1)
        yield start, width
        free &= ~(((1 << width) - 1) << start)


def _form(types: Types, start: int, width: int) -> str:
    """A block up to exchanging halves."""
    if len({*types[start : start + width]}) == 1:
        return f"{width}*{types[start]!r}"
    half = width // 2
    return "({} {})".format(*sorted((_form(types, start, half), _form(types, start + half, half))))
