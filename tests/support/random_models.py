"""Random small models of the registry's operators, as data that hypothesis can shrink.

In: a *tape* of small numbers. Out: a `Recipe`, and from it a module in float64 whose forward returns a scalar loss. Every number of the tape
chooses an operator, an operand or a dim; shorter tapes with smaller numbers are simpler models. Invariant: a recipe has the same model
always, its values stay small, and every value it makes is part of the loss. Operators that the registry does not have are not chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hapx.theory.ops  # noqa: F401  (fills the registry)
from hapx.theory.registry import REGISTRY
from support.models import _initialise

LARGEST = 1500  # elements of a value
CLASSES = 5

Shape = tuple[int, ...]
Function = Callable[..., Tensor]


@dataclass
class Reader:
    """Reads a tape; after its end everything is 0."""

    tape: Sequence[int]
    position: int = 0

    def below(self, n: int) -> int:
        self.position += 1
        return self.tape[self.position - 1] % n if self.position <= len(self.tape) else 0

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[self.below(len(options))]

    @property
    def is_done(self) -> bool:
        return self.position >= len(self.tape)


@dataclass
class Step:
    """`function(*values, **parameters)`; `parameters`: shapes by name; `norm`: a module with buffers that is called instead."""

    name: str
    function: Function
    operands: tuple[int, ...]
    parameters: dict[str, Shape] = field(default_factory=dict)
    norm: nn.Module | None = None


@dataclass
class Builder:
    """A model while it is drawn: the shapes of its values, which of them are used, the steps."""

    read: Reader
    shapes: list[Shape]
    used: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)

    def dim(self, shape: Shape) -> int:
        return self.read.below(len(shape))

    def add(self, step: Step) -> bool:
        """Append a step unless its value would be too large; its shape is found by running it."""
        operands = [torch.zeros(self.shapes[i], dtype=torch.float64) for i in step.operands]
        parameters = {k: torch.zeros(s, dtype=torch.float64) for k, s in step.parameters.items()}
        with torch.no_grad():
            shape = tuple((step.norm or step.function)(*operands, **parameters).shape)
        if not shape or not 0 < prod(shape) <= LARGEST:
            return False
        self.steps.append(step)
        self.used |= set(step.operands)
        self.shapes.append(shape)
        return True


# ---- operators -----------------------------------------------------------------------------------------------------------------------
# Each draws what it needs and returns a step, or None where it does not fit the value. `i`: a value, of shape `s`.

Maker = Callable[[Builder, int, Shape], Step | None]

ACTIVATIONS: dict[str, Function] = {
    "gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "softplus": F.softplus, "elu": F.elu,
    "leaky_relu": F.leaky_relu, "sin": torch.sin, "abs": torch.abs, "neg": torch.neg, "hardtanh": F.hardtanh, "mish": F.mish,
}  # fmt: skip


def activation(b: Builder, i: int, s: Shape) -> Step:
    name = b.read.one_of([n for n in ACTIVATIONS if f"aten.{n}" in REGISTRY or f"aten.{n}.default" in REGISTRY])
    return Step(name, ACTIVATIONS[name], (i,))


def linear(b: Builder, i: int, s: Shape) -> Step:
    out = b.read.one_of((6, 4, 8, 3))
    parameters = {"weight": (out, s[-1])} | ({"bias": (out,)} if b.read.below(3) else {})
    return Step("linear", F.linear, (i,), parameters)


def scale(b: Builder, i: int, s: Shape) -> Step:
    """Times or plus a parameter that is broadcast."""
    d = b.dim(s)
    shape = tuple(n if k == d else 1 for k, n in enumerate(s))[b.read.below(d + 1) :]
    function: Function = b.read.one_of((lambda x, p: x * p, lambda x, p: x + p, lambda x, p: p - x))
    return Step("scale", function, (i,), {"p": shape})


def norm(b: Builder, i: int, s: Shape) -> Step:
    name = b.read.one_of([n for n in ("layer_norm", "rms_norm") if f"aten.{n}" in REGISTRY])
    width = (s[-1],)
    if name == "layer_norm":
        return Step(name, lambda x, weight, bias: F.layer_norm(x, width, weight, bias), (i,), {"weight": width, "bias": width})
    return Step(name, lambda x, weight: F.rms_norm(x, width, weight, 1e-5), (i,), {"weight": width})


def batch_norm(b: Builder, i: int, s: Shape) -> Step | None:
    if len(s) not in (2, 3, 4) or prod(s) // s[1] < 3:
        return None
    return Step("batch_norm", F.batch_norm, (i,), norm=(nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[len(s) - 2](s[1], dtype=torch.float64))


def group_norm(b: Builder, i: int, s: Shape) -> Step | None:
    if len(s) < 3 or s[1] % 2:
        return None
    return Step("group_norm", lambda x, weight, bias: F.group_norm(x, 2, weight, bias), (i,), {"weight": (s[1],), "bias": (s[1],)})


def reduction(b: Builder, i: int, s: Shape) -> Step | None:
    if len(s) < 2:
        return None
    d, keep = b.dim(s), bool(b.read.below(2))
    function: Function = b.read.one_of((
        lambda x: x.mean(d, keepdim=keep), lambda x: x.sum(d, keepdim=keep), lambda x: x.amax(d, keepdim=keep),
        lambda x: x.logsumexp(d, keepdim=keep), lambda x: x.var(d, keepdim=keep, correction=0),
    ))  # fmt: skip
    return Step("reduction", function, (i,))


def along(b: Builder, i: int, s: Shape) -> Step:
    """What needs a dim whole and keeps it."""
    d = b.dim(s)
    function: Function = b.read.one_of((
        lambda x: x.softmax(d), lambda x: 0.3 * x.cumsum(d), lambda x: x.flip(d), lambda x: x.log_softmax(d), lambda x: F.normalize(x, dim=d),
        lambda x: x.roll(1, d), lambda x: x.narrow(d, 0, max(1, x.shape[d] - 1)), lambda x: x.repeat_interleave(2, d),
        lambda x: x.sort(d).values, lambda x: x.topk(max(1, x.shape[d] - 1), d).values, lambda x: x.gather(d, x.argsort(d)),
        lambda x: x.index_select(d, torch.arange(x.shape[d] - 1, -1, -1)), lambda x: torch.tril(x) if x.dim() > 1 else x,
    ))  # fmt: skip
    return Step("along", function, (i,))


def shape_change(b: Builder, i: int, s: Shape) -> Step | None:
    d, e = b.dim(s), b.dim(s)
    options: list[Function] = [lambda x: x.transpose(d, e), lambda x: x.unsqueeze(d)]
    if len(s) > 1:
        first = min(d, len(s) - 2)
        options += [lambda x: x.flatten(first, first + 1), lambda x: x.permute(*range(1, x.dim()), 0), lambda x: x.reshape(-1, x.shape[-1])]
    if s[d] % 2 == 0:
        options += [lambda x: x.unflatten(d, (2, x.shape[d] // 2)), lambda x: x.unflatten(d, (x.shape[d] // 2, 2))]
        options += [lambda x: torch.mul(*x.chunk(2, d)), lambda x: torch.sub(*x.split(x.shape[d] // 2, d))]
    if 1 in s:
        options += [lambda x: x.squeeze(s.index(1)), lambda x: x.expand(*(2 if k == s.index(1) else -1 for k in range(len(s))))]
    function = b.read.one_of(options)
    return Step("shape", function, (i,)) if len(s) < 4 or function is not options[1] else None


def masked(b: Builder, i: int, s: Shape) -> Step:
    function: Function = b.read.one_of((
        lambda x: torch.where(x > 0, x, 0.1 * x), lambda x: x.masked_fill(x < -0.5, 0.0), lambda x: x.clamp(-0.7, 0.9),
        lambda x: torch.where(torch.arange(x.shape[-1]) < 2, x, -x), lambda x: x * (x > 0).to(x.dtype),
    ))  # fmt: skip
    return Step("masked", function, (i,))


def binary(b: Builder, i: int, s: Shape) -> Step | None:
    """With another value that has the same shape or can be broadcast."""

    def fits(t: Shape) -> bool:
        return len(t) <= len(s) and all(a in (1, c) for a, c in zip(reversed(t), reversed(s), strict=False))

    others = [k for k, t in enumerate(b.shapes) if fits(t)]
    j = b.read.one_of(others)
    function: Function = b.read.one_of((torch.add, torch.mul, torch.sub, torch.maximum, lambda x, y: x / (2.0 + y * y)))
    return Step("binary", function, (i, j))


def joined(b: Builder, i: int, s: Shape) -> Step:
    d = b.dim(s)
    others = [k for k, t in enumerate(b.shapes) if len(t) == len(s) and all(m == n for e, (m, n) in enumerate(zip(s, t, strict=True)) if e != d)]
    alike = [k for k, t in enumerate(b.shapes) if t == s]
    if len(s) < 4 and not b.read.below(3):
        return Step("stack", lambda x, y: torch.stack((x, y), d), (i, b.read.one_of(alike)))
    return Step("cat", lambda x, y: torch.cat((x, y), d), (i, b.read.one_of(others)))


def product(b: Builder, i: int, s: Shape) -> Step | None:
    """Matrix products: with itself, with another value, by einsum."""
    if len(s) < 2:
        return None
    small = s[-1] ** -0.5
    others = [k for k, t in enumerate(b.shapes) if t[:-2] == s[:-2] and len(t) == len(s) and t[-1] == s[-1]]
    j = b.read.one_of(others)
    options: list[Function] = [lambda x, y: small * (x @ y.transpose(-1, -2))]
    if len(s) == 3:
        options += [lambda x, y: torch.bmm(x, y.transpose(1, 2)).tanh(), lambda x, y: small * torch.einsum("bik,bjk->bji", x, y)]
    if len(s) == 2:
        options += [lambda x, y: torch.mm(x, y.t()).softmax(-1)]
    return Step("product", b.read.one_of(options), (i, j))


def attention(b: Builder, i: int, s: Shape) -> Step | None:
    if len(s) != 3 or s[-1] % 2 or s[-1] < 4:
        return None
    causal, heads = bool(b.read.below(2)), 2

    def attend(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
        q, k, v = F.linear(x, qkv).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        return F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2), out)

    return Step("attention", attend, (i,), {"qkv": (3 * s[-1], s[-1]), "out": (s[-1], s[-1])})


def convolution(b: Builder, i: int, s: Shape) -> Step | None:
    if len(s) not in (3, 4):
        return None
    out, kernel, stride = b.read.one_of((4, 6)), b.read.one_of((3, 1)), b.read.one_of((1, 2))
    function = F.conv1d if len(s) == 3 else F.conv2d
    parameters = {"weight": (out, s[1], *(kernel,) * (len(s) - 2))} | ({"bias": (out,)} if b.read.below(2) else {})
    return Step("conv", lambda x, weight, bias=None: function(x, weight, bias, stride=stride, padding=kernel // 2), (i,), parameters)


def pooling(b: Builder, i: int, s: Shape) -> Step | None:
    if len(s) != 4 or min(s[2:]) < 2:
        return None
    options: tuple[Function, ...] = (lambda x: F.max_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2), lambda x: F.adaptive_avg_pool2d(x, 1))
    return Step("pool", b.read.one_of(options), (i,))


MAKERS: tuple[Maker, ...] = (
    activation, linear, binary, norm, scale, reduction, shape_change, attention, convolution, product, joined, along, masked, batch_norm,
    group_norm, pooling,
)  # fmt: skip


# ---- models --------------------------------------------------------------------------------------------------------------------------


class RandomModel(nn.Module):
    """The model of a recipe: steps over a list of values, then a loss of every value that no step has used."""

    def __init__(self, steps: Sequence[Step], open_values: Sequence[int], shapes: Sequence[Shape], loss: int):
        super().__init__()
        self.steps, self.open_values, self.loss = tuple(steps), tuple(open_values), loss
        self.table = nn.Embedding(7, 6)
        self.norms = nn.ModuleDict({str(k): s.norm for k, s in enumerate(steps) if s.norm is not None})
        self.weights = nn.ParameterDict(
            {f"{k}_{n}": nn.Parameter(torch.empty(shape)) for k, s in enumerate(steps) for n, shape in s.parameters.items()}
        )
        self.head = nn.Linear(shapes[self.open_values[-1]][-1], CLASSES)
        _initialise(self, 0, torch.float64)

    def forward(self, x: Tensor, image: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        values = [x, image, self.table(ids)]
        for k, step in enumerate(self.steps):
            parameters = {n: self.weights[f"{k}_{n}"] for n in step.parameters}
            values.append((self.norms[str(k)] if step.norm is not None else step.function)(*(values[i] for i in step.operands), **parameters))
        total = self._head(self.head(values[self.open_values[-1]]), labels)
        for i in self.open_values[:-1]:
            total = total + 0.1 * (values[i] ** 2).mean()
        return total

    def _head(self, scores: Tensor, labels: Tensor) -> Tensor:
        if scores.shape[0] == labels.shape[0]:
            rows = scores.flatten(1, -2).mean(1) if scores.dim() > 2 else scores
            if rows.dim() == 2 and self.loss == 0:
                return F.cross_entropy(rows, labels)
            if rows.dim() == 2 and self.loss == 1:
                return F.nll_loss(rows.log_softmax(-1), labels)
        if self.loss == 2:
            return F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores))
        return F.mse_loss(scores, torch.ones_like(scores))


@dataclass(frozen=True)
class Recipe:
    """A model as data."""

    tape: tuple[int, ...]

    def _built(self) -> tuple[Builder, int, int]:
        read = Reader(self.tape)
        batch, loss = 3 + read.below(4), read.below(4)
        b = Builder(read, [(batch, 4, 6), (batch, 2, 5, 4), (batch, 4, 6)])
        while not read.is_done and len(b.steps) < 12:
            maker = read.one_of(MAKERS)
            # the last values first: chains are likelier than bushes
            i = len(b.shapes) - 1 - read.below(len(b.shapes))
            step = maker(b, i, b.shapes[i])
            if step is not None:
                b.add(step)
        return b, batch, loss

    def model(self) -> RandomModel:
        b, _, loss = self._built()
        return RandomModel(b.steps, self._open(b), b.shapes, loss)

    @staticmethod
    def _open(b: Builder) -> list[int]:
        """Values that no step uses; the embedding alone in a model without steps."""
        return [i for i in range(2, len(b.shapes)) if i not in b.used] or [2]

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        b, batch, _ = self._built()
        generator = torch.Generator().manual_seed(step)
        x, image = (torch.randn(s, generator=generator, dtype=torch.float64) for s in b.shapes[:2])
        ids = torch.randint(0, 7, (batch, 4), generator=generator)
        return x, image, ids, torch.randint(0, CLASSES, (batch,), generator=generator)

    def __str__(self) -> str:
        b, batch, loss = self._built()
        steps = "; ".join(f"{len(b.shapes) - len(b.steps) + k}: {s.name}{list(s.operands)}" for k, s in enumerate(b.steps))
        return f"batch {batch}, loss {loss}: {steps or 'no steps'}"


__all__ = ["MAKERS", "RandomModel", "Recipe"]
