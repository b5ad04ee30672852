"""The search against exhaustive enumeration, on random small theories; every program found is replayed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hapx.cost.exposed import BETWEEN, NONE, Exposed
from hapx.errors import InsufficientMemoryError
from hapx.ir import Output
from hapx.restriction import Restriction
from hapx.states import Property, Sharded
from hapx.synth import domain
from hapx.synth import search as synth_search
from hapx.synth.astar import Statistics, Width, beam, search
from hapx.synth.domain import Synthesis
from hapx.synth.exhaustive import Enumeration
from hapx.synth.problem import build
from hapx.synth.search import attempt, least_memory, program_key, solve, synthesize
from hapx.theory.replay import replay
from support import toy

KINDS = {1: ((0, 1, 2, 3),), 2: ((0, 1), (2, 3)), 3: ((0,), (1, 2), (3,))}
PADDED = frozenset({"padded"})
RULE = Restriction(forms=PADDED)
# of random theories with six operators, those with 1000 to 17000 legal programs
SEEDS = (7, 11, 15, 19, 21, 24, 25, 26, 29, 30, 31, 34, 39, 41, 42, 43, 45, 47, 53, 54, 55, 56, 57, 58, 60, 61, 63, 65, 67, 69, 71, 73)


def case(seed: int):
    mesh, kinds = (toy.FLAT, KINDS[seed % 3 + 1]) if seed % 2 else (toy.SQUARE, ((0,), (1,)))
    theory = toy.random_theory(seed, mesh, nodes=6, triples=2, states=2, parameters=1 + seed % 2)
    return theory, toy.ToyCosts(mesh, seed, kinds), toy.shares(theory, len(kinds), seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_enumeration(seed):
    theory, costs, shares = case(seed)
    count = Enumeration(theory, costs, shares, forms=PADDED).run()
    solution = synthesize(theory, costs, shares, restriction=RULE)
    print(f"theory {seed}: {count.programs} legal programs, {solution.statistics.expansions} expansions")
    assert count.programs >= 1000
    assert solution.cost == pytest.approx(count.cost, rel=1e-9)
    assert solution.statistics.unproven == 0
    replay(solution.program, theory, solution.storage_of)


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_hopeless_moves_are_found_in_arrays(seed, monkeypatch):
    """As where a choice has many moves."""
    theory, costs, shares = case(seed)
    usual = synthesize(theory, costs, shares, restriction=RULE)
    monkeypatch.setattr(domain, "MANY", 0)
    found = synthesize(theory, costs, shares, restriction=RULE)
    assert found.cost == pytest.approx(usual.cost, rel=1e-12) and found.statistics.unproven == 0
    assert found.statistics.generated <= usual.statistics.generated


@pytest.mark.parametrize("exposed", (NONE, Exposed.alike(0.4), BETWEEN))
@pytest.mark.parametrize("seed", SEEDS[::5])
def test_equals_enumeration_where_sums_of_gradients_count_in_part(seed, exposed):
    theory, costs, shares = case(seed)
    problem = build(theory, costs, RULE)
    problem.exposed = exposed
    solution = solve(problem, shares, None, program_key(theory))
    assert solution.cost == pytest.approx(Enumeration(theory, costs, shares, forms=PADDED, exposed=exposed).run().cost, rel=1e-9)


@pytest.mark.parametrize("seed", (5, 7, 13, 15, 19, 21, 23, 25, 26, 29, 31, 45))
def test_equals_enumeration_where_memory_binds(seed):
    theory, costs, shares = case(seed)
    free = synthesize(theory, costs, shares, restriction=RULE)
    least = least_memory(build(theory, costs, RULE), shares, (1.0,) * len(costs.kinds), program_key(theory))
    top = max(least.memory)
    limits = tuple(max(1.001 * top, 0.6 * top + 0.4 * m) for m in free.memory)
    assert any(m > limit for m, limit in zip(free.memory, limits, strict=True)), "the limit must bind"
    count = Enumeration(theory, costs, shares, limits=limits, forms=PADDED).run()
    solution = synthesize(theory, costs, shares, limits, restriction=RULE)
    assert 0 < count.fitting < count.programs
    assert solution.cost == pytest.approx(count.cost, rel=1e-9)
    assert all(m <= limit for m, limit in zip(solution.memory, limits, strict=True))
    replay(solution.program, theory, solution.storage_of)


@pytest.mark.parametrize("seed", (5, 13, 21))
def test_memory_is_no_part_of_the_state_where_all_that_fits_is_far_from_what_is_known(seed, monkeypatch):
    """What prices of memory found will do then, with the gap that they prove; where it may be near, the search is made."""
    theory, costs, shares = case(seed)
    free = synthesize(theory, costs, shares, restriction=RULE)
    least = least_memory(build(theory, costs, RULE), shares, (1.0,) * len(costs.kinds), program_key(theory))
    top = max(least.memory)
    limits = tuple(max(1.001 * top, 0.6 * top + 0.4 * m) for m in free.memory)
    best = synthesize(theory, costs, shares, limits, restriction=RULE).cost
    asked = []
    with_memory = synth_search._with_memory
    monkeypatch.setattr("hapx.synth.search._with_memory", lambda *given: asked.append(given) or with_memory(*given))
    found = {}
    for times in (0.5, 1.1):
        known, asked[:] = times * best, []
        found[times], _ = attempt(build(theory, costs, RULE), shares, limits, program_key(theory), known=known)
        assert bool(asked) == (times > 1)
    assert found[1.1].cost == pytest.approx(best, rel=1e-9)
    assert best <= found[0.5].cost * (1 + 1e-9) and found[0.5].cost * (1 - found[0.5].statistics.gap) <= best * (1 + 1e-9)
    assert all(m <= limit for m, limit in zip(found[0.5].memory, limits, strict=True))


def test_the_smallest_program_says_how_good_it_is(monkeypatch):
    """Where no search finds what fits, the program of least memory is taken; its gap covers how much dearer it is than the best one."""
    theory, costs, shares = case(25)
    free = synthesize(theory, costs, shares, restriction=RULE)
    limits = tuple(0.999 * m for m in free.memory)
    monkeypatch.setattr("hapx.synth.search._limited", lambda domain, *known: (None, least_memory(domain.problem, *known[:3])))
    found = synthesize(theory, costs, shares, limits, restriction=RULE)
    best = Enumeration(theory, costs, shares, limits=limits, forms=PADDED).run().cost
    assert found.cost > best
    assert found.cost * (1 - found.statistics.gap) <= best * (1 + 1e-9)


def test_wider_beams_are_asked_once_at_nearly_the_same_shares(monkeypatch):
    """In larger problems whose searches end with their budget."""
    for name in ("EXACT", "BUDGET", "SHORT"):
        monkeypatch.setattr(f"hapx.synth.search.{name}", 0)
    asked = []
    widened = synth_search._widened
    monkeypatch.setattr("hapx.synth.search._widened", lambda *given: asked.append(given) or widened(*given))
    theory, costs, shares = case(25)
    problem = build(theory, costs, RULE)

    def found(shares):
        asked.clear()
        solution, _ = attempt(problem, shares, None, program_key(theory), budget=0)
        return solution, len(asked)

    first, times = found(shares)
    assert times == 1 and first.statistics.unproven
    near = {cut: own * (1 + 1e-3 * np.arange(len(own))) for cut, own in shares.items()}
    again, times = found(near)
    assert times == 0 and again.choices == first.choices
    far = {cut: own[::-1] * np.array([1.0, *[0.5] * (len(own) - 1)]) for cut, own in shares.items()}
    assert found(far)[1] == 1


def test_no_wider_beams_far_from_what_is_known(monkeypatch):
    """In larger problems, although the bound says that something as fast may be there."""
    for name, value in (("EXACT", 0), ("BUDGET", 0), ("SHORT", 0), ("FARTHER", 1.003)):
        monkeypatch.setattr(f"hapx.synth.search.{name}", value)
    asked = []
    widened = synth_search._widened
    monkeypatch.setattr("hapx.synth.search._widened", lambda *given: asked.append(given) or widened(*given))
    theory, costs, shares = case(25)
    first, _ = attempt(build(theory, costs, RULE), shares, None, program_key(theory), budget=0)
    assert first.statistics.gap > 0.005 and len(asked) == 1
    for times, wider in ((1.001, 1), (1.005, 0)):
        asked.clear()
        found, _ = attempt(build(theory, costs, RULE), shares, None, program_key(theory), budget=0, known=first.cost / times)
        assert len(asked) == wider and found.cost >= first.cost


@pytest.mark.parametrize("seed", SEEDS[:8])
def test_a_search_ends_once_all_that_is_left_takes_more_than_what_is_known(seed):
    """At shares at which nothing is as fast as at others, a good program will do; what it may be off by is what was proven."""
    theory, costs, shares = case(seed)
    best = synthesize(theory, costs, shares, restriction=RULE).cost
    spent = {}
    for known in (0.5, 0.9, 1 + 1e-9):
        domain, statistics = Synthesis(build(theory, costs, RULE), shares, None), Statistics()
        first = beam(domain, Width(1), Statistics())
        found = search(domain, statistics, first, enough=(known * best, 0))
        assert found.estimate * (1 - statistics.gap) <= best * (1 + 1e-9)
        assert found.estimate <= first.estimate
        spent[known] = statistics.expansions
        if known > 1:
            assert found.estimate == pytest.approx(best, rel=1e-9)
    assert spent[0.5] <= spent[0.9] <= spent[1 + 1e-9]
    assert spent[0.5] <= 1  # the bound of the start says so


def test_least_memory_is_least():
    theory, costs, shares = case(25)
    least = least_memory(build(theory, costs, RULE), shares, (1.0,) * len(costs.kinds), program_key(theory))
    below = tuple(least.cost * (1 - 1e-6) for _ in costs.kinds)
    assert Enumeration(theory, costs, shares, limits=below, forms=PADDED).run().fitting == 0
    assert Enumeration(theory, costs, shares, limits=tuple(least.cost * (1 + 1e-6) for _ in costs.kinds), forms=PADDED).run().fitting > 0


def test_nothing_fits():
    theory, costs, shares = case(25)
    with pytest.raises(InsufficientMemoryError, match=r"device.*needs [\d.]+ [KMG]?i?B there.*lack"):
        synthesize(theory, costs, shares, (1e-3,) * len(costs.kinds), restriction=RULE)


@pytest.mark.parametrize("seed", (3, 8, 10, 25))
def test_bound_never_exceeds_what_is_left(seed):
    """Along the best program found: cost so far + bound <= final cost, and the first bound is not trivial."""
    theory, costs, shares = case(seed)
    problem = build(theory, costs, RULE)
    domain = Synthesis(problem, shares, None)
    best = synthesize(theory, costs, shares, restriction=RULE).cost
    state, estimates = search(domain, Statistics(), beam(domain, Width(4), Statistics())), []
    while state is not None:
        estimates.append(state.estimate)
        state = state.parent
    assert all(e <= best * (1 + 1e-9) for e in estimates)
    assert estimates[-1] > 0.5 * best


@pytest.mark.parametrize("seed", (7, 26, 31))
def test_given_storage_is_kept(seed):
    theory, costs, shares = case(seed)
    for placement in theory.stored["w0"]:
        solution = synthesize(theory, costs, shares, given={"w0": placement}, restriction=RULE)
        assert solution.storage_of["w0"] == placement
        replay(solution.program, theory, solution.storage_of)


@pytest.mark.parametrize("seed", (7, 29, 42))
def test_as_used_never_gathers(seed):
    theory, costs, shares = case(seed)
    solution = synthesize(theory, costs, shares, restriction=Restriction(forms=PADDED, storage="as-used"))
    for instruction in solution.program.instructions:
        t = instruction.triple
        if t.node is None and t.pre[0].tensor.startswith("w"):
            assert not any(isinstance(c.source, Sharded) for c in t.body), str(t)


def test_alike_nodes_share_their_tables():
    theory, costs, _ = case(60)
    nodes = theory.graph.nodes
    twin = replace(nodes[0], outputs=(replace(nodes[0].outputs[0], name="twin"),))
    triples = tuple(replace(t, node=6, post=(Property("twin", t.post[0].placement),)) for t in theory.triples[0])
    refs = {**theory.graph.refs, "twin": twin.outputs[0]}
    graph = replace(theory.graph, refs=refs, nodes=(*nodes, twin), outputs=(*theory.graph.outputs, Output("twin", "result")))
    longer = replace(theory, graph=graph, triples=(*theory.triples, triples), outputs={**theory.outputs, "twin": (triples[0].post[0].placement,)})
    problem = build(longer, costs, RULE)
    assert problem.tables["twin"].placements == tuple(dict.fromkeys(t.post[0].placement for t in triples))
    assert len(problem.steps) == 7 + len(graph.outputs)
    assert problem.steps[6].kind.choices[0].cost == problem.steps[0].kind.choices[0].cost
