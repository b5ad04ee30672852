"""A program that was found on one mesh, carried to another: to other devices, to more or fewer of them, to another size of the batch; or to where
other blocks are computed again in backward.

In: a candidate of the planner, a theory of the same model on a mesh with as many axes, a cluster. Out: the candidate there, or None where it cannot
be said which triples are the same ones. Nothing is searched: a carried program is one of the space, perhaps not its best one.

The triples of a graph do not depend on how many devices an axis has; so between meshes of one graph only lengths change, in proportion to the shares
that coordinates with equal devices had. Two graphs of one model at different batch sizes have the same nodes, and theirs triples in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hapx.balancer.lp import Objective, objective
from hapx.balancer.rounding import round_ratios
from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CommunicationCost, CostModel, StepCost
from hapx.ir import Graph, OpCall
from hapx.lower import Candidate
from hapx.plan import Communication, Instruction, Mesh, Program, Triple
from hapx.states import Cut, Placement, Property, Row, Sharded, State
from hapx.theory.derive import derive
from hapx.theory.triple import Theory
from hapx.theory.triples import NodeTriples

States = Mapping[tuple[str, State], State]
Shards = tuple[tuple[Sharded, Sharded], ...]  # which stand for which


def carried(known: Candidate, theory: Theory, cluster: ClusterSpec, costs: CostModel | None = None) -> Candidate | None:
    """See the module. costs: a model of the theory's graph with the wanted number of micro-batches; None: the candidate's own, whose graph it is.
    Its cost and time are not known."""
    shares = _shares(known, theory.mesh, cluster)
    if shares is None:
        return None
    program, storage = known.program, known.storage_of
    if theory.graph is not known.theory.graph:
        found = _translated(known, theory)
        if found is None:
            return None
        program, storage = found
    program = replace(program, mesh=theory.mesh)
    cuts = dict.fromkeys(cut for cut in _cuts(program, storage) if cut.row in shares)
    model = (costs or known.costs).changed(theory=theory, cluster=cluster)
    return Candidate(theory, model, program, storage, round_ratios(shares, cuts), shares, 0.0, 0.0)


def _cuts(program: Program, storage: Mapping[str, Placement]) -> Iterator[Cut]:
    for i in program.instructions:
        yield from (cut for cut in i.triple.work if cut is not None)
        yield from (s.cut for p in (*i.triple.pre, *i.triple.post) for s in p.placement.states if isinstance(s, Sharded))
    yield from (s.cut for p in storage.values() for s in p.states if isinstance(s, Sharded))


def _shares(known: Candidate, mesh: Mesh, cluster: ClusterSpec) -> dict[Row, tuple[float, ...]] | None:
    """Of every coordinate of the uneven axis what one with such devices had; None where there was none."""
    if mesh.uneven is None or known.mesh.uneven != mesh.uneven or len(mesh.axes) != len(known.mesh.axes):
        return None
    before, after = _appearance(known.mesh, known.costs.cluster), _appearance(mesh, cluster)
    found = {}
    for row, shares in known.shares.items():
        of = dict(zip(before, shares, strict=True))
        own = [of.get(a) for a in after]
        if any(s is None for s in own) or not sum(s for s in own if s is not None):
            return None
        found[row] = tuple(s / sum(own) for s in own)  # type: ignore[operator, arg-type]
    return found


def _appearance(mesh: Mesh, cluster: ClusterSpec) -> list[tuple[str, ...]]:
    """Device types at every coordinate of the uneven axis; of axes inside that are of another size, each type once."""
    assert mesh.uneven is not None
    types: list[dict[str, None]] = [{} for _ in range(mesh.sizes[mesh.uneven])]
    for d in mesh.devices:
        types[mesh.coordinates(d)[mesh.uneven]][cluster.devices[d].type] = None
    return [tuple(sorted(t)) for t in types]


def again(known: Candidate, graph: Graph) -> Candidate:
    """The same program on the candidate's own graph with other regions that are computed again. Its cost and time are not known."""
    segments = known.theory.graph.segment_of
    theory = replace(known.theory, graph=graph if graph.segment_of == segments else replace(graph, segment_of=segments))
    return replace(known, theory=theory, costs=_of_graph(known.costs, theory), cost=0.0, time=0.0)


def goal_of(known: Candidate) -> Objective:
    """What its program costs, as the search adds it up: every instruction, the update of every parameter, and what is stored."""
    costs, refs, storage = known.costs, known.costs.graph.refs, known.storage_of
    steps = costs.steps(known.program.instructions)
    if costs.mode == "train":
        updates = [costs.update(refs[name], placement) for name, placement in storage.items() if refs[name].requires_grad]
        steps += [StepCost(None, None, (CommunicationCost("synchronise", update, False),), None) for update in updates]
    return objective(steps, [costs.storage(refs[name], placement) for name, placement in storage.items()], len(costs.kinds))


# ---- to another graph ----------------------------------------------------------------------------------------------------------------------------


def _translated(known: Candidate, theory: Theory) -> tuple[Program, dict[str, Placement]] | None:
    """Program and storage in the triples of another theory of the model."""
    states = _states(known.theory, theory)
    if states is None:
        return None

    def placed(tensor: str, p: Placement) -> Placement:
        return Placement(tuple(_moved(states, tensor, s) for s in p.states), p.nest)

    def prop(p: Property) -> Property:
        return Property(p.tensor, placed(p.tensor, p.placement))

    instructions = []
    for instruction in known.program.instructions:
        t = instruction.triple
        if t.node is not None and isinstance(t.body, OpCall):
            number = _number(t, known.theory.triples[t.node])
            if number is None:
                return None
            made = theory.triples[t.node][number]
        else:
            assert not isinstance(t.body, OpCall)
            made = replace(t, pre=tuple(map(prop, t.pre)), post=tuple(map(prop, t.post)), body=_path(states, t.post[0].tensor, t.body))
        instructions.append(Instruction(made, instruction.remat))
    program = replace(
        known.program, instructions=tuple(instructions), needs=tuple(map(prop, known.program.needs)), gives=tuple(map(prop, known.program.gives))
    )
    return program, {name: placed(name, p) for name, p in known.storage_of.items()}


