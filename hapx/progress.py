"""What the planner is doing, for whoever wants to watch: data that a callback gets.

The planner calls `progress(Progress(...))` when it begins something and every few hundred expansions of a search; without a callback nothing is made.
Copies of the process that plan at the same time (`hapx.processes`) tell nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hapx.processes import is_copy
from hapx.synth.astar import Statistics, Watch

Doing = Literal["deriving rules", "searching", "planning stages"]


@dataclass(frozen=True, slots=True)
class Progress:
    """view: the mesh that is planned, the `number`-th of `of` (from 1). best: cost in seconds of the best program of all views so far, None before
    the first. expansions: of all searches so far. bound: of the running search, no program that is still open costs less; known: the cost of the
    best program that it has. detail: what it is about, in words, of pipelines ("planning stages")."""

    doing: Doing
    view: str
    number: int
    of: int
    best: float | None
    expansions: int
    bound: float | None = None
    known: float | None = None
    detail: str = ""


Watcher = Callable[[Progress], None]


@dataclass
class Teller:
    """Tells a watcher what is done on a view. statistics: of the searches that have ended; known: cost of the best program of all views so far."""

    progress: Watcher | None
    statistics: Statistics
    view: str
    number: int
    of: int
    known: float

    def __call__(self, doing: Doing, cost: float = float("inf"), detail: str = "") -> None:
        """What begins now, and what the last program costs."""
        self.known = min(self.known, cost)
        if self.progress is not None:
            self._tell(doing, 0, None, None, detail)

    def watch(self) -> Watch | None:
        """For searches, that tell how far they are; None where nobody watches."""
        if self.progress is None:
            return None
        ended, more = self.statistics.expansions, 0

        def called(expansions: int, bound: float, known: float | None) -> None:
            nonlocal ended, more
            if self.statistics.expansions != ended:  # a search has ended: its expansions are counted
                ended, more = self.statistics.expansions, 0
            more += expansions
            self._tell("searching", more, bound, known)

        return called

    def _tell(self, doing: Doing, more: int, bound: float | None, known: float | None, detail: str = "") -> None:
        assert self.progress is not None
        best = self.known if self.known < float("inf") else None
        if not is_copy():
            self.progress(Progress(doing, self.view, self.number, self.of, best, self.statistics.expansions + more, bound, known, detail))
