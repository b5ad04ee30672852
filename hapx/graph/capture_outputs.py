"""What a module returned: the scalar loss and the other tensors.

In: any container of tensors. Out: the loss, and the rest by place ("logits", "1.0"). A loss is a scalar floating tensor; in a dict,
dataclass or named tuple it is called "loss", or else comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from hapx.errors import CaptureError


def split_output(output: Any, maker: str = "forward") -> tuple[Tensor, dict[str, Tensor]]:
    """The scalar loss and the other tensors, by their place in `output`. Raises CaptureError if there is no loss."""
    places: dict[str, Tensor] = {}
    _collect(output, "", places, maker)
    named = _entries(output)
    key = "" if isinstance(output, Tensor) else "loss" if "loss" in named else next(iter(named), "")
    loss = places.pop(key, None)
    if loss is None or loss.dim() != 0 or not loss.is_floating_point():
        hint = "loss_fn must return the mean loss" if maker == "loss_fn" else "return the loss, or pass loss_fn=lambda output, targets: ..."
        raise CaptureError(
            f"{maker} returned {_describe(output)}, which is no scalar loss",
            allowed="a scalar floating tensor, or a tuple, dict or dataclass that has it first or as 'loss'",
            hint=hint,
        )
    return loss, places


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
