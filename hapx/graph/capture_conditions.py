"""What a captured program took for constant: dtypes and arguments of the call that are no tensors, flags and plain attributes of the modules.

In: a module and a call. Out: conditions, by name (`Watch`); `Seen` knows under which of them each program is known to be
the model's. Programs are told apart by mode, shapes and autocast only (`hapx.plan.ProgramKey`): a call under other conditions is captured again and
compared before it is run, so that it never runs a program that computes something else.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hapx.errors import PlanError
from hapx.graph.capture_inputs import Inputs
from hapx.plan import ProgramKey
from hapx.warnings import HapWarning, warn

Conditions = dict[str, Any]


class UnreadAttributeWarning(HapWarning):
    """An attribute of the model that changes often, without effect, is not looked at any more."""


PLAIN = (bool, int, float, str, type(None), torch.dtype)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
_CONTAINERS = frozenset({dict, OrderedDict, set})
ENOUGH = 3  # times that an attribute changed and the program did not: it is not looked at any more


class Watch:
    """The conditions of one module at every call: as long as nothing that they are read from is another object, the same answer again."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._modules: list[_Untouched] = []
        self._of_module: Conditions = {}
        self._of_call: Conditions = {}
        self._found: Conditions = {}

    def conditions(self, call: Inputs, with_loss_fn: bool = False) -> Conditions:
        """By what error messages call them. with_loss_fn: as in `bind_inputs`."""
        of_call = _of_call(self.module, call, with_loss_fn)
        untouched = bool(self._modules) and all(m.holds() for m in self._modules)
        if not untouched:
            self._of_module, self._modules = _of_module(self.module), [_Untouched(m) for m in self.module.modules()]
        if not untouched or of_call != self._of_call:
            self._of_call, self._found = of_call, of_call | self._of_module
        return self._found


def _of_call(module: nn.Module, call: Inputs, with_loss_fn: bool) -> Conditions:
    found: Conditions = {f"the dtype of input {name!r}": t.dtype for name, t in zip(call.names, call.tensors, strict=True)}
    positional, keyword, *targets = call.args if with_loss_fn else (call.args, call.kwargs)
    named = dict(zip(inspect.signature(module.forward).parameters, positional, strict=False)) if positional else {}
    given = {**named, **keyword, **{f"target {i}": t for i, t in enumerate(targets)}}
    return found | {f"argument {name}": value for name, value in _leaves(given)}


def _of_module(module: nn.Module) -> Conditions:
    found: Conditions = {}
    for name, m in module.named_modules():
        own = vars(m)
        found[f"module {name!r}"] = _kind(m)
        prefix = f"{name}." if name else ""
        for key, value in own.items():
            if type(value) in _CONTAINERS:  # most of them
                continue
            if isinstance(value, PLAIN):
                found[prefix + key] = value
            elif isinstance(value, Tensor):
                found[prefix + key] = _state(value)
    return found | {f"{name}.requires_grad": p.requires_grad for name, p in module.named_parameters()}


def _state(t: Tensor) -> tuple[int, int]:
    """Which tensor it is, and how often it was written."""
    return id(t), 0 if t.is_inference() else t._version


class _Untouched:
    """What `_of_module` has read of one module. Tensors are not kept alive. (This runs at every call, for every module.)"""

    def __init__(self, module: nn.Module):
        self.module, self.type, own = module, type(module), vars(module)
        self.number = len(own)
        others = [name for name, value in own.items() if not isinstance(value, Tensor)]  # never less than what nn.Module itself has
        self.read, self.values = operator.itemgetter(*others), tuple(own[name] for name in others)
        self.tensors = [(name, _state(value)) for name, value in own.items() if isinstance(value, Tensor)]
        self.hooks = [own[name] for name in HOOKS]
        self.inside = tuple(map(len, self.hooks)), tuple(module._modules.items()), _parameters(module)

    def holds(self) -> bool:
        module, own = self.module, vars(self.module)
        try:
            if len(own) != self.number or not all(map(operator.is_, self.read(own), self.values)) or type(module) is not self.type:
                return False
            if any(not isinstance(own[name], Tensor) or _state(own[name]) != state for name, state in self.tensors):
                return False
        except KeyError:
            return False
        return (tuple(map(len, self.hooks)), tuple(module._modules.items()), _parameters(module)) == self.inside


