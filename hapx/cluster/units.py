"""Numbers with units: "10.4 Gbit/s", "24 GiB", "50 us", "35 TFLOP/s", or plain SI numbers.

In: what a YAML file holds (a number, or text). Out: a float in B/s, B, s or FLOP/s. Invariant: `parse(show(x)) == x` up to the digits shown.
Bits are spelled out ("Gbit/s"), because "Gb" and "GB" are too easily confused. YAML 1.1 reads `35e12` as text; it is a number here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal

Quantity = Literal["bandwidth", "size", "time", "flops", "number"]

_SI = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{p}B": f for p, f in (_SI | _BINARY).items() if p != "P"}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}

UNITS: Mapping[Quantity, Mapping[str, float]] = {
    "bandwidth": {f"{u}/s": f for u, f in _BYTES.items()} | {f"{p}bit/s": f / 8 for p, f in _SI.items() if p != "P"},
    "size": _BYTES,
    "time": _TIMES,
    "flops": {f"{p}{u}": f for p, f in _SI.items() for u in ("FLOP/s", "FLOPS", "FLOPs")},
    "number": {},
}

ALLOWED: Mapping[Quantity, str] = {
    "bandwidth": "a number of B/s, or a number with a unit: B/s, kB/s, MB/s, GB/s, TB/s, MiB/s, GiB/s, bit/s, Mbit/s, Gbit/s, ...",
    "size": "a number of bytes, or a number with a unit: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB",
    "time": "a number of seconds, or a number with a unit: s, ms, us, ns",
    "flops": "a number of FLOP/s such as 35e12, or a number with a unit: GFLOP/s, TFLOP/s, PFLOP/s",
    "number": "a number",
}

# Units in which numbers are shown to people, largest first.
_SHOWN: Mapping[Quantity, tuple[str, ...]] = {
    "bandwidth": ("TB/s", "GB/s", "MB/s", "kB/s", "B/s"),
    "size": ("TiB", "GiB", "MiB", "KiB", "B"),
    "time": ("s", "ms", "us", "ns"),
    "flops": ("PFLOP/s", "TFLOP/s", "GFLOP/s", "MFLOP/s", "FLOP/s"),
}

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\D.*?)?\s*", re.DOTALL)


class UnitError(ValueError):
    """Text or a value that is not a quantity of the wanted kind. `what` says why, `allowed` what would be one."""

    def __init__(self, what: str, allowed: str):
        super().__init__(f"{what}; allowed: {allowed}")
        self.what, self.allowed = what, allowed


def parse(value: object, quantity: Quantity) -> float:
    """`value` in SI units, finite. Raises UnitError for another type, unknown or wrong units, and numbers that are not finite."""
    allowed, factor = ALLOWED[quantity], 1.0
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        if match is None:
            raise UnitError("not a number" + (" with a unit" if UNITS[quantity] else ""), allowed)
        unit = match[2]
        if unit is not None and unit not in UNITS[quantity]:
            raise UnitError(_unit_fault(unit, quantity), allowed)
        factor = 1.0 if unit is None else UNITS[quantity][unit]
        value = float(match[1])
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnitError(f"wrong type: {type_name(value)}", allowed)
    try:
        # dividing by 1e6 rounds once, multiplying with 1e-6 twice: "50 us" is exactly 5e-5
        number = float(value) * factor if factor >= 1 else float(value) / round(1 / factor)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UnitError("not a finite number", allowed)
    return number


def _unit_fault(unit: str, quantity: Quantity) -> str:
    other = next((q for q, units in UNITS.items() if unit in units), None)
    if other is not None and UNITS[quantity]:
        return f"wrong unit {unit!r}, a unit of {other}"
    return f"unknown unit {unit!r}" if UNITS[quantity] else f"no unit expected, got {unit!r}"


def type_name(value: object) -> str:
    """The type of a YAML value, in YAML's words."""
    names = {bool: "true/false", int: "a whole number", float: "a number", str: "text", list: "a list", tuple: "a list", dict: "a mapping"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def show(number: float, quantity: Quantity, digits: int = 3) -> str:
    """A number as people write it: `show(1.3e9, "bandwidth") == "1.3 GB/s"`."""
    units = _SHOWN[quantity]
    unit = next((u for u in units if abs(number) >= UNITS[quantity][u] * (1 - 1e-9)), units[-1])
    scaled = number / UNITS[quantity][unit]
    if abs(scaled) >= 10**digits:  # never an exponent: 1023 KiB, not 1.02e+03 KiB
        return f"{scaled:.0f} {unit}"
    return f"{scaled:.{digits}g} {unit}"
