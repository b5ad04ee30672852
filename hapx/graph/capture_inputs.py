"""Example inputs of a model: flattened, named, and replaced by empty twins on the model's device.

In: a module and the user's example inputs (a tuple, a dict of keyword arguments, or a single tensor). Out: `Inputs`: the tensors in
the order of the module's signature, their names, and how to call the module with other tensors in their place.

Invariant: every tensor of `empty_twins()` is a different object. torch.export merges inputs that are one object: for `(x, x)`
the graph would read one placeholder only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hapx.errors import CaptureError


@dataclass(frozen=True)
class Inputs:
    """`args`, `kwargs`: the call, tensors replaced by their index. `names`, `tensors`: the tensors, flattened in signature order."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    @property
    def batch(self) -> int:
        """Size of the batch: the first dim of the first tensor that has dims, else 1."""
        first = next((t for t in self.tensors if t.dim() > 0), None)
        return int(first.shape[0]) if first is not None else 1

    def call(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `tensors` in their places."""
        return _fill(self.args, tensors), {k: _fill(v, tensors) for k, v in self.kwargs.items()}

    def empty_twins(self, device: torch.device) -> tuple[Tensor, ...]:
        """One new tensor on `device` for each input: same shape, strides and dtype, values never read."""
        return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).requires_grad_(t.requires_grad) for t in self.tensors)


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of tensor number `index`."""

    index: int


def bind_inputs(module: nn.Module, example_inputs: Any, with_loss_fn: bool = False) -> Inputs:
    """Match `example_inputs` with the parameters of `module.forward`.

    With a loss function they are (inputs, *targets), each one tensor or a tuple (inputs also a dict), or a dict of `inputs` and, where there are
    some, `targets`; the result's `args` are then (positional inputs, keyword inputs, targets). Raises CaptureError when they do not fit.
    """
    if isinstance(example_inputs, Tensor):
        example_inputs = (example_inputs,)
    if not isinstance(example_inputs, tuple | list | Mapping):
        raise CaptureError(
            f"example_inputs is a {type(example_inputs).__name__}",
            allowed="a tuple of positional arguments or a dict of keyword arguments",
        )
    names: list[str] = []
    tensors: list[Tensor] = []

    def take(value: Any, name: str) -> Any:
        return _flatten(value, name, names, tensors)

    if not with_loss_fn:
        args, kwargs = _bind(module, example_inputs, take)
        return Inputs(args, kwargs, _unique(names), tuple(tensors))
    inputs, targets = _pair(example_inputs)
    args, kwargs = _bind(module, inputs if isinstance(inputs, tuple | list | Mapping) else (inputs,), take)
    targets = targets if isinstance(targets, tuple | list) else (targets,)
    flat = tuple(take(t, "targets" if len(targets) == 1 else f"targets_{i}") for i, t in enumerate(targets))
    return Inputs((args, kwargs, flat), {}, _unique(names), tuple(tensors))


def _pair(example_inputs: Any) -> tuple[Any, Any]:
    """Inputs and targets; without targets the loss is a function of the output alone."""
    if isinstance(example_inputs, Mapping):
        if "inputs" in example_inputs and example_inputs.keys() <= {"inputs", "targets"}:
            return example_inputs["inputs"], example_inputs.get("targets", ())
    elif example_inputs:
        return example_inputs[0], example_inputs[1] if len(example_inputs) == 2 else tuple(example_inputs[1:])
    raise CaptureError(
        "example_inputs do not fit a loss function", allowed="(inputs, *targets), each a tensor or a tuple of tensors; inputs may be a dict"
    )


def check_targets(loss_fn: Callable[..., Any], count: int) -> None:
    """Raise CaptureError where a loss cannot take so many targets beside the output."""
    takes = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        signature = inspect.signature(takes)
    except (TypeError, ValueError):  # some builtin functions have none
        return
    try:
        signature.bind(None, *(None,) * count)
    except TypeError as error:
        raise CaptureError(
            f"loss_fn{signature} does not take the output and {count} targets: {error}",
            allowed="example_inputs (inputs, *targets), loss_fn(output, *targets)",
        ) from error


def _bind(module: nn.Module, inputs: Any, take: Callable[[Any, str], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments in signature order, tensors replaced by slots."""
    positional, keyword = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*positional, **keyword)
    except TypeError as error:
        raise CaptureError(
            f"example_inputs do not fit {type(module).__name__}.forward: {error}", allowed=f"arguments of forward{signature}"
        ) from None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            args += [take(v, f"{name}_{i}") for i, v in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            kwargs |= {k: take(v, k) for k, v in value.items()}
        elif kind is inspect.Parameter.KEYWORD_ONLY or len(args) < _position(signature, name):
            kwargs[name] = take(value, name)  # a parameter before it was left out
        else:
            args.append(take(value, name))
    return tuple(args), kwargs


def _position(signature: inspect.Signature, name: str) -> int:
    return list(signature.parameters).index(name)


def _flatten(value: Any, name: str, names: list[str], tensors: list[Tensor]) -> Any:
    """`value` with every tensor replaced by a slot; tensors and their names are appended."""
    if isinstance(value, Tensor):
        names.append(name)
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if type(value).__module__.partition(".")[0] == "numpy":
        raise CaptureError(f"input {name!r} is a {type(value).__name__} of numpy", allowed="tensors and Python constants", hint="use torch.as_tensor")
    if isinstance(value, dict):
        return {k: _flatten(v, f"{name}_{k}", names, tensors) for k, v in value.items()}
    if isinstance(value, tuple | list):
        items = [_flatten(v, f"{name}_{i}", names, tensors) for i, v in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _fill(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.index]
    if isinstance(value, dict):
        return {k: _fill(v, tensors) for k, v in value.items()}
    if isinstance(value, tuple | list):
        items = [_fill(v, tensors) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _unique(names: list[str]) -> tuple[str, ...]:
    used: set[str] = set()
    return tuple(unique_name(name, used) for name in names)


def unique_name(name: str, used: set[str]) -> str:
    """`name` as an identifier that is not in `used`; it is added there."""
    name = "".join(c if c.isalnum() or c == "_" else "_" for c in name) or "value"
    name = f"_{name}" if name[0].isdigit() else name
    candidate, number = name, 0
    while candidate in used:
        number += 1
        candidate = f"{name}_{number}"
    used.add(candidate)
    return candidate


def device_of(module: nn.Module, inputs: Inputs) -> torch.device:
    """The one device of the module's parameters and buffers (of the inputs, if it has none)."""
    devices: dict[torch.device, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise CaptureError(f"the model lies on several devices: {places}", allowed="one device (cpu, meta or one GPU)", hint="call model.to(device)")
    if devices:
        return next(iter(devices))
    return inputs.tensors[0].device if inputs.tensors else torch.device("cpu")


def caller_autocast() -> str | None:
    """Dtype of the caller's autocast, if it is on."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None
