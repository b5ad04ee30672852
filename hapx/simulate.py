"""Event-driven simulation of one training iteration: what runs when on each device.

In: a plan, or a program with its graph, cost model and lengths. Out: a `Timeline`. Every device has a compute stream and a communication
stream, as the runtime has: instructions run in order forward, and in reverse order backward; a collective starts when the last device has
arrived and the stream is free, and the program waits for it. Gradients of parameters are synchronised in buckets on the communication stream,
started as soon as the last gradient of the bucket is there, and waited for at the end, before the optimizer's update. On two levels, collectives
of the inner axis run inside machines on links (and process groups, so streams) of their own: they do not wait for a bucket that is on
its way between machines.

The terms are those of `hapx.cost` at the exact lengths of every device; devices that are alike and have equal lengths do the same and
are simulated as one kind. Of a plan of several stages, `hapx.schedules.timetable` says when which stage runs which micro-batch; its programs fill
these runs (`hapx.pipeline_timeline`).
Invariant: a program without gradient synchronisation takes at most its additive cost at these lengths, and just as long where one kind is the
slowest in every phase; overlap and slack, which the additive cost cannot see, only shorten it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from operator import add
from typing import Any, NamedTuple, get_args

from hapx.buckets import BUCKET_BYTES, in_buckets
from hapx.cost.model import CommunicationCost, CostModel, Direction, StepCost
from hapx.cost.terms import Piece, Term
from hapx.ir import Graph, Kind, OpCall
from hapx.layout import Lengths
from hapx.plan import Instruction, Plan, Program
from hapx.states import Property
from hapx.theory.triple import Theory
from hapx.timeline import Event, Stream, Timeline

Seconds = tuple[float, ...]  # per kind
WAYS = get_args(Direction)


def simulate(plan: Plan) -> Timeline:
    """One iteration of a plan's first training program, of its whole pipeline where it has one."""
    if plan.schedules:
        from hapx.pipeline_timeline import pipeline_timeline  # it is made from the simulations of the stages

        return pipeline_timeline(plan)
    stage = plan.stages[0]
    key, program = next(iter(stage.programs.items()))
    graph = plan.graphs[key]
    described = Theory(graph, stage.mesh, (), {}, {}, frozenset())  # costs need no more than the graph and the mesh
    cost = CostModel(described, plan.cluster, plan.precision, plan.optimizer, key.mode)
    return simulate_program(program, graph, cost, stage.lengths[key])


def simulate_program(
    program: Program, graph: Graph, cost: CostModel, lengths: Lengths, synchronisation: Mapping[str, float] | None = None
) -> Timeline:
    """One iteration of a program at concrete lengths, with the cluster, precision, optimizer and mode of a cost model of its graph and mesh.
    `synchronisation`: by parameter, the seconds that its gradient takes if something other than an all-reduce synchronises it."""
    assert cost.graph is graph and cost.theory.mesh == program.mesh, "the cost model is of another program"
    exact = cost.at_lengths(lengths)
    clock = _run(program, graph, exact, events=True, synchronisation=synchronisation)
    kind_of = tuple((device, k) for k, devices in enumerate(exact.view.devices) for device in devices)
    return Timeline(tuple(sorted(kind_of)), tuple(clock.events), max(clock.now))


def iteration_time(program: Program, graph: Graph, exact: CostModel) -> float:
    """Seconds of one iteration, as `simulate_program` has them, by a cost model at concrete lengths."""
    return max(_run(program, graph, exact, events=False).now)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of a stage's program on its slowest device: of one micro-batch forward and backward; and what the last one of an iteration takes
    longer: collectives of its backward that wait behind those of gradients, gradients that are still on their way when backward is done, and the
    update."""

    forward: float
    backward: float
    iteration: float

    @property
    def micro(self) -> float:
        return self.forward + self.backward


def stage_times(program: Program, graph: Graph, exact: CostModel) -> StageTimes:
    """By a cost model at concrete lengths."""
    assert exact.repeats == 1, "what happens once per iteration counts whole"
    each, last = _each_and_last(program, graph, exact, events=False)
    forward = each.marks[0]
    backward = each.marks[-1]  # evaluation ends with forward
    return StageTimes(forward, backward - forward, max(last.now) - backward)


def _each_and_last(program: Program, graph: Graph, exact: CostModel, events: bool) -> tuple[_Clock, _Clock]:
    """A micro-batch whose gradients are only added up, and the last one, which synchronises them."""
    return _run(program, graph, exact, events, synchronise=False), _run(program, graph, exact, events)


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Seconds of some instructions on their slowest device: of one micro-batch forward and backward, and what the update takes."""

    micro_forward: float
    micro_backward: float
    update: float


