"""Programs whose parts have ratios of their own train like one device: tensors are cut again at the borders, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from hapx.ir import Graph
from hapx.plan import Plan, Triple
from hapx.states import is_recut
from hapx.theory.derive import derive
from support.cases import CASES, MESHES, assert_case
from support.random_programs import Taste, random_plan


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
