"""A program whose parts have ratios of their own: what it would cost if nothing else changed.

In: a program of one compute and one storage row, its cost model, the part of every node. Out: for any grouping of the parts, the `Objective` of
the same program with such rows for each group. A tensor that is used in another group than it is made in is cut again there; a conversion leads
from the row where its tensor is made to the row where it is used.

Invariant: with one group, it is the program's objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hapx.balancer.lp import Objective, objective
from hapx.cost.model import CommunicationCost, CostModel, StepCost
from hapx.cost.rounds import Folded, short, whole
from hapx.cost.terms import Piece, Term, Vector
from hapx.ir import Kind, OpCall, TensorRef
from hapx.layout import Lengths
from hapx.plan import Communication, Form, Program, Triple
from hapx.states import Cut, Placement, Property, Row, Sharded, State


@dataclass(frozen=True, slots=True)
class Crossing:
    """A property that is made in one part and used in another, split along the uneven axis."""

    what: Property
    made: int
    used: int


class Event(NamedTuple):
    """What one instruction costs, in its part. `before`: properties that it takes from other parts. `source`: for a conversion that changes the
    uneven axis, the part in which its tensor is made."""

    step: StepCost
    part: int
    before: tuple[Crossing, ...] = ()
    source: int | None = None
    triple: Triple | None = None


class Untied:
    """`events`: the program's steps. `kept`: bytes of parameters and buffers as they are stored, with the part that uses them first."""

    def __init__(self, program: Program, storage_of: Mapping[str, Placement], costs: CostModel, part_of: Sequence[int]):
        assert costs.theory.mesh.uneven is not None
        self.program, self.costs, self.axis = program, costs, costs.theory.mesh.uneven
        self.refs, self.parts = costs.graph.refs, 1 + max(part_of)
        self._terms: dict[tuple[int, int], Term] = {}
        self._steps: dict[tuple[int, int], StepCost] = {}
        self._alive: list[object] = []
        self._kept: dict[object, tuple[Term, StepCost]] = {}
        self._recuts: dict[object, StepCost] = {}
        self._objectives: dict[tuple[int, ...], Objective] = {}
        self.kept: list[tuple[Term, int]] = []
        self.events = self._events(storage_of, part_of) + self._storing(storage_of, part_of)

    def memory(self, lengths: Lengths) -> Vector:
        """The sum of bytes per kind at one row's lengths."""
        goal = self.objective((0,) * self.parts)
        return goal.memory(self.costs.lengths_to_shares({c: lengths[c] for c in goal.cuts}))

    # ---- the program ----------------------------------------------------------------------------------------------------

    def _events(self, storage_of: Mapping[str, Placement], part_of: Sequence[int]) -> list[Event]:
        numbered, less = self.program.numbered, self._short(part_of)
        triples = [self.program.instructions[k].triple for k in less.instructions]
        users = _users(triples, less, part_of)
        made = {key: users[key] for key in numbered.needs if key in users and numbered.properties[key].tensor in storage_of}
        events = []
        for triple, before, after in zip(triples, less.read, less.made, strict=True):
            if triple.node is not None:
                part = part_of[triple.node]
                taken = {key: p for key, p in zip(before, triple.pre, strict=True) if made.get(key, part) != part and self._split(p)}
                events.append(Event(self.costs.step(triple), part, tuple([Crossing(p, made[key], part) for key, p in taken.items()])))
                for key in after:
                    made[key] = part
                continue
            (source_key,), (key,) = before, after
            source = made.get(source_key, users.get(key, 0))
            part = users.get(key, source)
            if triple.pre[0].placement.states[self.axis] == triple.post[0].placement.states[self.axis]:
                part = source  # it is cut again where it is used
            made[key] = part
            events.append(Event(self.costs.step(triple), part, (), source, triple))
        start, stop = less.spans[1] if less.left_out else (0, 0)  # the round that stands for those that are left out
        return events[:stop] + less.left_out * events[start:stop] + events[stop:]

    def _short(self, part_of: Sequence[int]) -> Folded:
        """Repeated layers of one part are looked at once."""
        found = short(self.program, self.costs)
        if found is not None:
            start, stop = (found.instructions[k] for k in (found.spans[1][0], found.spans[2][1] - 1))
            nodes = [i.triple.node for i in self.program.instructions[start : stop + 1]]
            if len({part_of[node] for node in nodes if node is not None}) == 1:
                return found
        return whole(self.program)

    def _split(self, p: Property) -> bool:
        return isinstance(p.placement.states[self.axis], Sharded)

    def _storing(self, storage_of: Mapping[str, Placement], part_of: Sequence[int]) -> list[Event]:
        graph, events = self.costs.graph, []
        for name, placement in storage_of.items():
            ref = self.refs[name]
            part = part_of[graph.consumers[name][0]] if graph.consumers[name] else 0
            term, step = self._stored(ref, placement)
            self.kept.append((term, part))
            events.append(Event(step, part))
        return events

    def _stored(self, ref: TensorRef, placement: Placement) -> tuple[Term, StepCost]:
        """Bytes and update of a parameter; equal ones are one object, so that the linear program counts them together."""
        key = ref.bytes, ref.kind, ref.requires_grad, placement
        if key not in self._kept:
            training = self.costs.mode == "train" and ref.requires_grad and ref.kind is Kind.PARAMETER
            update = (CommunicationCost("synchronise", self.costs.update(ref, placement), False),) if training else ()
            self._kept[key] = self.costs.storage(ref, placement), StepCost(None, None, update, None)
        return self._kept[key]

    # ---- groups ---------------------------------------------------------------------------------------------------------

    def objective(self, groups: Sequence[int]) -> Objective:
        """The cost of the program where part i has the rows of groups[i]."""
        key = tuple(groups)
        if key not in self._objectives:
            self._objectives[key] = self._grouped(key)
        return self._objectives[key]

    def _grouped(self, groups: tuple[int, ...]) -> Objective:
        steps: list[StepCost] = []
        done: set[tuple[Property, int]] = set()
        for event in self.events:
            group = groups[event.part]
            for c in event.before:
                if groups[c.made] != group and (c.what, group) not in done:
                    done.add((c.what, group))
                    steps.append(self.recut(c.what, groups[c.made], group))
            if event.source is not None and groups[event.source] != group:
                assert event.triple is not None
                steps.append(self._between(event.triple, groups[event.source], group))
            else:
                steps.append(self.step(event.step, group))
        return objective(steps, [self.term(t, groups[part]) for t, part in self.kept], len(self.costs.kinds))

    def recut(self, what: Property, source: int, target: int) -> StepCost:
        """What it costs to cut a property of one group's rows again for another group."""
        ref, before = self.refs[what.tensor], self._placed(what.placement, source)
        key = ref.bytes, ref.requires_grad, ref.kind, before, target, what.tensor in self.costs.graph.recomputed
        if key not in self._recuts:
            after = self._placed(what.placement, target)
            step = Communication(self.axis, before.states[self.axis], after.states[self.axis], Form.NONE, ref.requires_grad)
            self._recuts[key] = self.costs.conversion(ref, (step,), after)
        return self._recuts[key]

    def _between(self, triple: Triple, source: int, target: int) -> StepCost:
        """A conversion that takes the place of a re-cut."""
        assert not isinstance(triple.body, OpCall)
        path = tuple(replace(c, source=self._state(c.source, source), target=self._state(c.target, target)) for c in triple.body)
        ref = self.refs[triple.post[0].tensor]
        return self.costs.conversion(ref, path, self._placed(triple.post[0].placement, target))

    def _placed(self, placement: Placement, group: int) -> Placement:
        return placement.with_state(self.axis, self._state(placement.states[self.axis], group))

    def _state(self, state: State, group: int) -> State:
        return replace(state, cut=_in_group(state.cut, group)) if isinstance(state, Sharded) else state

    def step(self, step: StepCost, group: int) -> StepCost:
        """A step with the rows of a group."""
        if group == 0:
            return step
        key = id(step), group
        if key not in self._steps:
            self._alive.append(step)
            communication = tuple(replace(c, term=self.term(c.term, group)) for c in step.communication)
            forward, backward, memory = (None if t is None else self.term(t, group) for t in (step.forward, step.backward, step.memory))
            self._steps[key] = StepCost(forward, backward, communication, memory)
        return self._steps[key]

    def term(self, term: Term, group: int) -> Term:
        if group == 0:
            return term
        key = id(term), group
        if key not in self._terms:
            self._alive.append(term)
            pieces = (Piece(p.const, tuple((_in_group(cut, group), slope) for cut, slope in p.slopes)) for p in term.pieces)
            self._terms[key] = Term(tuple(pieces))
        return self._terms[key]


def _users(triples: Sequence[Triple], program: Folded, part_of: Sequence[int]) -> dict[int, int]:
    """The part that uses a property first, itself or what a conversion makes of it."""
    found: dict[int, int] = {}
    for triple, before, after in zip(reversed(triples), reversed(program.read), reversed(program.made), strict=True):
        if triple.node is not None:
            part = part_of[triple.node]
            for key in before:
                found[key] = part
        elif after[0] in found:
            found[before[0]] = found[after[0]]
    return found


def _in_group(cut: Cut, group: int) -> Cut:
    """A cut of the same units in a group's row."""
    row = cut.row
    return cut if row.kind == "even" or row.segment == group else Cut(Row(row.kind, group, row.axis), cut.units)
