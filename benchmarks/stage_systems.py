"""The ways to train a model on a cluster that `benchmarks.stages` compares.

In: a case. Out: `Found`: the fastest plan of a system, by the simulator (`hapx.predict`). All systems go through `hapx.inter_op.pipelines`: the same
planner answers for their stages, the same code puts pipelines together, simulates schedules and plans the best stages once more. What is different
is replaced there for the time of the call:

    pipeline             nothing; one stage that accumulates is a candidate here alone. hapx is the better of this and SPMD
    islands              the space, and neighbours of its best pipeline: no submesh with devices of two types
    SPMD, micro-batches  no program: one stage on all devices (gradients are accumulated)
    equal layers, dp+pp  the program itself: as many layers in every stage, a stage per machine, per two machines, ... ; schedule 1F1B,
                         and nothing near these is looked at, nor parts of layers.
                         dp+pp also under a restriction: only the batch is split, every parameter is kept where it is used
    equal operators      the layers: as many operators in each, which are not cut into parts
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from unittest.mock import patch

from benchmarks.stage_cases import OPTIMIZER, PRECISION, Case
from hapx import climbing, inter_op
from hapx.cluster.spec import ClusterSpec
from hapx.cost.remat import with_blocks
from hapx.errors import InsufficientMemoryError
from hapx.ir import Graph
from hapx.pipelines import assemble, plan_piece, scheduled
from hapx.plan import Plan
from hapx.planner import plan_graphs
from hapx.predict import predictions
from hapx.put_together import SMALL
from hapx.restriction import AUTO, Restriction
from hapx.scarcity import lacks_memory
from hapx.setting import Counters
from hapx.stage_prices import Asker
from hapx.stages.clustering import Layers, equal_operators, find_layers, finer
from hapx.stages.costs import ONE_F_ONE_B, Answer, Pipeline, Prices
from hapx.stages.dp import Solution, solve
from hapx.stages.neighbours import neighbours
from hapx.stages.numbers import numbers_of_micro_batches
from hapx.stages.plain import pipeline_by_hand
from hapx.stages.space import Space, space
from hapx.stages.submeshes import Shape
from hapx.theory.discover import discover

SPMD, PIPELINE, ISLANDS, EQUAL, DP_PP = "SPMD", "pipeline", "equal-GPU islands", "equal layers", "dp+pp"
OPERATORS, ACCUMULATED = "equal operators", "SPMD, micro-batches"
BATCH_ONLY = Restriction("dp", split="batch", storage="as-used", sfb="never", forms=frozenset({"padded"}), max_stages=64)
SIMULATED = 3  # pipelines with equal layers


def cpu() -> float:
    """CPU seconds of this process and of those that it has made."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@dataclass(frozen=True)
class Costs:
    """CPU seconds of planning. asking: in `asks` calls of the planner; program: the inter-operator program alone; rest: putting pipelines together,
    simulating them, planning the stages of the best one once more; or all of SPMD."""

    capture: float = 0.0
    asking: float = 0.0
    program: float = 0.0
    rest: float = 0.0
    asks: int = 0

    @property
    def total(self) -> float:
        return self.capture + self.asking + self.program + self.rest


@dataclass(frozen=True)
class Found:
    """The best plan of a system. None: nothing fits (or the model cannot be cut). others: all that were put together, the best one among them."""

    system: str
    plan: Plan | None
    costs: Costs
    others: tuple[Plan, ...] = ()

    @property
    def time(self) -> float:
        return self.plan.iteration_time if self.plan is not None else math.inf


Memo = dict[tuple[Hashable, ...], tuple[Answer, ...]]


