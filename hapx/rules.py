"""Rules as data: for one mesh axis, the states of an operator's operands and outputs. Pure data, so that plans can hold rules.

Rules of the operator table are made by `hapx.theory.registry`; those of operators that the table does not know are found by execution
(`hapx.theory.discover`), kept in the graph as `Probed`, and executed again where a plan is verified.
"""

from __future__ import annotations

from dataclasses import dataclass

from hapx.states import Invariant, Partial, Replicated


@dataclass(frozen=True, slots=True)
class Site:
    """A factor of a dim: the dim is `outer` blocks, each of which is cut alike."""

    dim: int
    outer: int = 1

    def __str__(self) -> str:
        return f"S{self.dim}" if self.outer == 1 else f"S{self.dim}[{self.outer}x]"


Slot = Site | Replicated | Invariant | Partial


@dataclass(frozen=True, slots=True)
class Rule:
    """For one axis: state of every operand occurrence and of every output. `variant` names how the local body differs ("" not
    at all). `limit`: the number of units must also divide this (0: no limit). `divides`: each device does its share of the work.
    """

    operands: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    variant: str = ""
    limit: int = 0
    divides: bool = False

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.operands)) or '()'} -> {' '.join(map(str, self.outputs))}"


@dataclass(frozen=True, slots=True)
class Probed:
    """What execution showed of an operator without an entry. `nodes`: indices of alike calls. `rules`: those that held in every trial,
    beside all-Replicated and all-Invariant. `note`: why there are none, if there are none."""

    target: str
    nodes: tuple[int, ...]
    rules: tuple[Rule, ...]
    note: str = ""
