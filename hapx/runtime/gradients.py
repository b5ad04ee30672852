"""Sums the gradients of parameters that devices use in their own way, in buckets, while backward is still running.

In: a parameter stored Invariant along some axes and used Replicated along them. Its cotangent is Partial there (dual of
Replicated), so the true gradient is the sum over those axes: the transpose of the conversion Invariant -> Replicated. Instead of
one all_reduce in the place of each conversion, the parameter goes through `Pass.enter` once per forward pass; backward leaves the
local partial gradient in a bucket, full buckets are summed asynchronously, and at the end of backward the sums are added to
`.grad` of the parameters.

Invariants: the layout of the buckets is static (reverse order of first use) and they are launched in the order of that layout,
so all ranks start the same collectives in the same order, whatever order autograd visits the parameters in. Every forward pass
has its own state: several forwards before one backward, repeated backward and accumulation give what one device would get. The sums are
taken in the dtype of the bucket (the parameter's, or the one the user chose); `.grad` has the parameter's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hapx.buckets import BUCKET_BYTES, in_buckets
from hapx.runtime.local import Communicators
from hapx.runtime.sums import STEPS, Sum, buffer_size, start

Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter's gradient in its bucket."""

    key: Key
    bucket: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed together. `size`: elements."""

    axes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    keys: tuple[Key, ...]
    size: int


@dataclass(frozen=True)
class Layout:
    """The buckets of one program, in the order in which they are launched."""

    buckets: tuple[Bucket, ...]
    slots: Mapping[Key, Slot]


@dataclass(frozen=True, slots=True)
class Use:
    """A parameter that enters the synchroniser. `size`: local elements."""

    key: Key
    size: int
    dtype: torch.dtype


def bucket_layout(uses: Sequence[Use], device: torch.device, limit: int = BUCKET_BYTES) -> Layout:
    """Buckets for `uses`, in order of first use in forward: backward meets them in reverse. A bucket is launched when its last
    gradient is there, so buckets are in the order of their last members."""
    backward = uses[::-1]
    numbers = in_buckets((((use.key[1], use.dtype), use.size * use.dtype.itemsize) for use in backward), limit)
    last = {index: position for position, index in enumerate(numbers)}
    buckets, slots = [], {}
    for number, index in enumerate(sorted(last, key=last.__getitem__)):
        members = [use for use, own in zip(backward, numbers, strict=True) if own == index]
        start = 0
        for use in members:
            slots[use.key] = Slot(use.key, number, start, start + use.size)
            start += use.size
        buckets.append(Bucket(members[0].key[1], members[0].dtype, device, tuple(u.key for u in members), start))
    return Layout(tuple(buckets), slots)


class GradientSynchroniser:
    """The gradients of one model on one device.

    Args:
        parameters: local parameters by name.
        communicators: by axes.
        dtype: in which gradients are summed over devices; None: the parameter's.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], communicators: Communicators, dtype: torch.dtype | None = None):
        self.parameters, self.communicators, self.dtype = parameters, communicators, dtype
        self.held: dict[Key, Tensor] = {}
        self._aside = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes inside keep their partial gradients aside; they join the next synchronised backward."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def begin(self, layout: Layout) -> Pass:
        """State of a new forward pass."""
        return Pass(self, layout, self._aside)

    def clear(self) -> None:
        """Forget what was kept aside."""
        self.held.clear()

    def hold(self, key: Key, gradient: Tensor) -> None:
        self.held[key] = self.held[key] + gradient if key in self.held else gradient.detach().clone()
        parameter = self.parameters[key[0]]
        if parameter.grad is None:  # so that `zero_grad` of an optimizer can be noticed: see `drop_zeroed`
            parameter.grad = torch.zeros_like(parameter)

    def drop_zeroed(self) -> None:
        """Gradients that were set to None since are not wanted any more, neither are the parts kept aside."""
        for key in [k for k in self.held if self.parameters[k[0]].grad is None]:
            del self.held[key]

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a finished gradient to the parameter's `.grad`."""
        parameter = self.parameters[name]
        gradient = gradient.view(parameter.shape).to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            with torch.no_grad():
                parameter.grad += gradient