@dataclass
class Bench:
    """One case. Answers of the planner are kept for all systems with the same restriction: only the first that asks pays for them."""

    case: Case
    numbers: tuple[int, ...] = ()
    watch: Callable[[str], None] = lambda _: None
    answers: Memo = field(default_factory=dict)

    @cached_property
    def tried(self) -> tuple[int, ...]:
        """Numbers of micro-batches."""
        return self.numbers or numbers_of_micro_batches(self.case.model.whole.batch, self.case.cluster, self.scarce)

    @cached_property
    def scarce(self) -> bool:
        """Whether one program of the whole batch has too little memory."""
        return lacks_memory(self.case.setting())

    # ---- systems ------------------------------------------------------------------------------------------------------

    def systems(self) -> dict[str, Callable[[], Found]]:
        """By name, in the order in which they are shown."""
        found: dict[str, Callable[[], Found]] = {SPMD: self.spmd, PIPELINE: lambda: self.pipelines(PIPELINE), ACCUMULATED: self.accumulated}
        if mixed(self.case.cluster):
            found[ISLANDS] = lambda: self.pipelines(ISLANDS, make_space=islands, near=neighbouring_islands)
        return found | {EQUAL: lambda: self.equal(EQUAL), DP_PP: lambda: self.equal(DP_PP, BATCH_ONLY)}

    def ablations(self) -> dict[str, Callable[[], Found]]:
        """The inter-operator program, as many layers per stage, and layers of as many operators."""
        operators = replace(self, answers={})
        return {
            PIPELINE: lambda: self.pipelines(PIPELINE), EQUAL: lambda: self.equal(EQUAL),
            OPERATORS: lambda: operators.pipelines(OPERATORS, layers=with_equal_operators),
        }  # fmt: skip

    def spmd(self) -> Found:
        """One program on all devices, the whole batch at once."""
        whole, began = self.case.model.whole, cpu()
        plan = None
        if not self.scarce or len(whole.nodes) <= SMALL:
            with suppress(InsufficientMemoryError):
                plan = plan_graphs([whole], self.case.cluster, precision=PRECISION, optimizer=OPTIMIZER, advise=False)
        return Found(SPMD, plan, Costs(rest=cpu() - began))

    def accumulated(self) -> Found:
        """One stage on all devices that runs micro-batches one after another."""
        began, captured, plans = cpu(), self.case.model.capture_seconds, []
        devices = range(self.case.cluster.num_devices)
        for n in self.tried:
            graph = discover(self.case.model.parts(n))
            for own in (graph, with_blocks(graph)):
                setting = replace(self.case.setting(replace(AUTO, segments="none")), graph=own, repeats=n)
                with suppress(InsufficientMemoryError):
                    piece = plan_piece(setting, (0, len(graph.nodes)), devices, Counters())[0]
                    plans.append(assemble([piece], replace(setting, graph=graph), "1f1b", {}))
                    break
        capture = self.case.model.capture_seconds - captured
        best = min(plans, key=lambda p: p.iteration_time, default=None)
        return Found(ACCUMULATED, best, Costs(capture, rest=cpu() - began - capture, asks=len(plans)))

    def equal(self, system: str, rule: Restriction = AUTO) -> Found:
        """As many layers in every stage, 1F1B; also with twice as many micro-batches as hapx looks at."""
        batch = self.case.model.whole.batch
        more = tuple(n for n in (2 * max(self.tried, default=1),) if batch % n == 0)
        found = self.pipelines(system, rule, program=equal_layers(self.case.cluster), near=no_neighbours, numbers=(*self.tried, *more))
        plain = [one_f_one_b(plan) for plan in found.others if len(plan.groups) == len(plan.stages)]
        return replace(found, plan=min(plain, key=lambda p: p.iteration_time, default=None), others=())

    def pipelines(
        self, system: str, rule: Restriction = AUTO, *, make_space: Callable[[ClusterSpec], Space] = space, program: Any = solve,
        layers: Callable[[Graph], Layers] = find_layers, near: Any = neighbours, numbers: Sequence[int] = (),
    ) -> Found:  # fmt: skip
        """The best pipeline, with parts of the inter-operator program replaced."""
        captured, began = self.case.model.capture_seconds, cpu()
        setting, clock = self.case.setting(rule), _Clock()
        with _replaced(self.answers, clock, make_space, program, layers, near):
            plans = inter_op.pipelines(
                setting, self.case.model.parts, tuple(numbers) or self.tried, watch=lambda m: self.watch(f"{system}: {m}"),
                one_stage=system == PIPELINE,
            )  # fmt: skip
        capture = self.case.model.capture_seconds - captured
        rest = cpu() - began - capture - clock.program - clock.asking
        costs = Costs(capture, clock.asking, clock.program, rest, clock.asks)
        return Found(system, plans[0] if plans else None, costs, tuple(plans))


def one_f_one_b(plan: Plan) -> Plan:
    """The pipeline with that schedule."""
    made = replace(plan, schedules={plan.first: scheduled(plan, plan.first, "1f1b")})
    seconds, held, shares = predictions(made)
    return replace(made, iteration_time=seconds, memory=held, shares=shares)


# ---- what is replaced ----------------------------------------------------------------------------------------------------------------------------


