"""Schedules: what every group of devices does in one iteration, step by step, made ahead of time.

In: a style, the group of each stage, what crosses between stages, the sizes of micro-batches, which stages parameters tie together. Out: a
`Schedule`. How actions are meant:

- `send` and `receive` start a transfer and return; a run waits for what it receives. A transfer begins when both ends have reached it.
- `send` follows the run that makes the tensors. `receive` is posted one run before the run that needs the same of the micro-batch before (so two are
  on their way at most times), or earlier still: before the first run of its group that ends later than the run that makes the tensors (if forwards
  take 1 and backwards 2). So transfers overlap with runs, and few buffers wait (`received_ahead`).
- Between two stages of one group, `receive` follows its `send`.
- `free` follows the last run of a micro-batch on a stage and what it sends (tensors on their way are kept by their transfers).
- `synchronise` comes as soon as all backwards are done of the stage and of those that parameters tie to it. What is tied is summed at the last
  `synchronise` that a group has of these stages, in the order of the plan's storage.

Why nothing can wait for ever: put all runs in one order, by the time they end, each with what it sends; all dependencies go forward in it. Each
group's list is a part of this order, only that some receives, which never wait, are moved forward. So the first action in this order that is not
done can always be done: also where a send waits until its receive is posted (rendezvous), and where `synchronise` waits for all stages that are
tied. All transfers from one group to another start in the same order on both ends, so they need no tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hapx.plan import Action, Direction, Schedule
from hapx.schedules.orders import Runs, finishes, needs_of, orders
from hapx.schedules.replay import receive_of
from hapx.schedules.styles import Crossing, Style, expected_crossings, tied_stages

# Receives are posted one run before the run that needs the micro-batch before. With 1, links idle between transfers that take longer than a run:
# on random pipelines warm 1F1B took up to 44 % longer than with all receives posted at the start; with 2 up to 5 %, plain 1F1B and GPipe nothing.
AHEAD = 2


class _Receive(NamedTuple):
    """before: number of the receiving group's run that it is posted before, at the latest."""

    action: Action
    before: int


def make(
    style: Style | str, groups: Sequence[int], crossings: Iterable[Crossing], micro_batches: Sequence[int], ties: Iterable[Iterable[int]] = ()
) -> Schedule:
    """The schedule of a style. groups: of each stage, numbered in the order of their first stages. crossings: see `Crossing`. micro_batches: samples
    of each. ties: sets of stages that share a parameter. Raises PlanError where the style does not fit."""
    style = Style.parse(style) if isinstance(style, str) else style
    crossings = expected_crossings(crossings, len(groups))
    runs = orders(style, groups, len(micro_batches))
    lists = _Lists(runs, groups, crossings)
    if style.name != "forward":
        lists.synchronise(tied_stages(ties, len(groups)), len(micro_batches) - 1)
    return Schedule(str(style), tuple(micro_batches), tuple(lists.actions(g) for g in range(len(runs))))


def sends_after(run: Action, crossings: Iterable[Crossing]) -> tuple[Action, ...]:
    """What a stage sends after a run."""
    direction: Direction = "forward" if run.kind == "forward" else "backward"
    if direction == "forward":
        peers = [c.target for c in crossings if c.source == run.stage]
    else:
        peers = [c.source for c in crossings if c.target == run.stage and c.gradient]
    return tuple(Action("send", run.stage, run.micro_batch, peer, direction) for peer in peers)


class _Lists:
    """Runs of all groups in the order in which they end, and where between them everything else goes."""

    def __init__(self, runs: Runs, groups: Sequence[int], crossings: Sequence[Crossing]):
        self.runs, self.groups = runs, groups
        self.number = {run: k for actions in runs for k, run in enumerate(actions)}
        needs = needs_of(crossings)
        ends = finishes(runs, needs)
        assert ends is not None, "an order of runs that cannot be carried out"
        # runs that end together do not depend on each other
        self.order = sorted(self.number, key=lambda run: (ends[run], run.stage, run.micro_batch))
        by_run = {(kind, s): [c for c in crossings if s in c[:2]] for kind in ("forward", "backward") for s in range(len(groups))}
        self.sends = {run: sends_after(run, by_run[run.kind, run.stage]) for run in self.order}
        self.last_run = "backward" if any(run.kind == "backward" for run in self.order) else "forward"
        self.after: dict[tuple[int, int], list[Action]] = {}  # (group, runs before it): synchronisations
        self.posted = self._posted()

    def synchronise(self, tied: Sequence[frozenset[int]], micro_batch: int) -> None:
        """Places the synchronisation of all stages."""
        left = {run for run in self.order if run.kind == "backward"}
        open_runs = [0] * len(self.groups)
        for run in left:
            open_runs[run.stage] += 1
        started = [0] * len(self.runs)
        for run in self.order:
            started[self.groups[run.stage]] += 1
            if run.kind != "backward":
                continue
            open_runs[run.stage] -= 1
            joined = tied[run.stage]
            if open_runs[run.stage] == 0 and not any(open_runs[s] for s in joined):
                for stage in sorted(joined):
                    group = self.groups[stage]
                    self.after.setdefault((group, started[group]), []).append(Action("synchronise", stage, micro_batch))

    def actions(self, group: int) -> tuple[Action, ...]:
        """The list of a group."""
        receives = sorted(self.posted.get(group, ()), key=lambda r: r.before)  # stable
        result: list[Action] = []
        at = 0
        for k, run in enumerate(self.runs[group]):
            while at < len(receives) and receives[at].before <= k:
                result.append(receives[at].action)
                at += 1
            result += self.after.get((group, k), ())
            result.append(run)
            for send in self.sends[run]:
                result += [send, receive_of(send)] if self.groups[send.peer] == group else [send]
            if run.kind == self.last_run:
                result.append(Action("free", run.stage, run.micro_batch))
        return (*result, *self.after.get((group, len(self.runs[group])), ()))

    def _posted(self) -> dict[int, list[_Receive]]:
        """The receives of each group from others, in the order in which they are sent."""
        started = [0] * len(self.runs)
        channels: dict[tuple[int, int], list[_Receive]] = {}
        order: dict[Action, int] = {}
        for run in self.order:
            source = self.groups[run.stage]
            started[source] += 1
            for send in self.sends[run]:
                target = self.groups[send.peer]
                if target == source:
                    continue
                needed = self.number[Action(run.kind, send.peer, max(0, run.micro_batch + 1 - AHEAD))]
                receive = _Receive(receive_of(send), min(started[target], max(needed - 1, 0)))
                order[receive.action] = len(order)
                channels.setdefault((source, target), []).append(receive)
        posted: dict[int, list[_Receive]] = {}
        for (_, target), receives in channels.items():
            posted.setdefault(target, []).extend(_in_order(receives))
        return {target: sorted(receives, key=lambda r: order[r.action]) for target, receives in posted.items()}


def _in_order(receives: Sequence[_Receive]) -> list[_Receive]:
    """None later than one that is sent after it."""
    result: list[_Receive] = []
    latest = None
    for r in reversed(receives):
        latest = r.before if latest is None else min(latest, r.before)
        result.append(_Receive(r.action, latest))
    return result[::-1]
