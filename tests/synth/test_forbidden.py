"""Programs without a choice, and what the search counts on its way."""

from __future__ import annotations

import pytest

from hapx.errors import PlanError
from hapx.plan import Instruction
from hapx.restriction import Restriction
from hapx.states import Property
from hapx.synth.astar import Statistics, Width, beam, search
from hapx.synth.domain import Synthesis
from hapx.synth.exhaustive import Enumeration
from hapx.synth.forbidden import Forbidden
from hapx.synth.problem import build
from hapx.synth.search import least_memory, program_key, solve, synthesize
from hapx.theory.replay import replay
from support import toy

PADDED = frozenset({"padded"})
RULE = Restriction(forms=PADDED)


def case(seed: int):
    mesh, kinds = (toy.FLAT, ((0, 1), (2, 3))) if seed % 2 else (toy.SQUARE, ((0,), (1,)))
    theory = toy.random_theory(seed, mesh, nodes=6, triples=2, states=2, parameters=1 + seed % 2)
    return theory, toy.ToyCosts(mesh, seed, kinds), toy.shares(theory, len(kinds), seed)


def made(instruction: Instruction) -> Property | None:
    return instruction.triple.post[0] if instruction.triple.node is not None else None


@pytest.mark.parametrize("seed", (7, 24, 26, 31))
def test_without_a_placement_is_as_if_the_theory_did_not_have_it(seed: int) -> None:
    theory, costs, shares = case(seed)
    best = synthesize(theory, costs, shares, restriction=RULE)
    for instruction in best.program.instructions:
        property_ = made(instruction)
        left = tuple(tuple(t for t in ts if property_ not in t.post) for ts in theory.triples)
        if property_ is None:
            continue
        forbidden = Forbidden(made=frozenset({property_}))
        if not all(left):
            with pytest.raises(PlanError, match="leaves no way to run"):
                build(theory, costs, RULE, forbidden=forbidden)
            continue
        found = solve(build(theory, costs, RULE, forbidden=forbidden), shares, None, program_key(theory))
        smaller = theory.with_triples(left)
        assert found.cost == pytest.approx(Enumeration(smaller, costs, shares, forms=PADDED).run().cost, rel=1e-9)
        assert found.cost >= best.cost * (1 - 1e-9)
        replay(found.program, theory, found.storage_of)


@pytest.mark.parametrize("seed", (7, 24, 26, 31))
def test_without_a_change_of_state(seed: int) -> None:
    theory, costs, shares = case(seed)
    best = synthesize(theory, costs, shares, restriction=RULE)
    tried = 0
    for instruction in best.program.instructions:
        triple = instruction.triple
        for c in triple.body if triple.node is None else ():
            cost = costs.conversion(theory.graph.refs[triple.post[0].tensor], (c,), triple.post[0].placement)
            if not cost.communication:
                continue
            tried += 1
            forbidden = Forbidden(changes=frozenset({(triple.post[0].tensor, c.axis, type(c.source), type(c.target))}))
            try:
                found = solve(build(theory, costs, RULE, forbidden=forbidden), shares, None, program_key(theory))
            except PlanError as error:
                assert "allows no program" in str(error)
                continue
            assert found.cost >= best.cost * (1 - 1e-9)
            replay(found.program, theory, found.storage_of)
            bodies = [(i.triple.post[0].tensor, i.triple.body) for i in found.program.instructions if i.triple.node is None]
            changes = {(name, step.axis, type(step.source), type(step.target)) for name, body in bodies for step in body}
            assert not changes & forbidden.changes
    assert tried


def test_a_call_that_is_forbidden() -> None:
    theory, *_ = case(7)
    triple = theory.triples[2][0]
    assert Forbidden(calls=frozenset({(2, triple.body.target)})).triple(triple)
    assert not Forbidden(calls=frozenset({(1, triple.body.target), (2, "hapx.other")})).triple(triple)


# ---- counts ----------------------------------------------------------------------------------------------------------------


def test_a_budget_cuts_and_says_by_how_much() -> None:
    theory, costs, shares = case(31)
    problem = build(theory, costs, RULE)
    domain, whole = Synthesis(problem, shares, None), Statistics()
    best = search(domain, whole)
    assert best is not None
    assert (whole.unproven, whole.cut) == (0, 0)
    assert 0 < whole.kept <= whole.generated
    assert whole.generated == whole.kept + whole.dominated
    cut = Statistics()
    worse = beam(domain, Width(1), cut)
    assert cut.cut > 0 and worse is not None
    worse.estimate *= 1.5  # as if it were a bad program
    narrow, cut.cut = cut.cut, 0
    found = search(domain, cut, worse, budget=0)
    assert found is worse and narrow > 0
    assert cut.unproven == 1 and cut.cut > 0
    assert found.estimate * (1 - cut.gap) <= best.estimate * (1 + 1e-9)


def test_what_the_bound_and_memory_drop_is_counted() -> None:
    theory, costs, shares = case(25)
    free = synthesize(theory, costs, shares, restriction=RULE)
    assert free.statistics.unfit == 0
    assert free.statistics.bounded > 0
    least = least_memory(build(theory, costs, RULE), shares, (1.0,) * len(costs.kinds), program_key(theory))
    top = max(least.memory)
    limits = tuple(max(1.001 * top, 0.6 * top + 0.4 * m) for m in free.memory)
    assert synthesize(theory, costs, shares, limits, restriction=RULE).statistics.unfit > 0


def test_a_watcher_is_called_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapx.synth.astar.EVERY", 2)
    theory, costs, shares = case(31)
    problem = build(theory, costs, RULE)
    seen: list[tuple[int, float, float | None]] = []
    watched, alone = Statistics(), Statistics()
    found = search(Synthesis(problem, shares, None), watched, watch=lambda *now: seen.append(now))
    again = search(Synthesis(problem, shares, None), alone)
    assert found is not None and again is not None
    assert (found.estimate, watched) == (again.estimate, alone)
    assert len(seen) == watched.expansions // 2
    assert [bound for _, bound, _ in seen] == pytest.approx(sorted(bound for _, bound, _ in seen))
    assert all(count == 2 and bound <= found.estimate * (1 + 1e-9) for count, bound, _ in seen)
