"""The sharper bound, by potentials of all tensors at once: against the cheapest completion, and what it proves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hapx.restriction import Restriction
from hapx.synth import search as searching
from hapx.synth.astar import Front, Statistics, search
from hapx.synth.domain import State, Synthesis
from hapx.synth.exhaustive import Enumeration
from hapx.synth.potentials import Groups, Potentials, least
from hapx.synth.problem import Problem, build
from hapx.synth.search import Solution, least_memory, program_key, solve, synthesize
from support import toy
from support.completions import KINDS, Unbounded, random_domain, used_again, used_often, walk
from support.problems import problem_of
from support.zoo import load

PADDED = frozenset({"padded"})
RULE = Restriction(forms=PADDED)
GRAPHS: dict[str, Callable[[int], Synthesis]] = {
    "branches that meet again": lambda seed: random_domain(seed, parameters=2, branches=2 + seed % 2),
    "a value that is used often": used_often,
    "parameters that are used twice": lambda seed: used_again(seed, 2),
    "parameters that are used up to four times": lambda seed: used_again(seed, 4),
}


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("known", ["a program is known", "none is known", "what was found at other shares is known"])
@pytest.mark.parametrize("seeds", [range(600, 608), pytest.param(range(608, 616), marks=pytest.mark.slow)], ids=["some", "more"])
def test_potentials_never_exceed_the_cheapest_completion(kind: str, known: str, seeds: range) -> None:
    """Of states, and of every choice after them; sharper than the tables somewhere."""
    states = sharper = 0
    for seed in seeds:
        domain, plain = GRAPHS[kind](seed), GRAPHS[kind](seed)
        best = search(domain, Statistics()) if known == "a program is known" else None
        limit = best.estimate if best is not None else float("inf")
        if known == "what was found at other shares is known":
            problem = domain.problem
            other = Synthesis(problem, toy.shares(problem.theory, problem.terms.kinds, seed + 1000), None)
            assert not domain.quickly_sharp
            Potentials(other.bound.relaxation).refine(problem.start, limit)
            assert domain.quickly_sharp
        potentials = Potentials(domain.bound.relaxation)
        potentials.refine(domain.problem.start, limit)
        for state in walk(domain, Random(seed)):
            best = search(Unbounded(plain, state), Statistics())
            if best is None:  # nothing leads on from there
                continue
            rest = potentials.rest(state.level, state.place)
            estimate = domain.bound.estimate(state.cost, state.forward, state.backward, rest)
            assert estimate <= best.estimate * (1 + 1e-9), (seed, state.level)
            states, sharper = states + 1, sharper + (estimate > state.estimate * (1 + 1e-6))
            choices = potentials.choices(state.level, state.place)
            for following in plain.successors(state, float("inf")):
                if (found := search(Unbounded(plain, following), Statistics())) is not None and following.move is not None:
                    own = tuple(choices[following.move.choice.index].tolist())
                    least = domain.bound.estimate(state.cost, state.forward, state.backward, own)
                    assert least <= found.estimate * (1 + 1e-9), (seed, state.level)
    print(f"{states} states, the bound is sharper in {sharper}")
    assert states > 40
    assert sharper > 5


@pytest.mark.parametrize("seed", [7, 11, 15, 21, 25, 29, 30, 31, 45, 61, 65, 71, 73])
def test_equals_enumeration_with_a_sharp_bound_from_the_start(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no program is known before; and where memory binds."""
    monkeypatch.setattr(searching, "SHARPEN", 0)
    monkeypatch.setattr(searching, "_incumbent", lambda domain, statistics, within, best: best)
    sharpened = Counter[bool]()
    sharpen = Synthesis.sharpen

    def counted(domain: Synthesis, limit: float) -> Callable[[State], float] | None:
        found = sharpen(domain, limit)
        sharpened[found is not None] += 1
        return found

    monkeypatch.setattr(Synthesis, "sharpen", counted)
    mesh, kinds = (toy.FLAT, KINDS[seed % 3 + 1]) if seed % 2 else (toy.SQUARE, ((0,), (1,)))
    theory = toy.random_theory(seed, mesh, nodes=6, triples=2, states=2, parameters=2, twice=2)
    costs, shares = toy.ToyCosts(mesh, seed, kinds), toy.shares(theory, len(kinds), seed)
    everything = Enumeration(theory, costs, shares, forms=PADDED)
    count = everything.run()
    found = synthesize(theory, costs, shares, restriction=RULE)
    assert found.cost == pytest.approx(count.cost, rel=1e-9) and found.statistics.unproven == 0
    least = least_memory(build(theory, costs, RULE), shares, (1.0,) * len(kinds), program_key(theory))
    assert max(least.memory) == pytest.approx(min(max(memory) for _, memory in everything.found), rel=1e-9)
    limits = tuple(max(1.001 * max(least.memory), 0.6 * max(least.memory) + 0.4 * m) for m in found.memory)
    fitting = synthesize(theory, costs, shares, limits, restriction=RULE)
    assert fitting.cost == pytest.approx(Enumeration(theory, costs, shares, limits=limits, forms=PADDED).run().cost, rel=1e-9)
    print(f"{count.programs} programs, {sharpened[True]} searches with potentials")
    assert sharpened[True] >= 2


