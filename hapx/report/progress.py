"""A line on the terminal while the planner searches for long.

In: `hapx.progress.Progress`. Out: after `DELAY` seconds one line on stderr that changes, and is gone when planning ends; nothing where stderr is no
terminal (pipes, files, tests). The line has no thread of its own, as planning makes copies of a process only where it has one thread: it moves when
the planner says something.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from hapx.progress import Progress, Watcher
from hapx.report.words import time_text

DELAY = 2.0  # seconds before anything is shown
OFTEN = 0.1  # seconds from one picture to the next


@contextmanager
def shown(console: Console | None = None, delay: float = DELAY) -> Iterator[Watcher | None]:
    """A watcher for the planner, None where nobody would see it: then planning does nothing for it."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    line = _Line(console, delay)
    try:
        yield line
    finally:
        line.stop()


class _Line:
    def __init__(self, console: Console, delay: float):
        columns = SpinnerColumn("line"), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn()
        self.bar = Bar(*columns, console=console, transient=True, auto_refresh=False)
        self.task: TaskID | None = None
        self.due = time.monotonic() + delay

    def __call__(self, now: Progress) -> None:
        moment = time.monotonic()
        if moment < self.due:
            return
        if self.task is None:
            self.task = self.bar.add_task("", total=now.of)
            self.bar.start()
        self.due = moment + OFTEN
        self.bar.update(self.task, description=describe(now), completed=now.number - 1, total=now.of, refresh=True)

    def stop(self) -> None:
        if self.task is not None:
            self.bar.stop()


def describe(now: Progress) -> str:
    """ "mesh 2x4 (2 of 3): searching, best 93.1 ms, 1200 expansions, bound 91 ms of 95 ms", or
    "pipelines: submeshes asked: 12, best pipeline 93.1 ms"."""
    if now.detail:
        return f"{now.view}: {now.detail}"
    parts = [f"mesh {now.view} ({now.number} of {now.of}): {now.doing}"]
    if now.best is not None:
        parts.append(f"best {time_text(now.best)}")
    parts.append(f"{now.expansions} expansions")
    if now.bound is not None:
        parts.append(f"bound {time_text(now.bound)}" + (f" of {time_text(now.known)}" if now.known is not None else ""))
    return ", ".join(parts)
