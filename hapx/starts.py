"""Where the alternation of programs and ratios begins, beyond shares that are even or proportional to speed.

In: a setting, a cost model, the rows of a mesh, the best ratios so far, an old plan. Out: ratios per row, or a candidate.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Literal

import numpy as np

from hapx.carried import goal_of
from hapx.cost.model import CostModel
from hapx.cost.terms import Vector
from hapx.errors import HapError, PlanError
from hapx.lower import Candidate
from hapx.plan import Plan, ProgramKey
from hapx.setting import Setting
from hapx.squeezing import VERY_FEW_STEPS
from hapx.states import Row
from hapx.theory.replay import replay
from hapx.theory.triple import Theory

FEW_STEPS = 100  # nodes and outputs of a problem that is searched from further starts,
FEW_STEPS_ON_AXES = 50  # and on meshes of several axes
MANY_STEPS = 300  # of one that is searched from one start only where it is known that memory binds

_ROW_KINDS: tuple[Literal["compute", "storage"], ...] = ("compute", "storage")


class Starts:
    """Ratios to begin with on one mesh: rows of shares of one device of each kind. steps: of the problem; before: the best candidate of other views,
    whose shares are where it begins on several axes.

    Attributes:
        even, speed: shares that are equal, and in proportion to speed.
        small: whether a search is so short that there are many. free: whether ratios are chosen here.
    """

    def __init__(self, setting: Setting, theory: Theory, costs: CostModel, steps: int, before: Candidate | None):
        self.setting, self.theory, self.costs, self.steps, self.before = setting, theory, costs, steps, before
        self.kinds, self.sizes, self.capacity = costs.kinds, costs.sizes, np.asarray(costs.capacity)
        axis, segments = theory.mesh.uneven, range(setting.graph.segments)
        self.rows = tuple(theory.mesh.row(axis, kind, s) for s in segments for kind in _ROW_KINDS) if axis is not None else ()
        self.even: Vector = np.full(len(self.sizes), 1.0 / sum(self.sizes))
        self.speed: Vector = np.asarray(costs.speeds)
        self.small = steps <= (FEW_STEPS if len(theory.mesh.axes) == 1 else FEW_STEPS_ON_AXES)
        self.free = setting.rule.ratios == "balanced" and bool(self.rows)

    def usual(self) -> list[dict[Row, Vector]]:
        """What restrictions say, else in proportion to speed, and evenly. Raises HapError for given ratios that are none."""
        ratios = self.setting.rule.ratios
        if isinstance(ratios, tuple):
            return [self._explicit(ratios)]
        if self.setting.start is not None:
            return [self.by_kind(self.setting.start)]
        if ratios == "balanced" and self.setting.tight and self.rows and self.steps > MANY_STEPS:
            return [self.by_memory()]
        if ratios == "balanced" and self.before is not None and len(self.theory.mesh.axes) > 1 and self.steps > FEW_STEPS:
            return [self._as_before(self.before)]
        # on several axes a search costs more, and ratios that differ only between machines start nearer to the best
        single = np.allclose(self.even, self.speed) or (len(self.theory.mesh.axes) > 1 and self.steps > FEW_STEPS)
        both = [self.speed] if single else [self.speed, self.even]
        chosen = [self.even] if ratios == "even" else [self.speed] if ratios == "speed" else both
        return [dict.fromkeys(self.rows, shares) for shares in chosen]

    def tight(self) -> Iterator[dict[Row, Vector]]:
        """Where what needs least memory is looked for."""
        free = self.free and self.setting.start is None
        if not free or self.small:  # in larger problems a search takes long
            yield from self.usual()
        if free and self.steps > VERY_FEW_STEPS:
            yield self.by_memory()
        elif free:
            several = where_memory_binds(self.speed, self.sizes, self.capacity, lambda: self.speed), where_little_is_left(self.sizes, self.capacity)
            for compute, storage in chain.from_iterable(several):
                yield {r: storage if r.kind == "storage" else compute for r in self.rows}

    def beyond(self, best: Callable[[], Candidate], binds: Callable[[], bool]) -> Iterator[dict[Row, Vector]]:
        """Further ones. best: so far; binds: whether memory does, as far as is known; both are asked for when needed. With segments, whose compute
        rows are those of a program that perhaps keeps nothing in shards, only the storage rows differ."""
        if self.setting.graph.segments > 1:
            for storage in kept_otherwise(self.sizes):
                now = self.by_kind(best().shares)
                yield {r: storage if r.kind == "storage" else now[r] for r in self.rows}
            return
        row = self.rows[0]

        def compute() -> Vector:
            return self.by_kind(best().shares)[row]

        for start in further(self.speed, self.sizes, compute):
            yield {r: start[r.kind == "storage"] for r in self.rows}
        if binds():
            for start in where_memory_binds(self.speed, self.sizes, self.capacity, compute):
                yield {r: start[r.kind == "storage"] for r in self.rows}

    def by_kind(self, shares: Mapping[Row, tuple[float, ...]]) -> dict[Row, Vector]:
        """Shares per coordinate as shares per kind; of a row without shares, proportional to speed."""
        own = {row: np.array([max(shares[row][c] for c in kind) for kind in self.kinds]) for row in self.rows if row in shares}
        return dict.fromkeys(self.rows, self.speed) | own

    def by_memory(self) -> dict[Row, Vector]:
        """Everything in proportion to memory."""
        return dict.fromkeys(self.rows, self.capacity / (self.capacity * self.sizes).sum())

    def _as_before(self, best: Candidate) -> dict[Row, Vector]:
        """The shares of a candidate of another view, added up over the devices of each coordinate."""
        mesh, found = self.theory.mesh, self.by_kind({})
        for row in self.rows:
            known = best.shares.get(best.mesh.row(best.mesh.uneven, row.kind)) if best.mesh.uneven is not None and row.kind != "even" else None
            if known is None or best.mesh.uneven is None:
                continue
            inside = best.mesh.sizes[best.mesh.uneven]
            of_device = {d: known[best.mesh.coordinates(d)[best.mesh.uneven]] * inside / len(best.mesh.devices) for d in best.mesh.devices}
            at = [0.0] * mesh.sizes[row.axis]
            for d in mesh.devices:
                at[mesh.coordinates(d)[row.axis]] += of_device[d]
            found[row] = np.array([sum(at[c] for c in kind) / len(kind) for kind in self.kinds])
        return found

    def _explicit(self, shares: tuple[float, ...]) -> dict[Row, Vector]:
        n = sum(self.sizes)
        if len(shares) != n or min(shares) < 0 or sum(shares) <= 0:
            raise HapError(f"ratios {shares}", where="restriction", allowed=f"{n} numbers >= 0, one per coordinate of the uneven axis, not all 0")
        total = sum(shares)
        return dict.fromkeys(self.rows, np.array([max(shares[c] for c in kind) / total for kind in self.kinds]))


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


def carried(plan: Plan, key: ProgramKey, theory: Theory, costs: CostModel) -> Candidate | None:
    """The program of an old plan with its lengths, at the costs of now. None where it is of another graph or mesh, or its peak does not fit any
    more."""
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
    if not found.fits:
        return None
    time = goal_of(found).time(costs.lengths_to_shares(lengths))
    return replace(found, cost=time, time=time)