@pytest.mark.parametrize("rows", [1, 7, 24, 25, 97])
def test_the_least_of_rows_and_of_groups(rows: int) -> None:
    """As numpy's own, slower reductions say."""
    rng = np.random.default_rng(rows)
    cost, numbers = rng.random((5, rows, 3)), rng.integers(0, 2 * rows, (5, rows))
    cost[rng.random(cost.shape) < 0.2] = np.inf
    assert (least(cost) == cost.min(axis=1)).all()
    nothing = np.full((2 * rows, 3), np.inf)
    expected = nothing.copy()
    np.minimum.at(expected, numbers, cost)
    assert (Groups.of(numbers).least(cost, nothing.copy()) == expected).all()
    members = rng.random((4, rows)) < 0.5
    members[2] = False  # a row without any
    expected = np.where(members[:, :, None], cost[0], np.inf).min(axis=1)
    assert (Groups.inside(members).least(cost[0], np.full((4, 3), np.inf)) == expected).all()


class Cells(nn.Module):
    """A cell that is called once per time step, with four parameters."""

    def __init__(self, width: int, tokens: int):
        super().__init__()
        self.tokens, self.cell, self.head = nn.Embedding(tokens, width), nn.GRUCell(width, width), nn.Linear(width, tokens, bias=False)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        state = torch.zeros_like(self.tokens(text[:, 0]))
        states = []
        for i in range(text.shape[1]):
            state = self.cell(self.tokens(text[:, i]), state)
            states.append(state)
        return nn.functional.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), following.flatten())


def cells() -> tuple[Problem, Synthesis]:
    """Over a slow link between two machines."""
    with torch.device("meta"):
        model, text = Cells(512, 8192), torch.zeros(512, 4, dtype=torch.int64)
    problem, costs = problem_of(model, (text, text), "a6000x2_2080tix2", "2x2")
    return problem, Synthesis(problem, dict.fromkeys(problem.cuts, costs.speeds), None)


class Layers(nn.Module):
    """Equal layers, each with a residual connection; what the first ones make is read by all of them."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(width, 2 * width), nn.Linear(2 * width, width)]) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        for up, down in self.layers:
            x = x + down(torch.relu(up(x))) * gate
        return nn.functional.mse_loss(x, y)


class Onward(Unbounded):
    """With the bound."""

    def successors(
        self, state: State, limit: float, most: int | None = None, front: Front[State] | None = None, hasty: bool = False
    ) -> Iterator[State]:
        yield from self.domain.successors(state, limit)


@pytest.mark.parametrize("view", ["flat", "2x2"])
def test_equal_layers_have_the_potentials_of_the_one_after_them(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never above the cheapest completion, and nearly those that are computed layer by layer; and so at the shares that are searched next."""
    with torch.device("meta"):
        model, x = Layers(256, 14), torch.zeros(96, 256)
    problem, costs = problem_of(model, (x, x), "a6000x2_2080tix2", view)
    even = np.ones_like(costs.speeds) / sum(map(len, costs.kinds))
    states = 0
    for shares in (costs.speeds, even):
        domain, plain = (Synthesis(problem, dict.fromkeys(problem.cuts, shares), None) for _ in range(2))
        best = search(plain, Statistics())
        assert best is not None
        told = Potentials(domain.bound.relaxation)
        told.refine(problem.start, 2 * best.estimate)
        middle = list(told._period)
        assert len(middle) > len(problem.steps) / 3, middle
        with monkeypatch.context() as m:
            m.setattr(Potentials, "_middles", lambda self: iter(()))
            each = Potentials(domain.bound.relaxation)
        each._before = [dict(known) for known in told._before]
        each._backward()
        assert max(told.rest(0, problem.start)) > 0.99 * max(each.rest(0, problem.start))
        for seed in range(3):
            for state in walk(plain, Random(seed)):
                if state.level in middle and state.level % 5 == seed:
                    found = search(Onward(plain, state), Statistics())
                    assert found is not None
                    estimate = domain.bound.estimate(state.cost, state.forward, state.backward, told.rest(state.level, state.place))
                    assert estimate <= found.estimate * (1 + 1e-9), (seed, state.level)
                    states += 1
    print(f"{states} states")
    assert states > 10


