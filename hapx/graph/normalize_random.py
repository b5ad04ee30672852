"""Random tensors, written as three draws and what is computed from them, so that they may be split like any other tensor.

In: the arguments of a random operator. Out: its result. The draws are `aten.rand`, `aten.randn` and `aten.randint`, whose sizes are literal; they
read no tensor, and run as functions of the global position (`hapx.collectives.draws`). With u uniform on [0, 1) and z standard normal:

    bernoulli: u < p    uniform: low + (high - low) u    normal: mean + std z    exponential: -log(1 - u) / lambda
    randperm: the order of u    multinomial: the largest p / e, e exponential    rrelu: x (low + (high - low) u) below 0

as torch defines them; values differ from those of its generators. No gradient flows back through a draw's probability, mean or spread, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hapx.errors import CaptureError
from hapx.graph.normalize_args import base_of, dtype_of, name_of
from hapx.graph.normalize_bags import Compute
from hapx.graph.normalize_flatten import Slot

aten = torch.ops.aten
Bound = Mapping[str, Any]
Number = float | int


class Draws:
    """Appends the calls of one random operator. device: of its result; compute: appends a call."""

    def __init__(self, device: torch.device, compute: Compute):
        self.device, self.compute = device, compute

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, low: Number = 0.0, high: Number = 1.0) -> Slot:
        if dtype.is_complex:
            return self.pairs(lambda: self.uniform(shape, dtype.to_real(), low, high))
        drawn = self.compute(aten.rand.default, size=list(shape), dtype=_floating(dtype), device=self.device)
        return self.cast(self.scaled(drawn, high - low, low), dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype, mean: Slot | Number = 0.0, std: Slot | Number = 1.0) -> Slot:
        if dtype.is_complex:  # half of the variance in each part
            return self.scaled(self.pairs(lambda: self.normal(shape, dtype.to_real(), 0.0, math.sqrt(0.5))), std, mean)
        drawn = self.compute(aten.randn.default, size=list(shape), dtype=_floating(dtype), device=self.device)
        return self.cast(self.scaled(drawn, std, mean), dtype)

    def pairs(self, part: Callable[[], Slot]) -> Slot:
        """Complex numbers, of which each part is drawn."""
        return self.compute(aten.complex.default, real=part(), imag=part())

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        return self.compute(aten.randint.low, low=low, high=high, size=list(shape), dtype=dtype, device=self.device)

    def below(self, shape: Sequence[int], dtype: torch.dtype, p: Slot | float) -> Slot:
        """1 with probability p, else 0."""
        precise = isinstance(p, Slot) and dtype_of(p) == torch.float64
        u = self.uniform(shape, torch.float64 if precise else torch.float32)
        is_below = self.compute(aten.lt.Tensor, self=u, other=p) if isinstance(p, Slot) else self.compute(aten.lt.Scalar, self=u, other=p)
        return self.cast(is_below, dtype)

    def exponential(self, shape: Sequence[int], dtype: torch.dtype, rate: float = 1.0) -> Slot:
        """Never 0, so that its logarithm is finite."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        below_one = self.compute(aten.neg.default, self=self.uniform(shape, wide))
        drawn = self.compute(aten.mul.Tensor, self=self.compute(aten.log1p.default, self=below_one), other=-1.0 / rate)
        least = max(torch.finfo(wide).eps / 4 / rate, torch.finfo(dtype).tiny)
        return self.cast(self.compute(aten.clamp_min.default, self=drawn, min=least), dtype)

    def scaled(self, drawn: Slot, factor: Slot | Number, addend: Slot | Number) -> Slot:
        if isinstance(factor, Slot) or factor != 1:
            drawn = self.compute(aten.mul.Tensor, self=drawn, other=factor)
        if isinstance(addend, Slot) or addend != 0:
            drawn = self.compute(aten.add.Tensor, self=drawn, other=addend)
        return drawn

    def cast(self, slot: Slot, dtype: torch.dtype) -> Slot:
        return slot if dtype_of(slot) == dtype else self.compute(aten.to.dtype, self=slot, dtype=dtype)

    def fixed(self, value: Slot | Number) -> Slot | Number:
        """A mean or a spread, through which no gradient flows."""
        if isinstance(value, Slot) and value.fake is not None and value.fake.requires_grad:
            return self.compute(aten.detach.default, self=value)
        return value


