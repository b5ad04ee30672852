"""Repeated modules as one: "blocks.0.up", "blocks.1.up", ... that are alike are "blocks.0-11.up".

In: module paths with what must be equal for two of them to be one. Out: folded paths, in the order of their first members.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hapx.report.words import ranges_text

Group = tuple[str, tuple[int, ...]]


def fold(rows: Sequence[tuple[str, Hashable]]) -> list[Group]:
    """Rows (path, what they are like) that differ in one number of their path only, number by number, are one: (folded path, indices of its members).
    Rows with the same path that are alike are one as well."""
    alike = [like for _, like in rows]
    groups: dict[tuple[str, Hashable], list[int]] = {}
    for i, (path, like) in enumerate(rows):
        groups.setdefault((path, like), []).append(i)
    found: list[Group] = [(path, tuple(members)) for (path, _), members in groups.items()]
    for depth in range(max((path.count(".") + 1 for path, _ in rows), default=0)):
        found = _fold_at(found, alike, depth)
    return found


def _fold_at(rows: list[Group], alike: Sequence[Hashable], depth: int) -> list[Group]:
    groups: dict[tuple[object, ...], list[Group]] = {}
    for path, members in rows:
        parts = path.split(".")
        numbered = depth < len(parts) and parts[depth].isdigit()
        pattern = (*parts[:depth], None, *parts[depth + 1 :]) if numbered else tuple(parts)
        groups.setdefault((pattern, alike[members[0]]), []).append((path, members))
    merged = []
    for group in groups.values():
        parts = group[0][0].split(".")
        if len(group) > 1:
            parts[depth] = ranges_text(int(path.split(".")[depth]) for path, _ in group)
        merged.append((".".join(parts), tuple(sorted(m for _, members in group for m in members))))
    return merged
