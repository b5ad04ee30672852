"""How data parallelism synchronises each gradient: all-reduce, parameter server or sufficient factors, whichever takes the fewest seconds (the
choice that TAG makes, Zhang et al. 2023).

A parameter server is not in hapx's space of programs; its time is a formula on the same network. m devices in M machines, n in each; N bytes of
gradient; b: a machine's network card, in each direction; c: the slowest link inside a machine; a: latency of a message. Servers are dealt out
to the devices as evenly as can be (the best case), and each device sends its own gradient to the server and gets the parameter from it:

    M > 1:   2 ( n (M-1)/M N / b + a )      every card carries what its n devices push to other machines, and what theirs push to its servers
    M = 1:   2 ( (m-1)/m N / c + a )

A gradient goes to its server as soon as it is there, in messages of its own. Sufficient factors: what the linear layer's triple costs more than the
plain one (gathering inputs and cotangents, computing the whole gradient everywhere).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.ir import Kind, OpCall, Ref
from hapx.plan import Program, Triple
from hapx.theory.factors import gathered
from hapx.theory.triple import Theory


@dataclass(frozen=True)
class Choice:
    """`factors`: weights whose gradients are made from sufficient factors; `servers`: by parameter on a server, the seconds that it takes."""

    factors: frozenset[str]
    servers: Mapping[str, float]


def server_seconds(size: float, cluster: ClusterSpec) -> float:
    """Seconds to push a gradient of `size` bytes from every device to its server and to pull the parameter."""
    machines = len(cluster.machines)
    devices = max(len(m.devices) for m in cluster.machines)
    if machines > 1:
        return 2 * (devices * (machines - 1) / machines * size / cluster.inter.bandwidth + cluster.inter.latency)
    link = cluster.machines[0].intra
    return 2 * ((devices - 1) / devices * size / link.bandwidth + link.latency)


def cheapest(program: Program, theory: Theory, exact: CostModel, cluster: ClusterSpec) -> Choice:
    """The cheapest way for every gradient of a data-parallel program. `exact`: costs at the program's lengths."""
    reduced = _all_reduced(program, theory, exact)
    servers = {name: server_seconds(float(theory.graph.refs[name].bytes), cluster) for name in reduced}
    least = {name: min(reduced[name], servers[name]) for name in reduced}
    factors = _factors(program, theory, exact)
    chosen = frozenset(name for name, seconds in factors.items() if name in least and seconds < least[name])
    return Choice(chosen, {n: s for n, s in servers.items() if s < reduced[n] and n not in chosen})


def _all_reduced(program: Program, theory: Theory, exact: CostModel) -> dict[str, float]:
    """By parameter, the seconds of the all-reduce of its gradient."""
    found: dict[str, float] = {}
    for instruction in program.instructions:
        triple = instruction.triple
        if triple.node is None and not isinstance(triple.body, OpCall):
            ref = theory.graph.refs[triple.post[0].tensor]
            cost = exact.conversion(ref, triple.body, triple.post[0].placement)
            seconds = [float(c.term.at({}).max()) for c in cost.communication if c.direction == "synchronise"]
            if ref.kind is Kind.PARAMETER and seconds:
                found[ref.name] = sum(seconds)
    return found


def _factors(program: Program, theory: Theory, exact: CostModel) -> dict[str, float]:
    """By weight of a layer that nothing else reads, what sufficient factors cost more than the plain triple."""
    found: dict[str, float] = {}
    for instruction in program.instructions:
        plain = instruction.triple
        if plain.node is None:
            continue
        others = [t for t in theory.triples[plain.node] if _is_sfb(t) and t.pre[0] == plain.pre[0] and t.post == plain.post]
        weight = theory.graph.nodes[plain.node].call.get("weight")
        if others and isinstance(weight, Ref) and len(theory.graph.consumers[weight.name]) == 1:
            found[weight.name] = min(_backward(exact, t) for t in others) - _backward(exact, plain)
    return found


def _is_sfb(triple: Triple) -> bool:
    return gathered(triple.body) is not None


def _backward(exact: CostModel, triple: Triple) -> float:
    """Seconds of a triple's backward pass on the slowest kind."""
    cost = exact.instruction(triple)
    compute = 0.0 if cost.backward is None else float(cost.backward.at({}).max())
    return compute + sum(float(c.term.at({}).max()) for c in cost.communication if c.direction == "backward")
