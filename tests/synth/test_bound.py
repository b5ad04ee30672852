"""The lower bound of the rest of a program, against the true cost of the rest from states that random choices lead to."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from hapx.plan import Mesh
from hapx.restriction import Restriction
from hapx.synth import relaxation
from hapx.synth.astar import Statistics, search
from hapx.synth.domain import Synthesis
from hapx.synth.outline import PAIRS, PRICED
from hapx.synth.problem import build
from support import toy
from support.completions import KINDS, Unbounded, in_one, several, used_often, walk


@pytest.fixture(params=[None, 0, 1], ids=["deepest as it is", "0 levels deep", "1 level deep"])
def deepest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """How far tables that know where parameters are stored are followed back: these graphs are smaller than what is usual."""
    found: int | None = request.param
    if found is not None:
        monkeypatch.setattr(relaxation, "DEEPEST", (found, found))
    return found


@pytest.mark.usefixtures("deepest")
def test_bound_never_exceeds_the_cheapest_completion() -> None:
    checked = rich = 0
    for seed in (7, 8, 11, 15, 19, 21, 24, 25, 30, 42, 61, 72):
        mesh, kinds = (toy.FLAT, KINDS[seed % 3 + 1]) if seed % 2 else (toy.SQUARE, ((0,), (1,)))
        theory = toy.random_theory(seed, mesh, nodes=7, triples=2, states=2, parameters=1 + seed % 2)
        problem = build(theory, toy.ToyCosts(mesh, seed, kinds), Restriction(forms=frozenset({"padded"})))
        domain = Synthesis(problem, toy.shares(theory, len(kinds), seed), None)
        for number in range(3):
            for state in walk(domain, Random(number)):
                best = search(Unbounded(domain, state), Statistics())
                assert best is not None
                assert state.estimate <= best.estimate * (1 + 1e-9), (seed, number, state.level)
                checked, rich = checked + 1, rich + several(domain, state)
    print(f"{checked} states, {rich} with a value in several placements")
    assert rich > 30


def test_values_that_are_used_often() -> None:
    """Between its first use and its last one a value may be in several placements; before the last one the best of them counts."""
    between = before_last = 0
    for seed in range(100, 140):
        domain = used_often(seed)
        for number in range(3):
            for state in walk(domain, Random(number)):
                best = search(Unbounded(domain, state), Statistics())
                assert best is not None
                assert state.estimate <= best.estimate * (1 + 1e-9), (seed, number, state.level)
                values = domain.bound.outline.values[state.level].values()
                assert all(v.used or in_one(v.table, state.place >> v.shift & v.table.full) for v in values)
                between += any(v.several and not in_one(v.table, state.place >> v.shift & v.table.full) for v in values)
                before_last += any(v.last and not in_one(v.table, state.place >> v.shift & v.table.full) for v in values)
    print(f"{between} states with a value in several placements between its uses, {before_last} before its last one")
    assert between > 300
    assert before_last > 50


def test_sets_of_two_placements_sharpen_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []
    for pairs in (0, PAIRS):
        monkeypatch.setattr("hapx.synth.outline.PAIRS", pairs)
        found = [used_often(seed).start() for seed in range(100, 180)]
        starts.append([state.estimate for state in found if state is not None])
    assert all(a <= b * (1 + 1e-12) for a, b in zip(*starts, strict=True))
    assert sum(a < b * (1 - 1e-6) for a, b in zip(*starts, strict=True)) >= 5


def test_what_is_asked_first_is_not_above_the_bound() -> None:
    """A state is dropped by the quick bound only where the other one drops it, too."""
    checked = lower = 0
    for seed in (4, 6, 10, 15):
        theory = toy.random_theory(seed, toy.FLAT, nodes=8, triples=2, states=2, parameters=3, twice=3)
        problem = build(theory, toy.ToyCosts(toy.FLAT, seed, KINDS[2]), Restriction(forms=frozenset({"padded"})))
        domain, fresh = (Synthesis(problem, toy.shares(theory, 2, seed), None) for _ in range(2))
        for number in range(3):
            for state in walk(domain, Random(number)):
                quick, rest = fresh.bound.quick(state.level, state.place), domain.bound.rest(state.level, state.place)
                if quick is None:
                    continue
                assert all(q <= r * (1 + 1e-9) + 1e-12 for q, r in zip(quick, rest, strict=True)), (seed, number, state.level)
                checked, lower = checked + 1, lower + (max(quick) < max(rest) * (1 - 1e-9))
    print(f"{checked} states, {lower} with a lower quick bound")
    assert checked > 20
    assert lower > 5


@pytest.mark.usefixtures("deepest")
def test_of_many_parameters_that_are_used_again_the_largest_are_priced() -> None:
    """Each more multiplies the tables that a search needs: a block that is called four times would take minutes."""
    checked = 0
    for seed in (4, 6, 10, 15):  # three are live at once
        theory = toy.random_theory(seed, toy.FLAT, nodes=8, triples=2, states=2, parameters=3, twice=3)
        problem = build(theory, toy.ToyCosts(toy.FLAT, seed, KINDS[2]), Restriction(forms=frozenset({"padded"})))
        domain = Synthesis(problem, toy.shares(theory, 2, seed), None)
        live = [sum(bool(table.stored) for _, table, _ in step.live) for step in problem.steps]
        priced = [len(uses) for uses in domain.bound.outline.stored]
        assert priced[: len(live)] == [min(n, PRICED) for n in live]
        checked += max(live) > PRICED
        for state in walk(domain, Random(seed)):
            best = search(Unbounded(domain, state), Statistics())
            assert best is not None and state.estimate <= best.estimate * (1 + 1e-9), (seed, state.level)
    assert checked == 4


def test_below_a_context_what_comes_before_counts_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a context adds everywhere is little where the general table is high. What it costs to come to where the context ends, and at least what
    follows there, is more then; following the tables all the way back is better still, but takes long."""
    estimates: dict[str, list[float]] = {"least added": [], "until": [], "all the way": []}
    tables = relaxation.Relaxation.until

    def nothing(own: relaxation.Relaxation, level: int) -> relaxation.Context:
        found = tables(own, level)
        return replace(found, rows={at: {shift: np.full_like(own, -np.inf) for shift, own in rows.items()} for at, rows in found.rows.items()})

    for name, found in estimates.items():
        monkeypatch.setattr(relaxation, "DEEPEST", (99, 99) if name == "all the way" else (0, 0))
        monkeypatch.setattr(relaxation.Relaxation, "until", nothing if name == "least added" else tables)
        for seed in range(40, 100):
            mesh, kinds = (toy.FLAT, KINDS[2]) if seed % 2 else (toy.SQUARE, ((0,), (1,)))
            theory = toy.random_theory(seed, mesh, nodes=7, triples=2, states=2, parameters=2)
            problem = build(theory, toy.ToyCosts(mesh, seed, kinds), Restriction(forms=frozenset({"padded"})))
            domain = Synthesis(problem, toy.shares(theory, len(kinds), seed), None)
            state = domain.start()
            while state is not None and state.level < domain.depth:  # the same choices whatever the bound is
                found += domain.bound.rest(state.level, state.place)
                state = min(domain.successors(state, float("inf")), key=lambda s: s.spent, default=None)
    least, until, exact = (np.array(found) for found in estimates.values())
    assert (least <= until * (1 + 1e-9)).all()
    assert (until <= exact * (1 + 1e-9)).all()
    better, worse = (until > least * (1 + 1e-6)).sum(), (exact > until * (1 + 1e-6)).sum()
    print(f"{len(least)} bounds, {better} higher, {worse} still higher all the way back")
    assert better > 0


