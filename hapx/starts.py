"""Where the alternation of programs and ratios begins, beyond shares that are even or proportional to speed.

In: a cost model, the rows of a mesh, the best ratios so far, an old plan. Out: ratios per row, or a candidate.

The alternation moves downhill only, and a program that keeps nothing in shards, or leaves no kind of devices out, says nothing of what that would
bring. So further starts say it (`further`): the fastest kinds, or any one kind, alone; the best ratios with parameters kept evenly, or by one kind
only; all kinds but one; and where memory binds (`where_memory_binds`), shares in proportion to memory, and any two kinds alone. Each costs a search,
so they are for small problems, and are given up where their first program is far from the best (see the planner). Segments begin with the rows that
the linear program gives them in a program of one row, so of theirs only the storage rows are varied (`kept_otherwise`): where no parameter is kept in
shards, that program says nothing of the storage rows, and those decide whether shards pay.

An old plan of the same model on the same mesh is not only a start but a candidate itself (`carried`), so that what is planned with it is never slower
than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from hapx.carried import goal_of
from hapx.cost.model import CostModel
from hapx.cost.terms import Vector
from hapx.errors import PlanError
from hapx.lower import Candidate
from hapx.plan import Plan, ProgramKey
from hapx.theory.replay import replay
from hapx.theory.triple import Theory


def further(speeds: Vector, sizes: Sequence[int], compute: Callable[[], Vector]) -> Iterator[tuple[Vector, Vector]]:
    """(compute row, storage row), as shares of one device of each kind. compute: the best compute row so far, asked for when it is needed."""
    kinds = len(sizes)
    even = np.full(kinds, 1 / sum(sizes))

    def only(chosen: Sequence[int]) -> Vector:
        return _among(speeds, sizes, chosen)

    fastest = np.argsort(-speeds, kind="stable").tolist()
    for count in range(1, kinds):
        yield only(fastest[:count]), only(fastest[:count])
    for kind in fastest[1:]:
        yield only([kind]), only([kind])
    for storage in kept_otherwise(sizes):
        yield compute(), storage
    for kind in reversed(fastest if kinds > 2 else []):
        yield only([k for k in fastest if k != kind]), even


def where_memory_binds(speeds: Vector, sizes: Sequence[int], capacity: Vector, compute: Callable[[], Vector]) -> Iterator[tuple[Vector, Vector]]:
    """(compute row, storage row), as in `further`: parameters kept, and perhaps work done, in proportion to memory; any two kinds alone, by speed and
    by memory. capacity: bytes per device of each kind."""
    everyone = range(len(sizes))
    by_memory = _among(capacity, sizes, everyone)
    yield compute(), by_memory
    yield _among(speeds, sizes, everyone), by_memory
    yield by_memory, by_memory
    for pair in combinations(everyone, 2) if len(sizes) > 2 else ():
        for weights in (speeds, capacity):
            yield _among(weights, sizes, pair), _among(weights, sizes, pair)


def where_little_is_left(sizes: Sequence[int], capacity: Vector) -> Iterator[tuple[Vector, Vector]]:
    """(compute row, storage row): the work done by one kind alone, parameters kept in proportion to memory by everyone, or by the others."""
    everyone = range(len(sizes))
    for kind in everyone if len(sizes) > 1 else ():
        for keepers in (everyone, [k for k in everyone if k != kind]):
            yield _among(capacity, sizes, [kind]), _among(capacity, sizes, keepers)


def _among(weights: Vector, sizes: Sequence[int], chosen: Sequence[int]) -> Vector:
    """Shares of one device of each kind, in proportion to weights; of the chosen kinds alone."""
    shares = np.zeros(len(sizes))
    shares[list(chosen)] = weights[list(chosen)]
    shares /= (shares * np.asarray(sizes, dtype=float)).sum()
    return shares


def kept_otherwise(sizes: Sequence[int]) -> Iterator[Vector]:
    """Storage rows: evenly, then on one kind only."""
    number = np.asarray(sizes, dtype=float)
    yield np.full(len(sizes), 1 / number.sum())
    for kind in range(len(sizes) if len(sizes) > 1 else 0):
        yield np.where(np.arange(len(sizes)) == kind, 1 / number, 0.0)


def carried(plan: Plan, key: ProgramKey, theory: Theory, costs: CostModel, capacity: Vector) -> Candidate | None:
    """The program of an old plan with its lengths, at the costs of now. None where it is of another graph or mesh, or does not fit any more."""
    stage = plan.stages[0]
    if plan.schedules or key not in plan.graphs or plan.graphs[key].hash != theory.graph.hash or stage.mesh != theory.mesh:
        return None
    program, lengths = stage.programs[key], dict(stage.lengths[key])
    storage = {name: plan.storage_of[name].copies[0].placement for name in theory.stored}
    try:
        replay(program, theory, storage)
    except PlanError:
        return None
    found = Candidate(theory, costs, program, storage, lengths, stage.shares, 0.0, 0.0)
    goal, shares = goal_of(found), costs.lengths_to_shares(lengths)
    if not (goal.memory(shares) <= capacity * (1 + 1e-9)).all():
        return None
    time = goal.time(shares)
    return replace(found, cost=time, time=time)