def _floating(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.float32


def _shape(b: Bound) -> tuple[int, ...]:
    return tuple(b["size"]) if "size" in b else tuple(b["self"].fake.shape)


def _dtype(b: Bound) -> torch.dtype:
    return b.get("dtype") or (dtype_of(b["self"]) if "self" in b else torch.get_default_dtype())


def _randint(b: Bound, d: Draws) -> Slot | None:
    low, high = b.get("low", 0), b["high"]
    return None if isinstance(high, Slot) else d.integers(low, high, _shape(b), _dtype(b))


def _random(b: Bound, d: Draws) -> Slot | None:
    """Below a limit. (With a lower one, too, torch cannot trace it; without any, it depends on the dtype.)"""
    return d.integers(0, b["to"], _shape(b), _dtype(b)) if "to" in b and "from" not in b else None


def _bernoulli(b: Bound, d: Draws) -> Slot:
    return d.below(_shape(b), _dtype(b), b.get("p", b["self"]))


def _normal(b: Bound, d: Draws) -> Slot:
    """Into a tensor, of a given size, or like the mean or the spread."""
    mean, std = d.fixed(b["mean"]), d.fixed(b["std"])
    like = [t for t in (b["mean"], b["std"]) if isinstance(t, Slot)]
    if not like:
        return d.normal(_shape(b), _dtype(b), mean, std)
    shape = torch.broadcast_shapes(*(t.fake.shape for t in like if t.fake is not None))
    return d.normal(shape, dtype_of(like[0]), mean, std)


def _randperm(b: Bound, d: Draws) -> Slot:
    order = d.compute(aten.argsort.default, self=d.uniform([b["n"]], torch.float64))
    return d.cast(order, b["dtype"])


def _multinomial(b: Bound, d: Draws) -> Slot:
    """The largest of p / e: one each time with replacement, else the first ones (as torch does)."""
    p, shape, count = b["self"], _shape(b), b["num_samples"]
    if b["replacement"] or count == 1:
        races = d.exponential([*shape[:-1], count, shape[-1]], dtype_of(p))
        times = d.compute(aten.div.Tensor, self=d.compute(aten.unsqueeze.default, self=p, dim=-2), other=races)
        return d.compute(aten.argmax.default, self=times, dim=-1)
    times = d.compute(aten.div.Tensor, self=p, other=d.exponential(shape, dtype_of(p)))
    order = d.compute(aten.argsort.default, self=times, dim=-1, descending=True)
    return d.compute(aten.slice.Tensor, self=order, dim=-1, start=0, end=count)


def _rrelu(b: Bound, d: Draws) -> Slot:
    """In evaluation the slope is the middle of the range."""
    x = b["self"]
    if not b["training"]:
        return d.compute(aten.leaky_relu.default, self=x, negative_slope=(b["lower"] + b["upper"]) / 2)
    sloped = d.compute(aten.mul.Tensor, self=x, other=d.uniform(_shape(b), dtype_of(x), b["lower"], b["upper"]))
    return d.compute(aten.where.self, condition=d.compute(aten.gt.Scalar, self=x, other=0), self=x, other=sloped)


FORMS: Mapping[str, Callable[[Bound, Draws], Slot | None]] = {
    "aten.rand": lambda b, d: d.uniform(_shape(b), _dtype(b)),
    "aten.rand_like": lambda b, d: d.uniform(_shape(b), _dtype(b)),
    "aten.randn": lambda b, d: d.normal(_shape(b), _dtype(b)),
    "aten.randn_like": lambda b, d: d.normal(_shape(b), _dtype(b)),
    "aten.randint": _randint,
    "aten.randint_like": _randint,
    "aten.random": _random,
    "aten.bernoulli": _bernoulli,
    "aten.uniform": lambda b, d: d.uniform(_shape(b), _dtype(b), b["from"], b["to"]),
    "aten.normal": _normal,
    "aten.normal_functional": _normal,
    "aten.exponential": lambda b, d: d.exponential(_shape(b), _dtype(b), b["lambd"]),
    "aten.randperm": _randperm,
    "aten.multinomial": _multinomial,
    "aten.rrelu": _rrelu,
}


def drawn(op: torch._ops.OpOverload, bound: Bound, where: str, device: torch.device, compute: Compute) -> Slot | None:
    """The result of a random operator; None for any other, and for one that cannot be written out. device: of tensors that say nothing about theirs.

    Raises CaptureError for one with its own generator."""
    form = FORMS.get(base_of(op).removesuffix("_"))
    if form is None or "out" in bound:
        return None
    if bound.get("generator") is not None:
        raise CaptureError(f"{name_of(op)} has its own random generator", where=where, hint="use the default generator")
    source = next((v for v in bound.values() if isinstance(v, Slot) and v.fake is not None), None)
    own = source.fake.device if source is not None and source.fake is not None else device
    return form(bound, Draws(bound.get("device") or own, compute))
