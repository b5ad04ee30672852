"""The operator table for the documentation."""

from __future__ import annotations

import hapx.theory.ops  # noqa: F401  (fills the registry)
from hapx.theory.registry import REGISTRY
from hapx.theory.table import operators_table

NUMBERS = {id(e): 7 for e in REGISTRY.values()}


def test_every_operator_is_in_the_table_once() -> None:
    table = operators_table(REGISTRY, NUMBERS)
    shown = [name for row in table.splitlines()[2:] for name in row.split(" | ")[0].replace("|", "").replace("`", "").split()]
    assert sorted(shown) == sorted(t.removeprefix("aten.") for t in REGISTRY)


def test_rows_say_what_the_entries_say() -> None:
    rows = {r.split("`")[1]: r for r in operators_table(REGISTRY, NUMBERS).splitlines()[2:]}
    assert rows["linear"] == "| `linear` | `input: * k, weight: n k, bias: n -> * n` | k | input bias or weight bias | `hapx.linear_sfb` | 7 |"
    assert "nothing: made whole on every device" in rows["arange.default"]
    assert all(r.count("|") == 7 for r in rows.values()), "no cell breaks the table"
    assert all(r.split(" | ")[1].strip() for r in rows.values()), "every row says what may be split"
