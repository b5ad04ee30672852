"""The calls of a local program: arguments as one device sees them, operators by name, composites as modules.

In: calls of a plan, whose arguments may be symbolic (local shapes, offsets, indices, blocks, axes). Out: arguments of torch operators, with
`Ref`s where the operands go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hapx.collectives.freed import reading
from hapx.collectives.rng import Rng
from hapx.errors import PlanError
from hapx.ir import OpCall, Ref, TorchConst, Value
from hapx.layout import local_offset
from hapx.operators import find_overload
from hapx.plan import Axes, LocalBlock, LocalIndices, LocalOffset, LocalShape, LocalSize
from hapx.runtime.local import Communicators, Position


class Composite(nn.Module):
    """A call of a composite; tensors are passed, everything else is bound."""

    def __init__(self, target: str, function: Callable[..., Any], arguments: tuple[tuple[str, Any], ...]):
        super().__init__()
        self.target, self.function, self.arguments = target, function, arguments

    def forward(self, *operands: Tensor) -> Any:
        remaining = iter(operands)
        return self.function(**{name: _fill(value, remaining) for name, value in self.arguments})

    def extra_repr(self) -> str:
        return f"{self.target}({', '.join(f'{k}={v}' for k, v in self.arguments if not isinstance(v, Tensor | Ref))})"


class Reading(nn.Module):
    """A call that reads parameters in other dtypes than their own. dtypes: by the operand's number. call: takes the operands."""

    def __init__(self, target: str, call: Callable[..., Any], dtypes: Mapping[int, torch.dtype]):
        super().__init__()
        self.target, self.call, self.dtypes = target, call, dtypes

    def forward(self, *operands: Tensor) -> Any:
        return reading(self.call, operands, self.dtypes)

    def extra_repr(self) -> str:
        return f"{self.target}, operands read as {', '.join(f'{i}: {dtype}' for i, dtype in self.dtypes.items())}"


def _fill(value: Any, operands: Any) -> Any:
    """`value` with every Ref replaced by the next operand."""
    if isinstance(value, Ref):
        return next(operands)
    return tuple(_fill(v, operands) for v in value) if isinstance(value, tuple) else value


def fill_all(args: tuple[Any, ...], kwargs: Mapping[str, Any], operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with its operands in their places, in order of occurrence (keyword arguments come last in schemas)."""
    remaining = iter(operands)
    filled = _fill(args, remaining), {k: _fill(v, remaining) for k, v in kwargs.items()}
    assert next(remaining, None) is None, "operands are left over"
    return filled


def on_operands(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The call with these arguments, as a function of its operands."""
    if not kwargs and all(isinstance(a, Ref) for a in args):
        return function

    def call(*operands: Any) -> Any:
        filled, named = fill_all(args, kwargs, operands)
        return function(*filled, **named)

    return call


@dataclass(frozen=True)
class Arguments:
    """Arguments as the device at `position` sees them."""

    position: Position
    communicators: Communicators
    rng: Rng
    device: torch.device

    def of(self, function: torch._ops.OpOverload, call: OpCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments up to the last one that is not a default, and keyword arguments; Refs in the places of operands."""
        values = {name: self.bound(name, value) for name, value in call.args}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in function._schema.arguments:
            value = values.get(argument.name, argument.default_value)
            if argument.name == "device" and value is None and not call.refs():
                value = self.device  # factories make their tensor where this rank computes
            if not argument.kwarg_only:
                args.append(value)
            elif not is_default(argument, value):
                kwargs[argument.name] = value
        positional = [a for a in function._schema.arguments if not a.kwarg_only]
        while args and is_default(positional[len(args) - 1], args[-1]):
            args.pop()
        return tuple(args), kwargs

    def bound(self, name: str, value: Value) -> Any:
        """An argument as this device sees it; Refs stay."""
        sizes, lengths, mine = self.position.mesh.sizes, self.position.lengths, self.position.coordinates
        if name == "rng" and value is None:
            return self.rng
        if name == "local_device" and value is None:
            return self.device
        if isinstance(value, LocalShape):
            return list(self.position.shape(value.shape, value.placement))
        if isinstance(value, LocalSize):
            return self.position.shape((value.size,), value.placement)[0]
        if isinstance(value, LocalOffset):
            return local_offset(value.dim, value.placement, sizes, lengths, mine)
        if isinstance(value, LocalIndices):
            found = self.position.indices(value.shape, value.placement)
            return tuple(None if i is None else torch.from_numpy(i).to(self.device) for i in found)
        if isinstance(value, LocalBlock):
            return self.position.block(value.placement, value.axis)
        if isinstance(value, Axes):
            return self.communicators[value.axes] if value.axes else None
        if isinstance(value, TorchConst):
            return getattr(torch, value.name)
        if isinstance(value, tuple):
            return tuple(self.bound("", v) for v in value)
        return value


def find_operator(target: str) -> torch._ops.OpOverload:
    """The overload named "aten.linear.default". Raises PlanError for one that is not there."""
    try:
        return find_overload(target)
    except (ValueError, AttributeError):
        raise PlanError(
            f"there is no operator {target!r}", hint="import the library that registers it, or plan again with this version of torch"
        ) from None


def returns_several(function: torch._ops.OpOverload) -> bool:
    returns = function._schema.returns
    return len(returns) > 1 or not isinstance(returns[0].type, torch.TensorType)


def is_default(argument: Any, value: Any) -> bool:
    if not argument.has_default_value():
        return False
    default = argument.default_value
    if isinstance(value, tuple | list) and isinstance(default, list):
        return list(value) == default
    return type(value) is type(default) and bool(value == default)
