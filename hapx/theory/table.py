"""The operator table as markdown, for the documentation.

In: the registry. Out: one row per entry: its operators, what may be split, over what it sums, through which groups of operands Partial
passes, the composites its local body may call, and how many overloads are audited. Nothing is said that the entries do not say themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hapx.theory.registry import OpEntry, sentence


def operators_table(registry: Mapping[str, OpEntry], numbers: Mapping[int, int]) -> str:
    """A markdown table, entries in the order in which they were registered. `numbers`: audited overloads by the id of the entry."""
    entries = {id(e): e for e in registry.values()}.values()
    lines = ["| operators | may be split | sums over | linear in | composites | overloads |", "|---|---|---|---|---|--:|"]
    lines += [f"| {_operators(e)} | {_splits(e)} | {_cell(e.sum)} | {_cell(e.linear)} | {_code(e.composites)} | {numbers[id(e)]} |" for e in entries]
    return "\n".join(lines) + "\n"


def _operators(entry: OpEntry) -> str:
    return _code(t.removeprefix("aten.") for t in entry.targets)


def _splits(entry: OpEntry) -> str:
    if entry.reason:
        return f"nothing: {entry.reason}"
    if "->" in entry.signature:
        return f"`{entry.signature}`"
    return entry.signature or sentence(entry.rules)


def _code(names: Iterable[str]) -> str:
    return " ".join(f"`{n}`" for n in names)


def _cell(text: str) -> str:
    return text.replace("|", "or")
