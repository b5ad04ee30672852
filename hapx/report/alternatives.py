"""Why a plan is as it is: what the next best program without each of its most expensive choices would cost.

In: a plan; it has its model and its cluster inside. Out: `Alternative`s. A *choice* is how a layer computes (the placement of what its products
make), or one of its communications: how activations are exchanged, weights stored and gathered, gradients synchronised. Equal layers are one choice.
It is forbidden for all of them at once, and the model is planned again: on the plan's own mesh view, from the plan's ratios, then balanced. Its
price is the difference of the simulated times.
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
from hapx.progress import Watcher
from hapx.report.folding import fold
from hapx.report.layers import Layer, layers
from hapx.report.pricing import Message, Pricing, Step
from hapx.report.render import new_table, render
from hapx.report.words import collective_text, time_text
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


@dataclass
class _Draft:
    module: str
    says: str
    seconds: float = 0.0
    forbidden: list[Forbidden] = field(default_factory=list)


def choices(pricing: Pricing) -> tuple[Choice, ...]:
    """The choices of a plan, the most expensive first."""
    drafts: dict[tuple[str, str], _Draft] = {}
    for step in pricing.steps:
        for says, seconds, forbidden in (*_computing(pricing, step), *_communicating(pricing, step)):
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


def _computing(pricing: Pricing, step: Step) -> list[tuple[str, float, Forbidden]]:
    """The product of an instruction: where its result is, and seconds on the slowest kind."""
    triple = step.instruction.triple
    if triple.node is None or not work(pricing.graph, pricing.graph.nodes[triple.node]).forward:
        return []
    terms = [t.at({}) for t in (step.cost.forward, step.cost.backward) if t is not None]
    out = triple.post[0]
    says = f"computed with {pricing.words.placement(pricing.graph.refs[out.tensor], out.placement)}"
    return [(says.replace("with whole", "whole on every device"), float(np.sum(terms, axis=0).max()), Forbidden(made=frozenset({out})))]


def _communicating(pricing: Pricing, step: Step) -> list[tuple[str, float, Forbidden]]:
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
        found.append((says + pricing.words.over(axis), sum(m.seconds for m in messages), forbidden))
    return found


def _runs(collective: str, messages: Sequence[Message]) -> bool:
    return any(m.collective == collective for m in messages)


def _joined(parts: Sequence[Forbidden]) -> Forbidden:
    made, calls = (frozenset(x for p in parts for x in getattr(p, name)) for name in ("made", "calls"))
    return Forbidden(made, calls, frozenset(x for p in parts for x in p.changes))


def alternatives(pricing: Pricing, most: int = MOST, progress: Watcher | None = None) -> tuple[Alternative, ...]:
    """For the `most` expensive choices."""
    return tuple(without(pricing.plan, choice, progress) for choice in choices(pricing)[:most])


def without(plan: Plan, choice: Choice, progress: Watcher | None = None) -> Alternative:
    """The best program that does not make a choice, on the plan's mesh."""
    stage, graph = plan.stages[0], plan.graphs[plan.first]
    setting = Setting(
        graph, plan.first, plan.cluster, plan.restriction, plan.precision, plan.optimizer, start=stage.shares, progress=progress,
        forbidden=choice.forbidden,
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


def why_text(plan: Plan, progress: Watcher | None = None) -> str:
    """The table of `hapx show --why`."""
    pricing = Pricing.of(plan)
    columns = ("takes", "iteration", "change")
    table = new_table("choice", "takes", "instead", "iteration", "change", right=columns, whole=columns)
    for found in alternatives(pricing, progress=progress):
        choice = found.choice
        said = [f"{choice.layer or '(model)'}: {choice.says}", time_text(choice.seconds)]
        if found.plan is None:
            table.add_row(*said, found.none, "-", "-")
        else:
            more = found.plan.iteration_time / plan.iteration_time - 1
            table.add_row(*said, instead(plan, found.plan, choice), time_text(found.plan.iteration_time), f"{more:+.1%}")
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
