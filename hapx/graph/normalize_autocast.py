"""What autocast does to one operator call, found by asking it, and the call without autocast that does the same.

In: an operator and its arguments, the dtype of the enabled autocast. Out: the arguments, values cast by nodes of their own; and which
parameters the call itself casts (they are stored, moved and synchronised in their own dtype). Autocast's lists of operators differ between
devices and versions of torch, and operators that are composed of others (einsum, attention) are in none of them; so each operator is run
twice on fakes of one dtype,

    all arguments float32, result in the lower dtype: it casts down;      all arguments in the lower dtype, result float32: it casts up.

Invariant: the call without autocast, on arguments cast so, has results of the dtypes that it has under autocast (or the call is refused).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hapx.errors import CaptureError
from hapx.graph.normalize_args import name_of
from hapx.graph.normalize_flatten import Call, Slot

# what autocast casts: never float64, integers or booleans
CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})

CAST = "aten.to.dtype"

Values = Mapping[str, Any]
Casts = tuple[tuple[str, str], ...]


class Caster:
    """Makes the casts of autocast explicit.

    Args:
        device: type of device, "cpu" or "cuda".
        cast: emits a cast (call whose place it takes, source, dtype, slot of the result).
        of_parameter: whether a slot holds a parameter or a view of one.
    """

    def __init__(self, device: str, cast: Callable[[Call, Slot, torch.dtype, Slot], None], of_parameter: Callable[[Slot], bool]):
        self.device, self._emit, self._of_parameter = device, cast, of_parameter
        self._policies = Policies(device)
        self._made: dict[tuple[int | None, str, torch.dtype], Slot] = {}

    def arguments(self, op: torch._ops.OpOverload, bound: Values, call: Call) -> tuple[Values, Casts]:
        """The arguments as autocast gives them to the call; parameters, by name, that the call is to cast. Raises CaptureError where casts
        do not give what autocast gives."""
        if call.mark.autocast is None or name_of(op) == CAST:
            return bound, ()
        lower, values = getattr(torch, call.mark.autocast), fakes(bound)
        target = self._policies.target(op, values, lower)
        casts: dict[str, str] = {}
        changed = bound if target is None else {k: self._argument(v, target, call, casts) for k, v in bound.items()}
        found = tuple(casts.items())
        if self._policies.results(op, values, lower) != tuple(t.dtype for t in tensors_in(call_with(op, fakes(changed, found)))):
            raise CaptureError(
                f"what autocast does to {name_of(op)} cannot be expressed by casts of its arguments",
                where=call.where,
                hint="call it with autocast disabled",
            )
        return changed, found

    def _argument(self, value: Any, target: torch.dtype, call: Call, casts: dict[str, str]) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self._argument(v, target, call, casts) for v in value)
        if not isinstance(value, Slot) or value.fake is None or value.fake.dtype == target or value.fake.dtype not in CASTABLE:
            return value
        if self._of_parameter(value):
            casts[value.name] = str(target).removeprefix("torch.")
            return value
        key = (call.mark.checkpoint, value.name, target)
        if key not in self._made:
            twin = Slot()
            self._emit(replace(call, base="to", written=None), value, target, twin)
            self._made[key] = twin
        return self._made[key]


class Policies:
    """What autocast on a type of device does, per operator. Answers are kept."""

    def __init__(self, device: str):
        self.device = device
        self._known: dict[tuple[object, ...], torch.dtype | None] = {}

    def target(self, op: torch._ops.OpOverload, values: Values, lower: torch.dtype) -> torch.dtype | None:
        """The dtype that the castable arguments of `op(**values)` get under autocast to `lower`."""
        dtypes = {t.dtype for t in tensors_in(tuple(values.values())) if t.dtype in CASTABLE}
        if not dtypes:
            return None
        key = (op, lower, len(dtypes) > 1, *(_asked(v) for v in values.values()))  # an einsum is a product or not by its equation and sizes
        if key not in self._known:
            self._known[key] = self._ask(op, values, lower)
        found = self._known[key]
        if found is None and len(dtypes) > 1 and self._dtypes(op, values, None) is None:
            return torch.float32  # operators that take one dtype only get the widest one
        return found

    def results(self, op: torch._ops.OpOverload, values: Values, lower: torch.dtype) -> tuple[torch.dtype, ...] | None:
        """The dtypes of what the call returns under autocast, None if it fails."""
        return self._dtypes(op, values, lower)

    def _ask(self, op: torch._ops.OpOverload, values: Values, lower: torch.dtype) -> torch.dtype | None:
        for given, wanted in ((torch.float32, lower), (lower, torch.float32)):
            same = {k: cast_values(v, given) for k, v in values.items()}
            under, plain = self._dtypes(op, same, lower), self._dtypes(op, same, None)
            if under is not None and under != plain and wanted in under:
                return wanted
        return None

    def _dtypes(self, op: torch._ops.OpOverload, values: Values, lower: torch.dtype | None) -> tuple[torch.dtype, ...] | None:
        try:
            with torch.autocast(self.device, dtype=lower or torch.bfloat16, enabled=lower is not None, cache_enabled=False):
                result = call_with(op, values)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None
        return tuple(t.dtype for t in tensors_in(result))


def _asked(value: Any) -> object:
    """What of an argument the policy of an operator may depend on: all but the numbers in tensors, and their dtypes."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return tuple(map(_asked, value)) if isinstance(value, tuple | list) else value


def call_with(op: torch._ops.OpOverload, values: Values) -> Any:
    """The operator on arguments by name, all of its schema."""
    keyword_only = {a.name for a in op._schema.arguments if a.kwarg_only}
    return op(*(v for k, v in values.items() if k not in keyword_only), **{k: v for k, v in values.items() if k in keyword_only})


def fakes(value: Any, casts: Casts = ()) -> Any:
    """The value with the fake tensor of every slot in its place, some of them cast."""
    if isinstance(value, Slot):
        dtype = dict(casts).get(value.name)
        assert value.fake is not None
        return value.fake if dtype is None else value.fake.to(getattr(torch, dtype))
    if isinstance(value, Mapping):
        return {k: fakes(v, casts) for k, v in value.items()}
    return type(value)(fakes(v, casts) for v in value) if isinstance(value, tuple | list) else value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, tuple | list) else []


def cast_values(value: Any, dtype: torch.dtype) -> Any:
    """The value with every castable tensor in `dtype`."""
    return map_tensors(value, lambda t: t.to(dtype) if t.dtype in CASTABLE else t)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(map_tensors(v, change) for v in value) if isinstance(value, tuple | list) else value