def mixed(cluster: ClusterSpec) -> bool:
    """Whether there are devices of several types."""
    return len({d.type for d in cluster.devices}) > 1


def islands(cluster: ClusterSpec) -> Space:
    """The space without stages that mix types of devices."""
    every = space(cluster)
    kept = tuple(tuple(m for m in moves if len(set(every.shapes[m.shape].types)) == 1) for moves in every.moves)
    return replace(every, moves=kept)


def neighbouring_islands(*asked: Any) -> Iterator[Pipeline]:
    """Neighbours whose stages do not mix types of devices."""
    return (p for p in neighbours(*asked) if all(len(set(s.shape.types)) == 1 for s in p.stages))


def no_neighbours(*_: Any) -> Iterator[Pipeline]:
    """Of a pipeline that is made by hand."""
    return iter(())


def whole_layers(_: Graph, layers: Layers, __: int) -> Layers:
    """Of pipelines whose layers are made by hand, or as many in every stage."""
    return layers


def groupings(cluster: ClusterSpec) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Devices per stage from the front: halves of machines (of at most four), one machine, two, four, ...; in the cluster's order and backwards."""
    machines = cluster.members
    found = []
    if len(machines) <= 4 and all(len(m) % 2 == 0 for m in machines):
        found.append(tuple(half for m in machines for half in (m[: len(m) // 2], m[len(m) // 2 :])))
    width = 1
    while width < len(machines):
        found.append(tuple(sum(machines[i : i + width], ()) for i in range(0, len(machines), width)))
        width *= 2
    for stages in found:
        yield from dict.fromkeys((stages, stages[::-1])) if mixed(cluster) else (stages,)


def equal_layers(cluster: ClusterSpec) -> Callable[..., Solution]:
    """In place of `solve`: the best pipelines with as many layers in every stage, of all groupings and numbers of micro-batches."""

    def program(layers: Sequence[Hashable], _: Space, prices: Sequence[Prices], *__: Any, watch: Callable[..., None], **___: Any) -> Solution:
        found = [made for stages in groupings(cluster) for p in prices if (made := _equal(cluster, len(layers), stages, p)) is not None]
        best = sorted(found, key=lambda p: p.time)[:SIMULATED]
        watch(0, best[0].time if best else math.inf, 0.0)
        return Solution(tuple(best), 0.0, 0, 0, 0, 0)

    return program


def _equal(cluster: ClusterSpec, layers: int, groups: Sequence[Sequence[int]], prices: Prices) -> Pipeline | None:
    """The pipeline on these groups; None if there are too few layers, or a stage does not fit."""
    size = len(groups)
    ends = [round(k * layers / size) for k in range(size + 1)]
    return pipeline_by_hand(ends, groups, cluster, prices, ONE_F_ONE_B) if layers >= size else None


def with_equal_operators(graph: Graph) -> Layers:
    """As many layers as usual, with equally many operators in each."""
    return equal_operators(graph, len(find_layers(graph)))


@dataclass
class _Clock:
    """CPU seconds of the program without what it asks, and of all asking."""

    program: float = 0.0
    asking: float = 0.0
    asks: int = 0
    running: bool = False  # the program


@contextmanager
def _replaced(known: Memo, clock: _Clock, make_space: Any, program: Any, layers: Any, near: Any) -> Iterator[None]:
    """Inside, `hapx.inter_op` uses these, and asks only what was not asked before."""

    class Remembering(Asker):
        def ask(self, start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
            own = self.classes[start:stop], shape
            if own not in self.known:  # what this asker refused stays refused
                key = (self.asked.repeats, replace(self.asked.rule, name=""), *own)
                if key not in known:
                    began = cpu()
                    known[key] = super().ask(start, stop, shape)
                    spent = cpu() - began
                    clock.asking += spent
                    clock.program -= spent if clock.running else 0.0
                    clock.asks += 1
                self.known[own] = known[key]
            return self.known[own]

    def timed(*args: Any, **options: Any) -> Solution:
        began, clock.running = cpu(), True
        try:
            solution: Solution = program(*args, **options)
        finally:
            clock.program += cpu() - began
            clock.running = False
        return solution

    with (
        patch.object(inter_op, "Asker", Remembering), patch.object(inter_op, "space", make_space), patch.object(inter_op, "solve", timed),
        patch.object(inter_op, "find_layers", layers), patch.object(climbing, "neighbours", near),
        patch.object(climbing, "finer", finer if near is not no_neighbours and layers is find_layers else whole_layers),
    ):  # fmt: skip
        yield
