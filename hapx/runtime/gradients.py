"""Sums the gradients of parameters that devices use in their own way, in buckets, while backward is still running.

In: a parameter stored Invariant along some axes and used Replicated along them. Its cotangent is Partial there (dual of
Replicated), so the true gradient is the sum over those axes: the transpose of the conversion Invariant -> Replicated. Instead of
one all_reduce in the place of each conversion, the parameter goes through `Pass.enter` once per forward pass; when backward has
the local partial gradients of a whole bucket, they are copied into it, it is summed asynchronously, and at the end of backward the
sums are added to `.grad` of the parameters.

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
from torch._utils import _unflatten_dense_tensors

from hapx.buckets import BUCKET_BYTES, in_buckets
from hapx.runtime.local import Communicators
from hapx.runtime.sums import STEPS, Sum, buffer_size, start

Key = tuple[str, tuple[int, ...]]


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
    """The buckets of one program, in the order in which they are launched, and in which of them a gradient is."""

    buckets: tuple[Bucket, ...]
    numbers: Mapping[Key, int]


@dataclass(frozen=True, slots=True)
class Use:
    """A parameter that enters the synchroniser. `size`: local elements."""

    key: Key
    size: int
    dtype: torch.dtype


def summed_in(wanted: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """The dtype in which a parameter's gradient is summed, where one is wanted for all: complex ones keep theirs."""
    return own if wanted is None or own.is_complex else wanted


def bucket_layout(uses: Sequence[Use], device: torch.device, limit: int = BUCKET_BYTES) -> Layout:
    """Buckets for `uses`, in order of first use in forward: backward meets them in reverse. A bucket is launched when its last
    gradient is there, so buckets are in the order of their last members."""
    backward = uses[::-1]
    numbers = in_buckets((((use.key[1], use.dtype), use.size * use.dtype.itemsize) for use in backward), limit)
    last = {index: position for position, index in enumerate(numbers)}
    buckets = []
    for index in sorted(last, key=last.__getitem__):
        members = [use for use, own in zip(backward, numbers, strict=True) if own == index]
        keys, size = tuple([use.key for use in members]), sum([use.size for use in members])
        buckets.append(Bucket(members[0].key[1], members[0].dtype, device, keys, size))
    return Layout(tuple(buckets), {key: number for number, bucket in enumerate(buckets) for key in bucket.keys})


class GradientSynchroniser:
    """The gradients of one model on one device.

    Args:
        parameters: local parameters by name.
        communicators: by axes.
        dtype: in which gradients are summed over devices (see `summed_in`); None: the parameter's.
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

    def hold(self, gradients: Mapping[Key, Tensor]) -> None:
        """Keeps gradients aside, those that are there already added up."""
        before = self.held.keys() & gradients.keys()
        if before:
            torch._foreach_add_([self.held[key] for key in before], [gradients[key] for key in before])
        for key, gradient in gradients.items():
            if key not in before:
                self.held[key] = gradient.clone()
            parameter = self.parameters[key[0]]
            if parameter.grad is None:  # so that `zero_grad` of an optimizer can be noticed: see `drop_zeroed`
                parameter.grad = torch.zeros_like(parameter)

    def drop_zeroed(self) -> None:
        """Gradients that were set to None since are not wanted any more, neither are the parts kept aside."""
        for key in [k for k in self.held if self.parameters[k[0]].grad is None]:
            del self.held[key]

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a finished gradient, in the parameter's shape, to its `.grad`."""
        parameter = self.parameters[name]
        if gradient.dtype != parameter.dtype:
            gradient = gradient.to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient


