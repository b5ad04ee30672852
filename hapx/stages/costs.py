"""What a pipeline costs, as data: answers of the planner, disciplines, prices of one number of micro-batches, pipelines.

With n micro-batches, stages 1..S from the front, t_i seconds per micro-batch (forward and backward), x_i what crosses from stage i to the next one
(activations and their cotangents, charged to stage i; x_S = 0), u_i seconds per iteration (synchronisation of gradients, update):

    time = sum_i (t_i + x_i) + (n - 1) max_i period_i + max_i u_i
    period_i = t_i + x_i, or max(t_i, (x_(i-1) + x_i) / 2) in a discipline that hides what crosses behind other micro-batches: then activations of one
               micro-batch travel while cotangents of another come back, each half of x_i, and a stage sends activations to the next one and
               cotangents to the one before over the same card

and stage i, the s-th from the end, keeps what n or min(n, 1 + e (s - 1)) micro-batches need for backward at once, which must fit into its
devices. This is Alpa's equation 2 (OSDI'22) with x and u. It ranks pipelines; what overlaps exactly only the simulator knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hapx.cluster.spec import Link
from hapx.stages.submeshes import Shape

UNLIMITED = 1 << 20
ONE_WAY = 0.5  # of what crosses: cotangents have the sizes of activations


@dataclass(frozen=True, slots=True)
class Answer:
    """One way to run some layers on a submesh. micro: seconds per micro-batch; iteration: seconds per iteration; most_in_flight: micro-batches whose
    activations fit at once on the tightest device (0: not even one). plan: whatever the planner wants back."""

    micro: float
    iteration: float
    most_in_flight: int
    plan: Any = field(default=None, compare=False)


def most_in_flight(capacity: Sequence[float], static: Sequence[float], each: Sequence[float], temporary: Sequence[float]) -> int:
    """Micro-batches that fit. Bytes per kind of device: its memory, what is always there, what one micro-batch keeps, the largest temporary."""
    fits = UNLIMITED
    for room, fixed, one, peak in zip(capacity, static, each, temporary, strict=True):
        slack = room - fixed - peak
        if slack < 0:
            return 0
        fits = min(fits, int(slack // one)) if one > 0 else fits
    return fits


@dataclass(frozen=True, slots=True)
class Discipline:
    """What a schedule means for costs. each: micro-batches in flight for every stage behind, beside one; None: all of them. hides: what crosses is
    hidden behind other micro-batches."""

    name: str
    each: int | None = 1
    hides: bool = False

    def in_flight(self, micro_batches: int, from_end: int) -> int:
        """Micro-batches that the stage `from_end` (1: the last one) keeps at once."""
        return micro_batches if self.each is None else min(micro_batches, 1 + self.each * (from_end - 1))

    def period(self, micro: float, crossing: float, before: float = 0.0) -> float:
        """Seconds between two micro-batches of a stage. crossing, before: of what crosses behind it and before it."""
        return max(micro, ONE_WAY * (crossing + before)) if self.hides else micro + crossing


ONE_F_ONE_B = Discipline("1f1b")
GPIPE = Discipline("gpipe", None, hides=True)


def eager(each: int) -> Discipline:
    """1F1B with more micro-batches in flight, which hide what crosses: 2 for every stage behind hide as much as a stage computes
    (`hapx.schedules.warm`)."""
    return Discipline("1f1b-warm", each, hides=True)


def _nothing(_boundary: int, _front: Shape, _link: Link) -> float:
    return 0.0


@dataclass(frozen=True)
class Prices:
    """Costs at one number of micro-batches. Layers [start, stop); boundary b lies before layer b.

    ask(start, stop, shape): a few answers, none dominated; () where nothing fits. Slow: called once per (classes of the layers, shape), if ever.
    together: once one pair of a shape was asked, the others of the shape are quick: all are asked at once.
    bound(start, stop, shape): an answer at least as good as any, in each number. Quick: called for every pair of classes and shape.
    crossing(boundary, front, back, link): seconds per micro-batch between a stage on `front` and the next on `back`. Quick.
    least_crossing(boundary, front, link): at most that, whatever the stage behind it runs on.
    prepare(shapes): called before several shapes are asked about, for what may be done at the same time."""

    micro_batches: int
    ask: Callable[[int, int, Shape], tuple[Answer, ...]]
    bound: Callable[[int, int, Shape], Answer]
    crossing: Callable[[int, Shape, Shape, Link], float]
    least_crossing: Callable[[int, Shape, Link], float] = _nothing
    together: bool = False
    prepare: Callable[[Sequence[Shape]], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Assigned:
    """A stage: layers [start, stop) on devices (in the order of the shape), how it is run, micro-batches in flight, what crosses to the next one."""

    start: int
    stop: int
    shape: Shape
    devices: tuple[int, ...]
    answer: Answer
    in_flight: int
    crossing: float

    def __str__(self) -> str:
        cost = f"{self.answer.micro:.3g} s + {self.crossing:.3g} s, {self.answer.iteration:.3g} s per iteration"
        return f"layers {self.start}..{self.stop - 1} on {self.shape}: {cost}, {self.in_flight} in flight"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages from the front, with what they cost."""

    time: float
    micro_batches: int
    discipline: Discipline
    stages: tuple[Assigned, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.time:.4g} s, {self.discipline.name}, {self.micro_batches} micro-batches", *(f"  {s}" for s in self.stages)])


def latency(micro_batches: int, discipline: Discipline, stages: Sequence[tuple[float, float, float]]) -> float:
    """Seconds of an iteration; stages: (micro, crossing, iteration) each."""
    total = sum(t + x for t, x, _ in stages)
    before = [0.0, *(x for _, x, _ in stages[:-1])]
    period = max(discipline.period(t, x, y) for (t, x, _), y in zip(stages, before, strict=True))
    return total + (micro_batches - 1) * period + max(u for _, _, u in stages)
