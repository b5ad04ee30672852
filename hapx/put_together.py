"""Pipelines of the inter-operator program as plans: every stage planned for itself, with the schedule that is fastest in simulation.

In: a pipeline, what was asked of the planner (`hapx.stage_prices`). Out: a plan, or nothing where a stage does not fit as its answer said; then the
asker knows better. Stages of equal layers on like submeshes are planned once. Of the best pipeline the slowest stages are planned once more, each
with the micro-batches in flight that its place asks for, with all forms and also on the flat view.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

from hapx.carried import renamed
from hapx.cost.memory import usable
from hapx.cost.remat import chosen_blocks, with_blocks
from hapx.errors import HapError, InsufficientMemoryError, PlanError
from hapx.parts import part
from hapx.pipelines import Piece, agree, checked, drafted, joined, piece_of, predicted
from hapx.plan import Plan
from hapx.planner import plan_spmd, views
from hapx.predict import Staged
from hapx.processes import at_the_same_time
from hapx.restriction import Restriction
from hapx.schedules import Style, crossings_between, everywhere, hidings, in_flight, nearby, patient
from hapx.setting import Counters, Setting
from hapx.stage_prices import LEVELS, Asker, Planned, roomy_or_none, view_of
from hapx.stages.costs import ONE_F_ONE_B, Assigned, Pipeline
from hapx.stages.interleaved import INTERLEAVED

PUT_TOGETHER = 3  # pipelines that are planned stage by stage and simulated exactly, of those that look best
SMALL = 100  # nodes of a graph for which a search under limits of memory does not take long
ENOUGH = 8  # micro-batches per stage, until a pipeline repeats itself
SLACKS = (1, 2, 3)  # micro-batches between every two groups, of schedules that are simulated
TUNED = 1e-3  # of the time: less is not worth more micro-batches under way
POLISH = 0.01  # how far from the optimum stages may be that are planned once more
SLOW_STAGE = 0.9  # of the slowest stage's seconds: such stages are planned once more


@dataclass(frozen=True)
class Made:
    """A pipeline as a plan. pieces: its stages, each on its own devices."""

    plan: Plan
    pieces: tuple[Piece, ...]
    pipeline: Pipeline
    asker: Asker


def look_ahead(wanted: Iterable[tuple[Asker, Pipeline]]) -> None:
    """Plans the stages that are not planned yet, as many as there are cores at a time: the longest first, so that none is left alone in the end."""
    jobs: dict[tuple[int, Hashable], tuple[int, Asker, Callable[[], Planned]]] = {}
    for asker, pipeline in wanted:
        for s in pipeline.stages:
            missing = asker.missing(s.start, s.stop, s.shape, s.answer.plan)
            jobs |= {(id(asker), key): (s.stop - s.start, asker, plan) for key, plan in missing.items()}
    longest = sorted(jobs.items(), key=lambda job: -job[1][0])
    found = at_the_same_time([plan for _, (_, _, plan) in longest])
    for ((_, key), (_, asker, _)), planned in zip(longest, found, strict=True):
        asker.settle(key, planned)


def put_together(asker: Asker, pipeline: Pipeline, rule: Restriction, statistics: dict[str, Any]) -> Made | None:
    """The plan of a pipeline, each stage planned for itself; with fewer micro-batches in flight, where it takes more memory than its answer said, but
    as many as 1F1B needs. None where a stage does not fit so. The asker learns what fits."""
    look_ahead([(asker, pipeline)])
    pieces, turns = [], pipeline.discipline is INTERLEAVED
    for i, s in enumerate(pipeline.stages):
        least = s.in_flight if turns else ONE_F_ONE_B.in_flight(pipeline.micro_batches, len(pipeline.stages) - i)
        known = asker.piece(s.start, s.stop, s.shape, least, s.answer.plan)
        if known is None:
            asker.refuse(s.start, s.stop, s.shape, least)
        else:
            pieces.append(_placed(asker, s.start, s.stop, known, s.devices))
    if len(pieces) < len(pipeline.stages):
        return None
    agreed = _agreed(asker, pipeline, pieces)
    if agreed is None:
        return None
    try:
        return Made(_scheduled(agreed, asker.asked, rule, statistics), tuple(agreed), pipeline, asker)
    except InsufficientMemoryError:
        for s in () if turns else pipeline.stages:  # of several stages on a submesh each may have room
            asker.refuse(s.start, s.stop, s.shape, s.in_flight)
    return None


def _agreed(asker: Asker, pipeline: Pipeline, pieces: Sequence[Piece]) -> list[Piece] | None:
    """Stages of which those on the same devices store alike what they share (a tied embedding, a layer that is called again): the first ones as they
    are, later ones planned once more where they differ. None where there is no program for one."""
    found: list[Piece] = []
    for s, piece in zip(pipeline.stages, pieces, strict=True):
        before = [other for other in found if other.devices == piece.devices]
        again: Piece | None = piece
        if not all(agree(other, piece) for other in before):
            rule = replace(asker.asked.rule, storage="auto")
            own = replace(asker.asked, cluster=s.shape.spec(asker.asked.cluster), rule=rule, in_flight=s.in_flight, within=POLISH)
            again = stored_like(piece, before, own, asker.counters)
        if again is None:
            return None
        found.append(again)
    return found


def stored_like(piece: Piece, others: Sequence[Piece], asked: Setting, counters: Counters) -> Piece | None:
    """A stage planned once more for devices that others are on too, which store alike what all of them use; as if memory were no matter. asked: a
    setting for a stage like this, on its devices alone. None where there is no such program."""
    given = {name: at for other in others for name, at in other.candidate.storage_of.items() if name in piece.graph.refs}
    sharing = [other.candidate for other in others if other.candidate.storage_of.keys() & given.keys()]
    lengths = {cut: own for other in sharing for cut, own in other.lengths.items()}
    setting = replace(asked, graph=piece.graph).storing(given, lengths, sharing[0].shares)
    best = roomy_or_none(setting, counters, [sharing[0].mesh])
    made = piece_of(best, piece.nodes, piece.devices) if best is not None else None
    return made if made is not None and all(agree(other, made) for other in others) else None


def _scheduled(pieces: Sequence[Piece], asked: Setting, rule: Restriction, statistics: dict[str, Any], *, thorough: bool = False) -> Plan:
    """The plan with the schedule that is fastest in simulation, of those whose micro-batches fit. thorough: also of schedules near the fastest one.
    Raises InsufficientMemoryError where none fits."""
    plan, key = joined(pieces, asked, statistics), asked.key
    some = ENOUGH * len(pieces)  # micro-batches that tell schedules apart: in between, a pipeline repeats itself
    turns = len(plan.groups) < len(pieces)
    plainest = "interleaved" if turns else "1f1b"
    first = Staged(replace(plan, schedules={key: drafted(plan, key, plainest, some)}))

    @cache
    def under(style: str) -> Staged:
        return first.under(drafted(plan, key, style, some))

    styles: dict[str, None] = {}
    crossings = crossings_between(plan.boundaries(key), asked.graph.refs)
    for seconds in () if turns else (first.seconds, patient(first.seconds)):
        warm = [str(s) for s in hidings(seconds, crossings)]
        fits = bisect_left(warm, True, key=lambda style: has_room(under(style)))  # the fewer are under way the less memory it takes
        styles |= dict.fromkeys(warm[fits : fits + 1])
    if not turns:
        styles |= dict.fromkeys(str(everywhere(len(pieces), number)) for number in SLACKS)
    styles[plainest] = None
    if asked.repeats <= some:
        styles["gpipe"] = None
    drawn = list(map(under, styles))
    least = (1 + TUNED) * min(s.timetable.total for s in drawn)
    ranked = sorted(drawn, key=lambda s: (max(s.timetable.total, least), sum(in_flight(s.plan.schedules[key]))))
    if thorough and not turns:
        ranked[:0] = [_tuned(staged, under) for staged in islice(filter(has_room, ranked), 1)]
    for staged in ranked:
        if asked.repeats > some:
            staged = first.under(drafted(plan, key, staged.plan.schedules[key].name))
        if has_room(staged):
            checked(plan, key, staged.plan.schedules[key])
            return replace(predicted(staged), restriction=rule)
    raise InsufficientMemoryError("no schedule of the pipeline fits into memory")


def _tuned(best: Staged, under: Callable[[str], Staged]) -> Staged:
    """From a warm schedule to one near it, as long as that is faster and fits."""

    def faster_one() -> Staged | None:
        style = Style.parse(best.plan.schedules[best.plan.first].name)
        near = nearby(style, len(best.plan.groups)) if style.name in ("1f1b", "1f1b-warm") else ()
        limit = (1 - TUNED) * best.timetable.total
        return next((s for s in map(under, map(str, near)) if s.timetable.total < limit and has_room(s)), None)

    while (found := faster_one()) is not None:
        best = found
    return best


def has_room(staged: Staged) -> bool:
    """Whether every device has room for its stages, and what is left free of it."""
    cluster = staged.plan.cluster
    return all(held <= usable(cluster.type_of(d)) for d, held in enumerate(staged.memory))


def polished(made: Made, rule: Restriction) -> tuple[Plan | None, Counters]:
    """The stages that take longest planned once more, with all forms, also on the flat view, as long as the slowest one gets faster; and schedules
    near the best one. None where nothing fits. And what that cost."""
    plan, asker, cost = made.plan, made.asker, Counters()
    kept, number = in_flight(plan.schedules[plan.first]), asker.asked.repeats
    seconds = [p.times.micro * number + p.times.iteration for p in made.pieces]
    known: dict[Any, Piece | None] = {}
    pieces = list(made.pieces)
    for i in sorted((i for i, s in enumerate(seconds) if s > SLOW_STAGE * max(seconds)), key=lambda i: -seconds[i]):
        stage, piece = made.pipeline.stages[i], made.pieces[i]
        key = asker.classes[stage.start : stage.stop], stage.shape
        if key not in known:
            known[key] = _planned_again(asker, stage, piece, rule, kept[i], cost)
        better = known[key]
        faster = better is not None and better.times.micro * number + better.times.iteration < seconds[i]
        if better is None or not faster or asker.fits(better) < kept[i]:
            break  # faster other stages are of no use
        placed = _placed(asker, stage.start, stage.stop, better, stage.devices)
        if not all(agree(other, placed) for k, other in enumerate(pieces) if k != i and other.devices == placed.devices):
            break
        pieces[i] = placed
    with suppress(HapError):
        return _scheduled(pieces, asker.asked, rule, dict(plan.statistics), thorough=True), cost
    return None, cost


def _planned_again(asker: Asker, stage: Assigned, piece: Piece, rule: Restriction, kept: int, cost: Counters) -> Piece | None:
    """A stage planned for so many micro-batches in flight; a large one as if memory were no matter."""
    large = len(piece.graph.nodes) > SMALL
    rule = replace(rule, segments="none", max_stages=1, remat="none")
    storage = LEVELS[stage.answer.plan].storage
    if large and storage != "auto" and len(stage.devices) > 1:
        rule = replace(rule, storage=storage)
    cluster = stage.shape.spec(asker.asked.cluster)
    own = replace(asker.asked, graph=piece.graph, cluster=cluster, rule=rule, in_flight=kept, within=POLISH)
    meshes = list(dict.fromkeys([view_of(own), views(cluster, rule)[0]]))
    with suppress(InsufficientMemoryError, PlanError):
        best = roomy_or_none(own, cost, meshes) if large else plan_spmd(own, cost, meshes)[0]
        return piece_of(best, piece.nodes, tuple(range(cluster.num_devices))) if best is not None else None
    return None


def _placed(asker: Asker, start: int, stop: int, known: Piece, devices: Sequence[int]) -> Piece:
    """An answer for layers like these, for these."""
    nodes = (asker.layers[start][0], asker.layers[stop - 1][1])
    graph = part(asker.asked.graph, *nodes)
    if chosen_blocks(known.graph):
        graph = with_blocks(graph)
    if graph.hash == known.graph.hash:
        return replace(known, devices=tuple(devices))
    return piece_of(renamed(known.candidate, graph), nodes, tuple(devices))
