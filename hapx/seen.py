"""What else was seen while a pipeline was planned, for whoever asks why it is as it is.

In: plans that were put together, and pipelines with the answers for their stages. Out: `Seen`, the fastest of each sort, which a plan keeps in its
statistics under "beside". Invariant: none of them is cut like the plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hapx.plan import Plan
from hapx.stages.costs import Pipeline

NAME = "beside"  # in the statistics
TOLD = 2  # of each sort: with other layers in the stages, with other devices, with other micro-batches


@dataclass(frozen=True, slots=True)
class Seen:
    """A pipeline. devices, nodes [start, stop): of every stage; seconds: of an iteration; estimated: by answers, its stages were not planned."""

    micro_batches: int
    devices: tuple[tuple[int, ...], ...]
    nodes: tuple[tuple[int, int], ...]
    seconds: float
    estimated: bool

    @classmethod
    def of(cls, plan: Plan) -> Seen:
        key = plan.first
        devices, nodes = tuple(s.devices for s in plan.stages), tuple(s.nodes[key] for s in plan.stages)
        return cls(len(plan.schedules[key].micro_batches), devices, nodes, plan.iteration_time, False)

    @classmethod
    def answered(cls, pipeline: Pipeline, layers: Sequence[tuple[int, int]], scale: float) -> Seen:
        """layers: node ranges. scale: how many times as long as answers say pipelines take."""
        nodes = tuple((layers[s.start][0], layers[s.stop - 1][1]) for s in pipeline.stages)
        return cls(pipeline.micro_batches, tuple(s.devices for s in pipeline.stages), nodes, scale * pipeline.time, True)

    @property
    def cut(self) -> Hashable:
        return self.micro_batches, self.devices, self.nodes

    def sort(self, best: Seen) -> str:
        """What it does otherwise, first of all."""
        return next((name for name in ("micro_batches", "devices") if getattr(self, name) != getattr(best, name)), "nodes")


def remembered(best: Seen, others: Iterable[Seen]) -> dict[str, Any]:
    """For the statistics of the best one; of others that are cut alike, planned ones count more than estimates."""
    cuts: dict[Hashable, Seen] = {best.cut: best}
    for other in sorted(others, key=lambda s: (s.estimated, s.seconds)):
        cuts.setdefault(other.cut, other)
    del cuts[best.cut]
    found: dict[str, list[Seen]] = {}
    for other in sorted(cuts.values(), key=lambda s: s.seconds):
        found.setdefault(other.sort(best), []).append(other)
    return {NAME: tuple(asdict(s) for own in found.values() for s in own[:TOLD])}


def beside(statistics: Mapping[str, Any]) -> tuple[Seen, ...]:
    """What the statistics of a plan tell, the fastest of each sort first."""
    return tuple(Seen(**own) for own in statistics.get(NAME, ()))
