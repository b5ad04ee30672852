"""Arguments of exported operator calls in normal form, and the table of operators that are not kept as they are.

In: an operator and its arguments as the exporter wrote them. Out: every argument of the schema under its name, defaults filled,
tensors as `Ref`, sequences as tuples, torch constants as `TorchConst`, devices as None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hapx.errors import RANDOM_HINT, CaptureError, UnsupportedOperatorError
from hapx.graph.normalize_names import canonical, types, with_types
from hapx.ir import TorchConst, Value

# Checks of the exporter and of the user: nothing is computed.
ASSERTIONS = re.compile(r"aten\.(_assert|sym_constrain|_functional_assert|_debug|_print)")

# Same values as the first argument (a new tensor or the same one): the node vanishes.
IDENTITIES = frozenset({"aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default", "aten.lift.default", "aten.detach_.default"})

# Copies of values. Whether the exporter records them depends on strides, which differ between devices; they have no meaning where
# nothing is written in place and every view is a reshape.
_COPIES = frozenset({"aten.contiguous.default", "aten.clone.default"})

# What they give depends on how their operand lies in memory, which a plan does not know.
STRIDED = frozenset({"aten.as_strided.default", "aten.as_strided_copy.default"})

OUT = "out"  # the argument of an overload that writes its result there

_DROPOUTS = frozenset({"aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout"})

# Operators that update running statistics inside: (argument that says so, buffers).
STATEFUL: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "aten.batch_norm.default": ("training", ("running_mean", "running_var")),
    "aten.instance_norm.default": ("use_input_stats", ("running_mean", "running_var")),
}

# c10's numbers of the constants that occur as defaults.
_NUMBERED: Mapping[str, Mapping[int, Any]] = {
    "MemoryFormat": {0: torch.contiguous_format, 1: torch.preserve_format, 2: torch.channels_last, 3: torch.channels_last_3d},
    "ScalarType": {3: torch.int32, 4: torch.int64, 6: torch.float32, 7: torch.float64, 11: torch.bool},
    "Layout": {0: torch.strided},
}

_RANDOM = re.compile(r"\.(.*rand|.*dropout|.*bernoulli|.*normal(_functional)?$|.*multinomial|.*uniform|.*poisson|.*exponential|.*geometric|.*cauchy)")


def name_of(op: Any) -> str:
    """ "aten.linear.default"."""
    return str(op)


def base_of(op: Any) -> str:
    return name_of(op).rsplit(".", 1)[0]


def is_random(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags or bool(_RANDOM.match(op.name().replace("::", ".")[op.name().index("::") :]))


def bind(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of the schema by name, defaults filled in."""
    schema = op._schema.arguments
    bound: dict[str, Any] = {}
    for i, argument in enumerate(schema):
        if i < len(args) and not argument.kwarg_only:
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = _default(argument)
    return bound


def _default(argument: Any) -> Any:
    """The default of a schema's argument; torch constants are plain numbers there."""
    value = argument.default_value if argument.has_default_value() else None
    if isinstance(value, int) and (table := next((t for kind, t in _NUMBERED.items() if kind in str(argument.real_type)), None)):
        return table[value]
    return value


def is_identity(op: Any, bound: Mapping[str, Any]) -> bool:
    """Whether the call returns the values of its first argument. (Dropout that drops nothing is one.)"""
    if name_of(op) in IDENTITIES:
        return True
    if name_of(op) in _COPIES:
        # the schema's default is the number 0, torch.contiguous_format
        return bound["memory_format"] in (None, 0, torch.contiguous_format, torch.preserve_format)
    return base_of(op).removesuffix("_") in _DROPOUTS and (not bound["train"] or bound["p"] == 0)


def plain_value(value: Any, where: str, to_ref: Callable[[Any], Value | None]) -> Value:
    """An argument as data. `to_ref`: the Ref of a tensor argument, None for anything else."""
    if (ref := to_ref(value)) is not None:
        return ref
    if value is None or isinstance(value, bool | str | complex):
        return value
    if isinstance(value, torch.device):
        return None
    if isinstance(value, torch.dtype):
        return TorchConst("dtype", _short(value))
    if isinstance(value, torch.layout):
        return TorchConst("layout", _short(value))
    if isinstance(value, torch.memory_format):
        return TorchConst("memory_format", _short(value))
    if isinstance(value, int | torch.SymInt):
        return int(value)
    if isinstance(value, float | torch.SymFloat):
        return float(value)
    if isinstance(value, tuple | list):
        return tuple(plain_value(v, where, to_ref) for v in value)
    if isinstance(value, torch.Generator):
        raise CaptureError("an operator with its own random generator", where=where, hint="use the default generator")
    raise CaptureError(f"an operator has an argument of type {type(value).__name__}", where=where)


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


def device_arguments(op: torch._ops.OpOverload) -> frozenset[str]:
    """Names of the arguments that are devices."""
    return frozenset(a.name for a in op._schema.arguments if "Device" in str(a.type))


def written_arguments(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the arguments that the operator changes in place, by its schema."""
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def functional_twin(op: torch._ops.OpOverload, where: str) -> torch._ops.OpOverload:
    """The operator without the underscore, or without `out`. Raises UnsupportedOperatorError where there is none, or where it would be random."""
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    twin: torch._ops.OpOverload | None = None
    if written_arguments(op) == (OUT,):
        own = [kind for kind in types(op) if kind[0] != OUT]
        twin = next((o for overload in packet.overloads() if types(o := getattr(packet, overload)) == own), None)
    elif name.endswith("_") and packet is not None:
        # pow_.Scalar takes a tensor and a number, pow.Scalar a number and a tensor: the types decide
        twin = with_types(packet, op)
    if is_random(op) and "dropout" not in name:
        raise UnsupportedOperatorError(
            f"{name_of(op)} is random and has no rule",
            where=where,
            hint=RANDOM_HINT,
        )
    if twin is None or written_arguments(twin):
        raise UnsupportedOperatorError(
            f"{name_of(op)} writes into a tensor and has no form that makes a new one", where=where, hint="use an operator that makes a new tensor"
        )
    return canonical(twin)


def rebind(op: torch._ops.OpOverload, twin: torch._ops.OpOverload, bound: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator under the names that its twin has for them (dropout_ calls `self` what dropout calls `input`)."""
    names = [a.name for a in op._schema.arguments if not a.kwarg_only]
    own = [a.name for a in twin._schema.arguments if not a.kwarg_only]
    renamed = dict(zip(names, own, strict=False))
    return bind(twin, (), {renamed.get(k, k): v for k, v in bound.items() if k != OUT or k in own})


def target_dtype(op: torch._ops.OpOverload, bound: Mapping[str, Any]) -> torch.dtype | None:
    """For `x.to(...)` in any of its forms: the dtype asked for (that of x if only a device was), None for other operators."""
    if base_of(op) == "aten.type_as":
        return dtype_of(bound["other"])
    if base_of(op) != "aten.to" or name_of(op) == "aten.to.dtype":
        return None
    if name_of(op) == "aten.to.other":
        return dtype_of(bound["other"])
    if bound.get("layout") not in (None, torch.strided):
        return None
    return bound.get("dtype") or dtype_of(bound["self"])


def dtype_of(value: Any) -> torch.dtype:
    """Of a tensor, or of what a slot holds."""
    fake = value if isinstance(value, Tensor) else value.fake
    assert isinstance(fake, Tensor)
    return fake.dtype
