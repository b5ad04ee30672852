"""What a captured program would leave out without a word: found before or while a model is traced, and refused.

In: a module, the calls that forward makes, the world before and after it. Out: nothing, or a CaptureError that names the user's line. Refused
are wrappers inside of the model, parameters without a shape, hooks that change gradients, gradients that forward itself computes, changes
of global variables and closures, and random numbers of Python, numpy or torch that a captured program would freeze.
"""

from __future__ import annotations

import dis
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin

from hapx.errors import CaptureError

WRAPPERS: Mapping[str, str] = {
    "DistributedDataParallel": "DDP",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FSDP",
    "RecursiveScriptModule": "scripting",
}
# hooks of torch.nn.utils that newer functions of the same name replace
OLD: Mapping[str, str] = {"WeightNorm": "weight_norm", "SpectralNorm": "spectral_norm"}
# functions by which forward computes gradients, or changes them
GRADIENTS: Mapping[str, str] = {
    "register_hook": "registers a hook on a gradient",
    "register_post_accumulate_grad_hook": "registers a hook on a gradient",
    "backward": "calls backward",
    "grad": "computes a gradient",
}
TORCH = os.path.dirname(torch.__file__) + os.sep
STANDARD = tuple({sysconfig.get_path(k) + os.sep for k in ("stdlib", "platstdlib")} | {TORCH, "<"})
INSTALLED = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))
KEEP = "keep such state in a registered buffer, or outside forward"
PLAIN = (bool, int, float, str, tuple, list, dict, set, type(None))


def check_modules(module: nn.Module) -> None:
    """Refuse wrappers inside of the model, weights that hooks make, parameters without a shape, and hooks on gradients."""
    for name, part in module.named_modules():
        if name and (kind := type(part).__name__) in WRAPPERS:
            raise CaptureError(
                f"{name!r} is a {kind}", where=type(module).__name__, allowed="plain single-device modules",
                hint=f"use the module from before {WRAPPERS[kind]}: {name}.module" if kind != "RecursiveScriptModule" else "do not script it",
            )  # fmt: skip
        if (old := next((OLD[kind] for hook in part._forward_pre_hooks.values() if (kind := type(hook).__name__) in OLD), None)) is not None:
            raise CaptureError(
                f"{name or 'the model'} sets its weight anew in a hook (torch.nn.utils.{old})", where=type(module).__name__,
                hint=f"use torch.nn.utils.parametrizations.{old}",
            )  # fmt: skip
        if part._backward_hooks or part._backward_pre_hooks:
            raise _hooked(f"module {name!r}" if name else "the model", type(module).__name__)
    refuse_lazy(module)
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise _hooked(f"parameter {name!r}", type(module).__name__)


