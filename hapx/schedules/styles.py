"""What a schedule is made from: its style, as text that people write and plans store, and what crosses between stages.

gpipe               all forwards, then all backwards (Huang et al., NeurIPS 2019)
1f1b                one forward, one backward, as few micro-batches kept as possible (Narayanan et al., PipeDream-Flush, ICML 2021)
1f1b-warm:2         the same with 2 further micro-batches under way in every group but the last, which hide slow links; 1f1b-warm:3,1,0 says
                    it group by group
interleaved         1F1B over several stages per group, in Megatron-LM's order (Narayanan et al., SC 2021); interleaved:2 asks for 2 of them
forward             evaluation: forwards only
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

from hapx.errors import PlanError
from hapx.ir import TensorRef
from hapx.plan import Boundary, Plan

NAMES = ("gpipe", "1f1b", "1f1b-warm", "interleaved", "forward")


@dataclass(frozen=True, slots=True)
class Style:
    """A name and its numbers. 1f1b-warm: further micro-batches, one number for every group but the last or one per group. interleaved: stages per
    group, or nothing. Raises PlanError for names and numbers that mean nothing."""

    name: str
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            near = get_close_matches(self.name, NAMES, 1)
            raise PlanError(f"no schedule is named '{self.name}'", allowed=", ".join(NAMES), hint=f"did you mean {near[0]}?" if near else None)
        if any(n < 0 for n in self.numbers):
            raise PlanError("the numbers of a schedule are not negative", where=str(self))
        if self.name == "1f1b-warm" and not self.numbers:
            raise PlanError("1f1b-warm needs a number of further micro-batches", allowed="1f1b-warm:2, or 1f1b-warm:3,1,0 group by group")
        if self.name == "interleaved" and (len(self.numbers) > 1 or 0 in self.numbers):
            raise PlanError("interleaved takes one positive number: stages per group", where=str(self), allowed="interleaved, interleaved:2")
        if self.name not in ("1f1b-warm", "interleaved") and self.numbers:
            raise PlanError(f"{self.name} takes no numbers", where=str(self))

    @classmethod
    def parse(cls, text: str) -> Style:
        """The style that `str` has written. Raises PlanError."""
        name, colon, numbers = text.strip().partition(":")
        parts = numbers.split(",") if colon else []
        if not all(p.strip().isdecimal() for p in parts):
            raise PlanError(f"'{numbers}' are not numbers", where=f"schedule '{text}'", allowed=f"{name}:2, or several with commas between them")
        return cls(name, tuple(map(int, parts)))

    def __str__(self) -> str:
        return f"{self.name}:{','.join(map(str, self.numbers))}" if self.numbers else self.name


class Crossing(NamedTuple):
    """Tensors that cross from stage `source` to stage `target` > `source`. gradient: cotangents flow back."""

    source: int
    target: int
    gradient: bool = True


def crossings_between(boundaries: Iterable[Boundary], tensors: Mapping[str, TensorRef], backward: bool = True) -> tuple[Crossing, ...]:
    """One crossing per pair of stages; with gradient where any of its tensors has one and there is a backward pass."""
    found: dict[tuple[int, int], bool] = {}
    for b in boundaries:
        pair = b.source[0], b.target[0]
        found[pair] = found.get(pair, False) or (backward and tensors[b.tensor].requires_grad)
    return tuple(Crossing(*pair, gradient) for pair, gradient in sorted(found.items()))


def expected_crossings(crossings: Iterable[Crossing], stages: int) -> list[Crossing]:
    """In order. Raises PlanError unless each leads to a later stage of so many, and no two join the same stages."""
    result = sorted(crossings)
    for c in result:
        if not 0 <= c.source < c.target < stages:
            raise PlanError(f"tensors cannot cross from stage {c.source} to stage {c.target}", where="schedule", allowed=f"to later ones of {stages}")
    if len({c[:2] for c in result}) < len(result):
        raise PlanError("two crossings join the same stages", where="schedule", allowed="one, with gradient where any tensor has one")
    return result


def groups_of(plan: Plan) -> tuple[int, ...]:
    """The number of its group, for each stage of a plan."""
    return tuple(plan.groups.index(s.devices) for s in plan.stages)


def tied_stages(ties: Iterable[Iterable[int]], count: int) -> tuple[frozenset[int], ...]:
    """For each of `count` stages, the stages (itself among them) that parameters tie to it, directly or through others. `ties`: sets of stages
    that share a parameter. Raises PlanError for stages that do not exist."""
    tied = [frozenset({s}) for s in range(count)]
    for tie in map(tuple, ties):
        if not all(0 <= s < count for s in tie):
            raise PlanError(f"stages {tie} cannot be tied", where="schedule", allowed=f"stages below {count}")
        joined = frozenset().union(*(tied[s] for s in tie))
        for s in joined:
            tied[s] = joined
    return tuple(tied)
