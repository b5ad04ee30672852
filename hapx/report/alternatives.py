"""Why a plan is as it is: what the next best program without each of its most expensive choices would cost.

In: a plan; it has its model and its cluster inside. Out: `Alternative`s. A *choice* is how a layer computes (the placement of what its products
make), or one of its communications: how activations are exchanged, weights stored and gathered, gradients synchronised. Equal layers are one choice.
It is forbidden for all of them at once, and the model is planned again: on the plan's own mesh view, from the plan's ratios, then balanced. Its
price is the difference of the simulated times. A stage of a pipeline is planned again alone, for its micro-batches, and priced by the whole pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hapx.cost.compute import work
from hapx.errors import InsufficientMemoryError, PlanError
from hapx.ir import OpCall
from hapx.lower import lower
from hapx.plan import Plan
from hapx.planner import Counters, Setting, plan_spmd
from hapx.predict import Staged
from hapx.progress import Watcher
from hapx.report.folding import fold
from hapx.report.layers import Layer, layers
from hapx.report.one_stage import stage_plan, with_stage
from hapx.report.pricing import Message, Pricing, Step
from hapx.report.render import new_table, render
from hapx.report.words import collective_text, time_text
from hapx.schedules import in_flight
from hapx.synth.forbidden import Forbidden
from hapx.transposes import backward_collective, forward_collective

MOST = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """layer: a module or equal ones; says: what is done; seconds: what it takes per iteration, in all modules, on the slowest devices; forbidden:
    what programs without this choice may not do."""

    layer: str
    says: str
    seconds: float
    modules: tuple[str, ...]
    forbidden: Forbidden


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best program found without a choice; or `none` says why there is none."""

    choice: Choice
    plan: Plan | None
    none: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """What is planned again. alone: a plan of one stage; of: the pipeline of which it is the stage with that number."""

    alone: Plan
    of: Plan | None = None
    number: int = 0

    @classmethod
    def stage(cls, staged: Staged, number: int) -> Part:
        return cls(stage_plan(staged, number), staged.plan, number)

    @property
    def repeats(self) -> int:
        """Micro-batches per iteration."""
        return len(self.of.schedules[self.of.first].micro_batches) if self.of is not None else 1

    @property
    def in_flight(self) -> int:
        """Micro-batches that are kept at once."""
        return in_flight(self.of.schedules[self.of.first])[self.number] if self.of is not None else 1

    @property
    def now(self) -> float:
        """Seconds of an iteration."""
        return self.alone.iteration_time if self.of is None else self.of.iteration_time

    def seconds(self, alone: Plan) -> float:
        """Seconds of an iteration with another plan in its place."""
        return alone.iteration_time if self.of is None else Staged(with_stage(self.of, self.number, alone)).timetable.total


@dataclass
class _Draft:
    module: str
    says: str
    seconds: float = 0.0
    forbidden: list[Forbidden] = field(default_factory=list)


def choices(pricing: Pricing, repeats: int = 1) -> tuple[Choice, ...]:
    """The choices of a plan, the most expensive first. repeats: how often everything runs per iteration, but for the synchronisation of gradients."""
    drafts: dict[tuple[str, str], _Draft] = {}
    for step in pricing.steps:
        for says, seconds, forbidden in (*_computing(pricing, step, repeats), *_communicating(pricing, step, repeats)):
            draft = drafts.setdefault((step.module, says), _Draft(step.module, says))
            draft.seconds += seconds
            draft.forbidden.append(forbidden)
    rows = list(drafts.values())
    found = []
    for layer, members in fold([(d.module, (d.says, f"{d.seconds:.3g}")) for d in rows]):
        chosen = [rows[m] for m in members]
        together = [f for d in chosen for f in d.forbidden]
        found.append(Choice(layer, chosen[0].says, sum(d.seconds for d in chosen), tuple(d.module for d in chosen), _joined(together)))
    return tuple(sorted(found, key=lambda c: -c.seconds))


def _computing(pricing: Pricing, step: Step, repeats: int) -> list[tuple[str, float, Forbidden]]:
    """The product of an instruction: where its result is, and seconds on the slowest kind."""
    triple = step.instruction.triple
    if triple.node is None or not work(pricing.graph, pricing.graph.nodes[triple.node]).forward:
        return []
    terms = [t.at({}) for t in (step.cost.forward, step.cost.backward) if t is not None]
    out = triple.post[0]
    says = f"computed with {pricing.words.placement(pricing.graph.refs[out.tensor], out.placement)}"
    return [(says.replace("with whole", "whole on every device"), repeats * float(np.sum(terms, axis=0).max()), Forbidden(made=frozenset({out})))]


