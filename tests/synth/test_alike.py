"""Prices of conversions that are found once for all that cost the same, against the least over their sources."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hapx.cost.edges import mixed
from hapx.restriction import Restriction
from hapx.synth import alike
from hapx.synth.alike import numbered
from hapx.synth.domain import Synthesis
from hapx.synth.problem import build
from support import toy
from support.problems import problem_of
from support.zoo import load

PADDED = frozenset({"padded"})


def least(domain: Synthesis) -> int:
    """Compares all prices of all tables with the least over the sources of each row; how many were compared."""
    relaxation, compared = domain.bound.relaxation, 0
    priced, outline = relaxation.priced, relaxation.outline
    for table in priced.sheet.tables:
        direct, rows, sets = priced.direct(table), priced.conversions(table), outline.sets(table)
        n = len(table.placements)
        for row, mask in enumerate(sets):
            inside = [p for p in range(n) if mask >> p & 1]
            expected = direct[inside].min(axis=0) if row != n else np.zeros_like(direct[0])  # row n, where there is one, is of anything
            np.testing.assert_array_equal(rows[row], expected)
            compared += n
    return compared


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("seed", [7, 8, 24, 42])
def test_a_row_costs_the_least_of_its_sources(seed: int, several: bool) -> None:
    mesh, kinds = (toy.FLAT, ((0,), (1, 2), (3,))) if seed % 2 else (toy.SQUARE, ((0,), (1,)))
    theory = toy.random_theory(seed, mesh, nodes=7, triples=2, states=2, parameters=2, twice=1 + several)
    problem = build(theory, toy.ToyCosts(mesh, seed, kinds), Restriction(forms=PADDED))
    shares = toy.shares(theory, len(kinds), seed)
    assert least(Synthesis(problem, shares, None)) > 20
    assert least(Synthesis(problem, shares, None, prices=tuple(0.3 + k for k in range(len(kinds))))) > 20


@pytest.mark.parametrize("view", ["flat", "16x4"])
def test_of_a_whole_model(view: str) -> None:
    with torch.device("meta"):
        model, tokens = load("gpt").GPT(4096, 64, 4, 2, 32), torch.zeros(64, 32, dtype=torch.int64)
    problem, costs = problem_of(model, (tokens, tokens), "v100x2_p100x6", view)
    shares = dict.fromkeys(problem.cuts, costs.speeds)
    free, priced = Synthesis(problem, shares, None), Synthesis(problem, shares, None, prices=(1e-12, 3e-12))
    assert least(free) > 200 and least(priced) > 200
    sheet = free.bound.relaxation.priced.sheet
    print(f"{view}: {len(sheet.alike)} conversions, {sheet.alike.max() + 1} unlike; {sheet.length} from sets, {sheet.without.rows.max()} unlike")
    assert sheet.alike.max() + 1 < len(sheet.alike) / 2


def test_groups_whose_sums_are_equal_by_chance_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their second sums."""
    chosen = alike.np.random.default_rng

    class FirstAreEqual:
        def integers(self, *given: object) -> np.ndarray:
            first, second = chosen(0).integers(*given)  # type: ignore[call-overload]
            return np.stack([np.zeros_like(first), second])

    theory = toy.random_theory(8, toy.SQUARE, nodes=7, triples=2, states=2, parameters=2)
    problem = build(theory, toy.ToyCosts(toy.SQUARE, 8, ((0,), (1,))), Restriction(forms=PADDED))
    shares = toy.shares(theory, 2, 8)
    monkeypatch.setattr(alike.np.random, "default_rng", lambda seed: FirstAreEqual())
    assert least(Synthesis(problem, shares, None)) > 20


def test_numbers_of_equal_values() -> None:
    one, which = numbered(np.array([5, 3, 5, 9, 3]))
    assert one.tolist() == [0, 1, 3] and which.tolist() == [0, 1, 0, 2, 1]
    columns = [np.array([0, 1, 0, 1, 2**31 - 1]), np.array([3, 3, 3, 4, 2**31 - 1]), np.array([7, 7, 7, 7, 2**31 - 1])]
    assert numbered(mixed(*columns))[1].tolist() == [0, 1, 0, 2, 3], "also of more numbers than there are integers"
