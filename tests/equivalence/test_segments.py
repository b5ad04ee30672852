"""Programs whose parts have ratios of their own train like one device: tensors are cut again at the borders, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from torch import Tensor

from hapx.ir import Graph
from hapx.plan import Plan, Triple
from hapx.planner import plan_module
from hapx.restriction import Restriction
from hapx.simulate import simulate
from hapx.states import is_recut
from hapx.theory.derive import derive
from hapx.verify import verify
from support.cases import CASES, MESHES, assert_case
from support.equivalence import assert_equivalent
from support.random_programs import Taste, random_plan
from support.unlike import TwoParts, unlike


def halves(graph: Graph) -> Graph:
    return replace(graph, segment_of=tuple(int(2 * i >= len(graph.nodes)) for i in range(len(graph.nodes))))


def thirds(graph: Graph) -> Graph:
    return replace(graph, segment_of=tuple(3 * i // len(graph.nodes) for i in range(len(graph.nodes))))


def interleaved(graph: Graph) -> Graph:
    return replace(graph, segment_of=tuple(i % 2 for i in range(len(graph.nodes))))


def recuts(plan: Plan) -> int:
    """How many communications of a plan's first program are re-cuts."""
    bodies = [i.triple.body for i in plan.stages[0].program.instructions]
    return sum(is_recut(c.source, c.target) for body in bodies if isinstance(body, tuple) for c in body)


EAGER = Taste(cut=40.0, lazy=0.95, detour=0.1)
RUNS: list[tuple[str, Callable[[Graph], Graph], str, int]] = [
    *(("mlp", halves, mesh, seed) for mesh, seed in (("2", 0), ("3", 1), ("2x2", 2))),
    *(("gpt", thirds, mesh, seed) for mesh, seed in (("2", 0), ("4", 1), ("2x2", 2))),
    *(("cnn", thirds, mesh, seed) for mesh, seed in (("3", 0), ("2x2", 1))),
    *(("gpt", interleaved, mesh, seed) for mesh, seed in (("3", 0), ("2x2", 3))),
    *(("vision", interleaved, mesh, seed) for mesh, seed in (("4", 0), ("2x2", 0))),
    ("gpt with dropout", thirds, "2x2", 0),
    ("cross entropy, weighted, none", halves, "2x2", 1),
]


@pytest.mark.parametrize("case, parts, mesh, seed", RUNS, ids=lambda v: getattr(v, "__name__", str(v)).replace(", ", " "))
def test_segments_with_rows_of_their_own(case: str, parts: Callable[[Graph], Graph], mesh: str, seed: int) -> None:
    theory = derive(parts(CASES[case].graph), MESHES[mesh])
    plans = (random_plan(theory, Random(f"{seed} {k}"), EAGER) for k in range(20))
    plan = next(p for p in plans if recuts(p) > 0)
    assert_case(CASES[case], plan)


def test_a_batch_that_two_axes_split_is_cut_again() -> None:
    """The machines' shares change, and with them what the devices inside have: data moves between all of them."""
    theory = derive(interleaved(CASES["mlp of 8"].graph), MESHES["2x2"])
    batch = {s for _, s in theory.batch}

    def by_both(triple: Triple) -> bool:
        return any(all(s in batch for s in p.placement.states) for p in triple.post)

    def joint(plan: Plan) -> bool:
        paths = [(i.triple.post[0].placement, i.triple.body) for i in plan.stages[0].program.instructions if isinstance(i.triple.body, tuple)]
        return any(len(path) == 1 and is_recut(path[0].source, path[0].target) and all(s in batch for s in at.states) for at, path in paths)

    plan = next(p for seed in range(40) if joint(p := random_plan(theory, Random(seed), replace(EAGER, wanted=by_both))))
    assert_case(CASES["mlp of 8"], plan)


# ---- planned ---------------------------------------------------------------------------------------------------------------

PLANNED = {  # cluster, mesh, at most this part of the time with one row, at most these seconds
    "2": (unlike(["counter", "mover"]), "flat", 0.95, 0.95),
    "4": (unlike(["counter", "counter"], ["mover", "mover"]), "flat", 0.96, 0.49),
    "2x2": (unlike(["counter", "counter"], ["mover", "mover"]), "2x2", 0.95, 0.49),
}


def batches(step: int) -> tuple[Tensor]:
    return TwoParts().example(96, step)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name == "2x2" else name for name in PLANNED])
def test_segments_pay_where_devices_differ_by_operator(name: str) -> None:
    """The planner frees the border between products and chains of small operators; the plan is faster in the simulator and trains as one device."""
    cluster, mesh, part, seconds = PLANNED[name]
    model, inputs = TwoParts, TwoParts().example(96)
    tied, freed = (plan_module(model(), cluster, inputs, strategy=Restriction(mesh=mesh, segments=s)) for s in ("none", "auto"))
    assert freed.graphs[freed.first].segments > 1 and recuts(freed) > 0
    assert simulate(freed).total == pytest.approx(freed.iteration_time)
    assert freed.iteration_time < part * tied.iteration_time and freed.iteration_time < seconds
    verify(freed)
    uses = assert_equivalent(model, batches, freed)
    assert uses.unequal and uses.sharded_flops > 0.95


@pytest.mark.gloo
def test_segments_over_processes() -> None:
    plan = plan_module(TwoParts(), unlike(["counter"], ["mover"]), TwoParts().example(96), micro_batches=1)
    assert recuts(plan) > 0
    assert_equivalent(TwoParts, batches, plan, mode="processes")
