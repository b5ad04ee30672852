"""Random legal programs of mixtures of experts, recurrent networks and the zoo's other kinds of layers train as one device does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from random import Random
from typing import Any

import pytest
from torch import Tensor, nn

from hapx.graph.capture import capture
from hapx.plan import Plan
from hapx.theory.derive import derive
from hapx.theory.triple import Theory
from hapx.verify import verify
from support.cases import MESHES
from support.equivalence import assert_equivalent, uses_of
from support.random_programs import random_plan
from support.recurrent import RECURRENT
from support.zoo import TINY, Balanced, Tiny, masked_text

BATCH = 5
Factory = Callable[[], nn.Module]
Inputs = Callable[[int], tuple[Tensor, ...]]


def _tiny(tiny: Tiny) -> tuple[Factory, Inputs]:
    return tiny.model, partial(tiny.inputs, BATCH)


def _recurrent(name: str) -> tuple[Factory, Inputs]:
    make: Any = RECURRENT[name]
    return make, lambda step: make().example(BATCH, seed=step)


MODELS: dict[str, tuple[Factory, Inputs]] = {
    "balanced": _tiny(Tiny(lambda: Balanced(0.5), masked_text)),
    **{name: _tiny(TINY[name]) for name in ("bert_moe", "vit", "llama")},
    **{name: _recurrent(name) for name in RECURRENT},
}
QUICK = [("balanced", "3", 1), ("balanced", "2x2", 2), ("bert_moe", "2x2", 3), ("bert_moe", "4", 0), ("vit", "3", 0), ("llama", "2x2", 1),
         ("lstm", "2x2", 0), ("gru", "3", 2), ("rnn", "2x2", 3)]  # fmt: skip
LONG = [(model, mesh, seed) for model in MODELS for mesh in ("2", "3", "4", "2x2") for seed in range(100, 106)]


@cache
def theory(model: str, mesh: str) -> Theory:
    make, inputs = MODELS[model]
    return derive(capture(make(), inputs(0)), MESHES[mesh])


def checked(model: str, mesh: str, seed: int) -> Plan:
    plan = random_plan(theory(model, mesh), Random(seed))
    verify(plan)
    assert_equivalent(*MODELS[model], plan, steps=2)
    return plan


@pytest.mark.parametrize("model, mesh, seed", QUICK)
def test_random_programs(model: str, mesh: str, seed: int) -> None:
    assert uses_of(checked(model, mesh, seed)).sharded_flops > 0


@pytest.mark.slow
@pytest.mark.parametrize("model, mesh, seed", LONG, ids=["{}-{}-{}".format(*run).replace(", ", " ") for run in LONG])
def test_many_random_programs(model: str, mesh: str, seed: int) -> None:
    checked(model, mesh, seed)
