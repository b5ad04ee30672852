"""Random pipelines, and a small machine that carries schedules out, for tests of `hapx.schedules`.

The machine knows nothing of `check`: groups take turns at random, transfers are first in, first out between each two groups and carry no tags, and
values are numbers that depend on everything they should have been made from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from hapx.plan import Action, Schedule
from hapx.schedules import Crossing, make

STYLES = ("gpipe", "1f1b", "1f1b-warm:0", "1f1b-warm:1", "1f1b-warm:3", "interleaved", "forward")


@dataclass(frozen=True)
class Pipeline:
    style: str
    groups: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    micro_batches: tuple[int, ...]
    ties: tuple[tuple[int, ...], ...] = ()

    def make(self) -> Schedule:
        return make(self.style, self.groups, self.crossings, self.micro_batches, self.ties)


def chain(stages: int) -> tuple[Crossing, ...]:
    return tuple(Crossing(s, s + 1) for s in range(stages - 1))


@st.composite
def pipelines(draw: st.DrawFn, styles: Sequence[str] = STYLES, layouts: bool = True) -> Pipeline:
    """Any style; groups one after another, round robin, or (`layouts`) anyhow where the style allows; any crossings."""
    style = draw(st.sampled_from(styles))
    size = draw(st.integers(1, 4))
    groups = list(range(size))
    if style in ("gpipe", "interleaved", "forward"):
        groups *= draw(st.integers(1, 3))
        if layouts and draw(st.booleans()):
            anyhow = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=7))
            groups = [list(dict.fromkeys(anyhow)).index(g) for g in anyhow]
    stages = range(len(groups))
    pairs = [(i, j) for i in stages for j in stages if i < j]
    kept = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=8)) if pairs else []
    if draw(st.booleans()):
        kept = list(dict.fromkeys([*kept, *((s, s + 1) for s in stages[:-1])]))
    crossings = tuple(Crossing(i, j, draw(st.booleans()) if draw(st.booleans()) else True) for i, j in kept)
    ties = draw(st.lists(st.sampled_from(pairs), max_size=2)) if pairs else []
    sizes = (draw(st.integers(1, 9)),) * draw(st.integers(1, 11))
    return Pipeline(style, tuple(groups), crossings, sizes, tuple(ties))


class Deadlock(AssertionError):
    """No group can go on."""


class Machine:
    """Carries a schedule out. Assertions fail where something is used that is not there, or is not what it should be."""

    def __init__(self, schedule: Schedule, pipeline: Pipeline, seed: int, rendezvous: bool):
        self.schedule, self.p, self.random, self.rendezvous = schedule, pipeline, Random(seed), rendezvous
        size = len(schedule.actions)
        self.place = [0] * size
        self.channels: dict[tuple[int, int], deque[float]] = {(a, b): deque() for a in range(size) for b in range(size)}
        self.posted: dict[tuple[int, int], deque[Action]] = {pair: deque() for pair in self.channels}
        self.got: dict[Action, float] = {}
        self.kept: dict[tuple[int, int], float] = {}  # (stage, micro-batch): result of the forward
        self.cotangents: dict[tuple[int, int], float] = {}
        self.outputs: dict[tuple[int, int], float] = {}
        self.gradients = [0.0] * len(pipeline.groups)
        self.waiting: set[int] = set()
        self.synchronised: list[int] = []

    def run(self) -> None:
        """To the end. Raises Deadlock."""
        size = len(self.place)
        while any(self.place[g] < len(self.schedule.actions[g]) for g in range(size)):
            turns = self.random.sample(range(size), size)
            if not any([self.step(g) for g in turns]):  # noqa: C419 (all of them)
                raise Deadlock(f"groups are at {self.place}")
        assert not self.kept, "something was not freed"
        assert not any(self.channels.values()) and not any(self.posted.values()), "something was sent for nothing"

    def step(self, group: int) -> bool:
        actions = self.schedule.actions[group]
        if self.place[group] == len(actions):
            return False
        if not getattr(self, f"do_{actions[self.place[group]].kind}")(actions[self.place[group]], group):
            return False
        self.place[group] += 1
        return True

    def received(self, run: Action, group: int) -> dict[int, float] | None:
        """By peer, what a run needs from others; None while something is on its way."""
        forward = run.kind == "forward"
        peers = [c.source if forward else c.target for c in self.p.crossings if (c[1] if forward else c[0]) == run.stage and (forward or c.gradient)]
        for (source, target), posted in self.posted.items():
            while target == group and posted and self.channels[source, target]:
                self.got[posted.popleft()] = self.channels[source, target].popleft()
        receives = {p: Action("receive", run.stage, run.micro_batch, p, run.kind) for p in peers}  # type: ignore[arg-type]
        known = [*self.got, *(a for posted in self.posted.values() for a in posted)]
        assert all(r in known for r in receives.values()), f"{run} before its receives are posted"
        return {p: self.got[r] for p, r in receives.items()} if all(r in self.got for r in receives.values()) else None

    def do_forward(self, run: Action, group: int) -> bool:
        found = self.received(run, group)
        if found is None:
            return False
        assert (run.stage, run.micro_batch) not in self.outputs, "a second forward"
        value = made(run.stage, run.micro_batch, found)
        self.kept[run.stage, run.micro_batch] = self.outputs[run.stage, run.micro_batch] = value
        return True

    def do_backward(self, run: Action, group: int) -> bool:
        found = self.received(run, group)
        if found is None:
            return False
        assert (run.stage, run.micro_batch) not in self.cotangents, "a second backward"
        value = cotangent(self.kept[run.stage, run.micro_batch], found)
        self.cotangents[run.stage, run.micro_batch] = value
        self.gradients[run.stage] += value
        return True

    def do_send(self, send: Action, group: int) -> bool:
        target = self.p.groups[send.peer]
        receive = Action("receive", send.peer, send.micro_batch, send.stage, send.direction)
        known = receive in self.posted[group, target]
        if self.rendezvous and target != group and not known:
            return False
        values = self.kept if send.direction == "forward" else self.cotangents
        assert (send.stage, send.micro_batch) in self.kept, "sent after it was freed"
        self.channels[group, target].append(values[send.stage, send.micro_batch])
        return True

    def do_receive(self, receive: Action, group: int) -> bool:
        self.posted[self.p.groups[receive.peer], group].append(receive)
        return True

    def do_free(self, free: Action, group: int) -> bool:
        del self.kept[free.stage, free.micro_batch]
        return True

    def do_synchronise(self, action: Action, group: int) -> bool:
        """The last one of tied stages that a group has waits for those of the other groups."""
        joined, size = {action.stage}, 0
        while len(joined) > size:
            size = len(joined)
            joined |= {s for tie in self.p.ties if joined & set(tie) for s in tie}
        self.waiting.add(action.stage)
        later = any(self.p.groups[s] == group and s not in self.waiting for s in joined)
        if not later and not joined <= self.waiting:
            return False
        self.synchronised.append(action.stage)
        return True


def made(stage: int, micro_batch: int, received: dict[int, float]) -> float:
    """What a stage makes of what it receives: no two are alike."""
    return (1 + stage + 0.37 * micro_batch + sum((1 + 0.11 * p) * v for p, v in received.items())) % 7.13


def cotangent(kept: float, received: dict[int, float]) -> float:
    return (kept * 1.7 + sum((2 + 0.13 * p) * v for p, v in received.items())) % 5.77


def expected(pipeline: Pipeline) -> tuple[dict[tuple[int, int], float], list[float]]:
    """Outputs by stage and micro-batch, and the gradient of each stage, micro-batch after micro-batch on one device."""
    outputs: dict[tuple[int, int], float] = {}
    gradients = [0.0] * len(pipeline.groups)
    for m in range(len(pipeline.micro_batches)):
        for s in range(len(pipeline.groups)):
            outputs[s, m] = made(s, m, {c.source: outputs[c.source, m] for c in pipeline.crossings if c.target == s})
        back: dict[int, float] = {}
        for s in reversed(range(len(pipeline.groups))):
            back[s] = cotangent(outputs[s, m], {c.target: back[c.target] for c in pipeline.crossings if c.source == s and c.gradient})
            gradients[s] += back[s]
    return outputs, gradients