class Pass:
    """One forward pass and its backward."""

    def __init__(self, synchroniser: GradientSynchroniser, layout: Layout, aside: bool):
        self.synchroniser, self.layout, self.aside = synchroniser, layout, aside
        synchroniser.drop_zeroed()
        self._reset()

    def _reset(self) -> None:
        self.running = False
        self.present: dict[Key, None] = {}
        self.flat: dict[int, Tensor] = {}
        self.missing = [len(b.keys) for b in self.layout.buckets]
        self.sums: list[tuple[tuple[Key, ...], Sum]] = []
        self.launched = 0

    def enter(self, key: Key, parameter: Tensor) -> Tensor:
        """The parameter as used in this pass; its cotangent is this device's part of the gradient."""
        result: Tensor = _Enter.apply(parameter, self, key)
        return result

    def collect(self, key: Key, gradient: Tensor) -> None:
        """Called by autograd with the local partial gradient."""
        if not self.running:
            self.running = True
            self.synchroniser.drop_zeroed()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # runs at the end of this backward
        if self.aside:
            self.synchroniser.hold(key, gradient)
            return
        self._fill(key, gradient)
        buckets = self.layout.buckets
        while self.launched < len(buckets) and not self.missing[self.launched]:
            self._launch()

    def _fill(self, key: Key, gradient: Tensor) -> None:
        slot = self.layout.slots[key]
        bucket = self.layout.buckets[slot.bucket]
        if slot.bucket not in self.flat:
            size = buffer_size(self.synchroniser.communicators, bucket.axes, bucket.size)
            self.flat[slot.bucket] = torch.zeros(size, dtype=bucket.dtype, device=bucket.device)
        place = self.flat[slot.bucket][slot.start : slot.stop]
        with torch.no_grad():
            place += gradient.reshape(-1)
            if key in self.synchroniser.held:
                place += self.synchroniser.held.pop(key).reshape(-1)
        self.present[key] = None
        self.missing[slot.bucket] -= 1

    def _launch(self) -> None:
        """Start to sum the next bucket, if anything is in it; the sums before it go one step further."""
        bucket, flat = self.layout.buckets[self.launched], self.flat.get(self.launched)
        if flat is not None:
            self._advance()
            # shards of zero length are empty on the whole group: nothing to sum
            running = start(self.synchroniser.communicators, bucket.axes, flat)
            self.sums.append((tuple(k for k in bucket.keys if k in self.present), running))
        self.launched += 1

    def _advance(self) -> None:
        for _, running in self.sums:
            running.advance()

    def _finish(self) -> None:
        """End of backward: what is left is summed too, in the order of the layout, and gradients become visible."""
        if not self.aside:
            self._finish_sums()
        self._reset()

    def _finish_sums(self) -> None:
        held, slots = self.synchroniser.held, self.layout.slots
        for key in [k for k in held if k in slots]:
            self._fill(key, held.pop(key))
        while self.launched < len(self.layout.buckets):
            self._launch()
        strangers = []  # kept aside by another program, unknown to this one
        for key in sorted(held):
            gradient = held.pop(key).contiguous()
            gradient = gradient if self.synchroniser.dtype is None else gradient.to(self.synchroniser.dtype)
            strangers.append((key, self.synchroniser.communicators[key[1]].all_reduce_async(gradient)))
        for _ in range(STEPS):  # all of them together, so that links inside and between machines are both busy
            self._advance()
        for keys, running in self.sums:
            summed = running.wait()
            for key in keys:
                self.synchroniser.add(key[0], summed[slots[key].start : slots[key].stop])
        for key, handle in strangers:
            self.synchroniser.add(key[0], handle.wait())


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, current: Pass, key: Key) -> Tensor:
        ctx.current, ctx.key = current, key
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.current.collect(ctx.key, gradient.detach())
        return None, None, None
