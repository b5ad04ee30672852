"""What of a problem does not depend on shares, and is asked at every step of every search.

In: the steps of a problem. Out: per level, which slots are the first use of a parameter; what is live, as values that keep their placements and as
parameters with their next use. Made once per problem.
"""

from __future__ import annotations

from hapx.synth.problem import Step
from hapx.synth.tables import TensorTable


class Outline:
    """Per level: `first`: per slot, whether it is a parameter used for the first time. `stored`: of the parameters that are live the next use (level,
    slot) and their bits (shift, mask); `values`: of the other values name, table, next use and bits. `names`: those of `values`, with ""."""

    def __init__(self, steps: tuple[Step, ...]):
        self.first = [_first(step) for step in steps]
        self.stored: list[tuple[tuple[int, int, int, int], ...]] = []
        self.values: list[tuple[tuple[str, TensorTable, int, int], ...]] = []
        following: dict[str, tuple[int, int]] = {}
        for level in range(len(steps) - 1, -1, -1):
            step = steps[level]
            following |= {name: (level, slot) for slot, name in enumerate(step.tensors)}
            self.stored.append(tuple([(*following[n], shift, t.full) for n, t, shift in step.live if t.stored]))
            self.values.append(tuple([(n, t, following[n][0], shift) for n, t, shift in step.live if not t.stored]))
        self.stored.reverse()
        self.values.reverse()
        self.names = [("", *(n for n, _, _, _ in values)) for values in self.values]


def _first(step: Step) -> tuple[bool, ...]:
    if not any(slot.table.stored and slot.fixed is None for slot in step.kind.slots):
        return (False,) * len(step.kind.slots)
    known = {n for n, _, _ in step.live}
    return tuple([bool(s.table.stored) and s.fixed is None and n not in known for n, s in zip(step.tensors, step.kind.slots, strict=True)])
