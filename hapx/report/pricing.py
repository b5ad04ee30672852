"""What every instruction of a plan costs at the plan's exact lengths: the numbers behind all explanations.

In: a plan. Out: a `Pricing`: per instruction of the first training program its module, its `StepCost` and its *messages* (collectives, with bytes and
seconds). All from the planner's cost model; nothing is computed a second way. A communication belongs to the module that uses its result.

What each collective is, the cost model does not keep. So its links are replaced by `RecordingLinks`, which remember of every term of theirs what
it is the time of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from hapx.cluster.spec import ClusterSpec, DeviceType, Link
from hapx.cost.model import CommunicationCost, CostModel, StepCost
from hapx.cost.network import AxisLinks
from hapx.cost.terms import Piece, Term
from hapx.errors import HapError
from hapx.ir import Graph, Kind, OpCall, TensorRef
from hapx.plan import Communication, Form, Instruction, Plan, Program
from hapx.report.words import Vocabulary
from hapx.states import Placement, Property
from hapx.theory.triple import Theory
from hapx.transposes import backward_collective, forward_collective

ENDLESS = 1e30  # B/s or FLOP/s; finite, so that speeds stay ratios and collectives stay collectives

What = Literal["activations", "gradients", "weights", "loss", "buffers", "factors", "sums"]


@dataclass(frozen=True, slots=True)
class Sent:
    """What a collective moves. size: bytes of the tensor as it is whole along the axis (all-to-all: of what a device sends), on the device that has
    most; seconds: on the slowest device; volume: those of them that are not latency. crosses: it uses the network between machines."""

    what: What
    direction: Literal["forward", "backward", "synchronise"]
    collective: str
    form: Form
    axis: int
    size: float
    seconds: float
    volume: float
    crosses: bool


@dataclass(frozen=True, slots=True)
class Message(Sent):
    """One collective of an instruction. cuts: it ends a phase."""

    tensor: str
    cuts: bool


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction: the module that it belongs to, its cost, its messages in the order of `cost.communication`."""

    instruction: Instruction
    module: str
    cost: StepCost
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Moved:
    """What a term of links is the time of."""

    collective: str
    form: Form
    whole: Piece


@dataclass(frozen=True)
class RecordingLinks(AxisLinks):
    """Links of an axis that remember what their terms are the time of, by identity (terms are held, so that it stays theirs)."""

    told: dict[int, tuple[Term, Moved]] = field(default_factory=dict, compare=False)

    def all_reduce(self, whole: Piece) -> Term | None:
        return self._tell(super().all_reduce(whole), Moved("all_reduce", Form.NONE, whole))

    def all_gather(self, form: Form, shard: Piece, whole: Piece) -> Term | None:
        return self._tell(super().all_gather(form, shard, whole), Moved("all_gather", form, whole))

    def all_to_all(self, *parts: Piece) -> Term | None:
        return self._tell(super().all_to_all(*parts), Moved("all_to_all", Form.NONE, parts[0]))

    def _tell(self, term: Term | None, moved: Moved) -> Term | None:
        if term is not None:
            self.told[id(term)] = (term, moved)
        return term


def cost_model(plan: Plan, cluster: ClusterSpec | None = None) -> CostModel:
    """The cost model of the first training program at its lengths, perhaps on a cluster with other numbers."""
    stage, graph = plan.stages[0], plan.graphs[plan.first]
    described = Theory(graph, stage.mesh, (), {}, {}, frozenset())  # costs need no more than the graph and the mesh
    costs = CostModel(described, cluster or plan.cluster, plan.precision, plan.optimizer, plan.first.mode, lengths=stage.lengths[plan.first])
    costs.links = tuple(RecordingLinks(**{name: getattr(links, name) for name in AxisLinks.__dataclass_fields__}) for links in costs.links)
    return costs


def idealised(cluster: ClusterSpec, *, flops: bool = False, bandwidth: bool = False, launch: bool = False, links: bool = False) -> ClusterSpec:
    """The cluster with infinitely fast products, memory or kernel launches, or links on which only latency counts."""

    def better(t: DeviceType) -> DeviceType:
        rates = dict.fromkeys(t.flops, ENDLESS) if flops else t.flops
        return replace(
            t, flops=rates, memory_bandwidth=ENDLESS if bandwidth else t.memory_bandwidth, kernel_latency=0.0 if launch else t.kernel_latency
        )

    def near(link: Link) -> Link:
        return replace(link, bandwidth=ENDLESS) if links else link

    machines = tuple(replace(m, intra=near(m.intra)) for m in cluster.machines)
    return replace(cluster, machines=machines, inter=near(cluster.inter), device_types={name: better(t) for name, t in cluster.device_types.items()})


def step_cost(costs: CostModel, instruction: Instruction) -> StepCost:
    triple = instruction.triple
    if isinstance(triple.body, OpCall):
        return costs.instruction(triple)
    return costs.conversion(costs.graph.refs[triple.post[0].tensor], triple.body, triple.post[0].placement)


