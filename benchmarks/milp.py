"""The cheapest program of a theory as a mixed integer linear program (HiGHS): the oracle of the search on whole models.

In: a `Space` (`benchmarks.milp_space`). Out: the cheapest program found, priced by itself, and a proven lower bound.

Variables: y[k,c] = 1 if step k makes choice c; w[a] = 1 if a tensor is read along arc a of its network. With V(n,u) the vertices of tensor n after u
reads, N(k,i,p) the choices of step k that need occurrence i in placement p, G(n,v) the choices of n's node that lead to vertex v:

    (one)     sum_c y[k,c] = 1                                                    every step k
    (start)   sum_{a out of v} w[a] = sum_{c in G(n,v)} y[k,c]                    v in V(n,0);  = 1 where no node makes n
    (flow)    sum_{a out of v} w[a] = sum_{a into v} w[a]                         v in V(n,u), u > 0
    (need)    sum_{a reads (k,i) in p} w[a] = sum_{c in N(k,i,p)} y[k,c]          every occurrence i and placement p

Each direction d (forward, backward) has a clock per kind of devices. Events t are the reads and steps in program order; what is chosen there adds its
compute to the clocks, and, if it ends a phase, sets all of them to the latest in between. With x_t = sum of the variables at t that end a phase,
pre and post what is added before and after that, and M_t an upper bound of how far two clocks are apart:

    (before)  b_t[j]  =  e_{t-1}[j] + sum_{v at t} pre[v,j] v
    (own)     s_t[j] >=  b_t[j]
    (cut)     s_t[j] >=  b_t[i] - M_t (1 - x_t)                                   i != j
    (after)   e_t[j]  =  s_t[j] + sum_{v at t} post[v,j] v
    (end)     T_d    >=  e_last[j]

    (memory)  sum_v memory[v,j] v <= limit[j]                                     every kind, where there are limits

    minimise  T_forward + T_backward + sum_v const[v] v

The last event's latest clock is the sum over phases of max_j comp_ij, because each phase begins with equal clocks. e and b are written out as sums; s
exists only where x_t can be 1. y is binary; w is, where several arcs read one vertex in one placement, and follows from y elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from benchmarks.milp_space import DIRECTIONS, Arc, Network, Price, Space, Vector, Vertex

Expression = dict[int, float]
SCALE = 1e3  # what the cheapest compute of all steps adds up to: HiGHS has absolute tolerances


@dataclass(frozen=True)
class Found:
    """cost: seconds of the cheapest program found (inf: none was); bound: no program takes less; proven: whether HiGHS ended with a proof."""

    cost: float
    bound: float
    proven: bool
    variables: int
    binaries: int
    rows: int


def cheapest(space: Space, time_limit: float, limits: Vector | None = None) -> Found:
    """Solves the space. limits: bytes per kind (the space must count bytes)."""
    return _Model(space, limits).solve(time_limit)


class _Model:
    def __init__(self, space: Space, limits: Vector | None):
        self.space = space
        least = sum(min(_compute(c.price) for c in s.choices) for s in space.steps)
        self.scale = SCALE / least if least > 0 else 1.0
        self.objective: list[float] = []
        self.binary: list[bool] = []
        self.rows: list[tuple[Expression, float, float]] = []
        self.events: list[list[tuple[int, Price]]] = []  # in program order: the variables of an event that do something
        self.choices = [[self.variable(binary=True) for _ in s.choices] for s in space.steps]
        self.arcs: dict[tuple[int, int], tuple[tuple[Arc, ...], list[int]]] = {}
        for ys in self.choices:
            self.row(dict.fromkeys(ys, 1.0), 1.0, 1.0)
        for name, network in space.networks.items():
            self._network(name, network)
        for k, step in enumerate(space.steps):
            for i in range(len(step.reads)):
                arcs, ws = self.arcs[k, i]
                self.events.append([(w, a.price) for w, a in zip(ws, arcs, strict=True) if a.price is not None])
            self.events.append([(y, c.price) for y, c in zip(self.choices[k], step.choices, strict=True)])
        for event in self.events:
            for v, price in event:
                self.objective[v] += price.const * self.scale
        for direction in DIRECTIONS:
            self._clocks(direction)
        for j, limit in enumerate(limits or ()):
            share = {v: price.memory[j] / limit * SCALE for event in self.events for v, price in event}
            self.row(share, -np.inf, SCALE * (1 - space.unread.memory[j] / limit))

    # -- variables and rows ----------------------------------------------------------------------------------------------------------------------

    def variable(self, binary: bool = False, cost: float = 0.0) -> int:
        self.objective.append(cost)
        self.binary.append(binary)
        return len(self.objective) - 1

    def row(self, expression: Expression, low: float, high: float) -> None:
        self.rows.append((expression, low, high))

    def equal(self, left: Iterable[int], right: Iterable[int], constant: float = 0.0) -> None:
        """sum(left) = sum(right) + constant."""
        row: Expression = {}
        for v in left:
            row[v] = row.get(v, 0.0) + 1.0
        for v in right:
            row[v] = row.get(v, 0.0) - 1.0
        self.row(row, constant, constant)

    # -- availability ----------------------------------------------------------------------------------------------------------------------------

    def _network(self, name: str, network: Network) -> None:
        """(start), (flow) and (need) of a tensor."""
        into: dict[Vertex, list[int]] = {}
        if network.first is None:
            maker = next(k for k, s in enumerate(self.space.steps) if name in s.makes)
            place = self.space.steps[maker].makes.index(name)
            for y, choice in zip(self.choices[maker], self.space.steps[maker].choices, strict=True):
                into.setdefault(network.start[choice.gives[place]], []).append(y)
        for (k, i), arcs in zip(network.events, network.arcs, strict=True):
            ways: dict[tuple[Vertex, object], int] = {}
            for a in arcs:
                ways[a.source, a.target] = ways.get((a.source, a.target), 0) + 1
            ws = [self.variable(binary=ways[a.source, a.target] > 1) for a in arcs]
            out: dict[Vertex, list[int]] = {}
            reading: dict[object, list[int]] = {c.needs[i]: [] for c in self.space.steps[k].choices}
            after: dict[Vertex, list[int]] = {}
            for w, a in zip(ws, arcs, strict=True):
                out.setdefault(a.source, []).append(w)
                reading[a.target].append(w)
                after.setdefault(a.to, []).append(w)
            for vertex in {**out, **into}:
                self.equal(out.get(vertex, ()), into.get(vertex, ()), 1.0 if vertex == network.first else 0.0)
            for target, reads in reading.items():
                self.equal(reads, [y for y, c in zip(self.choices[k], self.space.steps[k].choices, strict=True) if c.needs[i] == target])
            self.arcs[k, i] = arcs, ws
            into = after

    # -- clocks ----------------------------------------------------------------------------------------------------------------------------------

    def _clocks(self, direction: str) -> None:
        """(before), (own), (cut), (after) and (end) of a direction; `apart` is M: how far kind i may be ahead of kind j."""
        kinds = range(self.space.kinds)
        clocks: list[Expression] = [{} for _ in kinds]
        apart = np.zeros((len(kinds), len(kinds)))
        for event in self.events:
            parts = [(v, getattr(price, direction)) for v, price in event]
            cuts = [(v, d.pre) for v, d in parts if d.pre is not None]
            for v, pre in cuts:
                _add(clocks, v, pre, self.scale)
            if cuts and len(kinds) > 1:
                apart += _spread([pre for _, pre in cuts], self.scale)
                clocks = self._synchronised(clocks, [v for v, _ in cuts], apart)
            for v, d in parts:
                _add(clocks, v, d.post, self.scale)
            if parts:
                apart += _spread([d.post for _, d in parts], self.scale)
        end = self.variable(cost=1.0)
        for clock in clocks:
            self.row({end: 1.0, **{v: -c for v, c in clock.items()}}, 0.0, np.inf)

    def _synchronised(self, clocks: Sequence[Expression], cuts: Sequence[int], apart: np.ndarray) -> list[Expression]:
        after = [self.variable() for _ in clocks]
        for j, s in enumerate(after):
            for i, clock in enumerate(clocks):
                row = {s: 1.0, **{v: -c for v, c in clock.items()}}
                if i == j:
                    self.row(row, 0.0, np.inf)
                elif apart[i, j] > 0:
                    for v in cuts:
                        row[v] = row.get(v, 0.0) - apart[i, j]
                    self.row(row, -apart[i, j], np.inf)
        return [{s: 1.0} for s in after]

    # -- solution --------------------------------------------------------------------------------------------------------------------------------

    def solve(self, time_limit: float) -> Found:
        n = len(self.objective)
        entries = [(r, v, c) for r, (row, _, _) in enumerate(self.rows) for v, c in row.items() if c]
        r, v, c = (np.array(x) for x in zip(*entries, strict=True))
        matrix = csr_array((c, (r, v)), shape=(len(self.rows), n))
        rows = LinearConstraint(matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows])
        used = {v for ys in self.choices for v in ys} | {w for _, ws in self.arcs.values() for w in ws}
        upper = np.array([1.0 if i in used else np.inf for i in range(n)])
        options = {"time_limit": time_limit, "mip_rel_gap": 0.0}
        result = milp(
            np.array(self.objective), integrality=np.array(self.binary, dtype=int), bounds=Bounds(0.0, upper), constraints=rows, options=options
        )
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else -np.inf
        cost = self.cost(result.x) if result.x is not None else np.inf
        return Found(cost, bound / self.scale, result.status == 0, n, sum(self.binary), len(self.rows))

    def cost(self, x: np.ndarray) -> float:
        """Seconds of the program that a solution stands for, phase by phase."""
        prices = [price for event in self.events for v, price in event if x[v] > 0.5]
        total = sum(p.const for p in prices)
        for direction in DIRECTIONS:
            pending = np.zeros(self.space.kinds)
            for part in (getattr(p, direction) for p in prices):
                if part.pre is not None:
                    total += float((pending + part.pre).max())
                    pending = np.zeros(self.space.kinds)
                pending = pending + part.post
            total += float(pending.max())
        return total


def _compute(price: Price) -> float:
    return max(a + b for a, b in zip(price.forward.post, price.backward.post, strict=True))


def _add(clocks: Sequence[Expression], variable: int, value: Vector, scale: float) -> None:
    for clock, own in zip(clocks, value, strict=True):
        if own:
            clock[variable] = clock.get(variable, 0.0) + own * scale


def _spread(values: Sequence[Vector], scale: float) -> np.ndarray:
    """[i, j]: by how much one of the values may bring kind i ahead of kind j."""
    own = np.array(values) * scale
    return np.maximum((own[:, :, None] - own[:, None, :]).max(axis=0), 0.0)
