"""What is asked of a graph again and again is found once.

In: a function of a graph, or of a graph and one of its nodes, that depends on nothing else. Out: the same function; what it found is kept by the
graph, as its cached properties are, and goes with it, for each node or for each kind of nodes. Invariant: a node that is not the graph's own is never
answered for by another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TypeVar

from hapx.ir import Graph, Node

T = TypeVar("T")


def once(function: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """A function of a graph."""
    name = _name(function)

    @wraps(function)
    def known(graph: Graph) -> T:
        found = graph.__dict__
        if name not in found:
            found[name] = function(graph)
        return found[name]  # type: ignore[no-any-return]

    return known


def once_per_node(function: Callable[[Graph, Node], T]) -> Callable[[Graph, Node], T]:
    """A function of a graph and a node."""
    name = _name(function)

    @wraps(function)
    def known(graph: Graph, node: Node) -> T:
        facts = graph.__dict__.get(name)
        if facts is None:
            facts = graph.__dict__[name] = {}
        found = facts.get(id(node))
        if found is None or found[0] is not node:  # the node is held, so that its identity stays its own; in a copy of the graph it is another's
            found = facts[id(node)] = node, function(graph, node)
        return found[1]

    return known


def once_per(kinds: Callable[[Graph], Sequence[int]]) -> Callable[[Callable[[Graph, Node], T]], Callable[[Graph, Node], T]]:
    """For functions of a graph and a node that say the same of nodes of a kind: found once for each. kinds: a number per node."""

    def once_per_kind(function: Callable[[Graph, Node], T]) -> Callable[[Graph, Node], T]:
        name = _name(function)

        @wraps(function)
        def known(graph: Graph, node: Node) -> T:
            index = graph.producer.get(node.outputs[0].name, -1)
            if index < 0 or graph.nodes[index] is not node:
                return function(graph, node)
            facts, kind = graph.__dict__.setdefault(name, {}), kinds(graph)[index]
            if kind not in facts:
                facts[kind] = function(graph, node)
            return facts[kind]  # type: ignore[no-any-return]

        return known

    return once_per_kind


def _name(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
