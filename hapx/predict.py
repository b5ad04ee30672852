"""What a plan of several stages is predicted to do: its pipeline simulated, the bytes and the part of the work of every device.

In: a plan. Out: seconds of an iteration, bytes and shares per device of the cluster. The one place where these numbers come from: a planned pipeline
gets them here, and verification compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hapx.cost.crossing import crossing_links, crossing_seconds
from hapx.cost.local_sizes import LocalSizes
from hapx.cost.model import CostModel
from hapx.ir import DTYPE_BYTES, Kind
from hapx.lower import Candidate, memory, work_shares
from hapx.pieces import Layout
from hapx.plan import Plan, ProgramKey, Schedule
from hapx.reshard import ReshardPlan, reshard_plan
from hapx.schedules import Seconds, Timetable, in_flight, received_ahead, timetable
from hapx.simulate import StageTimes, simulate_program, stage_times
from hapx.states import Placement, Property
from hapx.theory.derive import derive
from hapx.theory.triple import Theory


@dataclass(frozen=True)
class Staged:
    """A plan of several stages as its first program runs."""

    plan: Plan

    @cached_property
    def seconds(self) -> Seconds:
        """Of stages and crossings."""
        times = self.times
        update = tuple(t.iteration for t in times)
        links = {pair: crossing_links(plans, self.plan.cluster) for pair, plans in self.transfers.items()}
        return Seconds(tuple(t.forward for t in times), tuple(t.backward for t in times), update, self.crossing, links)

    @cached_property
    def timetable(self) -> Timetable:
        """One iteration."""
        return timetable(self.plan.schedules[self.plan.first], self.seconds, self.plan.ties)

    @cached_property
    def times(self) -> tuple[StageTimes, ...]:
        return tuple(stage_times(c.program, c.theory.graph, self.exact(i)) for i, c in enumerate(self.candidates))

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The stages as candidates of the planner, on their own devices."""
        plan, key = self.plan, self.plan.first
        found = []
        for i, stage in enumerate(plan.stages):
            theory = Theory(plan.part(key, i), stage.mesh, (), {}, {}, frozenset())  # costs need no more than the graph and the mesh
            costs = CostModel(theory, plan.cluster, plan.precision, plan.optimizer, key.mode)
            placed = stored_in(plan, i, key)
            found.append(Candidate(theory, costs, stage.programs[key], placed, stage.lengths[key], stage.shares, 0.0, 0.0))
        return tuple(found)

    def exact(self, stage: int, repeats: int = 1, kept: int = 1) -> CostModel:
        """The cost model of a stage at its lengths. repeats, kept: micro-batches in an iteration, and of them in memory."""
        best = self.candidates[stage]
        return best.costs.changed(lengths=best.lengths, repeats=repeats, in_flight=kept)

    @cached_property
    def crossing(self) -> Mapping[tuple[int, int], float]:
        """Seconds from stage to stage, in the direction in which tensors flow."""
        return {pair: crossing_seconds(plans, self.plan.cluster) for pair, plans in self.transfers.items()}

    @cached_property
    def transfers(self) -> Mapping[tuple[int, int], list[tuple[ReshardPlan, int]]]:
        """From stage to stage, how every tensor of a micro-batch gets there, and the bytes of its elements; cotangents go from a later stage to an
        earlier one."""
        plan, key = self.plan, self.plan.first
        found: dict[tuple[int, int], list[tuple[ReshardPlan, int]]] = {}
        for tensor, (a, made), (b, needed) in plan.boundaries(key):
            ref = plan.graphs[key].refs[tensor]
            ends = [self._layout(a, made), self._layout(b, needed)]
            machines = [d.machine for d in plan.cluster.devices]
            found.setdefault((a, b), []).append((reshard_plan(ref.shape, ends[0], ends[1], machines), DTYPE_BYTES[ref.dtype]))
            if ref.requires_grad and key.mode == "train":
                found.setdefault((b, a), []).append((reshard_plan(ref.shape, ends[1], ends[0], machines), DTYPE_BYTES[ref.dtype]))
        return found

    def _layout(self, stage: int, p: Property) -> Layout:
        own = self.plan.stages[stage]
        return Layout(own.mesh, p.placement, own.lengths[self.plan.first])

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Peak bytes per device; one that has several stages keeps what all of them keep."""
        total = [0] * self.plan.cluster.num_devices
        for stage in range(len(self.plan.stages)):
            for device, size in self.stage_memory(stage).items():
                total[device] += size
        return tuple(total)

    def stage_memory(self, stage: int) -> dict[int, int]:
        """Peak bytes of a stage by device: with all micro-batches in flight, and buffers for those that are received ahead."""
        schedule = self.plan.schedules[self.plan.first]
        key = stage, len(schedule.micro_batches), in_flight(schedule)[stage], received_ahead(schedule)[stage]
        if key not in self._held:
            self._held[key] = self._stage_memory(*key)
        return self._held[key]

    def _stage_memory(self, stage: int, repeats: int, kept: int, ahead: int) -> dict[int, int]:
        best, exact = self.candidates[stage], self.exact(stage, repeats, kept)
        found = dict(zip(sorted(best.mesh.devices), memory(best, exact), strict=True))
        received = LocalSizes(best.mesh, best.theory.graph, exact, best.storage_of).received()
        for devices, size in zip(exact.view.devices, received, strict=True):
            for device in devices:
                found[device] += round(ahead * float(size))
        return found

    @cached_property
    def _held(self) -> dict[tuple[int, int, int, int], dict[int, int]]:
        return {}

    def under(self, schedule: Schedule) -> Staged:
        """The same programs under another schedule: what does not depend on it is not found again."""
        twin = Staged(replace(self.plan, schedules={**self.plan.schedules, self.plan.first: schedule}))
        for name in ("candidates", "times", "transfers", "crossing", "seconds", "work", "shares", "_held"):
            twin.__dict__[name] = getattr(self, name)
        return twin

    @property
    def predictions(self) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
        """Seconds of an iteration, bytes and parts of the work per device."""
        return self.timetable.total, self.memory, self.shares

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Every stage's part of the work."""
        plan = self.plan
        speeds = [sum(plan.cluster.type_of(d).speed(plan.precision) for d in s.devices) for s in plan.stages]
        work = [t.micro * speed for t, speed in zip(self.times, speeds, strict=True)]
        return tuple(w / sum(work) for w in work)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Every device's part of the work."""
        shares = [0.0] * self.plan.cluster.num_devices
        for i, best in enumerate(self.candidates):
            for d, share in zip(sorted(best.mesh.devices), work_shares(best), strict=True):
                shares[d] += share * self.work[i]
        return tuple(shares)


