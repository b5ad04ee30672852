"""The order in which each group of devices runs forwards and backwards: the heart of a schedule, before anything is sent.

In: a style, the group of each stage, the number of micro-batches. Out: per group, its forward and backward actions in order.

Forwards of a group go through rounds of micro-batches: each round through the group's first stage, then through its second. A round is one
micro-batch per group (Megatron-LM's order), of one micro-batch where every group has one stage. Sorted by (round, stage, micro-batch), all
forwards follow what they depend on, so any layout of stages works; backwards go by (round, last stage first, micro-batch). 1F1B merges the two:
a group runs `warm` forwards, then a forward and a backward in turn, then the backwards that are left. With S stages, one per group,
`warm` of stage i is S - 1 - i (and what a warm style adds), so it keeps S - i micro-batches. Interleaved, v stages on each of G groups, group p:
(v - 1) G + 2 (G - 1 - p), as in Megatron-LM; where the layout or a last, shorter round would leave groups waiting for each other, `warm` grows.

Invariant: each stage runs its micro-batches in order, forward and backward, so gradients are summed in the same order in every schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from hapx.errors import PlanError
from hapx.plan import Action, Schedule
from hapx.schedules.styles import Crossing, Style

Runs = tuple[tuple[Action, ...], ...]
Needs = Callable[[Action], Iterable[Action]]


def orders(style: Style, groups: Sequence[int], count: int) -> Runs:
    """Per group, its runs of `count` micro-batches. `groups`: of each stage. Raises PlanError where the style does not fit the stages."""
    hosted = stages_by_group(groups)
    if count < 1:
        raise PlanError("a schedule needs at least one micro-batch", where=f"schedule {style}")
    size = len(hosted) if max(map(len, hosted)) > 1 else 1
    forwards = [_rounds("forward", stages, count, size) for stages in hosted]
    if style.name == "forward":
        return tuple(map(tuple, forwards))
    backwards = [_rounds("backward", stages[::-1], count, size) for stages in hosted]
    if style.name == "gpipe":
        return tuple((*f, *b) for f, b in zip(forwards, backwards, strict=True))
    if style.name == "interleaved":
        return _without_deadlock(forwards, backwards, _interleaved(style, hosted), len(groups))
    return tuple(_merged(f, b, w) for f, b, w in zip(forwards, backwards, _one_each(style, hosted), strict=True))


def promised(schedule: Schedule, groups: Sequence[int]) -> tuple[int, ...]:
    """Per stage, the most micro-batches that the schedule's style keeps at once; all of them where it promises nothing (interleaved, other names)."""
    count = len(schedule.micro_batches)
    if schedule.name == "forward":
        return (1,) * len(groups)
    if schedule.name.partition(":")[0] not in ("1f1b", "1f1b-warm"):
        return (count,) * len(groups)
    warm = _one_each(Style.parse(schedule.name), stages_by_group(groups))
    return tuple(min(count, w + 1) for w in warm)


def stages_by_group(groups: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The stages of each group. Raises PlanError unless groups are numbered in the order of their first stages."""
    if not groups or list(dict.fromkeys(groups)) != list(range(max(groups) + 1)):
        raise PlanError(f"groups {tuple(groups)} are not numbered in the order of their first stages", where="schedule", allowed="(0, 1, 0, 1)")
    return tuple(tuple(s for s, g in enumerate(groups) if g == group) for group in range(max(groups) + 1))


def needs_of(crossings: Iterable[Crossing]) -> Needs:
    """The runs whose results a run needs from other stages."""
    before: dict[tuple[str, int], list[int]] = {}
    for c in crossings:
        before.setdefault(("forward", c.target), []).append(c.source)
        if c.gradient:
            before.setdefault(("backward", c.source), []).append(c.target)
    return lambda run: [Action(run.kind, s, run.micro_batch) for s in before.get((run.kind, run.stage), ())]


def finishes(runs: Runs, needs: Needs) -> dict[Action, int] | None:
    """When each run ends if forwards take 1, backwards 2 and crossings no time; None where groups wait for each other for ever."""
    place, now = [0] * len(runs), [0] * len(runs)
    done: dict[Action, int] = {}
    waiting: dict[Action, list[int]] = {}
    ready = deque(range(len(runs)))
    while ready:
        group = ready.popleft()
        while place[group] < len(runs[group]):
            run = runs[group][place[group]]
            needed = list(needs(run))
            missing = next((n for n in needed if n not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(group)
                break
            now[group] = max([now[group], *(done[n] for n in needed)]) + (1 if run.kind == "forward" else 2)
            done[run] = now[group]
            place[group] += 1
            ready.extend(waiting.pop(run, ()))
    return done if len(done) == sum(map(len, runs)) else None


def _rounds(kind: str, stages: Sequence[int], count: int, size: int) -> list[Action]:
    rounds = [range(first, min(first + size, count)) for first in range(0, count, size)]
    return [Action("forward" if kind == "forward" else "backward", s, m) for r in rounds for s in stages for m in r]


def _merged(forwards: Sequence[Action], backwards: Sequence[Action], warm: int) -> tuple[Action, ...]:
    merged = list(forwards[:warm])
    for k, backward in enumerate(backwards):
        merged += [*forwards[warm + k : warm + k + 1], backward]
    return tuple(merged)


def _without_deadlock(forwards: Sequence[Sequence[Action]], backwards: Sequence[Sequence[Action]], warm: Sequence[int], stages: int) -> Runs:
    """The forwards and backwards of each group merged, with more warm forwards where groups would wait for each other, taking each stage to need
    the one before it. Ends, since all forwards before all backwards are never stuck."""
    needs = needs_of([Crossing(s, s + 1) for s in range(stages - 1)])
    while True:
        runs = tuple(_merged(f, b, w) for f, b, w in zip(forwards, backwards, warm, strict=True))
        if finishes(runs, needs) is not None:
            return runs
        assert any(w < len(f) for w, f in zip(warm, forwards, strict=True)), "all forwards before all backwards are stuck"
        warm = [w + 1 for w in warm]


def _one_each(style: Style, hosted: Sequence[Sequence[int]]) -> list[int]:
    """`warm` per group, of one stage each."""
    size = len(hosted)
    if max(map(len, hosted)) > 1:
        raise PlanError("a group has several stages", where=f"schedule {style}", allowed="one stage per group", hint="take interleaved or gpipe")
    extra = style.numbers
    if len(extra) == 1:
        extra = (*extra * (size - 1), 0)
    if extra and len(extra) != size:
        raise PlanError(f"{len(extra)} numbers for {size} groups", where=f"schedule {style}", allowed=f"one number, or {size}")
    if list(extra) != sorted(extra, reverse=True):
        # keeping as many micro-batches as the group before, it would wait in each round for a forward there that waits for a backward here
        raise PlanError("a group has more further micro-batches than the one before it", where=f"schedule {style}", allowed="numbers that never rise")
    return [size - 1 - i + (extra[i] if extra else 0) for i in range(size)]


def _interleaved(style: Style, hosted: Sequence[Sequence[int]]) -> list[int]:
    """`warm` per group. The last stage of group p of Megatron-LM's layout has G - 1 - p stages behind it."""
    wanted = style.numbers[0] if style.numbers else None
    for group, stages in enumerate(hosted):
        if wanted is not None and len(stages) != wanted:
            raise PlanError(f"group {group} has {len(stages)} stages", where=f"schedule {style}", allowed=f"{wanted} stages per group")
    last = max(map(max, hosted))
    return [(len(stages) - 1) * len(hosted) + 2 * (last - stages[-1]) for stages in hosted]