def refuse_lazy(module: nn.Module) -> None:
    """Refuse parameters and buffers of lazy modules that have no shape yet."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, UninitializedTensorMixin):
            raise CaptureError(
                f"{name!r} has no shape yet", where=type(module).__name__, allowed="modules whose parameters are made",
                hint="call a lazy module once with an example before",
            )  # fmt: skip


def _hooked(what: str, where: str) -> CaptureError:
    return CaptureError(f"{what} has a hook on gradients, which would not run", where=where, hint="remove it; change gradients after loss.backward()")


def refuse_gradients(function: Callable[..., Any], where: str) -> None:
    """Refuse a call by which forward computes or changes gradients; autograd differentiates the captured program once, as a whole."""
    home = getattr(function, "__module__", None) or ""
    name = getattr(function, "__name__", "")
    if name in GRADIENTS and home.startswith(("torch._tensor", "torch.autograd")):
        raise CaptureError(
            f"forward {GRADIENTS[name]}, which a captured program would not",
            where=where,
            hint="write the gradient as operators, or do it after forward",
        )


class World:
    """Everything outside of the module that forward might change: construct it before, `check` it after."""

    def __init__(self, functions: Iterator[FunctionType], where: str):
        self.where = where
        self.watched = list(_watched(functions))
        self.states = _generators()

    def check(self) -> None:
        """Raise CaptureError for a change; global variables are put back."""
        changed = [w for w in self.watched if w.restore()]
        if changed:
            raise CaptureError(
                f"forward changes {', '.join(w.text for w in changed)}: a captured program would not",
                where=changed[0].where,
                hint=KEEP,
            )
        for name, state in _generators().items():
            if not _is_same_state(state, self.states[name]):
                raise CaptureError(
                    f"forward uses {name} random numbers: a captured program would use the same ones in every step", where=self.where,
                    hint="use torch's (torch.rand, dropout), or draw them outside and pass them as an input",
                )  # fmt: skip


def _generators() -> dict[str, Any]:
    found: dict[str, Any] = {"Python's": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy's"] = numpy.random.get_state()
    return found


def _is_same_state(a: Any, b: Any) -> bool:
    return all((x == y) if not hasattr(x, "all") else bool((x == y).all()) for x, y in zip(a, b, strict=True))


def check_functions(module: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
    """Raises CaptureError where forward or the loss uses parameters by the name of a variable: in a captured program they would be constants."""
    own = {id(m) for m in module.modules()} | {id(p) for p in module.parameters()}
    for function in user_functions(module, loss_fn, _globals):
        code = function.__code__
        found = [(f"the global {name!r}", function.__globals__.get(name)) for name in _globals(code)]
        found += [(f"the outer variable {name!r}", value) for name, _, value in _outer(function)]
        for what, value in found:
            held = list(value.parameters()) if isinstance(value, nn.Module) else [value] if isinstance(value, Tensor) else []
            if id(value) not in own and any(p.requires_grad for p in held):
                raise CaptureError(
                    f"{what} requires a gradient but is no part of the model", where=f"{code.co_filename}:{code.co_firstlineno}: def {code.co_name}",
                    hint="make it a parameter or a submodule of the model, or add what depends on it to the loss after the call",
                )  # fmt: skip


def _globals(code: CodeType) -> Iterator[str]:
    """Global variables that a function reads, nested functions included; not the attributes."""
    return (i.argval for own in _codes(code) for i in dis.get_instructions(own) if i.opname == "LOAD_GLOBAL")


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function uses, nested functions included."""
    return (name for own in _codes(code) for name in own.co_names)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _outer(function: FunctionType) -> Iterator[tuple[str, Any, Any]]:
    """Variables of the functions around a function: name, cell, value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not filled yet
            yield name, cell, cell.cell_contents


def user_functions(
    module: nn.Module, loss_fn: Callable[..., Any] | None, names: Callable[[CodeType], Iterator[str]] = _names
) -> Iterator[FunctionType]:  # fmt: skip
    """The forward functions of all submodules, functions among their attributes, and the functions that these name. Not those of installed
    packages: their global variables are caches. names: of global variables in a function, by default all that have the name of anything in it."""
    pending: list[Any] = [loss_fn, getattr(loss_fn, "forward", None)]
    for part in module.modules():
        pending += [type(part).forward, *vars(part).values()]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        pending.append(getattr(function, "__wrapped__", None))
        if _is_installed(function.__code__.co_filename):
            continue
        yield function
        pending += [function.__globals__.get(n) for n in names(function.__code__)]
        pending += [value for _, _, value in _outer(function)]


def _is_installed(file: str) -> bool:
    """Whether a file is Python's, PyTorch's, or of a package that was installed: for this environment, the one below, the user or a folder."""
    return file.startswith(STANDARD) or any(part in file for part in INSTALLED) or file.startswith(_targets(tuple(sys.path)))


@lru_cache(maxsize=4)
def _targets(path: tuple[str, ...]) -> tuple[str, ...]:
    """Folders of the path into which an installer wrote packages (`pip install --target`): it leaves their metadata beside them."""
    return tuple(folder.rstrip(os.sep) + os.sep for folder in path if folder and any(Path(folder).glob("*.dist-info")))


@dataclass
class _Watched:
    """A variable: how to read and write it, its value and a copy of that."""

    text: str
    where: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    value: Any
    copy: Any

    def restore(self) -> bool:
        """Whether it has changed; if so it is put back."""
        now = self.read()
        if now is self.value and (type(now) not in (list, dict, set) or _alike(now, self.copy)):
            return False
        if isinstance(self.value, list):
            self.value[:] = self.copy
        elif isinstance(self.value, dict | set):
            self.value.clear()
            self.value.update(self.copy)
        self.write(self.value)
        return True


def _alike(now: Any, copy: Any) -> bool:
    if isinstance(now, dict):
        return len(now) == len(copy) and all(k in copy and copy[k] is v for k, v in now.items())
    if isinstance(now, set):
        return len(now) == len(copy) and now <= copy
    return len(now) == len(copy) and all(a is b for a, b in zip(now, copy, strict=True))


def _watched(functions: Iterator[FunctionType]) -> Iterator[_Watched]:
    seen: set[tuple[int, str]] = set()
    for function in functions:
        code, space = function.__code__, function.__globals__
        where = f"{code.co_filename}:{code.co_firstlineno}: def {code.co_name}"
        for name in _names(code):
            value = space.get(name)
            if name in space and isinstance(value, PLAIN) and (id(space), name) not in seen:
                seen.add((id(space), name))
                yield _Watched(f"the global {name!r}", where, _getter(space, name), _setter(space, name), value, _copied(value))
        for name, cell, value in _outer(function):
            if isinstance(value, PLAIN) and (id(cell), "") not in seen:
                seen.add((id(cell), ""))
                yield _Watched(f"the outer variable {name!r}", where, _contents(cell), _refill(cell), value, _copied(value))


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict | set) else value


def _getter(space: dict[str, Any], name: str) -> Callable[[], Any]:
    return lambda: space.get(name)


def _setter(space: dict[str, Any], name: str) -> Callable[[Any], None]:
    return lambda value: space.__setitem__(name, value)


def _contents(cell: Any) -> Callable[[], Any]:
    return lambda: cell.cell_contents


def _refill(cell: Any) -> Callable[[Any], None]:
    return lambda value: setattr(cell, "cell_contents", value)


def is_inside_functorch_grad() -> bool:
    """Whether a gradient of torch.func is being computed."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Grad


__all__ = ["KEEP", "TORCH", "World", "check_functions", "check_modules", "is_inside_functorch_grad", "refuse_gradients", "user_functions"]
