"""How much of a model the operator table covers: operators without an entry run whole on every device.

In: a graph. Out: `Coverage`: for each operator without a rule, its share of the FLOPs and of the bytes that one training step computes and moves on a
single device (forward and backward, by the cost model's counts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hapx.cost.compute import work
from hapx.ir import Graph, Node
from hapx.theory.registry import lookup


@dataclass(frozen=True, slots=True)
class Uncovered:
    """An operator without a rule: shares of the whole graph's FLOPs and bytes, and the first place where it is used."""

    target: str
    flops: float
    bytes: float
    where: str


@dataclass(frozen=True, slots=True)
class Coverage:
    """All operators without a rule, the largest first."""

    operators: tuple[Uncovered, ...]

    @property
    def flops(self) -> float:
        """Share of the FLOPs without a rule."""
        return sum((o.flops for o in self.operators), 0.0)

    @property
    def bytes(self) -> float:
        """Share of the bytes without a rule."""
        return sum((o.bytes for o in self.operators), 0.0)

    def as_dict(self) -> dict[str, Any]:
        """For `Plan.statistics`."""
        found = {o.target: {"flops": o.flops, "bytes": o.bytes, "where": o.where} for o in self.operators}
        return {"flops": self.flops, "bytes": self.bytes, "operators": found}


def has_rule(graph: Graph, index: int) -> bool:
    """Whether anything is known of a node but that it may run whole everywhere: by the table, or found by execution."""
    return lookup(graph.nodes[index].call) is not None or bool(graph.probed_rules.get(index))


def coverage(graph: Graph) -> Coverage:
    """Which operators of the graph have no rule."""
    flops: dict[str, float] = {}
    moved: dict[str, float] = {}
    first: dict[str, Node] = {}
    all_flops = all_bytes = 0.0
    for index, node in enumerate(graph.nodes):
        done = work(graph, node)
        own_flops, own_bytes = done.forward + done.backward, sum(b for _, b in (*done.moved, *done.moved_back))
        all_flops, all_bytes = all_flops + own_flops, all_bytes + own_bytes
        if not has_rule(graph, index):
            target = node.call.target
            first.setdefault(target, node)
            flops[target] = flops.get(target, 0.0) + own_flops
            moved[target] = moved.get(target, 0.0) + own_bytes
    operators = [
        Uncovered(target, flops[target] / max(all_flops, 1.0), moved[target] / max(all_bytes, 1.0), f"{node.module or 'model'} ({node.source})")
        for target, node in first.items()
    ]
    return Coverage(tuple(sorted(operators, key=lambda o: (-max(o.flops, o.bytes), o.target))))