class Pass:
    """One forward pass and its backward."""

    def __init__(self, synchroniser: GradientSynchroniser, layout: Layout, aside: bool):
        self.synchroniser, self.layout, self.aside = synchroniser, layout, aside
        self.entered: dict[Key, Tensor] = {}  # by buckets, until the program reads them
        synchroniser.drop_zeroed()
        self._reset()

    def _reset(self) -> None:
        self.running = False
        self.present: set[Key] = set()
        self.flat: dict[int, Tensor] = {}
        self.places: dict[int, dict[Key, Tensor]] = {}  # the parts of a bucket, in the shapes of their parameters
        self.arrived: set[int] = set()  # buckets
        self.sums: list[tuple[int, Sum]] = []  # of which bucket
        self.launched = 0

    def enter(self, key: Key) -> Tensor:
        """The parameter as used in this pass; its cotangent is this device's part of the gradient.

        All parameters of a bucket enter together, through one node of autograd. It is made when the first of them is used, and autograd visits nodes
        in the reverse of the order in which they were made: so backward comes to it after everything that this first use does there, gathering
        again included, and before what was made earlier, on every device alike."""
        if key not in self.entered:
            number = self.layout.numbers[key]
            bucket = self.layout.buckets[number]
            self.entered |= {k: self.synchroniser.parameters[k[0]] for k in bucket.keys}
            differentiable = [(k, self.entered[k]) for k in bucket.keys if self.entered[k].requires_grad]
            if differentiable:
                wanted, leaves = zip(*differentiable, strict=True)
                anchor = torch.empty((), requires_grad=True, device=bucket.device)  # never read
                self.entered |= zip(wanted, _Bucket.apply(anchor, self, number, wanted, leaves), strict=True)
        return self.entered.pop(key)

    def arrive(self, number: int, keys: Sequence[Key], gradients: Sequence[Tensor | None]) -> None:
        """Called by autograd: this device's parts of the gradients of a bucket are there; None where nothing that backward began from needs one."""
        if not self.running:
            self.running = True
            self.synchroniser.drop_zeroed()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # runs at the end of this backward
        there = {key: gradient for key, gradient in zip(keys, gradients, strict=True) if gradient is not None}
        with torch.no_grad():
            if self.aside:
                self.synchroniser.hold(there)
                return
            self._fill(number, there)
        self.arrived.add(number)
        while self.launched in self.arrived:
            self._launch()

    def _fill(self, number: int, gradients: Mapping[Key, Tensor]) -> None:
        """Puts gradients into their bucket, with those that were kept aside for it: once it is launched it is too late for them."""
        if number not in self.flat:
            self._open(number)
        places, held = self.places[number], self.synchroniser.held
        aside = {key: held.pop(key) for key in self.layout.buckets[number].keys if key in held}
        found = {**aside, **gradients}
        if found:
            torch._foreach_copy_([places[key] for key in found], list(found.values()))
        for key in aside.keys() & gradients.keys():
            places[key] += aside[key]
        self.present |= found.keys()

    def _open(self, number: int) -> None:
        """Room for a bucket, zero behind its gradients."""
        bucket = self.layout.buckets[number]
        size = buffer_size(self.synchroniser.communicators, bucket.axes, bucket.size)
        flat = torch.empty(size, dtype=bucket.dtype, device=bucket.device)
        flat[bucket.size :].zero_()
        self.flat[number], self.places[number] = flat, self._parts(bucket, flat)

    def _parts(self, bucket: Bucket, flat: Tensor) -> dict[Key, Tensor]:
        parameters = [self.synchroniser.parameters[name] for name, _ in bucket.keys]
        return dict(zip(bucket.keys, _unflatten_dense_tensors(flat[: bucket.size], parameters), strict=True))

    def _launch(self) -> None:
        """Start to sum the next bucket, if anything is in it; the sums before it go one step further."""
        bucket, flat = self.layout.buckets[self.launched], self.flat.get(self.launched)
        if flat is not None:
            self._advance()
            for key, place in self.places[self.launched].items():
                if key not in self.present:
                    place.zero_()
            # shards of zero length are empty on the whole group: nothing to sum
            self.sums.append((self.launched, start(self.synchroniser.communicators, bucket.axes, flat)))
        self.launched += 1

    def _advance(self) -> None:
        for _, running in self.sums:
            running.advance()

    def _finish(self) -> None:
        """End of backward: what is left is summed too, in the order of the layout, and gradients become visible."""
        if not self.aside:
            with torch.no_grad():
                self._finish_sums()
        self._reset()

    def _finish_sums(self) -> None:
        held = self.synchroniser.held
        for number in dict.fromkeys(self.layout.numbers[key] for key in held if key in self.layout.numbers):
            self._fill(number, {})
        while self.launched < len(self.layout.buckets):
            self._launch()
        strangers = []  # kept aside by another program, unknown to this one
        for key in sorted(held):
            gradient = held.pop(key).contiguous()
            gradient = gradient.to(summed_in(self.synchroniser.dtype, gradient.dtype))
            strangers.append((key, self.synchroniser.communicators[key[1]].all_reduce_async(gradient)))
        for _ in range(STEPS):  # all of them together, so that links inside and between machines are both busy
            self._advance()
        for number, running in self.sums:
            bucket, summed = self.layout.buckets[number], running.wait()
            parts = self.places[number] if summed is self.flat[number] else self._parts(bucket, summed)
            for key in bucket.keys:
                if key in self.present:
                    self.synchroniser.add(key[0], parts[key])
        for key, handle in strangers:
            self.synchroniser.add(key[0], handle.wait())


class _Bucket(torch.autograd.Function):
    """The parameters of a bucket as one pass uses them: their values, with one node for the gradients of all. They are no inputs of it, as their own
    nodes, with the hooks of users, are not for parts of gradients; `anchor` makes autograd record it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, anchor: Tensor, current: Pass, number: int, keys: Sequence[Key], parameters: Sequence[nn.Parameter]
    ) -> tuple[Tensor, ...]:
        ctx.current, ctx.number, ctx.keys = current, number, keys
        ctx.set_materialize_grads(False)
        return tuple(p.detach() for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.current.arrive(ctx.number, ctx.keys, gradients)
        return None, None, None, None, None