@dataclass(frozen=True)
class Pricing:
    """The steps of a plan's first training program, at its lengths. `kinds`: devices (numbers of the cluster) that are alike and have equal lengths;
    vectors of `costs` have one entry for each."""

    plan: Plan
    costs: CostModel

    @classmethod
    def of(cls, plan: Plan) -> Pricing:
        """Raises HapError for a plan of several stages."""
        if len(plan.stages) != 1:
            raise HapError(f"the plan has {len(plan.stages)} stages", where="show", allowed="explanations of plans of one stage")
        return cls(plan, cost_model(plan))

    @property
    def graph(self) -> Graph:
        return self.costs.graph

    @property
    def program(self) -> Program:
        return self.plan.stages[0].program

    @property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        return self.costs.view.devices

    @cached_property
    def words(self) -> Vocabulary:
        return Vocabulary.of(self.plan)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        latencies = cost_model(self.plan, idealised(self.plan.cluster, links=True))
        modules = modules_of(self.program, self.graph)
        return tuple(self._step(i, module, latencies) for i, module in zip(self.program.instructions, modules, strict=True))

    def _step(self, instruction: Instruction, module: str, latencies: CostModel) -> Step:
        body = instruction.triple.body
        cost = step_cost(self.costs, instruction)
        if isinstance(body, OpCall):
            what: What = "factors" if body.target.endswith("_sfb") else "sums"
            told = [(c, what, instruction.triple.post[0].tensor, self._moved(c, a), a) for c, a in self._axes_of(cost.communication)]
        else:
            told = self._path(instruction, body)
        late = step_cost(latencies, instruction).communication
        messages = [self._message(c, what, tensor, moved, axis, only) for (c, what, tensor, moved, axis), only in zip(told, late, strict=True)]
        return Step(instruction, module, cost, tuple(messages))

    def _axes_of(self, communication: Sequence[CommunicationCost]) -> list[tuple[CommunicationCost, int]]:
        """The axis of each collective inside of a composite: the one whose links made its term."""
        links = self.costs.links
        return [(c, next(a for a in range(len(links)) if id(c.term) in _told(links[a]))) for c in communication]

    def _moved(self, cost: CommunicationCost, axis: int) -> Moved:
        return _told(self.costs.links[axis])[id(cost.term)][1]

    def _path(self, instruction: Instruction, path: tuple[Communication, ...]) -> list[tuple[CommunicationCost, What, str, Moved, int]]:
        """The collectives of a conversion, step by step, as the cost model prices them."""
        ref = self.graph.refs[instruction.triple.post[0].tensor]
        at, found = instruction.triple.pre[0].placement, []
        for step in path:
            after = at.with_state(step.axis, step.target)
            costs = self.costs.conversion(ref, (step,), after).communication
            forward, backward = forward_collective(step.source, step.target), backward_collective(step.source, step.target)
            backwards = sum(c.direction == "backward" for c in costs)
            # backward, what was not kept is gathered again first; one collective alone is the transpose, if there is one
            names = {"forward": [forward], "synchronise": [backward], "backward": [forward, backward]}
            if backwards == 1:
                names["backward"] = [backward if step.gradient and backward is not None else forward]
            for cost in costs:
                whole = Moved("", Form.NONE, self._part(ref, after)) if cost.direction == "synchronise" else self._moved(cost, step.axis)
                moved = replace(whole, collective=names[cost.direction].pop(0) or "")
                found.append((cost, self._what(ref.name, step), ref.name, moved, step.axis))
            at = after
        return found

    def _part(self, ref: TensorRef, placement: Placement) -> Piece:
        return self.costs.view.fraction(placement).scaled([float(ref.bytes)] * len(self.kinds))

    def _what(self, name: str, step: Communication) -> What:
        ref = self.graph.refs[name]
        if ref.kind is Kind.PARAMETER:
            return "gradients" if forward_collective(step.source, step.target) is None else "weights"
        return "loss" if self.words.is_loss(name) else "buffers" if ref.kind is Kind.BUFFER else "activations"

    def _message(self, cost: CommunicationCost, what: What, tensor: str, moved: Moved, axis: int, late: CommunicationCost) -> Message:
        seconds = float(cost.term.at({}).max())
        return Message(
            what, cost.direction, moved.collective, moved.form, axis, float(moved.whole.at({}).max()), seconds,
            max(seconds - float(late.term.at({}).max()), 0.0), self.costs.links[axis].crosses, tensor, cost.cuts,
        )  # fmt: skip


def _told(links: AxisLinks) -> dict[int, tuple[Term, Moved]]:
    assert isinstance(links, RecordingLinks)
    return links.told


def modules_of(program: Program, graph: Graph) -> tuple[str, ...]:
    """The module of each instruction: of a call its own, of a conversion that of the first call that uses the result (else of the one that made
    the tensor)."""
    users: dict[Property, str] = {}
    for instruction in program.instructions:
        if instruction.triple.node is not None:
            for p in instruction.triple.pre:
                users.setdefault(p, graph.nodes[instruction.triple.node].module)

    def module(instruction: Instruction) -> str:
        triple = instruction.triple
        if triple.node is not None:
            return graph.nodes[triple.node].module
        made = graph.producer.get(triple.post[0].tensor)
        return users.get(triple.post[0], graph.nodes[made].module if made is not None else "")

    return tuple(map(module, program.instructions))