def run_times(instructions: Sequence[Instruction], needs: Sequence[Property], graph: Graph, exact: CostModel) -> RunTimes:
    """By a cost model at concrete lengths. needs: what is stored; the update of its parameters is counted."""
    clock = _Clock(len(exact.kinds))
    steps = _timed([exact.step(i.triple) for i in instructions])
    clock.ahead(steps)
    clock.mark()
    clock.back(steps)
    clock.mark()
    forward, backward = clock.marks[0], clock.marks[1] - clock.marks[0]
    if exact.mode == "train":
        clock.compute("", _updates(needs, graph, exact))
    return RunTimes(forward, backward, max(clock.now) - clock.marks[1])


@dataclass(frozen=True, slots=True)
class StageEvents:
    """What a stage's program does in a forward, and in a backward (times from its start on); what the last one of an iteration synchronises besides
    (from its start on); how parameters are updated (from its end on)."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    synchronise: tuple[Event, ...]
    update: tuple[Event, ...]


def stage_events(program: Program, graph: Graph, exact: CostModel) -> StageEvents:
    """The events behind `stage_times`; those of backward as if no gradients were on their way."""
    each, last = _each_and_last(program, graph, exact, events=True)
    forward, *rest = each.parts()
    backward = rest[0] if len(rest) == 2 else []  # evaluation ends with forward
    during, after = last.parts()[1:] if backward else ([], [])
    return StageEvents(
        tuple(forward),
        tuple(_later(e, -each.marks[0]) for e in backward),
        tuple(_later(e, -each.marks[0]) for e in during if e.name.startswith("synchronise")),
        tuple(_later(e, -each.marks[-1]) for e in after),
    )


def _later(event: Event, seconds: float) -> Event:
    """The event at another time; before 0 where a kind goes on before the others."""
    start, stop = (tuple(t + seconds for t in times) for times in (event.start, event.stop))
    return replace(event, start=start, stop=stop)


class _Message(NamedTuple):
    """A collective: seconds per kind, and whether all kinds wait for each other."""

    seconds: Seconds
    cuts: bool


class _Timed(NamedTuple):
    """What a step takes per kind: compute in either direction (None: nothing), and collectives in the order in which they run, those of gradients
    apart."""

    forward: Seconds | None
    backward: Seconds | None
    ahead: tuple[_Message, ...]
    back: tuple[_Message, ...]
    gradient: tuple[_Message, ...]


def _timed(steps: Sequence[StepCost]) -> list[_Timed]:
    """Steps at concrete lengths, where terms are constants. Those that are alike are one object, looked at once."""
    known: dict[int, _Timed] = {}
    for step in steps:
        if id(step) not in known:
            ways = {way: tuple([_Message(_seconds(c.term), c.cuts) for c in step.communication if c.direction == way]) for way in WAYS}
            forward, backward = (None if term is None else _seconds(term) for term in (step.forward, step.backward))
            known[id(step)] = _Timed(forward, backward, ways["forward"], ways["backward"][::-1], ways["synchronise"])
    return [known[id(step)] for step in steps]


def _seconds(term: Term) -> Seconds:
    """Of a constant term."""
    return term.pieces[0].const if len(term.pieces) == 1 else tuple(map(max, *(piece.const for piece in term.pieces)))


def _run(
    program: Program, graph: Graph, exact: CostModel, events: bool, synchronisation: Mapping[str, float] | None = None, synchronise: bool = True
) -> _Clock:
    """synchronise: whether gradients are, or only added to those of other micro-batches."""
    instructions = program.instructions
    assert exact.graph is graph, "the cost model is of another graph"
    costs = exact.steps(instructions)
    if synchronisation:
        costs = [_synchronised(i, step, synchronisation) for i, step in zip(instructions, costs, strict=True)]
    steps = _timed(costs)
    full = _full_buckets([_gradient_bytes(i, graph) if step.gradient else 0 for i, step in zip(instructions, steps, strict=True)])
    clock = _Clock(len(exact.kinds), list(map(_name, instructions)) if events else None)
    clock.ahead(steps)
    clock.mark()
    if exact.mode == "train":
        clock.back(steps, full if synchronise else None)
        clock.mark()
        clock.wait()
        if events:
            for need in program.needs:
                if graph.refs[need.tensor].kind is Kind.PARAMETER:
                    clock.compute(f"update {need.tensor}", _seconds(exact.update(graph.refs[need.tensor], need.placement)))
        else:
            clock.compute("", _updates(program.needs, graph, exact))
    return clock


def _updates(needs: Sequence[Property], graph: Graph, exact: CostModel) -> Seconds:
    """Of all parameters together; those that are alike are looked at once."""
    alike: dict[tuple[Any, ...], list[Property]] = {}
    for need in needs:
        ref = graph.refs[need.tensor]
        if ref.kind is Kind.PARAMETER:
            alike.setdefault((ref.shape, ref.dtype, ref.requires_grad, id(need.placement)), []).append(need)
    each = [(len(own), _seconds(exact.update(graph.refs[own[0].tensor], own[0].placement))) for own in alike.values()]
    return tuple([sum([n * seconds[kind] for n, seconds in each]) for kind in range(len(exact.kinds))])


def _name(instruction: Instruction) -> str:
    body, post = instruction.triple.body, instruction.triple.post[0]
    return f"{body.op} {post.tensor}" if isinstance(body, OpCall) else f"{' then '.join(map(str, body))} {post.tensor}"


def _synchronised(instruction: Instruction, step: StepCost, seconds: Mapping[str, float]) -> StepCost:
    """The step with a gradient's synchronisation taking the given seconds, where there are any for its parameter."""
    name = instruction.triple.post[0].tensor
    if name not in seconds:
        return step

    def changed(c: CommunicationCost) -> CommunicationCost:
        return replace(c, term=Term((Piece((seconds[name],) * len(c.term.pieces[0].const)),)))

    return replace(step, communication=tuple(changed(c) if c.direction == "synchronise" else c for c in step.communication))


