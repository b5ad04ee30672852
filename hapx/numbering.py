"""Numbers in the place of values that take long to hash: placements, properties, communications.

In: values. Out: a number for each, from 0 on, equal ones for equal values. Invariant: a number stays what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hapx.states import Placement, Property


class Numbering:
    """Numbers for deeply nested values, so that keys of caches are quick: hashing a placement takes longer than finding a cost. An object
    that was seen before is known by its identity; it is held, so that its identity stays its own."""

    def __init__(self) -> None:
        self._values: dict[Any, int] = {}
        self._objects: dict[int, tuple[Any, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_values": self._values, "_objects": {}}  # in another process objects have other identities

    def __call__(self, value: object) -> int:
        known = self._objects.get(id(value))
        if known is None:
            known = self._objects[id(value)] = (value, self.of_value(value))
        return known[1]

    def of_value(self, value: object) -> int:
        return self._values.setdefault(value, len(self._values))

    def values(self) -> list[Any]:
        """In the order of their numbers."""
        return list(self._values)

    def of_placement(self, placement: Placement) -> tuple[int, ...]:
        """The states' numbers, then the nest's."""
        return (*[self(s) for s in placement.states], self(placement.nest))


@dataclass(frozen=True, slots=True)
class Numbered:
    """A program with numbers for its properties. read, made: of each instruction, in order; needs, gives: the program's."""

    properties: tuple[Property, ...]
    read: tuple[tuple[int, ...], ...]
    made: tuple[tuple[int, ...], ...]
    needs: tuple[int, ...]
    gives: tuple[int, ...]


def numbered(
    read: Sequence[tuple[Property, ...]], made: Sequence[tuple[Property, ...]], needs: tuple[Property, ...], gives: tuple[Property, ...]
) -> Numbered:
    """Of what the instructions of a program read and make, and what it needs and gives."""
    # most properties are one object wherever they are read; few placements, and hardly ever equal ones that are not one object
    objects = {id(p): p for p in chain(chain.from_iterable(read), chain.from_iterable(made), needs, gives)}
    placements = {id(p.placement): p.placement for p in objects.values()}
    place = dict(zip(placements, map(Numbering().of_value, placements.values()), strict=True))
    numbers: dict[tuple[str, int], int] = {}
    number = {at: numbers.setdefault((p.tensor, place[id(p.placement)]), len(numbers)) for at, p in objects.items()}
    found = {own: objects[at] for at, own in reversed(number.items())}  # of equal ones the first
    before, after = (tuple([tuple([number[id(p)] for p in own]) for own in side]) for side in (read, made))
    wanted = tuple([number[id(p)] for p in needs]), tuple([number[id(p)] for p in gives])
    properties = tuple([found[own] for own in range(len(found))])
    return Numbered(properties, before, after, *wanted)
