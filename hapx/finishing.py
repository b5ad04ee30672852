"""The last step of planning a small problem: single units that are moved by the simulator.

Lengths were chosen by the additive cost, for which every phase ends when its slowest device does. The simulator knows that devices wait for each
other only where they communicate, and what hides behind what; with few units per device that is up to several per cent.

In: candidates, the best ones first, and one that gives candidates their simulated times. Out: the same, with better ones in front. Invariant: what is
added fits, and is faster by the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf

from hapx.balancer.rounding import Lengths, improve
from hapx.carried import goal_of
from hapx.lower import Candidate
from hapx.states import Cut

FEW_NODES = 30  # of a problem that is small
NEAR = 1.03  # times the best time, that a program may take to be asked, too,
MOST = 5  # of so many
DEARER = 1.05  # times its additive cost, above which lengths are not simulated
LEAST = 1e-4  # relative gain of a move


def finished(ranked: Sequence[Candidate], timed: Callable[[Candidate], Candidate], fixed: Iterable[Cut]) -> list[Candidate]:
    """See the module. fixed: cuts whose lengths may not change."""
    best = ranked[0]
    near = {id(c.program): c for c in reversed(ranked) if c.mesh == best.mesh and c.time <= NEAR * best.time}  # each at its best lengths
    moved = [_moved(c, timed, frozenset(fixed)) for c in sorted(near.values(), key=lambda c: c.time)[:MOST]]
    faster = sorted((c for c in moved if c.time < best.time), key=lambda c: c.time)
    return [*faster, *ranked]


def _moved(of: Candidate, timed: Callable[[Candidate], Candidate], fixed: frozenset[Cut]) -> Candidate:
    goal = goal_of(of)

    def at(lengths: Lengths) -> Candidate:
        return replace(of, lengths=lengths, cost=goal.time(of.costs.lengths_to_shares({c: lengths[c] for c in goal.cuts})))

    def seconds(lengths: Lengths) -> float:
        trial = at(lengths)
        return timed(trial).time if trial.cost <= DEARER * of.cost else inf

    movable = [c for c in goal.cuts if c not in fixed]
    return timed(at(improve(of.lengths, of.costs.kinds, seconds, movable, lambda lengths: at(lengths).fits, LEAST)))
