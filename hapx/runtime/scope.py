"""The fx graph of a program, or of a region inside of it, while it is made.

In: nodes, under the properties that they are. Out: the graph; what it takes from the graph around it becomes its placeholders. Invariant: a
property is one node, whichever scope reads it.
"""

from __future__ import annotations

from contextlib import nullcontext

from torch import fx

from hapx.ir import Graph
from hapx.plan import Program
from hapx.runtime.names import Names
from hapx.states import Property


class Scope:
    """`outer`: the scope around a region, None for the program. `taken`: node of the outer scope -> (placeholder, property, if it is one)."""

    def __init__(self, outer: Scope | None = None):
        self.outer, self.graph, self.names = outer, fx.Graph(), Names()
        self.made: dict[Property, fx.Node] = {}
        self.taken: dict[fx.Node, tuple[fx.Node, Property | None]] = {}

    def __contains__(self, p: Property) -> bool:
        return p in self.made or (self.outer is not None and p in self.outer)

    def read(self, p: Property) -> fx.Node:
        """The node that is `p`; it must be there."""
        return self.made[p] if p in self.made or self.outer is None else self.take(self.outer.read(p), p)

    def take(self, node: fx.Node, p: Property | None = None) -> fx.Node:
        """A node of the outer scope as one of this scope. (The program's own nodes are what they are.)"""
        if self.outer is None:
            return node
        if node not in self.taken:
            first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
            with self.graph.inserting_before(first) if first is not None else nullcontext():
                self.taken[node] = self.graph.placeholder(self.names.fresh(node.name)), p
        return self.taken[node][0]

    def pass_on(self, p: Property) -> bool:
        """Whether `p`, made here, is just something that was taken: then it is that in the outer scope too."""
        assert self.outer is not None
        source = next((outside for outside, (inside, _) in self.taken.items() if inside is self.made[p]), None)
        if source is not None:
            self.outer.made[p] = source
        return source is not None


def region_runs(program: Program, graph: Graph) -> dict[int, int]:
    """The instructions [start, stop) of every checkpoint region: its nodes, and the conversions just before each of them."""
    after = {-1: 0}  # node -> the instruction after its own
    after |= {i.triple.node: k + 1 for k, i in enumerate(program.instructions) if i.triple.node is not None}
    return {after[r.start - 1]: after[r.stop - 1] for r in graph.regions if r.kind == "checkpoint" and r.start < r.stop}
