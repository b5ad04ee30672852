"""Event-driven simulation of one training iteration: what runs when on each device.

In: a plan, or a program with its graph, cost model and lengths. Out: a `Timeline`. Every device has a compute stream and a communication
stream, as the runtime has: instructions run in order forward, and in reverse order backward; a collective starts when the last device has
arrived and the stream is free, and the program waits for it. Gradients of parameters are synchronised in buckets on the communication stream,
started as soon as the last gradient of the bucket is there, and waited for at the end, before the optimizer's update. On two levels, collectives
of the inner axis run inside machines on links (and process groups, so streams) of their own: they do not wait for a bucket that is on
its way between machines.

The terms are those of `hapx.cost` at the exact lengths of every device; devices that are alike and have equal lengths do the same and
are simulated as one kind.
Invariant: a program without gradient synchronisation takes at most its additive cost at these lengths, and just as long where one kind is the
slowest in every phase; overlap and slack, which the additive cost cannot see, only shorten it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from typing import Literal

from hapx.buckets import BUCKET_BYTES, in_buckets
from hapx.cost.model import CommunicationCost, CostModel, StepCost
from hapx.cost.terms import Piece, Term
from hapx.errors import HapError
from hapx.ir import Graph, Kind, OpCall
from hapx.layout import Lengths
from hapx.plan import Instruction, Plan, Program
from hapx.theory.triple import Theory

# "inside": communication of the inner axis of two levels
Stream = Literal["compute", "communication", "inside"]
Seconds = tuple[float, ...]  # per kind


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs on a stream of a device, from `start` to `stop` (seconds since the iteration began)."""

    name: str
    stream: Stream
    start: float
    stop: float

    @property
    def duration(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Event:
    """A span on every device: start and stop per kind."""

    name: str
    stream: Stream
    start: tuple[float, ...]
    stop: tuple[float, ...]


@dataclass(frozen=True)
class Timeline:
    """One iteration. `kind_of`: (device, by its number in the cluster; its kind). `total`: seconds."""

    kind_of: tuple[tuple[int, int], ...]
    events: tuple[Event, ...]
    total: float

    @cached_property
    def spans(self) -> dict[int, tuple[Span, ...]]:
        """Per device, its spans in the order in which they were started. Spans of no length are left out."""
        of = {
            k: tuple(Span(e.name, e.stream, e.start[k], e.stop[k]) for e in self.events if e.stop[k] > e.start[k])
            for k in {k for _, k in self.kind_of}
        }
        return {device: of[k] for device, k in self.kind_of}

    def busy(self, stream: Stream = "compute") -> dict[int, float]:
        """Seconds per device in which a stream works (a collective's waiting for the last device is not work)."""
        return {device: sum(s.duration for s in spans if s.stream == stream) for device, spans in self.spans.items()}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the Chrome trace format, which Perfetto reads: a process per device, a thread per stream, microseconds."""
        events: list[dict[str, object]] = []
        threads: dict[Stream, int] = {"compute": 0, "communication": 1, "inside": 2}
        for device, spans in self.spans.items():
            events.append({"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"device {device}"}})
            for stream, thread in threads.items():
                events.append({"ph": "M", "name": "thread_name", "pid": device, "tid": thread, "args": {"name": stream}})
            for s in spans:
                where = {"pid": device, "tid": threads[s.stream]}
                events.append({"ph": "X", "name": s.name, "cat": s.stream, "ts": s.start * 1e6, "dur": s.duration * 1e6, **where})
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def __str__(self) -> str:
        busy, outside, inside = self.busy(), self.busy("communication"), self.busy("inside")
        moving = {device: seconds + inside[device] for device, seconds in outside.items()}
        lines = [f"one iteration: {self.total * 1e3:.3f} ms"]
        share = 1.0 / self.total if self.total else 0.0
        return "\n".join(lines + [f"  device {d}: computes {b * share:4.0%}, communicates {moving[d] * share:4.0%}" for d, b in busy.items()])


def simulate(plan: Plan) -> Timeline:
    """One iteration of a plan's first training program. Raises HapError for a plan of several stages, whose pipeline is not simulated."""
    if len(plan.stages) != 1:
        raise HapError(f"the plan has {len(plan.stages)} stages", where="simulate", allowed="plans of one stage")
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
    longer: gradients that are still on their way when backward is done, and the update."""

    forward: float
    backward: float
    iteration: float

    @property
    def micro(self) -> float:
        return self.forward + self.backward


def stage_times(program: Program, graph: Graph, exact: CostModel) -> StageTimes:
    """By a cost model at concrete lengths."""
    assert exact.repeats == 1, "what happens once per iteration counts whole"
    clock = _run(program, graph, exact, events=False)
    forward = clock.marks[0]
    backward = clock.marks[-1]  # evaluation ends with forward
    return StageTimes(forward, backward - forward, max(clock.now) - backward)


def _run(program: Program, graph: Graph, exact: CostModel, events: bool, synchronisation: Mapping[str, float] | None = None) -> _Clock:
    steps = [(_name(i) if events else "", _cost(i, graph, exact)) for i in program.instructions]
    if synchronisation:
        steps = [(name, _synchronised(i, step, synchronisation)) for i, (name, step) in zip(program.instructions, steps, strict=True)]
    full = _full_buckets([_gradient_bytes(i, step, graph) for i, (_, step) in zip(program.instructions, steps, strict=True)])
    clock = _Clock(len(exact.kinds), events)
    for name, step in steps:
        clock.communicate(name, [c for c in step.communication if c.direction == "forward"])
        clock.compute(name, step.forward)
    clock.mark()
    if exact.mode == "train":
        for k, (name, step) in reversed(list(enumerate(steps))):
            name = f"{name} backward" if events else ""
            clock.compute(name, step.backward)
            clock.communicate(name, [c for c in reversed(step.communication) if c.direction == "backward"])
            clock.gradient([c for c in step.communication if c.direction == "synchronise"], full=k in full)
        clock.mark()
        clock.wait()
        for need in program.needs:
            if graph.refs[need.tensor].kind is Kind.PARAMETER:
                clock.compute(f"update {need.tensor}", exact.update(graph.refs[need.tensor], need.placement))
    return clock


def _name(instruction: Instruction) -> str:
    body, post = instruction.triple.body, instruction.triple.post[0]
    return f"{body.op} {post.tensor}" if isinstance(body, OpCall) else f"{' then '.join(map(str, body))} {post.tensor}"


def _cost(instruction: Instruction, graph: Graph, cost: CostModel) -> StepCost:
    triple = instruction.triple
    if isinstance(triple.body, OpCall):
        return cost.instruction(triple)
    return cost.conversion(graph.refs[triple.post[0].tensor], triple.body, triple.post[0].placement)


def _synchronised(instruction: Instruction, step: StepCost, seconds: Mapping[str, float]) -> StepCost:
    """The step with a gradient's synchronisation taking the given seconds, where there are any for its parameter."""
    name = instruction.triple.post[0].tensor
    if name not in seconds:
        return step

    def changed(c: CommunicationCost) -> CommunicationCost:
        return replace(c, term=Term((Piece((seconds[name],) * len(c.term.pieces[0].const)),)))

    return replace(step, communication=tuple(changed(c) if c.direction == "synchronise" else c for c in step.communication))


def _gradient_bytes(instruction: Instruction, step: StepCost, graph: Graph) -> int:
    """Bytes of the gradient that is synchronised after the instruction's backward, 0 if none is."""
    synchronised = any(c.direction == "synchronise" for c in step.communication)
    return graph.refs[instruction.triple.post[0].tensor].bytes if synchronised else 0


def _full_buckets(sizes: Sequence[int]) -> frozenset[int]:
    """Instructions after whose backward a bucket is complete: those with the last gradient before the bucket would exceed its limit, or of all.
    `sizes`: bytes of the gradient of every instruction, in forward order; backward meets them in reverse."""
    met = [k for k in reversed(range(len(sizes))) if sizes[k]]
    numbers = in_buckets((("all", sizes[k]) for k in met), BUCKET_BYTES)
    return frozenset(dict(zip(numbers, met, strict=True)).values())  # the last of each


class _Clock:
    """Time on the streams of every kind: `now` of the program (its compute stream), `wires` of the communication streams, by whether they cut.
    `events` are recorded where they are wanted."""

    def __init__(self, size: int, record: bool):
        self.size, self.record = size, record
        self.events: list[Event] = []
        self.now: Seconds = (0.0,) * size
        self.wires: dict[bool, Seconds] = {True: self.now, False: self.now}
        self._bucket: list[CommunicationCost] = []
        self._num_buckets = 0
        self._values: dict[int, tuple[Term, Seconds]] = {}
        self.marks: list[float] = []  # when forward was done, and backward

    def mark(self) -> None:
        self.marks.append(max(self.now))

    def compute(self, name: str, term: Term | None) -> None:
        if term is None:
            return
        start, self.now = self.now, tuple(map(add, self.now, self._seconds(term)))
        self._record(name, "compute", start, self.now)

    def communicate(self, name: str, collectives: Sequence[CommunicationCost]) -> None:
        """Collectives that the program waits for."""
        for collective in collectives:
            ready = tuple(map(max, self.now, self.wires[collective.cuts]))
            self.now = self.wires[collective.cuts] = self._run(name, collective, ready, "communication" if collective.cuts else "inside")

    def gradient(self, collectives: Sequence[CommunicationCost], full: bool) -> None:
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

    def _run(self, name: str, collective: CommunicationCost, ready: Seconds, stream: Stream) -> Seconds:
        """The end of a collective for which the kinds are ready at the given times."""
        times = self._seconds(collective.term)
        start = (max(ready),) * self.size if collective.cuts else ready
        stop = (start[0] + max(times),) * self.size if collective.cuts else tuple(map(add, start, times))
        self._record(name, stream, start, stop)
        return stop

    def _seconds(self, term: Term) -> Seconds:
        """Terms at concrete lengths are constants; steps that are alike share them."""
        known = self._values.get(id(term))
        if known is None:
            known = self._values[id(term)] = term, tuple(term.at({}).tolist())  # the term is held, so that its id stays its own
        return known[1]

    def _record(self, name: str, stream: Stream, start: Seconds, stop: Seconds) -> None:
        if self.record:
            self.events.append(Event(name, stream, start, stop))
