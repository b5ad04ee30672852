"""What the choices of a pipeline save: several stages, the cut of the layers, the devices of each stage, micro-batches, the schedule.

In: a `Staged` plan. Out: a table. Instead of a choice stands the fastest pipeline without it that was seen when the plan was made (`hapx.seen`).
Schedules are simulated now, with the plan's own stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hapx.pipelines import drafted
from hapx.plan import Plan
from hapx.predict import Staged
from hapx.put_together import has_room
from hapx.report.render import new_table, render
from hapx.report.stages import layers_of
from hapx.report.words import ranges_text, time_text
from hapx.seen import Seen, beside

PLAIN = ("1f1b", "gpipe")
AT_LEAST, ABOUT = "at least ", "about "  # where seconds are a bound, and where they are estimated


@dataclass(frozen=True, slots=True)
class Row:
    """A choice, what may stand instead of it, and seconds of an iteration with that. unfit: it does not fit into memory."""

    choice: str
    instead: str
    seconds: float
    how: str = ""
    unfit: bool = False


def pipeline_choices(staged: Staged) -> Iterator[Row]:
    """What is known of each choice; nothing of those without another way."""
    plan = staged.plan
    own, known = Seen.of(plan), plan.statistics
    for name, how in (("one_stage", ""), ("one_stage_at_least", AT_LEAST)):
        if name in known:
            stages = f"{len(plan.stages)} stages" if len(plan.stages) > 1 else "one stage that accumulates"
            yield Row(stages, "the whole batch at once, in one stage on all devices", known[name], how)
    others = {other.sort(own): other for other in reversed(beside(known))}
    for name, other in ((n, others[n]) for n in ("nodes", "devices", "micro_batches") if n in others):
        choice, instead = CHOICES[name](plan, own, other)
        yield Row(choice, instead, other.seconds, ABOUT if other.estimated else "")
    if len(plan.groups) == len(plan.stages) > 1 and plan.first.mode == "train":
        chosen = plan.schedules[plan.first].name
        for style in PLAIN:
            if style != chosen:
                under = staged.under(drafted(plan, plan.first, style))
                yield Row(f"schedule {chosen}", style, under.timetable.total, unfit=not has_room(under))


def _other_layers(plan: Plan, own: Seen, other: Seen) -> tuple[str, str]:
    """Of the stages that have other layers."""
    changed = [i for i, (a, b) in enumerate(zip(own.nodes, other.nodes, strict=True)) if a != b]
    return "cut of the layers", "; ".join(f"stage {i}: {layers_of(plan, other.nodes, i)}" for i in changed)


def _other_devices(plan: Plan, own: Seen, other: Seen) -> tuple[str, str]:
    stages = "; ".join(f"{ranges_text(devices)}: {layers_of(plan, other.nodes, i)}" for i, devices in enumerate(other.devices))
    return f"devices {_devices(own)}", stages


def _other_number(_: Plan, own: Seen, other: Seen) -> tuple[str, str]:
    return f"{own.micro_batches} micro-batches", f"{other.micro_batches}, devices {_devices(other)}"


CHOICES = {"nodes": _other_layers, "devices": _other_devices, "micro_batches": _other_number}


def _devices(seen: Seen) -> str:
    return " | ".join(map(ranges_text, seen.devices))


def pipeline_text(staged: Staged) -> str:
    """The table of `hapx show --why`."""
    columns = ("iteration", "change")
    table, now = new_table("choice", "instead", *columns, right=columns, whole=columns), staged.plan.iteration_time
    for row in pipeline_choices(staged):
        change = "does not fit" if row.unfit else f"{row.seconds / now - 1:+.1%}"
        table.add_row(row.choice, row.instead, row.how + time_text(row.seconds), change)
    if not table.rows:
        return "why this pipeline: the plan tells of no others"
    said = "why this pipeline: without each of its choices, the fastest that was seen when it was planned (about: estimated)"
    return f"{said}\n\n{render(table)}"
