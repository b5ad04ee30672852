"""Quantities with units."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapx.cluster.units import UNITS, Quantity, UnitError, parse, show


@pytest.mark.parametrize(
    ("text", "quantity", "number"),
    [
        ("10.4 Gbit/s", "bandwidth", 1.3e9),
        ("150 GB/s", "bandwidth", 150e9),
        ("150GB/s", "bandwidth", 150e9),
        ("1 MiB/s", "bandwidth", 2**20),
        ("24 GiB", "size", 24 * 2**30),
        ("24 GB", "size", 24e9),
        ("50 us", "time", 50e-6),
        ("50 µs", "time", 50e-6),
        (" 1.5 ms ", "time", 1.5e-3),
        ("35e12", "flops", 35e12),
        ("35 TFLOP/s", "flops", 35e12),
        ("35 TFLOPS", "flops", 35e12),
        (".5", "number", 0.5),
        (7, "size", 7.0),
        (0.25, "number", 0.25),
        ("1_000", "size", 1000.0),
    ],
)
def test_known_values(text: Any, quantity: Quantity, number: float) -> None:
    assert parse(text, quantity) == number


@pytest.mark.parametrize(
    ("value", "quantity", "told"),
    [
        ("fast", "bandwidth", "not a number with a unit"),
        ("", "size", "not a number"),
        ("1 gb/s", "bandwidth", "unknown unit 'gb/s'"),
        ("1 GB", "bandwidth", "wrong unit 'GB', a unit of size"),
        ("1 2 GB", "size", "unknown unit"),
        ("1 s", "number", "no unit expected"),
        (True, "size", "wrong type: true/false"),
        (None, "time", "wrong type: nothing"),
        ([1], "time", "wrong type: a list"),
        (float("nan"), "time", "finite"),
        ("1e999", "flops", "finite"),
        (10**400, "flops", "finite"),
        ("nan", "time", "not a number"),
    ],
)
def test_faults(value: Any, quantity: Quantity, told: str) -> None:
    with pytest.raises(UnitError, match="allowed:") as error:
        parse(value, quantity)
    assert told in error.value.what
    assert error.value.allowed


QUANTITIES = [q for q in UNITS if UNITS[q]]


@given(quantity=st.sampled_from(QUANTITIES), mantissa=st.floats(1e-3, 999.0), data=st.data())
def test_unit_is_a_factor(quantity: Quantity, mantissa: float, data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from(sorted(UNITS[quantity])))
    assert parse(f"{mantissa!r} {unit}", quantity) == pytest.approx(mantissa * UNITS[quantity][unit], rel=1e-15)


@given(quantity=st.sampled_from(QUANTITIES), number=st.floats(1e-9, 1e15))
def test_shown_numbers_read_back(quantity: Quantity, number: float) -> None:
    assert math.isclose(parse(show(number, quantity, digits=6), quantity), number, rel_tol=1e-5)


@given(value=st.text(max_size=12) | st.floats() | st.integers(), quantity=st.sampled_from(list(UNITS)))
def test_total(value: Any, quantity: Quantity) -> None:
    try:
        assert math.isfinite(parse(value, quantity))
    except UnitError as error:
        assert error.what


@pytest.mark.parametrize(
    ("number", "quantity", "text"),
    [
        (1.3e9, "bandwidth", "1.3 GB/s"),
        (2**34, "size", "16 GiB"),
        (1023, "size", "1023 B"),
        (5e-5, "time", "50 us"),
        (0.0, "time", "0 ns"),
        (9.6e10, "flops", "96 GFLOP/s"),
    ],
)
def test_shown(number: float, quantity: Quantity, text: str) -> None:
    assert show(number, quantity) == text
