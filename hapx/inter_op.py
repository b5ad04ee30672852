"""Pipelines for a model on a cluster: the inter-operator program (`hapx.stages.dp`) with the planner's answers, made into plans.

In: a setting of the whole model, and what gives the graph of one of so many micro-batches. Out: plans of several stages, best first, by their
simulated time. For a few numbers of micro-batches the model is captured and clustered into layers; the inter-operator program chooses stages, places
and schedule by the additive cost; its best pipelines, as a simulation of their answers ranks them, are put together (`hapx.put_together`), also with
other numbers of micro-batches and with several stages on every submesh.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Container, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

from hapx.climbing import climbed, faster, in_parts, is_short, is_tight, key_of
from hapx.errors import HapError, InsufficientMemoryError, PlanError, kept
from hapx.ir import Graph
from hapx.plan import Plan
from hapx.processes import Telling, at_once, beside, beside_telling
from hapx.progress import Teller
from hapx.put_together import PUT_TOGETHER, SMALL, Made, look_ahead, polished, put_together
from hapx.recompute import Tells
from hapx.restriction import Restriction
from hapx.scarcity import lacks_memory
from hapx.seen import Seen, remembered
from hapx.setting import Counters, Setting
from hapx.stage_prices import Asker
from hapx.stages.clustering import find_layers, node_flops
from hapx.stages.costs import ONE_F_ONE_B, Pipeline, eager
from hapx.stages.dp import solve
from hapx.stages.interleaved import interleavings
from hapx.stages.numbers import may_have_stages, numbers_of_micro_batches, stages_at_most
from hapx.stages.plain import pipeline_by_hand, plain_pipelines
from hapx.stages.simulated import simulated
from hapx.stages.space import space
from hapx.synth.astar import Statistics
from hapx.theory.discover import discover
from hapx.theory.normalise import warn_of_mixing

MANY = 16  # micro-batches per stage: more leave little work for each, so twice as many are tried only where the last doubling was worth
GAINED = 0.03  # of the time
SURE = 1.02  # how many times as long as a pipeline takes a plan of one stage must take at least, not to be waited for: bounds are no proofs
NEAR = 1.15  # how many times the time at full speed a plan of one stage may take, for pipelines not to be tried
MOST_ASKS = 60  # shapes (at one number of micro-batches), unless nothing was found yet
WORTH = 0.01  # of the time, for which another number of micro-batches is looked at
DISCIPLINES = (ONE_F_ONE_B, eager(2))
SLOWER = 1.1  # times as long, by answers and the additive cost, a pipeline may be that is faster in the end: they see less overlap
CANDIDATES = 12  # pipelines of the program that are simulated with its answers, of which `PUT_TOGETHER` are planned stage by stage:
CLOSE = 1.04  # those that take so many times as long as the best of them at most
LIKE = 2  # times the samples of a micro-batch: what was searched for one is carried over to the other
MISSES = 2  # times that twice as many micro-batches may be no faster, where memory binds
ROUNDS = 4  # of choosing, while what was chosen does not fit after all

_Said = tuple[Any, Any, str, int]  # a warning: message, category, file, line
_Made = Plan | InsufficientMemoryError | None  # of one stage; why it does not fit; None: not tried
Whole = Callable[[bool], Tells[Plan]]  # whether somebody listens: then it says early how long the plan takes at least


@dataclass(frozen=True)
class OneStage:
    """What is known of a plan of one stage beside a pipeline. plan: None where it does not fit, or was not waited for as it is `slower`: it takes
    longer than the pipeline, whatever memory there were. Micro-batches one after another on all devices would, too, then."""

    plan: Plan | None = None
    slower: bool = False


Rival = Callable[[float], OneStage]  # of the seconds of a pipeline


def plan_with_stages(asked: Setting, whole: Whole, parts: Callable[[int], Graph], number: int | None) -> Plan:
    """The faster one of a plan of one stage, made by `whole`, and the best pipeline. number: of micro-batches, if it is given. Raises what `whole`
    raises where no pipeline fits either."""
    scarce = lacks_memory(asked)
    numbers = (number,) if number is not None else numbers_of_micro_batches(asked.graph.batch, asked.cluster, scarce)
    free = may_have_stages(asked.rule, asked.cluster)
    found: list[Plan] = []
    began, cost = time.perf_counter(), Counters()
    apart = free and bool(numbers)
    with _single(asked, whole, hopeless=scarce and len(asked.graph.nodes) > SMALL, apart=apart) as single:
        if free:
            with suppress(_GoodEnough), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is to be said of the model is said of the plan of one stage
                single.expect_more()
                told = _teller(asked)

                def watch(detail: str) -> None:
                    single.expect_more()
                    told("planning stages", detail=detail)

                try:
                    found = pipelines(asked, parts, numbers, single, watch, more=number is None, counters=cost)
                except HapError:
                    single(inf)  # what they lack does not matter where none is needed
                    raise
        spent = time.perf_counter() - began
        one = single.against(found[0].iteration_time if found else inf).plan
        single.say()
    if not found or (one is not None and one.iteration_time <= found[0].iteration_time):
        if one is None:
            if single.failure is not None:
                raise single.failure
            return at_once(whole(False))
        return replace(one, statistics={**cost.added_to(one.statistics), "stages_time": spent, "pipelines": len(found)})
    best = found[0]
    warn_of_mixing(best.graphs[best.first])
    before = {**one.statistics, "one_stage": one.iteration_time} if one is not None else single.known
    return replace(best, statistics={**cost.added_to(before), **best.statistics, "stages_time": spent, "pipelines": len(found)})


class _GoodEnough(Exception):
    """The plan of one stage is hardly slower than anything could be: pipelines are not looked for."""


class _Single:
    """The plan of one stage, which a copy of the process may be making. Whatever is done until it is asked for is the same whenever it comes.

    Where memory binds, that takes long; but how long the plan takes at least is known early, and if a pipeline is faster, the plan is not needed."""

    def __init__(self, job: Telling[tuple[_Made, list[_Said]], tuple[float, list[_Said]]], enough: float):
        """enough: seconds that are good enough."""
        self._job, self._enough, self._waited = job, enough, False

    @cached_property
    def _bound(self) -> tuple[float, list[_Said]] | None:
        """Seconds that the plan takes at least, as far as `plan` has asked, and what was warned of until that was known; None where it had to be made
        to know."""
        return self._job.note()

    @cached_property
    def _made(self) -> tuple[_Made, list[_Said]]:
        self._waited = True
        return self._job.result()

    def against(self, best: float) -> OneStage:
        """Waits for it, unless it is known to take well more than `best` seconds."""
        if not self._waited and best < inf:
            while self._bound is not None:
                if self._bound[0] > SURE * best:
                    return OneStage(slower=True)
                self._bound = self._job.note()
        return OneStage(self._made[0] if isinstance(self._made[0], Plan) else None)

    @property
    def failure(self) -> InsufficientMemoryError | None:
        """Why there is no plan, if it was tried."""
        return self._made[0] if isinstance(self._made[0], InsufficientMemoryError) else None

    def __call__(self, best: float) -> OneStage:
        """As `against`. Raises _GoodEnough."""
        one = self.against(best)
        if one.plan is not None and one.plan.iteration_time <= self._enough:
            raise _GoodEnough
        return one

    def expect_more(self) -> None:
        """Raises _GoodEnough if it is there. Without a copy it is made now, as far as is quick."""
        if self._job.ready() or (not self._job.elsewhere and self._bound is None):
            self(inf)

    @property
    def known(self) -> dict[str, float]:
        """Statistics where it was not waited for."""
        return {} if self._waited or self._bound is None else {"one_stage_at_least": self._bound[0]}

    def say(self) -> None:
        """What it warned of."""
        said = self._made[1] if self._waited else self._bound[1] if self._bound is not None else []
        for message in said:
            warnings.warn_explicit(*message)


@contextmanager
def _single(asked: Setting, whole: Whole, *, hopeless: bool, apart: bool) -> Iterator[_Single]:
    """The plan of one stage. hopeless: it is not tried. apart: a copy of the process makes it, if there can be one."""

    def noted() -> Generator[tuple[float, list[_Said]], None, tuple[_Made, list[_Said]]]:
        """With its warnings."""
        said: list[_Said] = []
        steps = whole(True)
        while not hopeless:
            with warnings.catch_warnings(record=True) as heard:  # of this step: what is done before the next one has its own
                warnings.simplefilter("always")
                made: _Made = None
                seconds: float | None = None
                try:
                    seconds = next(steps)
                except StopIteration as end:
                    made = end.value
                except InsufficientMemoryError as error:
                    made = kept(error)
            said += [(w.message, w.category, w.filename, w.lineno) for w in heard]
            if seconds is None:
                return made, said
            yield seconds, list(said)
        return None, said

    enough = NEAR * at_full_speed(asked)
    if hopeless or not apart:
        yield _Single(Telling(noted), enough)
        return
    with beside_telling(noted, patient=True) as job:
        yield _Single(job, enough)


def plan_of_micro_batches(asked: Setting) -> Plan:
    """The fastest plan for the graph of a micro-batch and as many of them as it says, of several stages or of one that accumulates gradients:
    where the graph of the whole batch is not at hand. Raises InsufficientMemoryError where none fits."""
    micro = asked.graph.micro_batches
    assert micro is not None, "a graph of micro-batches"
    told = _teller(asked)
    counters = Counters()
    found = pipelines(
        asked, lambda _: asked.graph, (micro.number,), watch=lambda detail: told("planning stages", detail=detail), more=False, counters=counters
    )
    if not found:
        raise InsufficientMemoryError(
            f"no plan of {micro.number} micro-batches fits into memory", where=f"cluster {asked.cluster.name}", allowed="more devices or memory",
            hint="more micro-batches are smaller: plan the model again with the changed cluster file",
        )  # fmt: skip
    return replace(found[0], statistics=counters.added_to(found[0].statistics))


def _teller(asked: Setting) -> Teller:
    """Tells whoever watches what is done for pipelines."""
    return Teller(asked.progress, Statistics(), "pipelines", 1, 1, inf)


def at_full_speed(asked: Setting) -> float:
    """Seconds of an iteration if all devices computed all the time, and nothing else took any."""
    speeds = sum(asked.cluster.type_of(d).speed(asked.precision) for d in range(asked.cluster.num_devices))
    return float(node_flops(asked.graph).sum()) / speeds


def pipelines(
    asked: Setting, parts: Callable[[int], Graph], numbers: Sequence[int], rival: Rival = lambda _: OneStage(),
    watch: Callable[[str], None] = lambda _: None, *, more: bool = True, one_stage: bool = True, counters: Counters | None = None,
) -> list[Plan]:  # fmt: skip
    """Plans of micro-batches, best first; none where the model or the cluster cannot be cut, or nothing fits. rival: gives the plan of one stage that
    they are to be faster than, once it is needed. more: the best one is also tried with more micro-batches than these numbers. one_stage: one stage
    on all devices that accumulates gradients over micro-batches is a candidate; it takes less memory than the rival, and is no faster otherwise.
    counters: get what all of it cost."""
    counters = Counters() if counters is None else counters
    if asked.cluster.num_devices < 2 and not one_stage:
        return []
    # what is asked only has to rank: stages that are chosen are planned once more without these limits
    rule = replace(asked.rule, segments="none", max_stages=1, remat="none", sfb="never", forms=asked.rule.forms & {"padded"} or asked.rule.forms)
    askers: list[Asker] = []
    drawn: dict[Hashable, tuple[Pipeline, Asker]] = {}

    def another(number: int, afresh: bool = False) -> Asker | None:
        """Also asks about so many micro-batches; None where their layers are others. afresh: not with programs that were searched for like ones."""
        watch(f"capturing one of {number} micro-batches")
        asker = _asker(asked, rule, parts, number, counters)
        if asker is None or (askers and len(asker.layers) != len(askers[0].layers)):
            return None
        like = (a for a in askers if not a.others and max(number, n := a.asked.repeats) <= LIKE * min(number, n))
        asker.others = () if afresh else tuple(like)
        askers.append(asker)
        return asker

    def with_twice_as_many(best: Made, looked: Container[int] = ()) -> Made | None:
        """A pipeline with twice as many micro-batches: they leave fewer bubbles. None where the program has looked at them, where it does not fit, or
        answers say that it is slower."""
        number = 2 * best.asker.asked.repeats
        if asked.graph.batch % number or number in looked or not _fewer_bubbles(best):
            return None
        asker = next((a for a in askers if a.asked.repeats == number), None) or another(number)
        pipeline = _answered(best.pipeline, asker) if asker is not None else None
        if asker is None or pipeline is None or simulated(pipeline, asked.cluster) * _scale(best) > CLOSE * best.plan.iteration_time:
            return None
        watch(f"the best pipeline with {number} micro-batches")
        return put_together(asker, pipeline, asked.rule, dict(best.plan.statistics))

    plans: list[Made] = []
    todo = list(numbers)
    while todo and not plans:
        for number in todo:
            another(number)
        if not askers:
            return []
        plans = _chosen(asked, askers, rival, inf, watch, one_stage, drawn)
        number = 4 * max(a.asked.repeats for a in askers)  # smaller micro-batches take less memory
        todo = [number] if not plans and more and asked.graph.batch % number == 0 and rival(inf).plan is None else []
    plans.sort(key=lambda m: m.plan.iteration_time)
    missed, gained = 0, 0.0
    while more and plans and missed < MISSES and is_short(plans[0]):  # smaller ones leave room for quicker programs
        number, most = 2 * max(a.asked.repeats for a in askers), MANY * stages_at_most(asked.cluster) * (2 if gained > GAINED else 1)
        if asked.graph.batch % number or number > most or (asker := another(number, afresh=True)) is None:
            break
        before = plans[0].plan.iteration_time
        found = _chosen(asked, [asker], rival, before, watch, one_stage, drawn)
        plans = sorted([*plans, *found], key=lambda m: m.plan.iteration_time)
        missed, gained = 0 if plans[0].asker is asker else missed + 1, 1 - plans[0].plan.iteration_time / before
    looked = {a.asked.repeats for a in askers}  # numbers of micro-batches at which the program has looked
    while more and plans and (made := with_twice_as_many(plans[0], looked)) is not None and faster(made, plans[0]):
        plans.insert(0, made)
    if not plans:
        return []
    first = plans[0]
    # it is seldom beaten, so a copy polishes it meanwhile
    with beside(lambda: polished(first, asked.rule)) as polishing:
        plans = _improved(plans, asked, watch, with_twice_as_many if more else lambda _: None)
        watch("planning the slowest stages of the best pipeline once more")
        best, cost = polishing.result() if plans[0] is first else polished(plans[0], asked.rule)
        counters.include(cost)
    ranked, scale = [m.plan for m in plans], _scale(first)
    if best is not None and best.iteration_time < ranked[0].iteration_time:
        ranked.insert(0, best)
    others = [*map(Seen.of, ranked[1:]), *(Seen.answered(p, a.layers, scale) for p, a in drawn.values())]
    return [replace(ranked[0], statistics={**ranked[0].statistics, **remembered(Seen.of(ranked[0]), others)}), *ranked[1:]]


def _improved(
    plans: Sequence[Made], asked: Setting, watch: Callable[[str], None], with_twice_as_many: Callable[[Made], Made | None]
) -> list[Made]:  # fmt: skip
    """The plans, and those that are found near the best of them, if they are faster: best first."""
    plans = list(plans)
    tried = {key_of(m.pipeline) for m in plans}
    while faster(nearby := climbed(plans, asked, watch, tried), plans[0]):
        made = with_twice_as_many(nearby)
        if made is None or made.plan.iteration_time > CLOSE * nearby.plan.iteration_time:
            plans.insert(0, nearby)
            break
        plans = sorted([nearby, made, *plans], key=lambda m: m.plan.iteration_time)
    if faster(parted := in_parts(plans[:PUT_TOGETHER], asked, watch), plans[0]):
        plans.insert(0, parted)
    if (made := _interleaved(plans, asked, watch)) is not None:
        plans.insert(0, made)
    return plans


def _chosen(
    asked: Setting, askers: Sequence[Asker], rival: Rival, below: float, watch: Callable[[str], None], one_stage: bool,
    drawn: dict[Hashable, tuple[Pipeline, Asker]],
) -> list[Made]:  # fmt: skip
    """The best pipelines of the inter-operator program as plans; where what it chose does not fit after all, it is asked again. below: seconds of an
    iteration; slower ones are of no interest, nor are those that are slower than the rival. drawn: gets all that were simulated with answers."""

    def told(asks: int, best: float, _: float) -> None:
        watch(f"submeshes asked: {asks}" + (f", best pipeline {best * 1e3:.3g} ms" if best < inf else ""))

    plans: dict[Hashable, Made | None] = {}
    submeshes = space(asked.cluster)
    for last in (*(ROUNDS - 1) * [False], True):
        found = solve(
            askers[0].classes, submeshes, [a.prices() for a in askers], DISCIPLINES, prove=False, most_asks=MOST_ASKS, below=below,
            keep=CANDIDATES, watch=told,
        )  # fmt: skip
        single = rival(min((p.time for p in found.pipelines), default=inf) / SLOWER)
        below = min(below, single.plan.iteration_time if single.plan is not None else inf)
        one_stage = one_stage and (is_tight(single.plan) if single.plan is not None else not single.slower)
        plain = [p for a in askers for p in plain_pipelines(a.work, asked.cluster, a.prices(), ONE_F_ONE_B, asked.precision)]
        whole = [p for a in askers if one_stage and (p := a.accumulated()) is not None]
        candidates = (p for p in (*found.pipelines, *plain, *whole) if len(p.stages) <= asked.rule.max_stages and p.time < SLOWER * below)
        apart = {key_of(p): p for p in sorted(candidates, key=lambda p: -p.time)}
        nearer = [(key, replace(p, time=simulated(p, asked.cluster))) for key, p in apart.items()]
        least = min((p.time for _, p in nearer), default=inf)
        best, tried = inf, list[Pipeline]()
        by_number = {a.asked.repeats: a for a in askers}
        nearer.sort(key=lambda item: item[1].time)
        drawn |= {key: (p, by_number[p.micro_batches]) for key, p in nearer}
        promising = [(key, p) for key, p in nearer[:PUT_TOGETHER] if p.time <= CLOSE * least]
        look_ahead((by_number[p.micro_batches], p) for key, p in promising if key not in plans)
        for key, pipeline in nearer:
            # in the end whatever fits
            if (len(tried) >= PUT_TOGETHER or pipeline.time > CLOSE * least) and (best < inf or not last):
                break
            tried.append(pipeline)
            if key not in plans:
                asker = by_number[pipeline.micro_batches]
                statistics = {"asks": found.asked, "pairs": found.pairs, "inter_op_gap": found.gap, "layers": len(asker.layers)}
                plans[key] = put_together(asker, pipeline, asked.rule, statistics)
            made = plans[key]
            best = min(best, made.plan.iteration_time) if made is not None else best
        refused = min((p.time for a in askers for p in tried if a.refused(p)), default=inf)
        if not nearer or (best < inf and refused >= best):
            break
    return [made for made in plans.values() if made is not None]


def _fewer_bubbles(made: Made) -> bool:
    """Whether twice as many micro-batches may be worth a look: bubbles take stages - 1 of micro-batches + stages - 1 parts."""
    return (len(made.pieces) - 1) / 2 > WORTH * made.asker.asked.repeats


def _answered(pipeline: Pipeline, asker: Asker) -> Pipeline | None:
    """The pipeline with as many micro-batches as another asker asks about; None where a stage does not fit then."""
    ends, groups = (0, *(s.stop for s in pipeline.stages)), [s.devices for s in pipeline.stages]
    return pipeline_by_hand(ends, groups, asker.asked.cluster, asker.prices(), ONE_F_ONE_B)


def _scale(made: Made) -> float:
    """How many times as long as its answers say a plan takes: what these leave out is taken to be the same for pipelines like it."""
    return made.plan.iteration_time / simulated(made.pipeline, made.asker.asked.cluster)


def _interleaved(plans: Sequence[Made], asked: Setting, watch: Callable[[str], None]) -> Made | None:
    """The best pipelines with several stages on every submesh, under interleaved 1F1B; None unless that is faster than all of them."""
    best = plans[0].plan.iteration_time
    found: list[tuple[float, Pipeline, Asker]] = []
    for made in plans[:PUT_TOGETHER]:
        stages, asker = len(made.pieces), made.asker
        if (stages - 1) / (asker.asked.repeats + stages - 1) < WORTH:  # bubbles, of which some would be left
            continue
        others = interleavings(made.pipeline, len(asker.layers), asked.cluster, asker.prices())
        scale = _scale(made)
        found += [(p.time * scale, p, asker) for p in others if len(p.stages) <= asked.rule.max_stages]
    found = [f for f in found if f[0] < (1 - WORTH) * best]
    if not found:
        return None
    _, pipeline, asker = min(found, key=lambda f: f[0])
    watch("the best pipeline with several stages on every submesh")
    again = put_together(asker, pipeline, asked.rule, dict(plans[0].plan.statistics))
    return again if again is not None and again.plan.iteration_time < best else None


def _asker(asked: Setting, rule: Restriction, parts: Callable[[int], Graph], number: int, counters: Counters) -> Asker | None:
    """None where the model cannot be cut so."""
    with suppress(PlanError):
        graph = discover(parts(number))
        layers = find_layers(graph)
        if len(layers) > 1:
            return Asker(replace(asked, graph=graph, rule=rule, repeats=number, progress=None, old=None), layers, counters)
    return None