@pytest.mark.usefixtures("deepest")
@pytest.mark.parametrize(("mesh", "kinds"), [(toy.FLAT, KINDS[2]), (toy.FLAT, KINDS[3]), (toy.SQUARE, ((0,), (1,)))])
def test_what_is_communicated_after_a_cut_belongs_to_the_next_phase(mesh: Mesh, kinds: tuple[tuple[int, ...], ...]) -> None:
    """Left in the phase before, it would be added to compute that another kind of devices waits for."""
    checked = 0
    for seed in range(6):
        theory = toy.random_theory(seed, mesh, nodes=4, triples=2, states=2, parameters=1)
        problem = build(theory, toy.SumsOverLevels(mesh, seed, kinds), Restriction(forms=frozenset({"padded"})))
        domain = Synthesis(problem, toy.shares(theory, len(kinds), seed), None)
        for state in [domain.start(), *walk(domain, Random(seed))]:
            assert state is not None
            best = search(Unbounded(domain, state), Statistics())
            assert best is not None
            assert state.estimate <= best.estimate * (1 + 1e-9), (seed, state.level)
            least = domain.bound.choices(state.level, state.place, state.cost, state.forward, state.backward).min()
            assert least <= best.estimate * (1 + 1e-9), (seed, state.level)
            checked += 1
    assert checked >= 20


@pytest.mark.parametrize("seed", [7, 21])
def test_a_second_placement_helps_no_more_than_it_can(seed: int) -> None:
    """With a value in more placements the bound is lower, but not below what the cheapest of all placements allows."""
    theory = toy.random_theory(seed, toy.FLAT, nodes=7, triples=2, states=2, parameters=1)
    problem = build(theory, toy.ToyCosts(toy.FLAT, seed, KINDS[2]), Restriction(forms=frozenset({"padded"})))
    domain = Synthesis(problem, toy.shares(theory, 2, seed), None)
    for number in range(5):
        for state in walk(domain, Random(number)):
            for _, table, shift in problem.steps[state.level].live:
                everything = state.place | table.full << shift
                more = domain.bound.rest(state.level, everything)
                assert all(a <= b + 1e-12 for a, b in zip(more, domain.bound.rest(state.level, state.place), strict=True))
