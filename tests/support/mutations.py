"""Plans that somebody changed: every single change of the JSON of a plan, as the codec writes it.

In: encoded data. Out: `changes`, one (what was changed, the changed data) after the other. A change is of one value in the table: a number, a
word, a reference to another object, or a list or mapping that loses or doubles a member. Objects that are used in several
places are changed everywhere, or, by `once`, in one place only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

Path = tuple[int | str, ...]


def places(data: dict[str, Any]) -> list[Path]:
    """Paths of all values of the table but the classes' names."""
    found: list[Path] = []

    def walk(value: Any, path: Path) -> None:
        found.append(path)
        if isinstance(value, list):
            for i, member in enumerate(value):
                walk(member, (*path, i))
        elif isinstance(value, dict) and "$" not in value:
            for key, member in value.items():
                walk(member, (*path, key))

    for number, entry in enumerate(data["table"]):
        for name, value in entry.items():
            if name != "$class":
                walk(value, (number, name))
    return found


def at(data: dict[str, Any], path: Path) -> Any:
    value: Any = data["table"]
    for step in path:
        value = value[step]
    return value


def changed(data: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """The data with another value at `path`; what is not on the way there is shared."""

    def along(old: Any, steps: Path) -> Any:
        if not steps:
            return value
        new = dict(old) if isinstance(old, dict) else list(old)
        new[steps[0]] = along(old[steps[0]], steps[1:])
        return new

    return {**data, "table": along(data["table"], path)}


def others(data: dict[str, Any], path: Path, rng: Random) -> list[Any]:
    """Other values for a place, some of them likely to be of the right type."""
    value = at(data, path)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, 0 if value else 2]
    if isinstance(value, float):
        return [value * 1.25 + 0.01, -value - 1.0]
    if value is None:
        return [0, "x", [], {"$": rng.randrange(path[0])} if path[0] else 1]  # type: ignore[arg-type]
    if isinstance(value, str):
        return [f"{value}x", *rng.sample(words := sorted(_words(data, path)), min(3, len(words)))]
    if isinstance(value, dict) and "$" in value:
        return _references(data, path, value["$"], rng)
    if isinstance(value, dict):
        return [{k: v for k, v in value.items() if k != gone} for gone in rng.sample(list(value), min(2, len(value)))]
    assert isinstance(value, list)
    return _lists(value, rng)


def _words(data: dict[str, Any], path: Path) -> set[str]:
    """Words that stand in the same field of other objects of the class."""
    own, entry = at(data, path), data["table"][path[0]]
    alike = (e[path[1]] for e in data["table"] if e["$class"] == entry["$class"])
    found = {w for v in alike for w in ([v] if isinstance(v, str) else v if isinstance(v, list) else []) if isinstance(w, str)}
    return found - {own}


def _references(data: dict[str, Any], path: Path, number: int, rng: Random) -> list[Any]:
    """Earlier objects of the same class, and one of any class."""
    table, limit = data["table"], path[0]
    assert isinstance(limit, int)
    alike = [n for n in range(limit) if n != number and table[n]["$class"] == table[number]["$class"]]
    picked = rng.sample(alike, min(3, len(alike))) + [rng.randrange(limit)]
    return [{"$": n} for n in picked if n != number]


def _lists(value: list[Any], rng: Random) -> list[Any]:
    if not value:
        return [[0], [[]]]
    i = rng.randrange(len(value))
    return [value[:i] + value[i + 1 :], value[: i + 1] + value[i:]]


def once(data: dict[str, Any], path: Path, rng: Random) -> Iterator[dict[str, Any]]:
    """Copies of the data in which the object that `path` refers to is changed for this one use."""
    number, user = at(data, path)["$"], path[0]
    assert isinstance(user, int)
    names = [n for n in data["table"][number] if n != "$class"]
    if not names:
        return
    inner: Path = (number, rng.choice(names))
    while isinstance(at(data, inner), list) and at(data, inner) and rng.random() < 0.7:
        inner = (*inner, rng.randrange(len(at(data, inner))))
    for value in others(data, inner, rng):
        twin = changed(data, inner, value)["table"][number]
        result: dict[str, Any] = _shifted(data, user)
        result["table"].insert(user, _shifted(twin, user))
        yield changed(result, (user + 1, *path[1:]), {"$": user})


def _shifted(value: Any, start: int) -> Any:
    """A copy with references to the objects from `start` on, one up."""
    if isinstance(value, list):
        return [_shifted(v, start) for v in value]
    if isinstance(value, dict):
        number = value.get("$")
        if isinstance(number, int):
            return {"$": number + (number >= start)}
        return {k: _shifted(v, start) for k, v in value.items()}
    return value


def changes(data: dict[str, Any], rng: Random, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """`count` different changes of random places; kinds of fields come equally often."""
    by_kind: dict[tuple[str, ...], list[Path]] = {}
    for path in places(data):
        kind = (data["table"][path[0]]["$class"], str(path[1]), type(at(data, path)).__name__)
        by_kind.setdefault(kind, []).append(path)
    kinds, seen, k = sorted(by_kind), set(), 0
    while len(seen) < count:
        path = rng.choice(by_kind[kinds[k % len(kinds)]])
        k += 1
        value = at(data, path)
        found = [changed(data, path, v) for v in others(data, path, rng)]
        if isinstance(value, dict) and "$" in value:
            found += once(data, path, rng)
        for result in rng.sample(found, min(2, len(found))):
            text = json.dumps(result)
            if text not in seen and result != data:
                seen.add(text)
                where = data["table"][path[0]]
                yield f"{where['$class']}{''.join(f'.{p}' for p in path[1:])}: {json.dumps(value)[:80]}", result
