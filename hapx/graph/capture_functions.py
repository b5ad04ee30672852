"""Calls of torch.autograd.Functions while a model is captured: tracing would go through their forward and lose their backward, without a word.

In: the user's calls. Out: calls of operators that have both (`hapx.functions`); or, where one cannot be made, the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode

from hapx.functions import kinds_of, lies_open, operator_of, run

LOST = "its backward would be lost"

_here = threading.local()  # `device`: the kind of device for which this thread captures
_lock = threading.Lock()
_capturing = 0  # threads


@contextmanager
def functions_as_operators(device: str) -> Iterator[None]:
    """Inside, this thread calls operators instead."""
    global _capturing
    with _lock:
        _capturing += 1
        _SingleLevelFunction.apply = classmethod(_applied)
    _here.device = device
    try:
        yield
    finally:
        del _here.device
        with _lock:
            _capturing -= 1
            if not _capturing:
                del _SingleLevelFunction.apply


def _applied(cls: type[Function], *args: Any) -> Any:
    if not hasattr(_here, "device"):
        return run(cls, args)
    kinds, outputs = kinds_of(args), 0
    why = _reason(cls, kinds)
    if not why:
        outputs, why = _outputs(cls, args)
    if why or kinds is None:
        return run(cls, args)  # whose first operator tells `why`, which capture reads from this frame
    return operator_of(cls, kinds, outputs)(*(a for a in args if a is not None))


APPLIED = _applied.__code__


def _reason(cls: type[Function], kinds: str | None) -> str:
    if cls.__module__.startswith("torch."):
        return LOST
    if kinds is None:
        return "its arguments are not tensors, numbers, texts and None only"
    if not lies_open(cls):
        return "its class is not at the level of a module, where other processes find it"
    if torch.is_autocast_enabled(_here.device):
        return "its forward may cast under autocast"
    return ""


class _Watch(TorchDispatchMode):
    """Notes what an operator must not do."""

    why = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.why = "its forward draws random numbers"
        if "c10d" in func.namespace:
            self.why = "its forward communicates"
        return func(*args, **(kwargs or {}))


def _outputs(cls: type[Function], args: Sequence[Any]) -> tuple[int, str]:
    """How many tensors it returns in a tuple, 0 for one without, by a call that leaves no trace; or why that is no operator."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    versions = [t._version for t in tensors]
    watch = _Watch()
    try:
        with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing(), torch.no_grad(), watch:
            made = run(cls, [a.detach() if isinstance(a, Tensor) else a for a in args])
    except Exception as error:  # whatever a kernel says about tensors without values
        return 0, f"its forward says {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if watch.why:
        return 0, watch.why
    if [t._version for t in tensors] != versions:
        return 0, "its forward writes into its operands"
    if isinstance(made, Tensor):
        return 0, ""
    if isinstance(made, tuple) and made and all(isinstance(t, Tensor) for t in made):
        return len(made), ""
    return 0, "it returns something else than tensors"
