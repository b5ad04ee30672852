"""A schedule as a picture for people.

In: a schedule, and seconds where real ones are known. Out: text, ASCII: one row per group, time to the right; "F3" is the forward of micro-batch 3,
"B3--" its backward, "F3@1" says the stage where a group has several; dots are bubbles.

    1f1b: 2 groups, 2 stages, 4 micro-batches
    group 0  F0 F1 ..... B0--- F2 B1--- F3 B2--- .. B3---
    group 1  .. F0 B0--- F1 B1--- F2 B2--- F3 B3--- .....
"""

from __future__ import annotations

from hapx.plan import Schedule
from hapx.schedules.check import in_flight
from hapx.schedules.timetable import Seconds, Span, timetable
from hapx.schedules.words import run_text

WIDTH = 120


def grid(schedule: Schedule, seconds: Seconds | None = None, *, columns: int | None = None, width: int = WIDTH) -> str:
    """Runs in time. seconds: without them a forward takes one unit, a backward two, and nothing else any. columns: how many the whole iteration
    gets; without them the shortest run has room for its name. width: of a line; longer rows go on in further blocks. The schedule must have passed
    `check`."""
    stages = 1 + max(a.stage for actions in schedule.actions for a in actions)
    seconds = seconds or Seconds((1.0,) * stages, (2.0,) * stages)
    times = timetable(schedule, seconds)
    several = stages > len(schedule.actions)
    runs = [[s for s in spans if s.stream == "compute"] for spans in times.spans]
    shortest = min((s.duration for spans in runs for s in spans), default=1.0)
    longest = max((len(run_text(s.action, several)) for spans in runs for s in spans), default=1)
    scale = columns / times.total if columns and times.total else (longest + 1) / shortest
    rows = [_row(spans, scale, times.total, several) for spans in runs]
    names = [f"group {g}  " for g in range(len(rows))]
    label = max(map(len, names))
    unit = 1 if columns else longest + 1  # blocks end between units
    room = max(1, (width - label) // unit) * unit
    blocks = [
        "\n".join(f"{name:{label}}{row[k : k + room].rstrip()}" for name, row in zip(names, rows, strict=True))
        for k in range(0, max(1, *map(len, rows)), room)
    ]
    idle = "  ".join(f"{g}: {share:.0%}" for g, share in enumerate(times.bubbles))
    kept = " ".join(map(str, in_flight(schedule)))
    return "\n".join([_title(schedule, stages), "\n\n".join(blocks), f"bubbles by group  {idle}", f"micro-batches kept at once, by stage  {kept}"])


def _title(schedule: Schedule, stages: int) -> str:
    counts = (len(schedule.actions), "group"), (stages, "stage"), (len(schedule.micro_batches), "micro-batch")
    return f"{schedule.name}: " + ", ".join(f"{n} {word}{('es' if word[-1] == 'h' else 's') if n != 1 else ''}" for n, word in counts)


def _row(runs: list[Span], scale: float, total: float, several: bool) -> str:
    """Runs from column round(start * scale) to round(stop * scale), the last of which is empty where there is room."""
    row, at = "", 0
    for s in runs:
        start, stop = round(s.start * scale), round(s.stop * scale)
        row += _cell("", start - at, ".") + _cell(run_text(s.action, several), stop - start, "-")
        at = stop
    return row + _cell("", round(total * scale) - at, ".")


def _cell(text: str, columns: int, fill: str) -> str:
    """Text in exactly so many columns."""
    if columns < 2:
        return (text or fill)[:columns]
    return text[: columns - 1].ljust(columns - 1, fill) + " "
