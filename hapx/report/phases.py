"""What bounds each phase: a kind of device (its products, its memory, its kernel launches) or a link.

In: a `Pricing`. Out: `Phase`s: what runs between two synchronisations, by the planner's own equation

    t(Q, B) = sum over phases of comm_i + max over kinds of comp_ik,

forward, then backward, then once per iteration gradient synchronisation and the optimizer's update. The seconds of a device are divided by asking the
cost model again for clusters that are ideal in all but one thing: a kernel takes the longer of its products and its memory traffic, plus its launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hapx.cost.model import CostModel
from hapx.cost.terms import Term, Vector
from hapx.ir import Kind
from hapx.report.messages import link_text
from hapx.report.pricing import Message, Pricing, Step, cost_model, idealised, step_cost
from hapx.report.render import new_table, render
from hapx.report.words import collective_text, ranges_text, time_text

CAUSES = ("products", "memory", "launches", "links")


@dataclass(frozen=True, slots=True)
class Phase:
    """`begins`: the collectives that all devices wait for, one after another, before it; `waits`: their seconds. devices: the slowest kind, which
    takes `seconds`, of which `causes` (in the order of CAUSES; links: those inside machines that make no other device wait) are due to each."""

    direction: Literal["forward", "backward", "synchronise", "update"]
    modules: tuple[str, ...]
    begins: tuple[Message, ...]
    devices: tuple[int, ...]
    seconds: float
    causes: tuple[float, ...]

    @property
    def waits(self) -> float:
        return sum(m.seconds for m in self.begins)

    @property
    def total(self) -> float:
        return self.waits + self.seconds


@dataclass
class _Draft:
    begins: list[Message]
    modules: dict[str, None] = field(default_factory=dict)
    causes: list[Vector] = field(default_factory=list)  # per step, causes x kinds


class _Divided:
    """Terms of three cost models: as they are, with products alone, with memory traffic alone."""

    def __init__(self, pricing: Pricing):
        self.real, cluster = pricing.costs, pricing.plan.cluster
        self.products = cost_model(pricing.plan, idealised(cluster, bandwidth=True, launch=True))
        self.memory = cost_model(pricing.plan, idealised(cluster, flops=True, launch=True))

    def step(self, step: Step, direction: Literal["forward", "backward"]) -> Vector:
        """Seconds, causes x kinds, of a step's compute."""
        terms = [getattr(step_cost(costs, step.instruction), direction) for costs in (self.products, self.memory)]
        return self.of(getattr(step.cost, direction), self._per_kind(self.products, terms[0]), self._per_kind(self.memory, terms[1]))

    def of(self, term: Term | None, products: Vector, memory: Vector) -> Vector:
        total = term.at({}) if term is not None else np.zeros(len(self.real.kinds))
        most = np.minimum(np.maximum(products, memory), total)
        by_products = products >= memory
        return np.array([np.where(by_products, most, 0.0), np.where(by_products, 0.0, most), total - most, np.zeros_like(total)])

    def _per_kind(self, costs: CostModel, term: Term | None) -> Vector:
        """Values of another cost model, whose kinds may be fewer, in the kinds of the real one."""
        values = term.at({}) if term is not None else np.zeros(len(costs.kinds))
        kind_of = {device: k for k, devices in enumerate(costs.view.devices) for device in devices}
        return np.array([values[kind_of[devices[0]]] for devices in self.real.view.devices])


def phases(pricing: Pricing) -> tuple[Phase, ...]:
    """The phases of an iteration, in order."""
    divided = _Divided(pricing)
    found = [*_direction(pricing, divided, "forward", pricing.steps)]
    if pricing.costs.mode == "train":
        found += _direction(pricing, divided, "backward", tuple(reversed(pricing.steps)))
        found += _ending(pricing)
    return tuple(p for p in found if p.total > 0)


def _direction(pricing: Pricing, divided: _Divided, direction: Literal["forward", "backward"], steps: Sequence[Step]) -> Iterable[Phase]:
    current = _Draft([])
    for step in steps:
        forward = direction == "forward"
        messages = [m for m in (step.messages if forward else reversed(step.messages)) if m.direction == direction]
        if not forward:
            _compute(current, step, divided, direction)
        for m in messages:
            if not m.cuts:
                row = np.zeros((len(CAUSES), len(pricing.kinds)))
                row[-1] = m.seconds
                current.causes.append(row)
            elif current.causes:
                yield _phase(pricing, direction, current)
                current = _Draft([m])
            else:
                current.begins.append(m)
        if forward:
            _compute(current, step, divided, direction)
    yield _phase(pricing, direction, current)


