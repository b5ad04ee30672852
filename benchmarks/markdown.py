"""Tables of benchmarks as Markdown, for the pages in docs/."""

from __future__ import annotations

from rich.table import Table


def markdown(table: Table) -> str:
    """A table of texts as Markdown."""
    columns = [list(c.cells) for c in table.columns]
    lines = ["| " + " | ".join(str(c.header) for c in table.columns) + " |"]
    lines.append("|" + "|".join("--:" if c.justify == "right" else "---" for c in table.columns) + "|")
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in zip(*columns, strict=True)]
    return "\n".join([f"**{table.title}**", "", *lines])