def _number(triple: Triple, known: Sequence[Triple]) -> int | None:
    """Which of a node's triples an instruction is."""
    assert isinstance(triple.body, OpCall)
    form = triple.body.get("form")
    assert isinstance(known, NodeTriples), "theories as they are derived"
    for k in known.like(triple):
        t = known[k]
        if t is triple or (
            (t.pre, t.post, t.work) == (triple.pre, triple.post, triple.work)
            and isinstance(t.body, OpCall)
            and t.body.target == triple.body.target
            and t.body.get("form") == form
        ):
            return k
    return None


def _path(states: States, tensor: str, path: Sequence[Communication]) -> tuple[Communication, ...]:
    return tuple(replace(c, source=_moved(states, tensor, c.source), target=_moved(states, tensor, c.target)) for c in path)


def _moved(states: States, tensor: str, state: State) -> State:
    return states[tensor, state] if isinstance(state, Sharded) else state


def _states(old: Theory, new: Theory) -> States | None:
    """(tensor, shards) there to shards here, by the triples in which they appear; None where triples differ by more than lengths."""
    assert old.alike and new.alike, "theories as they are derived"
    if len(old.triples) != len(new.triples) or old.stored.keys() != new.stored.keys() or old.outputs.keys() != new.outputs.keys():
        return None
    found: dict[tuple[str, State], State] = {}
    checked: dict[tuple[int, int], list[Shards] | None] = {}  # by alike nodes there and here
    for k, (a, b) in enumerate(zip(old.triples, new.triples, strict=True)):
        key = old.alike[k], new.alike[k]
        if key not in checked:
            checked[key] = _of_node(a, b)
        both, names = checked[key], _names(a[0])
        if both is None or names != _names(b[0]) or not all(_noted(found, name, own) for name, own in zip(names, both, strict=True)):
            return None
    for before, after in ((old.stored, new.stored), (old.outputs, new.outputs)):
        for name in before:
            own = _shards(before[name], after[name])
            if own is None or not _noted(found, name, own):
                return None
    return found


def _names(triple: Triple) -> list[str]:
    return [p.tensor for p in (*triple.pre, *triple.post)]


def _of_node(before: Sequence[Triple], after: Sequence[Triple]) -> list[Shards] | None:
    """Which shards stand for which, per operand and result of a node; None where they cannot."""
    if len(before) != len(after):
        return None
    there, here = (list(zip(*([p.placement for p in (*t.pre, *t.post)] for t in own), strict=True)) for own in (before, after))
    if len(there) != len(here):
        return None
    found = [_shards(p, q) for p, q in zip(there, here, strict=True)]
    return [own for own in found if own is not None] if None not in found else None


def _shards(before: Sequence[Placement], after: Sequence[Placement]) -> Shards | None:
    """Which shards stand for which in placements that stand for each other; None where they cannot."""
    if len(before) != len(after):
        return None
    found: dict[Sharded, Sharded] = {}
    for p, q in dict.fromkeys(zip(before, after, strict=True)):
        if p.nest != q.nest:
            return None
        for s, t in zip(p.states, q.states, strict=True):
            if type(s) is not type(t):
                return None
            if isinstance(s, Sharded) and isinstance(t, Sharded) and (s.dim != t.dim or s.cut.row != t.cut.row or found.setdefault(s, t) != t):
                return None
    return tuple(found.items())


def _noted(found: dict[tuple[str, State], State], tensor: str, pairs: Shards) -> bool:
    """Notes which shards of a tensor stand for which; False where others do already."""
    return all(found.setdefault((tensor, s), t) == t for s, t in pairs)


# ---- to another part of the graph ----------------------------------------------------------------------------------------------------------------


def renamed(known: Candidate, graph: Graph) -> Candidate:
    """A candidate for a graph that differs from its own by names only. Every instruction is looked up in the theory of the new graph."""
    old = known.theory.graph
    names: dict[str, str] = {}
    for a, b in zip(old.nodes, graph.nodes, strict=True):
        names |= zip(a.names, b.names, strict=True)

    def named(p: Property) -> Property:
        return Property(names[p.tensor], p.placement)

    def triple(t: Triple) -> Triple:
        own = replace(t, pre=tuple(map(named, t.pre)), post=tuple(map(named, t.post)))
        if own.node is None or not isinstance(own.body, OpCall):
            return own
        number = _number(own, theory.triples[own.node])
        assert number is not None, f"alike graphs differ: {own}"
        return theory.triples[own.node][number]

    theory = derive(graph, known.theory.mesh)
    instructions = tuple(Instruction(triple(i.triple), i.remat) for i in known.program.instructions)
    have = {p.tensor: p for p in map(named, known.program.needs)}
    needs = tuple(have[name] for name in graph.refs if name in have)
    program = replace(known.program, instructions=instructions, needs=needs, gives=tuple(map(named, known.program.gives)))
    costs = _of_graph(known.costs, theory)
    placed = {names[n]: p for n, p in known.storage_of.items() if n in names}
    return replace(known, theory=theory, costs=costs, program=program, storage_of=placed)


def _of_graph(own: CostModel, theory: Theory) -> CostModel:
    """As a model of another graph, whose theory it is."""
    return CostModel(theory, own.cluster, own.precision, own.optimizer, own.mode, repeats=own.repeats, in_flight=own.in_flight)
