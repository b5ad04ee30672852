"""What a module returned: the scalar loss, the other tensors, and the container around them.

In: any container of tensors. Out: the loss, and the rest by place ("logits", "1.0"). A loss is a scalar floating tensor; in a dict,
dataclass or named tuple it is called "loss", or else comes first. Numbers and text are refused; other objects, caches of generation for one, are
left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from hapx.errors import CaptureError
from hapx.ir import Container, Ref, Value


def split_output(output: Any, maker: str = "forward") -> tuple[Tensor, dict[str, Tensor]]:
    """The scalar loss and the other tensors, by their place in `output`. Raises CaptureError if there is no loss."""
    places: dict[str, Tensor] = {}
    _collect(output, "", places, maker)
    loss = places.pop(_loss_place(output), None)
    if loss is None or loss.dim() != 0 or not loss.is_floating_point():
        hint = "loss_fn must return the mean loss" if maker == "loss_fn" else "return the loss, or pass loss_fn=lambda output, targets: ..."
        raise CaptureError(
            f"{maker} returned {_describe(output)}, which is no scalar loss",
            allowed="a scalar floating tensor, or a tuple, dict or dataclass that has it first or as 'loss'",
            hint=hint,
        )
    return loss, places


def container_of(output: Any) -> Container | None:
    """The container around the loss and the other tensors; None for a loss alone."""
    if isinstance(output, Tensor):
        return None
    found = _described_container(output, "", _loss_place(output))
    assert isinstance(found, Container)
    return found


def _loss_place(output: Any) -> str:
    named = _entries(output)
    return "" if isinstance(output, Tensor) else "loss" if "loss" in named else next(iter(named), "")


def _described_container(value: Any, path: str, loss: str) -> Value:
    if isinstance(value, Tensor):
        return Ref("" if path == loss else path)
    if value is None:
        return None
    kind = type(value)
    name = kind.__name__ if kind in (tuple, list, dict) else f"{kind.__module__}:{kind.__qualname__}"
    items = []
    for key, item in _entries(value).items():
        if _is_data(item):
            items.append((key, _described_container(item, f"{path}.{key}" if path else key, loss)))
        elif isinstance(value, tuple | list):
            items.append((key, None))  # the others stay where they are
    return Container(name, tuple(items))


def _is_data(value: Any) -> bool:
    return value is None or isinstance(value, Tensor | Mapping | tuple | list) or bool(_entries(value))


def _entries(output: Any) -> dict[str, Any]:
    """The parts of a container by name; {} if it is none."""
    if isinstance(output, Mapping):
        return {str(k): v for k, v in output.items()}
    if is_dataclass(output) and not isinstance(output, type):
        return {f.name: getattr(output, f.name) for f in fields(output)}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return dict(zip(output._fields, output, strict=True))
    if isinstance(output, tuple | list):
        return {str(i): v for i, v in enumerate(output)}
    return {}


def _collect(value: Any, path: str, places: dict[str, Tensor], maker: str) -> None:
    if isinstance(value, Tensor):
        places[path] = value
    elif path and isinstance(value, bool | int | float | complex | str | bytes):
        raise CaptureError(
            f"{maker} returns {value!r} as {path!r}, which is no tensor", allowed="tensors, and containers of them",
            hint="return torch.tensor(...), or compute it outside of the model",
        )  # fmt: skip
    for key, item in _entries(value).items():
        _collect(item, f"{path}.{key}" if path else key, places, maker)


def _describe(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a {str(output.dtype).removeprefix('torch.')} tensor of shape {list(output.shape)}"
    if entries := _entries(output):
        inside = ", ".join(f"{k}: {_describe(v)}" for k, v in list(entries.items())[:4])
        return f"a {type(output).__name__} ({inside}{', ...' if len(entries) > 4 else ''})"
    return f"{output!r}" if output is None or isinstance(output, int | float | str) else f"a {type(output).__name__}"