def _compute(draft: _Draft, step: Step, divided: _Divided, direction: Literal["forward", "backward"]) -> None:
    if getattr(step.cost, direction) is not None:
        draft.causes.append(divided.step(step, direction))
        draft.modules[step.module] = None


def _phase(pricing: Pricing, direction: Literal["forward", "backward", "synchronise", "update"], draft: _Draft) -> Phase:
    causes = sum(draft.causes, np.zeros((len(CAUSES), len(pricing.kinds))))
    kind = int(np.argmax(causes.sum(axis=0)))
    return Phase(
        direction, tuple(draft.modules), tuple(draft.begins), pricing.kinds[kind], float(causes[:, kind].sum()), tuple(map(float, causes[:, kind]))
    )


def _ending(pricing: Pricing) -> Iterable[Phase]:
    """Gradient synchronisation, then the update."""
    messages = [m for s in pricing.steps for m in s.messages if m.direction == "synchronise"]
    if messages:
        yield _phase(pricing, "synchronise", _Draft(messages))
    refs, update = pricing.graph.refs, _Draft([])
    for need in pricing.program.needs:
        if refs[need.tensor].kind is Kind.PARAMETER:
            row = np.zeros((len(CAUSES), len(pricing.kinds)))
            row[1] = pricing.costs.update(refs[need.tensor], need.placement).at({})
            update.causes.append(row)
    yield _phase(pricing, "update", update)


# ---- text --------------------------------------------------------------------------------------------------------------


def phases_table(pricing: Pricing, found: Sequence[Phase]) -> str:
    """One row per phase; those that are alike but for the number of their layer are one."""
    groups: dict[tuple[object, ...], list[Phase]] = {}
    for p in found:
        pattern = tuple(re.sub(r"\d+", "#", m) for m in p.modules)
        begins = tuple((m.collective, m.what, m.axis) for m in p.begins) if p.direction != "synchronise" else len(p.begins)
        groups.setdefault((p.direction, pattern, begins, f"{p.seconds:.3g}", f"{p.waits:.3g}"), []).append(p)
    numbers = ("times", "waits", "computes")
    table = new_table("phase", "begins with", *numbers, "bounded by", right=numbers, whole=("phase", "bounded by"))
    for members in groups.values():
        p = members[0]
        table.add_row(_label(p), _begins(pricing, p), str(len(members)), time_text(p.waits), time_text(p.seconds), bound_text(pricing, p))
    return render(table)


def _label(phase: Phase) -> str:
    if phase.direction == "synchronise":
        return "synchronisation"
    if phase.direction == "update":
        return "update"
    names = [m or "(model)" for m in phase.modules] or ["(end)"]
    return f"{phase.direction} {names[0] if len(names) == 1 else f'{names[0]} .. {names[-1]}'}"


def _begins(pricing: Pricing, phase: Phase) -> str:
    if not phase.begins:
        return "-"
    last = max(phase.begins, key=lambda m: m.seconds)
    if len(phase.begins) > 1:
        return f"{len(phase.begins)} collectives"
    return f"{collective_text(last.collective)} of {last.what}{pricing.words.over(last.axis)}"


def bound_text(pricing: Pricing, phase: Phase) -> str:
    """A link, if the phase waits longer than it computes; else the slowest devices and what they spend their time on."""
    if phase.waits > phase.seconds:
        return link_text(max(phase.begins, key=lambda m: m.seconds).crosses, sum(m.volume for m in phase.begins), phase.waits)
    parts = sorted(zip(phase.causes, CAUSES, strict=True), reverse=True)
    said = ", ".join(f"{name} {seconds / phase.seconds:.0%}" for seconds, name in parts[:2] if seconds >= 0.05 * phase.seconds)
    return f"{_who(pricing, phase.devices)}: {said}"


def _who(pricing: Pricing, devices: Sequence[int]) -> str:
    """A type of device, with numbers where not all of them are meant."""
    cluster = pricing.plan.cluster
    name = cluster.type_of(devices[0]).name
    alike = [d.index for d in cluster.devices if d.type == name]
    return name if len(alike) == len(devices) else f"{name} {ranges_text(devices)}"
