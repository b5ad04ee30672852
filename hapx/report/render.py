"""Tables as plain text: ASCII rules, no colours, at most 120 columns, no trailing blanks."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.box import Box
from rich.console import Console
from rich.table import Table

WIDTH = 120
RULED = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def render(table: Table) -> str:
    """A rich table as plain text without trailing blanks."""
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None, legacy_windows=False, _environ={}).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def new_table(*columns: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """`right`: columns of numbers; `whole`: columns whose text, like numbers, is not broken into lines."""
    table = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="none")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=column in whole or column in right)
    return table
