"""Steps that read several values of which it matters that they are in places that go together: stacks of embeddings, concatenations of branches, the
product of a matrix and its transpose.

In: the steps of a problem. Out: `Join`s: of what they cost together the bound has tables (`hapx.synth.ahead`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hapx.synth.problem import Step
from hapx.synth.tables import TensorTable

MANY = 4  # values that a step is the first to read, with which it is a join whenever they are made;
NEAR = 2  # with fewer it is one of those that were made so few steps before


@dataclass(frozen=True, slots=True)
class Part:
    """A value that a join reads: the level of the step that makes it, the slot of the join, where it has its bits."""

    made: int
    slot: int
    shift: int
    table: TensorTable


@dataclass(frozen=True, slots=True)
class Between:
    """A step before a join that reads one of its values, by its slot."""

    part: Part
    level: int
    slot: int

    def waits(self, level: int) -> bool:
        """Whether the value is made before a level, and not read."""
        return self.part.made < level <= self.level


@dataclass(frozen=True, slots=True)
class Join:
    """A step that reads several values, in the order in which they are made. masks: the bits of the first so many of them. between: the only step
    that reads one of them before; of one value at most."""

    level: int
    parts: tuple[Part, ...]
    masks: tuple[int, ...]
    between: Between | None

    def made(self, level: int) -> int:
        """How many of the values are made before a level."""
        return sum([part.made < level for part in self.parts])

    def waiting(self, level: int) -> Between | None:
        """The step in between, where its value waits for it before a level."""
        return self.between if self.between is not None and self.between.waits(level) else None

    def repeats(self, other: Join) -> bool:
        """Whether it reads what is made, and read in between, as many steps before it as in the other."""
        return self._distances() == other._distances()

    def _distances(self) -> tuple[list[tuple[int, int]], tuple[int, int, int] | None]:
        read = self.between
        return [(p.made - self.level, p.slot) for p in self.parts], (read.part.slot, read.level - self.level, read.slot) if read is not None else None


def find_joins(steps: Sequence[Step]) -> list[Join]:
    """All of a problem."""
    made: dict[str, int] = {}
    reads: dict[str, list[tuple[int, int]]] = {}  # of values: levels and slots
    found = []
    for level, step in enumerate(steps):
        new = []
        if len(step.tensors) > 1:
            read = [(slot, n, at) for slot, (n, at) in enumerate(zip(step.tensors, step.slot_shifts, strict=True)) if at >= 0 and n in made]
            new = [(slot, n, at) for slot, n, at in read if not reads[n] or made[n] >= level - NEAR]
        if len(new) < MANY:
            new = [(slot, n, at) for slot, n, at in new if made[n] >= level - NEAR]
        if len(new) > 1:
            parts = {n: Part(made[n], slot, at, step.kind.slots[slot].table) for slot, n, at in new}
            ordered = sorted(parts.values(), key=lambda p: p.made)
            masks = [0]
            for part in ordered:
                masks.append(masks[-1] | part.table.full << part.shift)
            between = [Between(part, *reads[name][0]) for name, part in parts.items() if len(reads[name]) == 1]
            found.append(Join(level, tuple(ordered), tuple(masks), between[0] if between else None))
        for slot, name in enumerate(step.tensors):
            if name in reads:
                reads[name].append((level, slot))
        for name in step.outputs:
            made[name], reads[name] = level, []
    return found
