"""Random legal programs of whole models train like one device: loss, gradients, parameters and buffers, three steps, float64.

Here a few of them. Some hundreds, on every case and mesh (minutes; deselected by default, with a line that says so):

    python -m pytest tests/equivalence -m slow

A failure's id names case, mesh and seed; `random_plan(CASES[case].theory(MESHES[mesh]), Random(seed))` makes its plan again.
"""

from __future__ import annotations

from random import Random

import pytest

from hapx.plan import Form, Plan, Triple
from hapx.states import Sharded
from hapx.verify import verify
from support.cases import CASES, MESHES, Case, assert_case, executor_alone
from support.equivalence import train_single, uses_of
from support.random_programs import Taste, random_plan

QUICK = [
    *(("mlp", mesh, seed) for mesh, seed in (("2", 3), ("3", 0), ("4", 1), ("2x2", 10))),
    *(("gpt", mesh, seed) for mesh, seed in (("2", 0), ("3", 1), ("4", 2), ("2x2", 4))),
    *(("cnn", mesh, seed) for mesh, seed in (("2", 1), ("3", 2), ("4", 0), ("2x2", 3))),
    ("cnn, eval mode", "2x2", 0),
    ("gpt with dropout", "3", 0),
    ("cross entropy", "2x2", 5),
    ("cross entropy, smoothed, weighted", "3", 1),
    ("cross entropy, sum", "2x2", 1),
    ("cross entropy, weighted, none", "2", 0),
    ("attention, mask", "2x2", 4),
    ("attention, float mask", "3", 0),
    ("attention, causal", "4", 1),
    ("attention, causal, dropout", "2x2", 2),
]
LONG = [(case, mesh, seed) for case in CASES for mesh in ("2", "3", "4", "2x2") for seed in range(100, 107)]
ids = ["{}-{}-{}".format(*run).replace(", ", " ") for run in LONG]


def plan_of(case: str, mesh: str, seed: int) -> Plan:
    return random_plan(CASES[case].theory(MESHES[mesh]), Random(seed))


@pytest.mark.parametrize("case, mesh, seed", QUICK)
def test_random_programs(case: str, mesh: str, seed: int) -> None:
    plan = plan_of(case, mesh, seed)
    verify(plan)
    assert_case(CASES[case], plan)


@pytest.mark.parametrize("mesh", ["3", "2x2"])
def test_running_statistics_in_shards(mesh: str) -> None:
    """Where the channels of a batch norm are split, its running statistics are stored so, and updated where they are."""

    def by_channels(triple: Triple) -> bool:
        return any("running" in p.tensor and isinstance(p.placement.states[0], Sharded) for p in triple.pre)

    plan = random_plan(CASES["cnn"].theory(MESHES[mesh]), Random(0), Taste(wanted=by_channels))
    assert all(isinstance(plan.storage_of[f"bn{i}.running_var"].copies[0].placement.states[0], Sharded) for i in (1, 2))
    assert_case(CASES["cnn"], plan)


@pytest.mark.slow
@pytest.mark.parametrize("case, mesh, seed", LONG, ids=ids)
def test_many_random_programs(case: str, mesh: str, seed: int) -> None:
    assert_case(CASES[case], plan_of(case, mesh, seed))


@pytest.mark.gloo
@pytest.mark.parametrize("case, mesh, seed", [("gpt", "4", 1), ("cnn", "2x2", 0)])
def test_random_programs_over_gloo(case: str, mesh: str, seed: int) -> None:
    assert_case(CASES[case], plan_of(case, mesh, seed), mode="processes")


@pytest.mark.parametrize("case", [c for c in CASES.values() if not c.random], ids=lambda c: c.name)
def test_the_executor_alone_is_torch(case: Case) -> None:
    assert_case(case, random_plan(case.theory(MESHES["1"]), Random(1)))


@pytest.mark.parametrize("case", [c for c in CASES.values() if c.random], ids=lambda c: c.name)
def test_masks_are_drawn(case: Case) -> None:
    """Otherwise the comparison with the executor on one device would say nothing about masks: each step draws others."""
    still = train_single(lambda: case.model().eval(), case.inputs, 1, "sgd")
    drawn = executor_alone(Case(case.name, case.model, case.batch, random=True), 2)
    assert drawn.losses[0] != pytest.approx(still.losses[0], rel=1e-3)


def test_quick_programs_use_everything() -> None:
    """Together the quick runs exercise what a planner may choose."""
    uses = [uses_of(plan_of(*run)) for run in QUICK]
    assert all(u.sharded_flops > 0 for u in uses)
    assert sum(u.zero_length for u in uses) >= 5
    assert sum(u.unequal for u in uses) >= 15
    assert set().union(*(u.forms for u in uses)) == {Form.PADDED, Form.GROUPED, Form.POINT_TO_POINT}
    assert sum(u.stored_sharded for u in uses) > 20
    assert sum(u.freed for u in uses) >= 5
    assert sum(u.sfb for u in uses) >= 3
    composites = "embedding cross_entropy batch_norm mean_loss linear_sfb dropout attention_dropout"
    assert {f"hapx.{name}" for name in composites.split()} <= set().union(*(u.targets for u in uses))
