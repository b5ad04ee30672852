"""Gives a `meta` module its values, one submodule at a time: rank 0's `reset_parameters` decides, every device keeps its piece.

In: the module, how each device keeps each tensor. Out: the same module with pieces inside. Invariant: beside its pieces, a device never holds more
than some rows of one tensor (twice `CHUNK` bytes); rank 0, which makes the values, also the tensors of one submodule.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from hapx.collectives.communicator import Communicator
from hapx.errors import LaunchError
from hapx.runtime.local import Position
from hapx.states import Placement

CHUNK = 16 * 2**20  # bytes that are broadcast at once

Place = Callable[[str], tuple[Position, Placement] | None]


def materialise(module: nn.Module, everyone: Communicator, device: torch.device, place: Place) -> frozenset[int]:
    """Replaces all tensors on `meta` by this device's pieces (a collective call); the ids of the new ones. place: by name, where this device keeps a
    tensor; None: not at all, the piece is empty.

    Raises LaunchError, on all ranks, where a submodule cannot say what its values are."""
    done: dict[Tensor, Tensor] = {}
    for path, owner in module.named_modules():
        own = _on_meta(owner)
        fresh = [n for n, t in own.items() if t not in done]
        if fresh:
            _made(owner, own, fresh, path, everyone, device)
        for name, t in own.items():
            if t not in done:
                value = _of(owner, name) if everyone.rank == 0 else None
                piece = spread(value, t, everyone, device, place(f"{path}.{name}" if path else name))
                done[t] = nn.Parameter(piece, t.requires_grad) if isinstance(t, nn.Parameter) else piece
            _put(owner, name, done[t])
    return frozenset(id(t) for t in done.values())


def spread(value: Tensor | None, like: Tensor, everyone: Communicator, device: torch.device, place: tuple[Position, Placement] | None) -> Tensor:
    """This device's piece of rank 0's `value`, which has shape and dtype of `like`, in memory of its own (a collective call)."""
    shape = tuple(like.shape) or (1,)
    step = max(1, CHUNK // max(1, like.element_size() * (like.numel() // max(1, shape[0]))))
    position, placement = place if place is not None else (None, None)
    indices: tuple[np.ndarray | None, ...] = (None,) * len(shape)
    piece = torch.empty(0, dtype=like.dtype, device=device)
    if position is not None and placement is not None:
        indices = position.indices(like.shape, placement) or indices
        piece = torch.empty(position.shape(like.shape, placement), dtype=like.dtype, device=device)
    rows = piece.reshape(1) if not like.shape and position is not None else piece
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        if value is not None:
            part = value.detach().reshape(shape)[start:stop].to(device)
        else:
            part = torch.empty((stop - start, *shape[1:]), dtype=like.dtype, device=device)
        part = everyone.broadcast(part, 0)
        if position is not None:
            _keep(rows, part, start, indices)
    return piece


def _keep(rows: Tensor, part: Tensor, start: int, indices: tuple[np.ndarray | None, ...]) -> None:
    """Writes what a device keeps of the rows from `start` on. indices: per dim, the global numbers of its elements (None: all)."""
    for dim, index in enumerate(indices[1:], 1):
        if index is not None:
            part = part.index_select(dim, torch.from_numpy(index).to(part.device))
    if indices[0] is None:
        rows[start : start + part.shape[0]] = part
        return
    inside = np.flatnonzero((indices[0] >= start) & (indices[0] < start + part.shape[0]))
    if len(inside):
        wanted = torch.from_numpy(indices[0][inside] - start).to(part.device)
        rows.index_copy_(0, torch.from_numpy(inside).to(part.device), part.index_select(0, wanted))


def _made(owner: nn.Module, own: dict[str, Tensor], fresh: list[str], path: str, everyone: Communicator, device: torch.device) -> None:
    """On rank 0, the submodule with its values. All ranks learn whether that went well."""
    if not callable(getattr(owner, "reset_parameters", None)):
        names = ", ".join(f"{path}.{n}" if path else n for n in fresh)
        raise LaunchError(
            f"cannot give a value to {names}: the module is on `meta` and {type(owner).__name__} has no reset_parameters()",
            where=path or "model", hint="define reset_parameters() on it, or build the module on the CPU",
        )  # fmt: skip
    error: Exception | None = None
    if everyone.rank == 0:
        try:
            for name, t in own.items():  # also the tied ones that are done: reset_parameters() fills them all
                empty = torch.empty_like(t, device=device)
                _put(owner, name, nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty)
            owner.reset_parameters()  # type: ignore[operator]
        except Exception as caught:  # raised below, when the others know
            error = caught
    failed = everyone.broadcast(torch.tensor([float(error is not None)], device=device), 0)
    if error is not None:
        raise error
    if bool(failed):
        raise LaunchError(f"reset_parameters() of {type(owner).__name__} failed on rank 0", where=path or "model")


def _on_meta(owner: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a submodule itself that have no values."""
    found = [*owner._parameters.items(), *owner._buffers.items()]
    return {n: t for n, t in found if t is not None and t.is_meta}


def _of(owner: nn.Module, name: str) -> Tensor:
    found = owner._parameters[name] if name in owner._parameters else owner._buffers[name]
    assert found is not None
    return found


def _put(owner: nn.Module, name: str, t: Tensor) -> None:
    if isinstance(t, nn.Parameter):
        owner._parameters[name] = t
    else:
        owner._buffers[name] = t
