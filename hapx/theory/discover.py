"""Operators that the table does not know: their rules are found by execution and written into the graph.

In: a graph. Out: the same graph with a `Probed` for every group of alike calls of unknown operators; the user is told, in one line each, what
was found (`ProbedOperatorWarning`), or later by `derive` that the operator runs whole on every device. `verify_probed` executes recorded
rules again, in a process that may be another. Torch is loaded only where there is something to execute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hapx.errors import RANDOM_HINT, PlanError, UnsupportedOperatorError
from hapx.ir import Graph, Node, TensorRef
from hapx.rules import Probed, Rule, Site
from hapx.theory.grains import operands
from hapx.theory.registry import lookup
from hapx.warnings import HapWarning, warn


class ProbedOperatorWarning(HapWarning):
    """An operator without an entry has rules that were found by execution: tried, not known."""


def discover(graph: Graph) -> Graph:
    """The graph with the rules of its unknown operators. Raises UnsupportedOperatorError for those that are random, in place or
    data-dependent, and for one without a gradient through which the loss needs one."""
    refuse(graph)
    if graph.probed:
        return graph
    found = tuple(_probe(graph, nodes) for nodes in unknown(graph))
    return replace(graph, probed=found) if found else graph


def refuse(graph: Graph) -> None:
    """Raise UnsupportedOperatorError for an operator about which nothing can be said."""
    for node in graph.nodes:
        if node.tags and lookup(node.call) is None:
            raise UnsupportedOperatorError(
                f"{node.call.target} is {' and '.join(node.tags)} and has no rule",
                where=place(node),
                hint=RANDOM_HINT if "random" in node.tags else "replace it, or register a rule for it",
            )


def place(node: Node) -> str:
    """Module path and source line, for people."""
    return f"{node.module or 'model'} ({node.source})"


def unknown(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Groups of alike nodes whose operator has no entry."""
    groups: dict[int, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        if lookup(node.call) is None:
            groups.setdefault(graph.alike[i], []).append(i)
    return tuple(map(tuple, groups.values()))


def _probe(graph: Graph, nodes: tuple[int, ...]) -> Probed:
    from hapx.theory import probe_rules as probe  # loads torch

    node = graph.nodes[nodes[0]]
    target = node.call.target
    try:
        found = probe.find_rules(node, operands(graph, node))
    except probe.Unprobed as reason:
        return Probed(target, nodes, (), str(reason))
    if not found.differentiable:
        for i in nodes:
            _refuse_gradient(graph, i)
    if not found.rules:
        return Probed(target, nodes, (), "no way to split it held in every trial")
    told = "; ".join(map(str, found.rules))
    warn(f"{target} has no entry; by execution it has the rules {told} (in {place(node)})", ProbedOperatorWarning)
    return Probed(target, nodes, found.rules)


def _refuse_gradient(graph: Graph, index: int) -> None:
    """Raise UnsupportedOperatorError if the loss needs a gradient through an operator that has none."""
    node = graph.nodes[index]
    if graph.mode != "train" or not any(o.requires_grad for o in node.outputs):
        return
    reached = {o.name for o in node.outputs if o.requires_grad}
    for later in graph.nodes[index + 1 :]:
        if reached & set(later.call.refs()):
            reached |= {o.name for o in later.outputs if o.requires_grad}
    if any(o.tensor in reached for o in graph.outputs if o.role == "loss"):
        raise UnsupportedOperatorError(
            f"{node.call.target} has no gradient, and the loss needs one through it",
            where=place(node),
            hint="register_autograd, or detach its inputs",
        )


# ---- plans -----------------------------------------------------------------------------------------------------------------


def verify_probed(graph: Graph, where: str) -> None:
    """Raise PlanError unless every unknown operator is registered in this process and its recorded rules hold here."""
    groups = unknown(graph)
    if not groups and not graph.probed:
        return
    from hapx.theory import probe_rules as probe  # loads torch

    for nodes in groups:
        node = graph.nodes[nodes[0]]
        if not probe.is_registered(node.call.target):
            raise PlanError(
                f"operator {node.call.target!r} of {place(node)} is not registered in this process", where=where,
                hint="import the library that registers it before the plan is used",
            )  # fmt: skip
    alike = {i: nodes for nodes in groups for i in nodes}
    seen: set[int] = set()
    for probed in graph.probed:
        _verify_one(graph, probed, alike, seen, where)


def _verify_one(graph: Graph, probed: Probed, alike: dict[int, tuple[int, ...]], seen: set[int], where: str) -> None:
    first = probed.nodes[0] if probed.nodes else -1
    if alike.get(first) != probed.nodes or seen & set(probed.nodes) or graph.nodes[first].call.target != probed.target:
        raise PlanError(f"rules of {probed.target} for nodes {probed.nodes}, which are not all its calls of one kind", where=where)
    seen |= set(probed.nodes)
    node = graph.nodes[first]
    tensors = operands(graph, node)
    if not all(_is_rule_of(rule, tensors, node.outputs) for rule in probed.rules):
        raise PlanError(f"rules of {probed.target} that do not fit its tensors", where=where)
    if not probed.rules:
        return
    from hapx.theory import probe_rules as probe  # loads torch

    try:
        wrong = probe.recheck(node, tensors, probed.rules)
    except probe.Unprobed as reason:
        wrong = str(reason)
    if wrong is not None:
        raise PlanError(f"{probed.target} does not have the recorded rule here: {wrong}", where=where, hint="plan again with this version of it")


def _is_rule_of(rule: Rule, tensors: Sequence[TensorRef], outputs: Sequence[TensorRef]) -> bool:
    if len(rule.operands) != len(tensors) or len(rule.outputs) != len(outputs) or rule.variant or rule.limit:
        return False
    slots = zip((*rule.operands, *rule.outputs), (*tensors, *outputs), strict=True)
    return all(s.outer == 1 and 0 <= s.dim < len(r.shape) and r.shape[s.dim] > 1 for s, r in slots if isinstance(s, Site))


__all__ = ["ProbedOperatorWarning", "discover", "place", "refuse", "unknown", "verify_probed"]
