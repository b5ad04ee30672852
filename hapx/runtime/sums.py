"""Sums of flat buckets over the devices of one or two mesh axes, while the program goes on.

In: a flat tensor, equally long on all devices; its size is a `buffer_size`, so that it can be cut into equal parts. Out: a `Sum`, whose `wait` gives
the finished sum. Over two axes, whose inner one has the devices of a machine,

    reduce_scatter over the inner axis,  all_reduce of every part over the outer one,  all_gather over the inner axis:

each link between machines carries every number once, instead of once per device of a machine, and the machine's devices share that work.

Invariant: the collectives of several sums start in an order that depends only on the order of `start` and `advance`, never on what has finished:
all ranks start the same ones in the same order.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hapx.collectives.communicator import Communicator, Handle
from hapx.runtime.local import Communicators

Axes = tuple[int, ...]
STEPS = 2  # of `advance` after which every sum is in its last collective


class Sum(Protocol):
    """A sum under way."""

    def advance(self) -> None:
        """Start its next collective, if there is one; waits for the one before it."""

    def wait(self) -> Tensor:
        """The finished sum."""


def buffer_size(communicators: Communicators, axes: Axes, size: int) -> int:
    """`size` elements and as many more as make the parts of a sum over `axes` equal."""
    levels = _levels(communicators, axes)
    return size if levels is None else size + -size % levels[1].size


def start(communicators: Communicators, axes: Axes, flat: Tensor) -> Sum:
    """Starts to sum `flat`, which may be used again after `wait`. Tensors that are empty (on all devices) take no part."""
    if not flat.numel():
        return _Empty(flat)
    levels = _levels(communicators, axes)
    return _OneLevel(communicators[axes].all_reduce_async(flat)) if levels is None else _TwoLevels(flat, *levels)


def _levels(communicators: Communicators, axes: Axes) -> tuple[Communicator, Communicator] | None:
    """The outer and the inner devices of a sum over two axes, None where one of them has a single device."""
    if len(axes) != 2:
        return None
    outer, inner = (communicators[(axis,)] for axis in axes)
    return (outer, inner) if outer.size > 1 and inner.size > 1 else None


class _Empty:
    def __init__(self, t: Tensor):
        self.t = t

    def advance(self) -> None:
        pass

    def wait(self) -> Tensor:
        return self.t


class _OneLevel:
    def __init__(self, handle: Handle):
        self.handle = handle

    def advance(self) -> None:
        pass

    def wait(self) -> Tensor:
        return self.handle.wait()


class _TwoLevels:
    def __init__(self, flat: Tensor, outer: Communicator, inner: Communicator):
        self.outer, self.inner, self.done = outer, inner, 0
        self.handle = inner.reduce_scatter_async(flat)

    def advance(self) -> None:
        if self.done == 0:
            self.handle = self.outer.all_reduce_async(self.handle.wait())
        elif self.done == 1:
            self.handle = self.inner.all_gather_async(self.handle.wait())
        self.done += 1

    def wait(self) -> Tensor:
        while self.done < STEPS:
            self.advance()
        return self.handle.wait()