def stored_in(plan: Plan, stage: int, key: ProgramKey) -> dict[str, Placement]:
    """Where a stage has what is there before a program begins: parameters and buffers of its graph, and what it receives."""
    graph, program = plan.part(key, stage), plan.stages[stage].programs[key]
    received = {p.tensor: p.placement for p in program.needs if p.tensor in graph.refs and graph.refs[p.tensor].kind is Kind.RECEIVED}
    return {s.name: c.placement for s in plan.storage for c in s.copies if c.stage == stage and s.name in graph.refs} | received


def predictions(plan: Plan, theory: Theory | None = None) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
    """(iteration time, memory, shares) by the cost model and the simulator. theory: of a plan without schedules, where it is known. Raises HapError
    for an unknown optimizer."""
    if plan.schedules:
        return Staged(plan).predictions
    stage, key = plan.stages[0], plan.first
    graph, program, lengths = plan.graphs[key], stage.programs[key], stage.lengths[key]
    known = theory or derive(graph, stage.mesh)
    costs = CostModel(known, plan.cluster, plan.precision, plan.optimizer, key.mode)
    candidate = Candidate(known, costs, program, stored_in(plan, 0, key), lengths, stage.shares, 0.0, 0.0)
    return simulate_program(program, graph, costs, lengths).total, memory(candidate), work_shares(candidate)
