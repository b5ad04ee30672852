"""Calls of torch.autograd.Functions while a model is captured: tracing would go through their forward and lose their backward, without a word.

In: the user's calls. Out: calls of operators that have both (`hapx.functions`); or, where one cannot be made, the reason.

`apply` is a method of torch's own (in C++ from torch 2.14 on), which the user's code may have taken before (`swish = Swish.apply`). Whatever it
is, it first makes a context, then calls `forward`. So the context's constructor is where a call is seen, and for that one call `forward` is another.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function, _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from hapx.functions import kinds_of, lies_open, operator_of, run

LOST = "its backward would be lost"

_here = threading.local()  # `device`: the kind of device for which this thread captures


@contextmanager
def functions_as_operators(device: str, recorder: TorchFunctionMode, refuse: Callable[[str, str], None]) -> Iterator[None]:
    """Inside, this thread calls operators instead; one thread at a time. recorder: of calls, which does not look into operators. refuse: gets the
    name of what cannot be one, and why; then it runs as it is."""
    calls: list[_Call] = []
    _here.device, _here.recorder, _here.refuse, _here.calls = device, recorder, refuse, calls
    BackwardCFunction.__init__ = _begun  # type: ignore[method-assign]
    try:
        yield
    finally:
        del BackwardCFunction.__init__
        del _here.device, _here.recorder, _here.refuse, _here.calls
        for call in reversed(calls):
            call.give_back(*call.own)  # where an error has ended it


def _begun(context: BackwardCFunction) -> None:
    """The constructor of a call's context."""
    if not hasattr(_here, "device") or sys._getframe(1).f_code is run.__code__ or torch._C._are_functorch_transforms_active():
        return
    if _here.recorder in _get_current_function_mode_stack():  # else it is a part of an operator
        _here.calls.append(_Call(context._forward_cls))  # type: ignore[attr-defined]


class _Call:
    """One call, which runs an operator instead of the class's own `forward`. Other threads that call the class meanwhile get its own."""

    def __init__(self, function: type[Function]):
        self.function = function
        self.gradients = torch.is_grad_enabled()  # which `apply` turns off before it calls `forward`
        self.apart = function.setup_context is not _SingleLevelFunction.setup_context  # `forward` has no context
        self.usual = function.forward, function.setup_context
        self.runs_operator = False
        others = {"forward": self.forward, "setup_context": self.setup_context} if self.apart else {"forward": self.forward}
        self.own = {name: vars(function).get(name) for name in others}  # None: inherited
        for name, other in others.items():
            setattr(function, name, staticmethod(other))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward, _ = self.usual
        if not hasattr(_here, "device"):
            return forward(*args, **kwargs)
        self.give_back("forward")
        given = args if self.apart else args[1:]
        kinds, outputs = kinds_of(given), 0
        why = _reason(self.function, kinds) if not kwargs else "it has arguments by name"
        if not why:
            outputs, why = _outputs(self.function, given)
        if why or kinds is None:
            _here.refuse(self.function.__name__, why)
            return forward(*args, **kwargs)
        self.runs_operator = True
        with _gradients(self.gradients):
            return operator_of(self.function, kinds, outputs)(*(a for a in given if a is not None))

    def setup_context(self, context: Any, inputs: Any, output: Any) -> None:
        if hasattr(_here, "device"):
            self.give_back("setup_context")
            if self.runs_operator:  # which makes its own
                return
        _, setup_context = self.usual
        setup_context(context, inputs, output)

    def give_back(self, *names: str) -> None:
        """Its own methods to the class."""
        for name in names:
            own = self.own.pop(name)
            if own is not None:
                setattr(self.function, name, own)
            else:
                delattr(self.function, name)


@contextmanager
def _gradients(enabled: bool) -> Iterator[None]:
    """With gradients or without, which the exporter does not see: nor did it see `apply`."""
    before = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(before)


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
