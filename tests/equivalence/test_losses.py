"""Losses, lookups and indexing in whole models: planned programs train as one device does, whatever the shares are.

Means over counts that are data (ignored targets, class weights, masks), every sample against every other, tables that are split by rows, sums of
several terms. In float64; devices are threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hapx.collectives import losses
from hapx.plan import Plan
from hapx.planner import plan_module
from hapx.restriction import Restriction
from hapx.runtime import build
from hapx.runtime.build import find_operator
from support.clusters import FOUR
from support.division import divisions
from support.equivalence import assert_equivalent, uses_of
from support.losses import MODELS


def shares(*ratios: float) -> Restriction:
    return Restriction(":".join(f"{r:g}" for r in ratios), mesh="flat", split="batch", ratios=ratios, storage="as-used", sfb="never")


STRATEGIES: Mapping[str, tuple[str | Restriction, int]] = {
    "even": (shares(1, 1, 1, 1), 8),
    "4:4:1:1": (shares(4, 4, 1, 1), 10),
    "zero length": (shares(5, 2, 1, 0), 8),
    "auto": (Restriction("auto", mesh="flat"), 10),
    "tensor-parallel": ("tensor-parallel", 10),
}


def example(model: str, batch: int, step: int) -> tuple[Tensor, ...]:
    return MODELS[model]().example(batch, 100 * step)  # type: ignore[operator]


@cache
def planned(model: str, strategy: str) -> Plan:
    chosen, batch = STRATEGIES[strategy]
    plan = plan_module(MODELS[model](), FOUR, example(model, batch, 0), strategy=chosen)
    plan.verify()
    return plan


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_trains_as_one_device_does(model: str, strategy: str) -> None:
    batch = STRATEGIES[strategy][1]
    plan = planned(model, strategy)
    uses = assert_equivalent(MODELS[model], partial(example, model, batch), plan, steps=2)
    if strategy not in ("auto", "tensor-parallel"):
        assert uses.sharded_flops > 0.9 and uses.zero_length == (strategy == "zero length") and uses.unequal == (strategy != "even")
        assert all("model" not in d for d in divisions(plan).values())
    elif strategy == "tensor-parallel":
        assert any("model" in d for d in divisions(plan).values())


def test_plans_use_the_composites() -> None:
    """Losses over global counts; tables and rows of which every device has some."""
    of = {model: uses_of(planned(model, "4:4:1:1")).targets for model in ("weighted", "terms", "contrastive")}
    assert {"hapx.cross_entropy", "hapx.nll_loss"} <= of["weighted"] and "hapx.cross_entropy" in of["contrastive"]
    assert {"hapx.mean_loss", "hapx.sum_loss"} <= of["terms"]
    assert "hapx.index" in uses_of(planned("indexed", "4:4:1:1")).targets


@pytest.mark.parametrize("model", ["indexed", "weighted", "terms"])
def test_plans_survive_a_file(model: str, tmp_path: Path) -> None:
    plan = planned(model, "4:4:1:1")
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    again.verify()
    assert again == plan


def local_likelihood(batch: object, local: Tensor, like: Tensor) -> Tensor:
    """The divisor of this device's rows alone."""
    return local


def test_a_likelihood_over_the_local_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "over", local_likelihood)
    with pytest.raises(AssertionError, match="loss"):
        assert_equivalent(MODELS["weighted"], partial(example, "weighted", 10), planned("weighted", "4:4:1:1"), steps=1)


def test_a_mean_of_local_means_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(operator: str, count: int, **arguments: Any) -> Tensor:
        rows: Tensor = find_operator(operator)(**{**arguments, "reduction": losses.NONE})
        return rows.mean()

    monkeypatch.setattr(build, "COMPOSITES", {**build.COMPOSITES, "hapx.mean_loss": wrong})
    with pytest.raises(AssertionError, match="loss"):
        assert_equivalent(MODELS["terms"], partial(example, "terms", 10), planned("terms", "4:4:1:1"), steps=1)