def _communicating(pricing: Pricing, step: Step, repeats: int) -> list[tuple[str, float, Forbidden]]:
    """The communications of an instruction, forward and backward together, per axis."""
    triple, found = step.instruction.triple, []
    for axis in dict.fromkeys(m.axis for m in step.messages if m.what != "sums"):
        messages = [m for m in step.messages if m.axis == axis]
        if isinstance(triple.body, OpCall):
            assert triple.node is not None
            forbidden = Forbidden(calls=frozenset({(triple.node, triple.body.target)}))
            says = "gradients made from sufficient factors"
        else:
            change = next(c for c in triple.body if c.axis == axis)
            forbidden = Forbidden(changes=frozenset({(triple.post[0].tensor, axis, type(change.source), type(change.target))}))
            forward, backward = forward_collective(change.source, change.target), backward_collective(change.source, change.target)
            names = " / ".join(collective_text(n) for n in (forward, backward) if n is not None and _runs(n, messages))
            says = f"{messages[0].what}: {names}"
        seconds = sum(m.seconds * (1 if m.direction == "synchronise" else repeats) for m in messages)
        found.append((says + pricing.words.over(axis), seconds, forbidden))
    return found


def _runs(collective: str, messages: Sequence[Message]) -> bool:
    return any(m.collective == collective for m in messages)


def _joined(parts: Sequence[Forbidden]) -> Forbidden:
    made, calls = (frozenset(x for p in parts for x in getattr(p, name)) for name in ("made", "calls"))
    return Forbidden(made, calls, frozenset(x for p in parts for x in p.changes))


def alternatives(part: Part, most: int = MOST, progress: Watcher | None = None) -> tuple[Alternative, ...]:
    """For the `most` expensive choices."""
    return tuple(without(part, choice, progress) for choice in choices(Pricing.of(part.alone), part.repeats)[:most])


def without(part: Part, choice: Choice, progress: Watcher | None = None) -> Alternative:
    """The best program that does not make a choice, on the plan's mesh."""
    plan = part.alone
    stage, graph = plan.stages[0], plan.graphs[plan.first]
    setting = Setting(
        graph, plan.first, plan.cluster, plan.restriction, plan.precision, plan.optimizer, start=stage.shares, progress=progress,
        forbidden=choice.forbidden, repeats=part.repeats, in_flight=part.in_flight,
    )  # fmt: skip
    counters = Counters()
    try:
        best = plan_spmd(setting, counters, [stage.mesh])[0]
    except InsufficientMemoryError:
        return Alternative(choice, None, "nothing else fits into memory")
    except PlanError:
        return Alternative(choice, None, "there is no other way")
    statistics = counters.as_dict()
    return Alternative(choice, lower(best, graph, plan.first, plan.cluster, plan.restriction, plan.precision, plan.optimizer, statistics))


# ---- text --------------------------------------------------------------------------------------------------------------


def why_text(part: Part, progress: Watcher | None = None) -> str:
    """The table of `hapx show --why`."""
    plan = part.alone
    if len(plan.stages[0].devices) == 1:
        return "why: on one device nothing is placed or communicated"
    columns = ("takes", "iteration", "change")
    table = new_table("choice", "takes", "instead", "iteration", "change", right=columns, whole=columns)
    for found in alternatives(part, progress=progress):
        choice = found.choice
        said = [f"{choice.layer or '(model)'}: {choice.says}", time_text(choice.seconds)]
        if found.plan is None:
            table.add_row(*said, found.none, "-", "-")
        else:
            seconds = part.seconds(found.plan)
            table.add_row(*said, instead(plan, found.plan, choice), time_text(seconds), f"{seconds / part.now - 1:+.1%}")
    heading = "why: the most expensive choices, and the next best program without each of them (planned again, on the same mesh)"
    return f"{heading}\n\n{render(table)}"


def instead(plan: Plan, other: Plan, choice: Choice) -> str:
    """What another plan does with the first module of a choice; where nothing of it shows there, how many layers changed."""
    module = choice.modules[0]
    before, after = (_row(layers(p), module) for p in (plan, other))
    parts = []
    if after is not None and before is not None:
        if after.weights != before.weights:
            parts.append(f"weights {after.weights[0]}" if len(after.weights) == 1 else ", ".join(after.weights) or "no weights")
        if after.activations != before.activations:
            parts.append(", ".join(after.activations))
        parts += [text for text in after.communication if text not in before.communication]
    if not parts:
        changed = [row.module or "(model)" for row in layers(other) if any(_row(layers(plan), m) != replace(row, module=m) for m in row.modules[:1])]
        return f"other placements in {', '.join(changed[:4])}" if changed else "another order of communications"
    return "; ".join(parts)


def _row(rows: Sequence[Layer], module: str) -> Layer | None:
    """The row of a module, under the module's name."""
    return next((replace(row, module=module) for row in rows if module in row.modules), None)
