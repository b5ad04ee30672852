"""The comparison of pipelines: each system is what it says, and results are kept."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.stage_cases import Case, small_gpt
from benchmarks.stage_systems import DP_PP, EQUAL, ISLANDS, OPERATORS, PIPELINE, SPMD, Bench, Found, groupings, islands
from benchmarks.stages import Book, faster, hapx, lines, table
from benchmarks.workloads import machines
from hapx.stages.clustering import find_layers
from hapx.stages.space import space

CLUSTER = machines((1, "V100-SXM2-16GB", 2), (1, "P100-SXM2-16GB", 2), inter="1 Gbit/s")


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    """A small GPT with wide gradients on two pairs of devices, in four micro-batches."""
    bench = Bench(Case(small_gpt(2, width=256, batch=16), "2 V100 + 2 P100", CLUSTER), numbers=(4,))
    return {name: find() for name, find in (bench.systems() | {OPERATORS: bench.ablations()[OPERATORS]}).items()}


def test_no_system_is_faster(found: dict[str, Found]) -> None:
    own = min(found[SPMD].time, found[PIPELINE].time)
    assert all(own <= f.time * 1.001 for name, f in found.items() if name != OPERATORS)


def test_islands_do_not_mix_devices(found: dict[str, Found]) -> None:
    every, kept = space(CLUSTER), islands(CLUSTER)
    mixed = {i for i, s in enumerate(every.shapes) if len(set(s.types)) > 1}
    assert mixed and not any(m.shape in mixed for moves in kept.moves for m in moves)
    plan = found[ISLANDS].plan
    assert plan is not None and all(len({plan.cluster.devices[d].type for d in s.devices}) == 1 for s in plan.stages)


@pytest.mark.parametrize("system", [EQUAL, DP_PP])
def test_equal_stages(found: dict[str, Found], system: str) -> None:
    plan = found[system].plan
    assert plan is not None and plan.schedules[plan.first].name == "1f1b"
    assert tuple(s.devices for s in plan.stages) in set(groupings(CLUSTER))
    layers = find_layers(plan.graphs[plan.first])
    held = [sum(a <= start and stop <= b for start, stop in layers) for a, b in (s.nodes[plan.first] for s in plan.stages)]
    assert sum(held) == len(layers) and max(held) - min(held) <= 1
    assert plan.restriction.split == ("batch" if system == DP_PP else "auto")


def test_results_are_kept(found: dict[str, Found], tmp_path: Path) -> None:
    case, file = Case(small_gpt(2, width=256, batch=16), "2 V100 + 2 P100", CLUSTER), tmp_path / "results.json"
    first = [Book.open(file).result(case.name, case, name, partial(found.__getitem__, name)) for name in (SPMD,)]
    book = Book.open(file)
    results = [book.result(case.name, case, name, partial(found.__getitem__, name)) for name in (SPMD, PIPELINE, EQUAL)]
    again = [Book.open(file).result(case.name, case, r.system, partial(pytest.fail, "looked for again")) for r in results]
    assert again == results and results[:1] == first
    assert not faster(results) and hapx(results) == min(found[SPMD].time, found[PIPELINE].time)
    assert table(case.name, results).row_count == 3 and any("bubbles" in line for line in lines(results))