def _parameters(module: nn.Module) -> list[tuple[str, int, bool]]:
    return [(name, id(p), p is not None and p.requires_grad) for name, p in module._parameters.items()]


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """What must not change: its class, and how many hooks it has."""
    return type(module), *[len(vars(module)[hooks]) for hooks in HOOKS]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values in arguments."""
    if isinstance(value, Mapping):
        for key, v in value.items():
            yield from _leaves(v, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple | list):
        for i, v in enumerate(value):
            yield from _leaves(v, f"{path}.{i}" if path else str(i))
    elif isinstance(value, PLAIN):
        yield path, value


class Seen:
    """Per program, the conditions under which its graph is the model's."""

    def __init__(self) -> None:
        self._known: dict[ProgramKey, list[Conditions]] = {}
        self._last: Conditions | None = None
        self._unread: Counter[str] = Counter()  # how often a name changed without effect

    def __contains__(self, key: ProgramKey) -> bool:
        """Whether any are known."""
        return key in self._known

    def changed(self, key: ProgramKey, now: Conditions) -> tuple[str, ...]:
        """What differs from the last conditions that are known, if these are not; of a program of which none are known, nothing."""
        known = self._known.get(key, [])
        if not known or now in known:
            return ()
        return tuple(sorted(self._differing(known[-1], now)))

    def news(self, now: Conditions) -> str:
        """For the ranks to agree on: what differs from the last conditions that were accepted, and whether these were ever."""
        if self._last is None or now == self._last:
            return ""
        fresh = not any(now in known for known in self._known.values())
        return f" with {'another' if fresh else 'once more the'} {', '.join(sorted(self._differing(self._last, now)))}"

    def accept(self, key: ProgramKey, now: Conditions) -> None:
        """The program is the model's under these, too."""
        known = self._known.setdefault(key, [])
        if known and now not in known:
            for name in self._differing(known[-1], now):
                if not _is_attribute(name):
                    continue
                self._unread[name] += 1
                if self._unread[name] == ENOUGH:
                    warn(
                        f"{name} changed {ENOUGH} times without changing what the model computes; it is not looked at any more",
                        UnreadAttributeWarning,
                    )
        self._known[key], self._last = [*known[1 - 2 * ENOUGH :], now], now

    def says(self, key: ProgramKey, now: Conditions) -> str:
        """What differs, with what it was and is."""
        before = self._known[key][-1]
        told = []
        for name in sorted(self._differing(before, now))[:3]:
            was, there = (_told(name, values) for values in (before, now))
            told.append(f"{name} was {was} and is {there}" if was != there else f"{name} is another one")
        return "; ".join(told)

    def _differing(self, before: Conditions, now: Conditions) -> set[str]:
        names = {n for n in before.keys() | now.keys() if before.get(n, _told) != now.get(n, _told)}
        return {n for n in names if self._unread[n] < ENOUGH}


def _is_attribute(name: str) -> bool:
    """Whether it is an attribute of the user's: what is part of the call, flags and modules are always looked at."""
    return not name.startswith(("argument ", "the dtype ", "module ")) and name.rpartition(".")[2] not in ("training", "requires_grad")


def _told(name: str, values: Conditions) -> str:
    if name not in values:
        return "left out"
    value = values[name]
    return str(value[0].__name__ if isinstance(value, tuple) and isinstance(value[0], type) else value)


def renew(twin: nn.Module, module: nn.Module) -> None:
    """Gives a copy of the module the flags and attributes that the module has now. Raises PlanError where its modules are others."""
    modules, others = dict(module.named_modules()), dict(twin.named_modules())
    if {n: _kind(m) for n, m in modules.items()} != {n: _kind(m) for n, m in others.items()}:
        raise PlanError("submodules or hooks of the model were changed", where=type(module).__name__, hint="change them first, then call hapx.HAP")
    for name, m in modules.items():
        vars(others[name]).update({k: v for k, v in vars(m).items() if isinstance(v, (*PLAIN, Tensor))})
    for name, p in module.named_parameters():
        twin.get_parameter(name).requires_grad_(p.requires_grad)
