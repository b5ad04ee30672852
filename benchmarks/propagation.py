"""Shardings propagated from the largest dims: the heuristic of Alpa's ablation (section 8.2), after GSPMD (Xu et al. 2021).

In: a setting on equal devices, a flat mesh. Out: seconds per iteration by the event-driven simulator, bytes per device. Every parameter is cut
along its largest dim that the theory can cut, and stored so; inputs are whole on every device, from which any shard is free. Then the operators, in
the order of the graph, run so that they convert their operands least, and of those ways so that they divide their work most. Nothing is searched. The
program is replayed: it is legal.
"""

from __future__ import annotations

from collections.abc import Iterable

from hapx.balancer.rounding import deal
from hapx.cost.model import CostModel
from hapx.ir import Kind, TensorRef
from hapx.lower import Candidate, memory
from hapx.plan import Communication, Instruction, Mesh, Program, Triple
from hapx.planner import Setting
from hapx.simulate import simulate_program
from hapx.states import REPLICATED, Cut, Placement, Property, Sharded
from hapx.theory.conversion import paths
from hapx.theory.derive import derive
from hapx.theory.replay import replay
from hapx.theory.triple import Theory
from hapx.verify import cuts_of

PADDED = frozenset({"padded"})
Way = tuple[float, Placement, tuple[Communication, ...]]  # seconds, from where, how


def largest_dims(setting: Setting, mesh: Mesh) -> tuple[float, int]:
    """(seconds, bytes of the fullest device)."""
    theory = derive(setting.graph, mesh)
    model = CostModel(theory, setting.cluster, setting.precision, setting.optimizer, setting.key.mode)
    lengths = {cut: deal(cut.units, [1.0] * mesh.sizes[0]) for cut in _cuts(theory)}
    costs = model.at_lengths(lengths)
    draft = Propagation(theory, costs)
    for triples in theory.triples:
        draft.run(triples)
    gives = tuple(draft.give(o.tensor, theory.outputs[o.tensor]) for o in setting.graph.outputs)
    program = Program(setting.key, mesh, tuple(draft.instructions), draft.needs(), gives)
    replay(program, theory, draft.storage)
    used = {cut: lengths[cut] for cut in cuts_of(program, draft.storage)}
    best = Candidate(theory, model, program, draft.storage, used, {}, 0.0, 0.0)
    return simulate_program(program, setting.graph, model, used).total, max(memory(best))


def _cuts(theory: Theory) -> set[Cut]:
    placements = [p.placement for ts in theory.triples for t in ts for p in (*t.pre, *t.post)]
    placements += [p for options in theory.stored.values() for p in options]
    return {s.cut for p in placements for s in p.states if isinstance(s, Sharded)}


class Propagation:
    """A program while it is made: where every tensor is (one placement, and what was made of it), and the instructions so far."""

    def __init__(self, theory: Theory, costs: CostModel):
        self.theory, self.costs, self.graph = theory, costs, theory.graph
        self.whole = Placement((REPLICATED,) * len(theory.mesh.axes))
        self.instructions: list[Instruction] = []
        self.at: dict[str, list[Placement]] = {}
        self.storage = {name: self._largest(self.graph.refs[name], options) or options[0] for name, options in theory.stored.items()}
        for ref in self.graph.refs.values():
            if ref.name in self.storage:
                self.at[ref.name] = [self.storage[ref.name]]
            elif ref.kind in (Kind.INPUT, Kind.CONSTANT) and ref.name not in self.graph.producer:
                self.at[ref.name] = [self.whole]

    def run(self, triples: tuple[Triple, ...]) -> None:
        """A node: by the triple that converts least, then divides most."""

        def effort(triple: Triple) -> tuple[float, int]:
            operands = dict.fromkeys((p.tensor, p.placement) for p in triple.pre)
            return sum(self._way(*operand)[0] for operand in operands), -sum(cut is not None for cut in triple.work)

        triple = min(triples, key=effort)
        for p in triple.pre:
            self._bring(p.tensor, p.placement)
        self.instructions.append(Instruction(triple))
        for p in triple.post:
            self.at[p.tensor] = [p.placement]

    def give(self, tensor: str, allowed: tuple[Placement, ...]) -> Property:
        """An output, in the allowed placement that is nearest."""
        target = min(allowed, key=lambda p: self._way(tensor, p)[0])
        self._bring(tensor, target)
        return Property(tensor, target)

    def needs(self) -> tuple[Property, ...]:
        given = dict.fromkeys(self.graph.input_names, self.whole) | self.storage
        constants = [r.name for r in self.graph.of_kind(Kind.CONSTANT) if r.name not in self.graph.producer]
        given |= dict.fromkeys(constants, self.whole)
        return tuple(Property(name, given[name]) for name in self.graph.refs if name in given)

    def _largest(self, ref: TensorRef, options: Iterable[Placement]) -> Placement | None:
        """The placement with the largest dim cut, of those with a unit for every device."""
        size = self.theory.mesh.sizes[0]
        cut = [(ref.shape[s.dim], -k, p) for k, p in enumerate(options) for s in p.states if isinstance(s, Sharded) and s.cut.units >= size]
        return max(cut, key=lambda c: c[:2])[2] if cut else None

    def _way(self, tensor: str, target: Placement) -> Way:
        """The quickest conversion from where the tensor is."""
        if target in self.at[tensor]:
            return 0.0, target, ()
        ref = self.graph.refs[tensor]
        ways = [(self._seconds(ref, path, target), source, path)
                for source in self.at[tensor] for path in paths(ref, self.theory.mesh, source, target, PADDED)]  # fmt: skip
        return min(ways, key=lambda way: way[0], default=(float("inf"), target, ()))

    def _seconds(self, ref: TensorRef, path: tuple[Communication, ...], target: Placement) -> float:
        return float(sum(c.term.at({}).max() for c in self.costs.conversion(ref, path, target).communication))

    def _bring(self, tensor: str, target: Placement) -> None:
        seconds, source, path = self._way(tensor, target)
        assert seconds < float("inf"), f"no way from {self.at[tensor]} to {target}"
        if path:
            self.instructions.append(Instruction(Triple(None, (Property(tensor, source),), (Property(tensor, target),), path)))
            self.at[tensor].append(target)