def test_what_several_parameters_cost_in_every_step_is_known_from_the_start() -> None:
    """Tables that follow one tensor at a time do not see 40 % of it; the search ended with its budget, 36 % of the cost unproven."""
    problem, domain = cells()
    plain = domain.start()
    best = solve(problem, domain.moves.values.shares, None, program_key(problem.theory))
    domain.bound.sharpen(best.cost)
    start = domain.start()
    assert plain is not None and start is not None
    print(f"{plain.estimate * 1e3:.3f} ms at the start, {start.estimate * 1e3:.3f} sharper, {best.cost * 1e3:.3f} found,"
          f" proven to {best.statistics.gap:.2%} after {best.statistics.expansions} expansions")  # fmt: skip
    assert plain.estimate < 0.75 * best.cost
    assert start.estimate > 0.99 * best.cost
    assert best.statistics.gap < 1e-9


def test_a_search_at_other_shares_begins_with_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round makes its bound as sharp as several from nothing do."""
    rounds = 0
    forward = Potentials._forward

    def counted(potentials: Potentials) -> None:
        nonlocal rounds
        rounds += 1
        forward(potentials)

    monkeypatch.setattr(Potentials, "_forward", counted)
    problem, domain = cells()
    other = {cut: tuple(0.75 * s + 0.25 / 4 for s in own) for cut, own in domain.moves.values.shares.items()}  # nearer to even ones, of 4 devices
    best = solve(problem, other, None, program_key(problem.theory))
    problem.forward.clear()
    domain.bound.sharpen(best.cost)

    def sharpened() -> tuple[float, int]:
        nonlocal rounds
        shifted, rounds = Synthesis(problem, other, None), 0
        shifted.bound.sharpen(best.cost)
        start = shifted.start()
        assert start is not None
        return start.estimate, rounds

    quickly, few = sharpened()
    problem.forward.clear()
    slowly, several = sharpened()
    print(f"{slowly * 1e3:.4f} ms after {several} rounds from nothing, {quickly * 1e3:.4f} after {few}; the best {best.cost * 1e3:.4f}")
    assert quickly > 0.999 * slowly > 0.98 * best.cost
    assert few < several


@pytest.mark.parametrize("shares", ["by speed", "even"])
def test_a_sharp_bound_spares_larger_problems_most_of_the_search(shares: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six layers of Llama: the same program, proven, after a part of what is looked at with a bound that leaves much."""
    llama: Any = load("llama")
    with torch.device("meta"):
        model, text = llama.Llama(replace(llama.SIZES["1B"], layers=6), 256), torch.zeros(16, 256, dtype=torch.int64)

    def found() -> Solution:
        problem, costs = problem_of(model, (text, text), "a100x2_p100x2", "flat")
        at = costs.speeds if shares == "by speed" else np.ones_like(costs.speeds) / sum(map(len, costs.kinds))
        assert len(problem.steps) > searching.EXACT
        return solve(problem, dict.fromkeys(problem.cuts, at), None, program_key(problem.theory))

    sharp = found()
    monkeypatch.setattr(searching, "_sharpened", lambda domain, statistics, within, best: best)
    plain = found()
    many, few = plain.statistics.generated, sharp.statistics.generated
    print(f"{sharp.cost * 1e3:.3f} ms, {sharp.statistics.gap:.2e} left, of {few} partial programs; {plain.cost * 1e3:.3f} of {many}")
    assert sharp.cost == pytest.approx(plain.cost, rel=1e-6)
    assert sharp.statistics.gap < 1.1 * searching.ALMOST
    assert few < many / 2
