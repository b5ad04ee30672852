"""Programs with untied rows: their objective, and which borders are freed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmarks.random_graphs import random_graph, two_characters
from hapx.balancer import untied
from hapx.balancer.borders import WORTH, free_borders
from hapx.balancer.lp import balance, objective
from hapx.balancer.untied import Untied
from hapx.cluster.spec import ClusterSpec
from hapx.cost.model import CostModel
from hapx.graph.borders import find_segments
from hapx.ir import Graph
from hapx.plan import Mesh
from hapx.restriction import Restriction
from hapx.states import Row
from hapx.synth.problem import build
from hapx.synth.search import program_key, solve
from hapx.theory.derive import derive
from support.theories import cluster, deep, device_type, flat, two_level

COUNTER, MOVER = device_type("counter", 8e6, bandwidth=4e6), device_type("mover", 2e6, bandwidth=16e6)
PAIR = cluster((("counter", "mover"),), (COUNTER, MOVER))
FOUR = cluster((("counter", "counter"), ("mover", "mover")), (COUNTER, MOVER))
MESHES = {"flat": (flat(2), PAIR), "2x2": (two_level(2, 2), FOUR)}


class Solved:
    """The cheapest program of a graph at one row, and what it costs untied."""

    def __init__(self, graph: Graph, mesh: Mesh, spec: ClusterSpec, parts: tuple[int, ...], share: float = 0.7):
        theory = derive(graph, mesh)
        self.costs = CostModel(theory, spec, "fp32", "adamw", "train")
        sizes = np.array(self.costs.sizes)
        self.row = np.array([share, 1 - share]) / sizes
        self.shares = {mesh.row(0, kind): self.row for kind in ("compute", "storage")}
        problem = build(theory, self.costs, Restriction())
        self.solution = solve(problem, dict.fromkeys(problem.cuts, self.row), None, program_key(theory))
        self.untied = Untied(self.solution.program, self.solution.storage_of, self.costs, parts)
        self.graph, self.mesh, self.spec, self.parts = graph, mesh, spec, parts

    def free(self, most: int = 4, capacity: float = 1e18):
        return free_borders(self.untied, self.costs.sizes, np.full(2, capacity), self.shares, most, consecutive=True)


@pytest.mark.parametrize("seed, mesh", list(product(range(6), MESHES)))
def test_one_group_is_the_program(seed: int, mesh: str) -> None:
    graph = random_graph(seed, operators=8, batch=24, widths=(8, 24))
    of = Solved(graph, *MESHES[mesh], parts=find_segments(graph, 4))
    goal, same = objective(of.solution.steps, of.solution.storage, 2), of.untied.objective((0,) * of.untied.parts)
    for share in (0.2, 0.5, 0.9):
        row = np.array([share, 1 - share]) / np.array(of.costs.sizes)
        at = {c: row for g in (goal, same) for c in g.cuts}
        assert same.time(at) == pytest.approx(goal.time(at), rel=1e-12)
        assert same.memory(at) == pytest.approx(goal.memory(at), rel=1e-12)


@pytest.mark.parametrize("kind", ["plain", "a mask for all"])
@pytest.mark.parametrize("border", [0, 1, 19, 40])
def test_repeated_layers_are_looked_at_once(kind: str, border: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a border is inside of their run, all of them are."""
    graph = deep(18, kind)
    of = Solved(graph, *MESHES["flat"], parts=tuple(int(i >= border) for i in range(len(graph.nodes))))
    program = of.solution.program
    assert (len(of.untied._short(of.parts).instructions) < len(program.instructions)) is (border < 2)
    monkeypatch.setattr(untied, "short", lambda program, costs: None)
    every = Untied(program, of.solution.storage_of, of.costs, of.parts)
    assert [(e.step, e.part, e.source) for e in of.untied.events] == [(e.step, e.part, e.source) for e in every.events]
    for groups in {(0,) * every.parts, tuple(range(every.parts))}:
        one, other = of.untied.objective(groups), every.objective(groups)
        at = {cut: np.array([0.6, 0.4]) if cut.row.segment else np.array([0.3, 0.7]) for cut in other.cuts}
        assert set(one.cuts) == set(other.cuts)
        assert one.time(at) == pytest.approx(other.time(at), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_more_groups_cost_no_less_at_equal_rows_than_the_search_finds(seed: int) -> None:
    """At any rows the untied program costs what it costs; the search in the theory with those segments finds nothing dearer."""
    graph = random_graph(seed, operators=8, batch=24, widths=(8, 24))
    of = Solved(graph, *MESHES["flat"], parts=(parts := find_segments(graph, 3)))
    groups = tuple(range(of.untied.parts))
    goal = of.untied.objective(groups)
    theory = derive(replace(graph, segment_of=parts), of.mesh)
    problem = build(theory, CostModel(theory, of.spec, "fp32", "adamw", "train"), Restriction())
    rng = np.random.default_rng(seed)
    for _ in range(3):
        rows = {k: np.array([s, 1 - s]) for k, s in enumerate(rng.uniform(0.2, 0.9, len(groups)))}
        found = solve(problem, {c: rows[c.row.segment] for c in problem.cuts}, None, program_key(theory))
        assert found.cost <= goal.time({c: rows[c.row.segment] for c in goal.cuts}) * (1 + 1e-9)


def test_borders_are_freed_where_the_character_changes() -> None:
    graph = two_characters()
    of = Solved(graph, *MESHES["flat"], parts=find_segments(graph, 16))
    freed = of.free()
    assert freed is not None and freed.gain > WORTH
    assert 1 < 1 + max(freed.groups) <= 4 and of.free(most=2) is not None and max(of.free(most=2).groups) == 1
    goal = of.untied.objective(freed.groups)
    time = goal.time({c: freed.shares[c.row] for c in goal.cuts})
    one = of.untied.objective((0,) * of.untied.parts)
    tied = balance(one, of.costs.sizes, None, of.shares)
    assert time == pytest.approx((1 - freed.gain) * one.time({c: tied[c.row] for c in one.cuts}))
    first, last = freed.shares[Row("compute", 0, 0)], freed.shares[Row("compute", max(freed.groups), 0)]
    assert first[0] > last[0] + 0.1  # counters count


def test_nothing_is_freed_where_re_cuts_cost_too_much_or_all_is_alike() -> None:
    graph = two_characters()
    slow = cluster((("counter",), ("mover",)), (COUNTER, MOVER), inter=replace(PAIR.inter, bandwidth=1e4, latency=1.0))
    assert Solved(graph, flat(2), slow, find_segments(graph, 16)).free() is None
    alike = cluster((("fast", "slow"),), (device_type("fast", 8e6, bandwidth=8e6), device_type("slow", 2e6, bandwidth=2e6)))
    assert Solved(graph, flat(2), alike, find_segments(graph, 16), share=0.8).free() is None


def test_memory_has_a_price_where_it_binds() -> None:
    graph = two_characters()
    of = Solved(graph, *MESHES["flat"], parts=find_segments(graph, 16))
    one = of.untied.objective((0,) * of.untied.parts)
    use = one.memory(dict.fromkeys(one.cuts, of.row))
    freed = of.free(capacity=float(use[0]) * 0.999)
    assert freed is not None and freed.gain > WORTH
    goal = of.untied.objective(freed.groups)
    assert (goal.memory({c: freed.shares[c.row] for c in goal.cuts}) <= use[0] * 0.999 * (1 + 1e-7)).all()
