"""Choices whose moves are all dominated before they are made: by a bound of what is spent after them, for every pair of kinds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import reduce
from itertools import product
from operator import or_
from random import Random

import pytest

from hapx.cost.exposed import ALL, NONE, Exposed
from hapx.restriction import Restriction
from hapx.synth import astar, moves
from hapx.synth.astar import Statistics, Width, beam, search
from hapx.synth.bound import Bound
from hapx.synth.domain import State, Synthesis, moves_of
from hapx.synth.effect import cheaper
from hapx.synth.moves import Moves
from hapx.synth.problem import build
from hapx.synth.tables import bits
from support import toy
from support.cases import Attention
from support.completions import KINDS, used_often, walk
from support.models import CNN
from support.searched import case, gpt


def toys() -> Iterator[Synthesis]:
    for seed in range(12):
        mesh, kinds = (toy.FLAT, KINDS[seed % 3 + 1]) if seed % 2 else (toy.SQUARE, ((0,), (1,)))
        theory = toy.random_theory(seed, mesh, nodes=6, triples=3, states=2, parameters=1 + seed % 2)
        for costs in (toy.ToyCosts, toy.SumsOverLevels):
            problem = build(theory, costs(mesh, seed, kinds), Restriction(forms=frozenset({"padded"})))
            for prices in (None, (1e-3,) * len(kinds)):
                yield Synthesis(problem, toy.shares(theory, len(kinds), seed), None, prices=prices)
            yield Synthesis(problem, toy.shares(theory, len(kinds), seed), None, capacity=(1e3,) * len(kinds))
        yield used_often(seed)


TWO_AXES = pytest.param("2x2", marks=pytest.mark.slow)  # where a test takes long
SOURCES = ["toys", "flat", "2x2", pytest.param("2x2, two layers", marks=pytest.mark.slow)]
QUICKLY = [TWO_AXES if source == "2x2" else source for source in SOURCES]


def real(source: str, exposed: Exposed = ALL) -> Iterator[Synthesis]:
    """At shares in proportion to speed, and at even ones."""
    view, attention, cnn = source.split(",")[0], Attention(mask="float"), CNN()
    for of in (gpt(view, 1 if source == "2x2" else 2), case(cnn, cnn.example(8), view), case(attention, attention.example(6), view)):
        for part, prices in ((exposed, None), (NONE, (1e-9,) * of.problem.terms.kinds)):
            of.problem.exposed = part
            yield of.domain(prices)
        yield Synthesis(of.problem, of.shares, None, capacity=(1e6,) * of.problem.terms.kinds)


@pytest.mark.parametrize("source", QUICKLY)
def test_nothing_has_spent_less_than_the_bound_says(source: str) -> None:
    """And what is available afterwards depends on the choice alone, unless a parameter is stored that is used again."""
    checked = exact = unknown = 0
    for number, domain in enumerate(toys() if source == "toys" else real(source)):
        for state in [domain.start(), *walk(domain, Random(number))]:
            assert state is not None
            step = domain.problem.steps[state.level]
            paid = domain.bound.paid(state.level, state.place, state.cost, state.forward, state.backward)
            assert paid is not None
            for choice, (least, made) in enumerate(zip(paid.tolist(), domain.following.places(state.level), strict=True)):
                following = domain.following(state.level, state.place & step.reads, choice).moves
                for after in domain._follow(state, following, float("inf")):
                    spent = [after.cost + there + back for there, back in product(after.forward, after.backward)]
                    assert all(a >= b - 1e-9 * abs(a) for a, b in zip(spent, least, strict=True)), (number, state.level, choice)
                    assert after.spent_at_most(spent) and not after.spent_at_most([*spent[:-1], spent[-1] - 1e-12])
                    unknown += made is None
                    assert made is None or after.place == state.place & step.keep | made
                    exact += all(a <= b * (1 + 1e-9) for a, b in zip(spent, least, strict=True))
                    checked += 1
    print(f"{checked} partial programs, the bound is exact for {exact}; what {unknown} make available is not known before")
    assert exact > checked / 4 and unknown < checked


@pytest.mark.parametrize("source", SOURCES)
def test_conversions_that_others_cover_are_not_priced(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All options are there, in the same order, with far fewer conversions priced."""
    monkeypatch.setattr(moves, "PRICED", 0)
    asked = priced = every = 0
    for number, domain in enumerate(toys() if source == "toys" else real(source)):
        if domain.moves.capacity is not None:
            continue
        random, least = Random(number), domain.bound.relaxation.priced
        tables = list({id(t): t for t in domain.problem.tables.values()}.values())
        plain, screened = (Moves(domain.problem, domain.moves.values.shares, False, None, domain.prices) for _ in range(2))
        screened.least = least
        for table in random.choices(tables, k=40):
            mask = reduce(or_, (table.closure(p) for p in random.sample(range(len(table.placements)), min(3, len(table.placements)))))
            target = random.randrange(len(table.placements))
            assert screened.options(table, mask, target, True) == plain.options(table, mask, target, True)
            for source_, other in product(bits(mask) if not mask >> target & 1 else (), repeat=2):
                for effect, _ in plain._paths(table, other, target):
                    if least.covered(table, source_, target, effect, True):
                        assert all(cheaper(effect, own, False) for own, _ in plain._paths(table, source_, target))
                        asked += 1
        priced, every = priced + len(screened._between), every + len(plain._between)
    print(f"{priced} of {every} priced; {asked} covered")
    assert asked > 250 and priced < 0.9 * every


@pytest.mark.parametrize("source", QUICKLY)
def test_searches_are_the_same(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what would have been dominated is not made: programs, and the nodes that searches look at, are those without."""

    monkeypatch.setattr(astar, "PREPARED", 0)

    def searched(domain: Synthesis) -> tuple[State, Statistics]:
        statistics = Statistics()
        found = search(domain, statistics, beam(domain, Width(1), statistics), 700)
        assert found is not None
        return found, statistics

    made, covered = list(map(searched, toys() if source == "toys" else real(source))), 0
    generated = 0
    monkeypatch.setattr(Bound, "paid", lambda *_: None)
    for (found, own), domain in zip(made, toys() if source == "toys" else real(source), strict=True):
        other, all_made = searched(domain)
        assert found.estimate == pytest.approx(other.estimate, rel=1e-12)
        assert [m.choice.index for m in moves_of(found)] == [m.choice.index for m in moves_of(other)]
        assert all(getattr(own, f.name) == getattr(all_made, f.name) for f in fields(own) if f.name in ("expansions", "kept", "unproven"))
        assert own.gap == pytest.approx(all_made.gap, abs=1e-9)
        covered += all_made.generated - own.generated
        generated += all_made.generated
    print(f"{generated} nodes without, {covered} fewer with")
    assert covered > 0.03 * generated
