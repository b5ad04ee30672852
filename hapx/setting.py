"""What a program is planned for, and what planning cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any

from hapx.cluster.spec import ClusterSpec
from hapx.ir import Graph
from hapx.plan import Plan, ProgramKey
from hapx.progress import Watcher
from hapx.restriction import Restriction
from hapx.states import Cut, Placement, Row, Sharded
from hapx.synth.astar import Statistics
from hapx.synth.forbidden import NOTHING, Forbidden


@dataclass
class Counters:
    """What planning cost, for `Plan.statistics`."""

    theory_time: float = 0.0
    search_time: float = 0.0  # of which:
    problem_time: float = 0.0
    balance_time: float = 0.0
    segments_time: float = 0.0
    simulation_time: float = 0.0
    alternations: int = 0
    kept: list[tuple[float, ...]] = field(default_factory=list)  # per start, the least cost seen after every step of the alternation
    ended: Counter[str] = field(default_factory=Counter)  # why alternations ended
    views: list[str] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)  # per view: what came of it
    search: Statistics = field(default_factory=Statistics)

    def include(self, other: Counters) -> None:
        """What another plan cost, of which nothing else is told."""
        for name in self._own():
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.search.add(other.search)

    def sums(self) -> dict[str, float]:
        """What adds up when several things are planned: seconds, and counts of searches."""
        searched = {f.name: getattr(self.search, f.name) for f in fields(self.search) if f.name != "gap"}
        return {**{name: getattr(self, name) for name in self._own()}, **searched}

    def as_dict(self) -> dict[str, Any]:
        ended = {f"ended_{why}": n for why, n in sorted(self.ended.items())}
        return {**self.sums(), "gap": self.search.gap, **ended, "views": tuple(self.views), "tried": tuple(map(dict, self.tried))}

    def added_to(self, statistics: Mapping[str, Any]) -> dict[str, Any]:
        """Statistics of a plan, to which is added what else was planned before it was chosen."""
        return {**statistics, **{name: statistics.get(name, 0) + number for name, number in self.sums().items()}}

    def _own(self) -> list[str]:
        return [*(f.name for f in fields(self) if f.name.endswith("_time")), "alternations"]


@dataclass(frozen=True)
class Setting:
    """What a program is planned for.

    Attributes:
        given, fixed: placements of parameters, and lengths, that are settled already (those of a plan that gets a further program).
        start: ratios to begin with, instead of the usual ones.
        progress: is told what is done. forbidden: choices that are left out.
        strict: the peak of every program is looked at, not only of those that come near the capacity.
        tight: it is known that what would be fastest does not fit. beside: seconds of what was found otherwise; what is far slower is not improved.
        old: a plan of the same restriction; where its mesh is tried again, it is a start and a candidate.
        within: relative distance from the optimum at which searches may end, if they need not be exact.
        repeats, in_flight: of a stage, how many micro-batches it runs per iteration, and how many of them it keeps at once.
    """

    graph: Graph
    key: ProgramKey
    cluster: ClusterSpec
    rule: Restriction
    precision: str
    optimizer: str
    given: Mapping[str, Placement] = field(default_factory=dict)
    fixed: Mapping[Cut, tuple[int, ...]] = field(default_factory=dict)
    start: Mapping[Row, tuple[float, ...]] | None = None
    progress: Watcher | None = None
    forbidden: Forbidden = NOTHING
    strict: bool = False
    tight: bool = False
    beside: float = inf
    old: Plan | None = None
    repeats: int = 1
    in_flight: int = 1
    within: float = 0.0

    def storing(self, given: Mapping[str, Placement], lengths: Mapping[Cut, tuple[int, ...]], shares: Mapping[Row, tuple[float, ...]]) -> Setting:
        """Where parameters stay as another program has them: in these placements, at its lengths; from its shares on."""
        cuts = {state.cut for at in given.values() for state in at.states if isinstance(state, Sharded)}
        return replace(self, given=given, fixed={cut: own for cut, own in lengths.items() if cut in cuts}, start=shares)
