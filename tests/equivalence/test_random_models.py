"""The audit of whole models: a random small model, a random legal program of it, three devices or four: it trains like one device.

Models are drawn by hypothesis from the registry's operators (`support.random_models`), programs and lengths from a seed. Here 20 of them;
300 (minutes; deselected by default, with a line that says so):

    python -m pytest tests/equivalence/test_random_models.py -m slow
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, currently_in_test_context, example, given, note, settings
from hypothesis import strategies as st

from hapx.graph.capture import capture
from hapx.layout import divide
from hapx.theory.derive import ReplicatedOperatorWarning, derive
from hapx.theory.discover import ProbedOperatorWarning, discover
from hapx.theory.registry import REGISTRY, signature_rules
from hapx.verify import verify
from support.cases import MESHES
from support.equivalence import assert_equivalent
from support.random_models import MAKERS, Recipe
from support.random_programs import Deal, Taste, random_lengths, random_plan

TAPES, SHORT = (st.lists(st.integers(0, 255), min_size=12, max_size=n).map(tuple) for n in (70, 32))
# examples are the same in every run; one that fails is printed with its tape
SETTINGS = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False)


def check(tape: tuple[int, ...], mesh: str, seed: int, taste: Taste | None = None, deal: Deal = random_lengths) -> None:
    recipe = Recipe(tape)
    if currently_in_test_context():
        note(str(recipe))
    with warnings.catch_warnings():
        # operators that the table does not have are part of the audit: their rules are found by execution, or they stay whole
        warnings.simplefilter("ignore", ProbedOperatorWarning)
        warnings.simplefilter("ignore", ReplicatedOperatorWarning)
        graph = discover(capture(recipe.model(), recipe.inputs(0)))
        plan = random_plan(derive(graph, MESHES[mesh]), Random(seed), taste, deal)
    verify(plan)
    assert_equivalent(recipe.model, recipe.inputs, plan, steps=2)


@settings(SETTINGS, max_examples=20, phases=[Phase.explicit, Phase.generate])
@given(SHORT, st.sampled_from(["3", "2x2", "2", "4"]), st.integers(0, 999))
def test_random_models(tape: tuple[int, ...], mesh: str, seed: int) -> None:
    check(tape, mesh, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(SETTINGS, max_examples=300)
@given(TAPES, st.sampled_from(["3", "2x2", "2", "4"]), st.integers(0, 999))
def test_many_random_models(tape: tuple[int, ...], mesh: str, seed: int) -> None:
    check(tape, mesh, seed)


@settings(SETTINGS, max_examples=200)
@given(TAPES)
@example((0,) * 16)
def test_recipes_are_models(tape: tuple[int, ...]) -> None:
    """The same model always; every value is part of the loss."""
    recipe = Recipe(tape)
    loss = recipe.model()(*recipe.inputs(0))
    assert loss.dim() == 0 and bool(loss.isfinite()) and torch.equal(loss, recipe.model()(*recipe.inputs(0)))
    loss.backward()


def test_every_operator_is_chosen() -> None:
    rng, counted = Random(0), Counter[str]()
    for _ in range(300):
        recipe = Recipe(tuple(rng.randrange(256) for _ in range(60)))
        counted.update({s.name for s in recipe.model().steps})
    assert len(counted) >= len(MAKERS) and min(counted.values()) >= 5, counted


def test_a_wrong_rule_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: softmax and its logarithm as if they were elementwise."""
    wrong = replace(REGISTRY["aten.linear"], targets=(), rules=signature_rules("self: * -> *"), body=None)
    for name in [n for n in REGISTRY if n.split(".")[1] in ("softmax", "log_softmax", "_softmax", "_log_softmax")]:
        monkeypatch.setitem(REGISTRY, name, wrong)
    tape = (2, 3, [m.__name__ for m in MAKERS].index("along"), 0, 1, 0)  # the softmax of the embedding over its dim 1
    taste = Taste(wanted=lambda t: "softmax" in t.body.target and "S1" in str(t.pre[0]))  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match=r"instead of|is off by"):
        check(tape, "3", 0, taste, lambda cut, size, rng: divide(cut.units, size))
