"""Operators made of the user's own torch.autograd.Functions, so that captured programs have their backward.

In: a subclass of torch.autograd.Function that lies at module level. Out: an operator of torch.library that runs its forward and, for gradients, its
backward. Its name says where the class lies and how it is called, so that a process that has only a plan finds it, too. What the class saves for
backward is made anew there: the operator keeps its operands, and its forward runs twice.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

NAMESPACE = "hapx_functions"
_BETWEEN = "_s_"  # parts of a name; other signs are _ and their hexadecimal number and _
_SCHEMA = {"T": "Tensor", "b": "bool", "i": "int", "f": "float", "s": "str"}  # N: None, which the operator does not get
_KINDS = ((Tensor, "T"), (bool, "b"), (int, "i"), (float, "f"), (str, "s"), (type(None), "N"))
_LOCK = threading.Lock()
_CLASSES: dict[str, type[Function]] = {}  # by the operator's name: the class that lies there now, as a notebook may define it again


def kinds_of(args: Sequence[Any]) -> str | None:
    """A letter for every argument; None where one cannot be an operator's."""
    letters = [next((letter for kind, letter in _KINDS if isinstance(a, kind)), None) for a in args]
    return None if None in letters or "T" not in letters else "".join(filter(None, letters))


def lies_open(function: type[Function]) -> bool:
    """Whether the class is found by its name."""
    try:
        return _class_of(function.__module__, function.__qualname__) is function
    except (ImportError, AttributeError):
        return False


def run(function: type[Function], args: Sequence[Any]) -> Any:
    """What the class returns, as if nobody looked."""
    return super(torch.autograd.function._SingleLevelFunction, function).apply(*args)


def operator_of(function: type[Function], kinds: str, outputs: int) -> torch._ops.OpOverload:
    """The operator for calls with such arguments. outputs: the number of tensors in the tuple that is returned; 0: a tensor without one."""
    parts = function.__module__, function.__qualname__, kinds, str(outputs)
    name = _BETWEEN.join(re.sub(r"[^A-Za-z0-9]", lambda sign: f"_{ord(sign[0]):x}_", part) for part in parts)
    with _LOCK:
        known = name in _CLASSES
        _CLASSES[name] = function
        if not known:
            _register(name, kinds, outputs)
    found = getattr(getattr(torch.ops, NAMESPACE), name).default
    assert isinstance(found, torch._ops.OpOverload)
    return found


def make_known(namespace: str, name: str) -> None:
    """Registers an operator of a plan that another process made. Raises AttributeError where the class is not there."""
    if namespace != NAMESPACE or name in _CLASSES:
        return
    module, path, kinds, outputs = (re.sub("_([0-9a-f]+)_", lambda code: chr(int(code[1], 16)), part) for part in name.split(_BETWEEN))
    try:
        operator_of(_class_of(module, path), kinds, int(outputs))
    except ImportError as error:
        raise AttributeError(str(error)) from error


def _class_of(module: str, path: str) -> type[Function]:
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _register(name: str, kinds: str, outputs: int) -> None:
    arguments = ", ".join(f"{_SCHEMA[kind]} a{i}" for i, kind in enumerate(kinds) if kind != "N")
    returned = f"({', '.join(['Tensor'] * outputs)})" if outputs else "Tensor"

    def whole(given: Sequence[Any]) -> list[Any]:
        rest = iter(given)
        return [None if kind == "N" else next(rest) for kind in kinds]

    def forward(*given: Any) -> Any:
        with torch.no_grad():
            made = run(_CLASSES[name], [a.detach() if isinstance(a, Tensor) else a for a in whole(given)])
        lent = {a.untyped_storage()._cdata for a in given if isinstance(a, Tensor)}
        fresh = [t.clone() if t.untyped_storage()._cdata in lent else t for t in (made if outputs else (made,))]
        return tuple(fresh) if outputs else fresh[0]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(a for a in inputs if isinstance(a, Tensor)))
        ctx.others = [None if isinstance(a, Tensor) else a for a in inputs]
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        given = [next(saved) if kind == "T" else other for kind, other in zip(kinds.replace("N", ""), ctx.others, strict=True)]
        twins = [a.detach().requires_grad_(needed) if isinstance(a, Tensor) else a for a, needed in zip(given, ctx.needs_input_grad, strict=True)]
        with torch.enable_grad():
            made = run(_CLASSES[name], whole(twins))
        reached = [(t, g) for t, g in zip(made if outputs else (made,), cotangents, strict=True) if g is not None and t.requires_grad]
        wanted = [t for t in twins if isinstance(t, Tensor) and t.requires_grad]
        if not reached or not wanted:
            return (None,) * len(given)
        found = torch.autograd.grad([t for t, _ in reached], wanted, [g for _, g in reached], allow_unused=True)
        of = {id(t): g for t, g in zip(wanted, found, strict=True)}
        return tuple(of.get(id(t)) for t in twins)

    operator = torch.library.custom_op(f"{NAMESPACE}::{name}", forward, mutates_args=(), schema=f"({arguments}) -> {returned}")
    operator.register_fake(forward)
    operator.register_autograd(backward, setup_context=keep)