def _gradient_bytes(instruction: Instruction, graph: Graph) -> int:
    """Bytes of the gradient that is synchronised after the instruction's backward."""
    return graph.refs[instruction.triple.post[0].tensor].bytes


def _full_buckets(sizes: Sequence[int]) -> frozenset[int]:
    """Instructions after whose backward a bucket is complete: those with the last gradient before the bucket would exceed its limit, or of all.
    `sizes`: bytes of the gradient of every instruction, in forward order; backward meets them in reverse."""
    met = [k for k in reversed(range(len(sizes))) if sizes[k]]
    numbers = in_buckets((("all", sizes[k]) for k in met), BUCKET_BYTES)
    return frozenset(dict(zip(numbers, met, strict=True)).values())  # the last of each


class _Clock:
    """Time on the streams of every kind: `now` of the program (its compute stream), `wires` of the communication streams, by whether they cut.
    `events` are recorded where steps have names."""

    def __init__(self, size: int, names: Sequence[str] | None = None):
        self.size, self.names, self.record = size, names, names is not None
        self.events: list[Event] = []
        self.now: Seconds = (0.0,) * size
        self.wires: dict[bool, Seconds] = {True: self.now, False: self.now}
        self._bucket: list[_Message] = []
        self._num_buckets = 0
        self.marks: list[float] = []  # when forward was done, and backward
        self._places: list[int] = []

    def mark(self) -> None:
        self.marks.append(max(self.now))
        self._places.append(len(self.events))

    def parts(self) -> list[list[Event]]:
        """The events before, between and after marks."""
        return [self.events[a:b] for a, b in pairwise((0, *self._places, len(self.events)))]

    def ahead(self, steps: Sequence[_Timed]) -> None:
        """Steps forward: what each waits for, then its compute."""
        names = self.names or repeat("", len(steps))
        for name, step in zip(names, steps, strict=True):
            if step.ahead:
                self.communicate(name, step.ahead)
            if step.forward is not None:
                self.compute(name, step.forward)

    def back(self, steps: Sequence[_Timed], full: frozenset[int] | None = None) -> None:
        """Steps backward, in reverse. full: of gradients that are synchronised, those with which a bucket sets off."""
        for k in range(len(steps) - 1, -1, -1):
            step, name = steps[k], f"{self.names[k]} backward" if self.names else ""
            if step.backward is not None:
                self.compute(name, step.backward)
            if step.back:
                self.communicate(name, step.back)
            if step.gradient and full is not None:
                self.gradient(step.gradient, k in full)

    def compute(self, name: str, seconds: Seconds) -> None:
        start, self.now = self.now, tuple(map(add, self.now, seconds))
        if self.record:
            self.events.append(Event(name, "compute", start, self.now))

    def communicate(self, name: str, collectives: Sequence[_Message]) -> None:
        """Collectives that the program waits for."""
        for collective in collectives:
            ready = tuple(map(max, self.now, self.wires[collective.cuts]))
            self.now = self.wires[collective.cuts] = self._run(name, collective, ready, "communication" if collective.cuts else "inside")

    def gradient(self, collectives: Sequence[_Message], full: bool) -> None:
        """A parameter's gradient is there; a full bucket sets off."""
        self._bucket += collectives
        if not full:
            return
        name = f"synchronise bucket {self._num_buckets}"
        # all axes of a bucket are one process group: a bucket that leaves the machines does so as a whole
        cuts = any(c.cuts for c in self._bucket)
        ready = tuple(map(max, self.now, self.wires[cuts]))
        for collective in self._bucket:
            ready = self._run(name, collective, ready, "communication" if cuts else "inside")
        self.wires[cuts] = ready
        self._bucket, self._num_buckets = [], self._num_buckets + 1

    def wait(self) -> None:
        """For all buckets."""
        assert not self._bucket, "a bucket was never sent"
        self.now = tuple(map(max, self.now, *self.wires.values()))

    def _run(self, name: str, collective: _Message, ready: Seconds, stream: Stream) -> Seconds:
        """The end of a collective for which the kinds are ready at the given times."""
        times, cuts = collective
        start = (max(ready),) * self.size if cuts else ready
        stop = (start[0] + max(times),) * self.size if cuts else tuple(map(add, start, times))
        if self.record:
            self.events.append(Event(name, stream, start, stop))
        return stop
