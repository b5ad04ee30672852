"""The state of a module around a run of its forward: put back afterwards, and what the run changed.

In: a module. Out: `Changes`. Invariant: after `same_module` every attribute of every submodule is what it was, containers with what they held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hapx.errors import CaptureError

# attributes that torch's own modules derive from their parameters, which the exporter exchanges: put back, but no state of the model
_DERIVED = ((nn.RNNBase, frozenset({"_flat_weights", "_flat_weight_refs"})),)

_MAPPINGS = (dict, OrderedDict)
_REGISTERED = ("_parameters", "_buffers", "_modules")


@dataclass
class Changes:
    """Attributes that forward has changed, by full name, and what they became: `now`, by module and name (of mappings: the new entries); the
    buffers that it has assigned anew: their old tensors. `plain`: whether what they became can be set again."""

    names: list[str] = field(default_factory=list)
    now: dict[tuple[str, str], Any] = field(default_factory=dict)
    buffers: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    plain: bool = True

    def note(self, module: str, key: str, now: Any, before: Any) -> None:
        """An attribute that was `before` and is `now` (_GONE if it is not there any more)."""
        keys = [key]
        if type(now) in _MAPPINGS and type(before) is type(now):
            if key in _REGISTERED:  # by the names that the user gave them
                keys = [k for k in {**now, **before} if now.get(k) is not before.get(k)] or keys
            if all(k in now and now[k] is v for k, v in before.items()):
                now = {k: v for k, v in now.items() if k not in before}
        if key != "_non_persistent_buffers_set" or not self.names:  # beside a buffer it says nothing
            self.names += [f"{module}.{k}" if module else k for k in keys]
        self.now[module, key] = now
        self.plain = self.plain and now is not _GONE and not _holds_tensor(now)

    def repeat(self, module: nn.Module) -> bool:
        """Make the changes in the module, as forward did; False (and nothing is made) where tensors are among them."""
        if not self.plain:
            return False
        modules = dict(module.named_modules())
        for (name, key), now in self.now.items():
            attributes = vars(modules[name])
            if type(attributes.get(key)) in _MAPPINGS:
                attributes[key].update(now)
            else:
                attributes[key] = now
        return True


_GONE = object()


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor | nn.Module)


@contextmanager
def same_module(module: nn.Module, changes: Changes | None = None) -> Iterator[None]:
    """Afterwards put back every attribute of every submodule; `changes` gets those that were different."""
    changes = changes or Changes()
    modules = dict(module.named_modules())
    before = {name: {k: (v, _copy(v)) for k, v in vars(m).items()} for name, m in modules.items()}
    changes.buffers.update({(name, k): b for name, m in modules.items() for k, b in m._buffers.items() if b is not None})
    try:
        yield
    finally:
        for name, m in modules.items():
            derived = {k for kind, keys in _DERIVED if isinstance(m, kind) for k in keys}
            for key, now, old in _restore(m, before[name]):
                if key not in derived:
                    changes.note(name, key, now, old)


def write_assigned_buffers(module: nn.Module, changes: Changes) -> None:
    """`self.buffer = value` as a write into the buffer. (The exporter sees it on the outermost module only.) Raises CaptureError where the value
    is of another shape or dtype, as tables are that a first call makes: what is planned must be what later calls compute."""
    for name, m in module.named_modules():
        for key, now in m._buffers.items():
            old = changes.buffers.get((name, key))
            if old is not None and now is not None and now is not old:
                if (now.shape, now.dtype) != (old.shape, old.dtype):
                    path = f"{name}.{key}" if name else key
                    raise CaptureError(
                        f"forward makes the buffer {path!r} anew, {_kind(now)} where it was {_kind(old)}",
                        where=type(m).__name__, hint="call the model once with the example inputs before, or make it like this from the start",
                    )  # fmt: skip
                with torch.no_grad():
                    old.copy_(now)
                m._buffers[key] = old


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def _copy(value: Any) -> Any:
    return value.copy() if type(value) in (*_MAPPINGS, list, set) else value


def _restore(module: nn.Module, before: Mapping[str, tuple[Any, Any]]) -> list[tuple[str, Any, Any]]:
    """Put the attributes back as they were; those that had changed: (name, what it was changed to, what it was)."""
    now = vars(module)
    changed = [(k, now[k], _GONE) for k in now if k not in before]
    for key, _, _ in changed:
        del now[key]
    for key, (value, copy) in before.items():
        found = now.get(key, _GONE)
        same = found is not _GONE and _same(found, value, copy)
        if not same:
            changed.append((key, _copy(found), copy))
        if not same or found is not value:  # the exporter leaves equal copies of containers behind
            now[key] = value
            if type(value) in (*_MAPPINGS, set):
                value.clear()
                value.update(copy)
            elif type(value) is list:
                value[:] = copy
    return changed


def _same(now: Any, value: Any, copy: Any) -> bool:
    if isinstance(now, Tensor | nn.Module) or isinstance(value, Tensor | nn.Module):
        return now is value
    if type(now) is not type(value):
        return False
    if type(value) in _MAPPINGS:
        return now.keys() == copy.keys() and all(_same(now[k], copy[k], copy[k]) for k in copy)
    if type(value) in (list, tuple):
        return len(now) == len(copy) and all(_same(a, b, b) for a, b in zip(now, copy, strict=True))
    if type(value) is set:
        return bool(now == copy)
    return now is value or (isinstance(value, bool | int | float | str) and bool(now == value))
