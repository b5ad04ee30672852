"""The audit of micro-batches: random small models, cut into random numbers of micro-batches. Where nothing mixes samples, the losses and gradients
of all micro-batches add up to those of the whole batch. 300 of them (minutes; deselected by default):

    python -m pytest tests/equivalence/test_micro_batches.py -m slow
"""

from __future__ import annotations

import warnings
from collections import Counter
from random import Random

import pytest

from hapx.errors import CaptureError
from hapx.graph.capture import capture
from hapx.runtime.micro_batches import cut_batch
from hapx.theory.derive import ReplicatedOperatorWarning
from hapx.theory.discover import ProbedOperatorWarning, discover
from hapx.theory.normalise import normalised
from support.micro import assert_same, at_once, in_parts
from support.random_models import Recipe


def check(seed: int) -> str:
    """What became of a random model: "exact", "mixing", or "refused" (some are made for one size of batch)."""
    random = Random(seed)
    recipe = Recipe(tuple(random.randrange(256) for _ in range(random.choice((12, 20, 40)))))
    inputs = recipe.inputs(0)
    batch = inputs[0].shape[0]
    number = random.choice([n for n in range(2, batch + 1) if batch % n == 0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProbedOperatorWarning)
        warnings.simplefilter("ignore", ReplicatedOperatorWarning)
        whole = discover(capture(recipe.model(), inputs))
    try:
        small = capture(recipe.model(), cut_batch(inputs, number)[0])
    except CaptureError:  # its shapes do not fit together
        return "refused"
    graph = normalised(small, whole)
    assert graph.micro_batches is not None
    if graph.micro_batches.mixing:
        return "mixing"
    assert_same(in_parts(graph, recipe.model, inputs), at_once(recipe.model, inputs), 1e-9)
    return "exact"


def test_random_models() -> None:
    found = Counter(map(check, range(20)))
    assert found["exact"] >= 8, found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_models() -> None:
    found = Counter(map(check, range(1000, 1300)))
    assert found["exact"] >= 120 and found["mixing"] >= 60, found
