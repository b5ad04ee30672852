"""Grains: into how many units each dim may be cut, decided for the whole graph before the theory is derived.

In: a graph. Out: for every site (tensor, dim, outer) the number of units of its class. Invariant: sites joined by a rule (that is,
by a triple without communication) have the same number of units, so equal cuts line up everywhere. 768 columns that are viewed as
12 heads of 64 somewhere are cut in 12 units of 64 everywhere they are joined to.

A class is a connected component of sites under the rules of all nodes; its units are the greatest common divisor of the block
extents (size / outer) of its members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import hapx.theory.ops  # noqa: F401  (fills the registry)
from hapx.ir import Graph, Kind, Node, TensorRef
from hapx.theory.registry import Context, Rule, Site, implied_rules, lookup, without_gradient


@dataclass(frozen=True)
class Grains:
    """`rules[i]`: rules of node i. `units`: by (tensor, site). `classes`: (tensor, site) -> class number. `batch`: classes of the batch."""

    rules: tuple[tuple[Rule, ...], ...]
    units: Mapping[tuple[str, Site], int]
    classes: Mapping[tuple[str, Site], int]
    batch: frozenset[int]

    @cached_property
    def sites_of(self) -> Mapping[str, tuple[tuple[Site, int], ...]]:
        """Tensor -> its sites with their units."""
        found: dict[str, tuple[tuple[Site, int], ...]] = {}
        for (tensor, site), units in self.units.items():
            found[tensor] = (*found.get(tensor, ()), (site, units))
        return found


def operands(graph: Graph, node: Node) -> tuple[TensorRef, ...]:
    """Tensors of a node, one per occurrence in its arguments."""
    return tuple(graph.refs[name] for name in node.call.refs())


def find_grains(graph: Graph) -> Grains:
    """Sites, classes and units of a graph."""
    sites: dict[str, frozenset[Site]] = {name: frozenset(Site(d) for d, size in enumerate(ref.shape) if size > 1) for name, ref in graph.refs.items()}
    rules = _fixpoint(graph, sites)
    members = [(tensor, site) for tensor, found in sites.items() for site in found]
    numbers: dict[str, dict[Site, int]] = {}
    for k, (tensor, site) in enumerate(members):
        numbers.setdefault(tensor, {})[site] = k
    joined = _Joined(len(members))
    for node, node_rules in zip(graph.nodes, rules, strict=True):
        of = [numbers.get(r.name, {}) for r in (*operands(graph, node), *node.outputs)]
        for rule in node_rules:
            own = [numbered[s] for numbered, s in zip(of, (*rule.operands, *rule.outputs), strict=True) if isinstance(s, Site)]
            for member in own[1:]:
                joined.join(own[0], member)
            if own and rule.limit:
                joined.limits[own[0]] = gcd(joined.limits.get(own[0], 0), rule.limit)
    return _collect(graph, rules, members, joined)


def _fixpoint(graph: Graph, sites: dict[str, frozenset[Site]]) -> tuple[tuple[Rule, ...], ...]:
    """Rules of all nodes; sites named by a rule are added until nothing changes, which comes: blocks divide a dim. Alike nodes share the work.
    Nodes are gone through forward and backward in turns, as sites travel both ways."""
    cache: dict[object, tuple[Rule, ...]] = {}
    rules: list[tuple[Rule, ...]] = [()] * len(graph.nodes)
    dirty = set(range(len(graph.nodes)))
    backward = False
    while dirty:
        order = sorted(dirty, reverse=backward)
        backward = not backward
        dirty = set()
        for i in order:
            node = graph.nodes[i]
            tensors = (*operands(graph, node), *node.outputs)
            found = graph.probed_rules.get(i, ())
            key = graph.alike[i], tuple([sites[t.name] for t in tensors]), found
            if key not in cache:
                context = Context(node, tensors[: len(tensors) - len(node.outputs)], sites)
                entry = lookup(node.call)
                implied = implied_rules(context) if entry is None or entry.implied else ()
                rules_of = (*implied, *(entry.rules(context) if entry else found))
                cache[key] = tuple(dict.fromkeys(without_gradient(context, rules_of)))
            rules[i] = cache[key]
            for slot_of in rules[i]:
                for ref, slot in zip(tensors, (*slot_of.operands, *slot_of.outputs), strict=True):
                    if isinstance(slot, Site) and slot not in sites[ref.name]:
                        sites[ref.name] |= {slot}
                        dirty |= set(graph.consumers[ref.name])
                        if ref.name in graph.producer:
                            dirty.add(graph.producer[ref.name])
    return tuple(rules)


class _Joined:
    """Disjoint sets of members by number. `limits`: by member, what the units of its class must divide."""

    def __init__(self, count: int):
        self._parent = list(range(count))
        self.limits: dict[int, int] = {}

    def root(self, x: int) -> int:
        parent = self._parent
        while (up := parent[x]) != x:
            parent[x] = parent[up]
            x = up
        return x

    def join(self, a: int, b: int) -> None:
        self._parent[self.root(a)] = self.root(b)


def _collect(graph: Graph, rules: tuple[tuple[Rule, ...], ...], members: Sequence[tuple[str, Site]], joined: _Joined) -> Grains:
    number: dict[int, int] = {}
    of = [number.setdefault(joined.root(k), len(number)) for k in range(len(members))]  # the class of every member
    units = [0] * len(number)
    for (tensor, site), k in zip(members, of, strict=True):
        units[k] = gcd(units[k], graph.refs[tensor].shape[site.dim] // site.outer)
    for member, limit in joined.limits.items():
        units[of[member]] = gcd(units[of[member]], limit)
    classes = dict(zip(members, of, strict=True))
    batch = frozenset(classes[r.name, Site(0)] for r in graph.of_kind(Kind.INPUT) if r.shape and r.shape[0] == graph.batch > 1)
    # what another stage sends: rows are samples, or samples times positions
    rows = (r for r in graph.of_kind(Kind.RECEIVED) if r.shape and r.shape[0] > 1 and r.shape[0] % graph.batch == 0 and graph.batch > 1)
    batch |= frozenset(classes[r.name, Site(0)] for r in rows)
    return Grains(rules, {m: units[k] for m, k in zip(members, of, strict=True)}, classes, batch)
