"""The leaves of a cluster file: single values, checked and converted by pydantic validators.

In: what YAML gives. Out: a value in SI units, or a fault that says what is wrong, what is allowed, and where inside the value. Invariant:
a bool is never a number, a number never text, and every number is positive and finite.
"""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from hapx.cluster.catalogue import suggest
from hapx.cluster.units import Quantity, UnitError, parse, type_name

MAX_DEVICES = 65536
MESHES = "auto, flat, two-level, or sizes such as 2x4"
_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp64")


def fault(what: str, allowed: str | None = None, hint: str | None = None, key: str | int | None = None) -> PydanticCustomError:
    """A fault of the value being validated, or of its entry `key`."""
    return PydanticCustomError("cluster", "fault", {"what": what, "allowed": allowed, "hint": hint, "key": key})


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _quantity(quantity: Quantity, most: float = math.inf) -> BeforeValidator:
    """A positive number, with or without a unit."""

    def check(value: object) -> float:
        try:
            number = parse(value, quantity)
        except UnitError as error:
            raise fault(f"{error.what} in {shown(value)}" if isinstance(value, str) else f"{error.what} ({shown(value)})", error.allowed) from None
        if number <= 0:
            raise fault(f"{shown(value)} is not positive", "a number greater than 0")
        if number > most:
            raise fault(f"{shown(value)} is too large", f"a number greater than 0 and at most {most:g}")
        return number

    return BeforeValidator(check)


def _bytes(value: float) -> int:
    if round(value) < 1:
        raise fault(f"{value:g} bytes is less than one", "at least 1 byte")
    return round(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        hint = "put it in quotes" if value is not None and not isinstance(value, list | dict) else None
        raise fault(f"wrong type: {type_name(value)} ({shown(value)})", "text", hint)
    if not value.strip():
        raise fault("empty text", "a name")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise fault(f"wrong type: {type_name(value)} ({shown(value)})", "a whole number, 1 or more")
    if value < 1:
        raise fault(f"{value} is not positive", "a whole number, 1 or more")
    if value > MAX_DEVICES:
        raise fault(f"{shown(value)} is too many", f"at most {MAX_DEVICES} devices")
    return value


def _devices(value: object) -> int | tuple[str, ...]:
    """A number of devices, or a list of type names."""
    if not isinstance(value, list | tuple):
        if isinstance(value, bool) or not isinstance(value, int):
            raise fault(f"wrong type: {type_name(value)} ({shown(value)})", "a whole number, or a list of device types")
        return _whole(value)
    if not value:
        raise fault("empty list", "at least one device type")
    for i, name in enumerate(value):
        if not isinstance(name, str):
            raise fault(f"wrong type: {type_name(name)} ({shown(name)})", "the name of a device type", key=i)
    return tuple(value)


def _flops(value: object) -> object:
    """One number means fp32; else a mapping from dtypes, fp32 among them."""
    if not isinstance(value, dict):
        return {"fp32": value}
    for key in value:
        if key not in _DTYPES:
            raise fault(f"unknown key {shown(key)}", ", ".join(_DTYPES), suggest(str(key), _DTYPES))
    return value


def _need_fp32(value: dict[str, float]) -> dict[str, float]:
    if "fp32" not in value:
        raise fault("missing field 'fp32'", "one number (fp32), or a mapping with fp32 and others of " + ", ".join(_DTYPES[1:]))
    return value


def _mesh(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"auto|flat|two-level|[1-9]\d{0,5}(x[1-9]\d{0,5})+", value):
        kind = "unknown mesh" if isinstance(value, str) else f"wrong type: {type_name(value)},"
        raise fault(f"{kind} {shown(value)}", MESHES)
    return value


def _machines(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise fault(f"wrong type: {type_name(value)} ({shown(value)})", "a list of machines")
    if not value:
        raise fault("empty list", "at least one machine")
    return list(value)


def _named(value: object) -> object:
    """A mapping whose keys are names."""
    if not isinstance(value, dict):
        raise fault(f"wrong type: {type_name(value)} ({shown(value)})", "a mapping from names of device types")
    for key in value:
        if not isinstance(key, str):
            raise fault(f"wrong type of key: {type_name(key)} ({shown(key)})", "the name of a device type", "put it in quotes")
    return value


Text = Annotated[str, BeforeValidator(_text)]
Count = Annotated[int, BeforeValidator(_whole)]
Bandwidth = Annotated[float, _quantity("bandwidth")]
Seconds = Annotated[float, _quantity("time")]
Bytes = Annotated[int, BeforeValidator(_bytes), _quantity("size")]
Share = Annotated[float, _quantity("number", most=1.0)]
Peaks = Annotated[dict[str, Annotated[float, _quantity("flops")]], BeforeValidator(_flops)]
PeaksWithFp32 = Annotated[Peaks, BeforeValidator(_need_fp32), BeforeValidator(_flops)]
Devices = Annotated[int | tuple[str, ...], BeforeValidator(_devices)]
Mesh = Annotated[str, BeforeValidator(_mesh)]
NAMED, FILLED = BeforeValidator(_named), BeforeValidator(_machines)  # for mappings from names, and for the list of machines
