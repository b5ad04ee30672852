"""What crosses between the stages of a plan, as one device carries it: activations, their cotangents, gradients of parameters that stages share.

In: a plan, a program's key, this device. Out: `Crossings`: a `Resharder` per pair of stages and direction, and per tied parameter the ways of its
gradient between all stages that keep a copy. All devices make the same crossings in the same order, so their channels are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch

from hapx.collectives.mailbox import Lane
from hapx.collectives.messages import Messenger
from hapx.ir import Kind, TensorRef
from hapx.pieces import Layout
from hapx.plan import Direction, Plan, ProgramKey, Property
from hapx.reshard import reshard_plan
from hapx.runtime.local import Communicators
from hapx.runtime.reshard import Crossing, Resharder, lanes

Messengers = Callable[[Iterable[Lane]], Messenger]


@dataclass(frozen=True)
class Way:
    """All tensors that cross from one stage to another, in one direction."""

    names: tuple[str, ...]
    resharder: Resharder


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages keep. Per stage of this device: where its gradient goes, and whence the others come, in the order of the stages
    (None: its own). `stages`: all that keep it, ascending."""

    name: str
    stages: tuple[int, ...]
    senders: Mapping[int, tuple[Resharder, ...]]
    receivers: Mapping[int, tuple[Resharder | None, ...]]


@dataclass(frozen=True)
class Crossings:
    """`ways`: by (stage, other stage, direction), of this device's stages; the same way under both of its ends. `messenger`: carries all of it."""

    ways: Mapping[tuple[int, int, Direction], Way]
    ties: tuple[Tie, ...]
    messenger: Messenger


def crossings(
    plan: Plan, key: ProgramKey, rank: int, communicators: Sequence[Communicators], messengers: Messengers, device: torch.device
) -> Crossings:
    """Of a program (a collective call: `messengers` may make process groups for the lanes)."""
    own = frozenset(plan.stages_of(rank))
    found = _between(plan, key)
    tied = _tied(plan)
    every = [(a, b, cs) for (a, b, _), cs in found.items()] + [(a, b, [c]) for ways in tied.values() for (a, b), c in ways.items()]
    channels = {id(cs): number for number, (_, _, cs) in enumerate(every)}
    messenger = messengers({lane for _, _, cs in every for lane in lanes(cs, channels[id(cs)])})

    def carried(number: int) -> Resharder:
        _, target, cs = every[number]
        return Resharder(cs, rank, messenger, communicators[target], number, device)

    ways: dict[tuple[int, int, Direction], Way] = {}
    for number, ((a, b, direction), cs) in enumerate(found.items()):
        if own & {a, b}:
            way = Way(tuple(c.name for c in cs), carried(number))
            ways[a, b, direction] = ways[b, a, direction] = way
    ties, number = [], len(found)
    for name, between in tied.items():
        numbers = {pair: number + i for i, pair in enumerate(between)}
        number += len(between)
        made = {pair: carried(n) for pair, n in numbers.items() if own & set(pair)}
        stages = sorted({s for pair in between for s in pair})
        senders = {s: tuple(made[s, t] for t in stages if t != s) for s in stages if s in own}
        receivers = {s: tuple(None if t == s else made[t, s] for t in stages) for s in stages if s in own}
        ties.append(Tie(name, tuple(stages), senders, receivers))
    return Crossings(ways, tuple(ties), messenger)


def _between(plan: Plan, key: ProgramKey) -> dict[tuple[int, int, Direction], list[Crossing]]:
    """By (source, target, direction) what crosses."""
    found: dict[tuple[int, int, Direction], list[Crossing]] = {}
    for tensor, (a, made), (b, needed) in plan.boundaries(key):
        ref = plan.graphs[key].refs[tensor]
        crossing = _crossing(plan, key, ref, (a, made), (b, needed))
        found.setdefault((a, b, "forward"), []).append(crossing)
        if ref.requires_grad and key.mode == "train":
            found.setdefault((b, a, "backward"), []).append(crossing.reversed())
    return found


def _tied(plan: Plan) -> dict[str, dict[tuple[int, int], Crossing]]:
    """Per parameter that stages on different devices train, the ways of its gradient between any two of them."""
    found: dict[str, dict[tuple[int, int], Crossing]] = {}
    refs = plan.graphs[plan.first].refs
    for stored in plan.storage:
        ref = refs.get(stored.name)
        if ref is None or ref.kind is not Kind.PARAMETER or not ref.requires_grad or len(stored.copies) < 2:
            continue
        first = {plan.stages[c.stage].devices: c for c in reversed(stored.copies)}  # stages on the same devices share one
        copies = sorted(first.values(), key=lambda c: c.stage)
        ends = [(c.stage, Property(stored.name, c.placement)) for c in copies]
        if len(ends) > 1:
            found[stored.name] = {(a[0], b[0]): _crossing(plan, plan.first, ref, a, b) for a, b in permutations(ends, 2)}
    return found


def _crossing(plan: Plan, key: ProgramKey, ref: TensorRef, source: tuple[int, Property], target: tuple[int, Property]) -> Crossing:
    layouts = [Layout(plan.stages[s].mesh, p.placement, plan.stages[s].lengths[key]) for s, p in (source, target)]
    machines = [d.machine for d in plan.cluster.devices]
    return Crossing(ref.name, reshard_plan(ref.shape, layouts[0], layouts[1], machines), getattr(torch, ref.dtype))
