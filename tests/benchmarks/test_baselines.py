"""Programs written from tables of cuts are legal, train as one device, and are never faster than what hapx plans."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from benchmarks.baselines import DP_EVEN, PER_GRADIENT, Bench, Shares, Timed, Way, systems
from benchmarks.cuts import BATCH, EXPERTS, INSIDE, MEGATRON, ZERO_FREE, ZERO_KEEP, CutTable, Part
from benchmarks.gradients import server_seconds
from benchmarks.handwritten import write
from benchmarks.paper import DP_EVEN as NAMED
from benchmarks.paper import HAPX, HOMOGENEOUS, PAPER, Case, Result, headline, main, slower, verdict
from benchmarks.paper_page import write_page
from hapx.cluster.spec import ClusterSpec
from hapx.errors import PlanError
from hapx.graph.capture import capture
from hapx.ir import Graph
from hapx.planner import key_of, plan_graphs
from hapx.theory.derive import derive
from support.clusters import THREE, slow_devices
from support.equivalence import assert_equivalent
from support.plans import flat
from support.zoo import TINY

SQUARE = slow_devices(["fast", "fast"], ["slow", "slow"], inter="100 Mbit/s")
BATCH_SIZE = 10
EVERY_PARAMETER = 0
WAYS: dict[str, tuple[str, tuple[CutTable, ...], Shares]] = {
    "data parallel": ("vit", (BATCH,), "speed"),
    "ZeRO, kept": ("bert", (replace(ZERO_KEEP, threshold=EVERY_PARAMETER),), "even"),
    "ZeRO, freed": ("vit", (replace(ZERO_FREE, threshold=EVERY_PARAMETER),), "even"),
    "all-reduce in two levels": ("bert", (BATCH, INSIDE), "speed"),
    "Megatron": ("bert", (MEGATRON,), "speed"),
    "Megatron, vision": ("vit", (MEGATRON,), "even"),
    "Megatron inside of machines": ("bert", (BATCH, MEGATRON), "speed"),
    "Megatron, experts": ("bert_moe", (MEGATRON,), "even"),
    "experts": ("bert_moe", (EXPERTS,), "even"),
    "experts, uneven": ("bert_moe", (EXPERTS,), "speed"),
    "sufficient factors": ("bert", (BATCH.with_factors(frozenset({"layers.0.up.weight", "layers.1.attention.proj.weight"})),), "speed"),
}


@cache
def graph_of(name: str) -> Graph:
    return capture(TINY[name].model(), TINY[name].inputs(BATCH_SIZE, 0))


def timed(name: str, tables: tuple[CutTable, ...], shares: Shares, cluster: ClusterSpec = SQUARE) -> Timed:
    (found,) = Bench(graph_of(name), cluster).timed(Way(tables, (shares,)))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_what_people_write_trains_as_one_device(way: str) -> None:
    name, tables, shares = WAYS[way]
    found = timed(name, tables, shares)
    plan = found.plan(SQUARE)
    plan.verify()
    assert found.fits
    assert plan.iteration_time == pytest.approx(found.time)
    uses = assert_equivalent(TINY[name].model, partial(TINY[name].inputs, BATCH_SIZE), plan, steps=2, optimizer="adamw")
    assert uses.sharded_flops > 0.9
    assert uses.sfb == (2 if way == "sufficient factors" else 0)
    assert uses.stored_sharded > 8 or not any(t.parameters or t.storage != "used" for t in tables) or tables == (EXPERTS,)
    assert (uses.freed > 8) == ("freed" in way)


def test_experts_are_apart_and_tokens_travel() -> None:
    found = timed("bert_moe", (EXPERTS,), "even")
    conversions = [str(i) for i in found.candidate.program.instructions if i.triple.node is None]
    assert sum("->S" in c and "{" + "einsum" in c for c in conversions) == 2  # to the experts and back, in the one mixture
    assert sum(p.states[0] == found.candidate.storage_of["layers.1.experts.up"].states[0] for p in found.candidate.storage_of.values()) == 2


def test_a_parameter_server_moves_what_its_formula_says() -> None:
    """Two machines of two devices, 100 Mbit/s = 12.5 MB/s: a card pushes half of what its two devices have, and pulls as much."""
    assert server_seconds(12.5e6, SQUARE) == pytest.approx(2 * (2 * 0.5 * 1.0 + 1e-6))
    one = slow_devices(["fast"] * 4)
    assert server_seconds(10e9, one) == pytest.approx(2 * (0.75 + 1e-6))


def test_each_gradient_goes_the_cheapest_way() -> None:
    ways = systems(graph_of("bert"))
    best, even = (Bench(graph_of("bert"), SQUARE).best(ways[name]) for name in (PER_GRADIENT, DP_EVEN))
    assert best is not None
    assert even is not None
    assert best.time < even.time
    best.plan(SQUARE).verify()


def test_a_table_that_no_program_follows_is_refused() -> None:
    table = CutTable("whole", ((r".*\.norm1\.weight", Part(0)),))  # a norm looks at the whole width
    theory = derive(graph_of("bert"), flat(2))
    with pytest.raises(PlanError, match="no triple agrees"):
        write(theory, (table,), key_of(theory.graph))


@pytest.mark.parametrize("name", ["bert", "bert_moe"])
def test_hapx_is_not_slower(name: str) -> None:
    graph = graph_of(name)
    planned = plan_graphs([graph], THREE).iteration_time
    bench = Bench(graph, THREE)
    found = {system: best for system, ways in systems(graph).items() if (best := bench.best(ways)) is not None}
    assert len(found) == (6 if name == "bert_moe" else 5)  # one axis has no two levels
    assert {s: t.time for s, t in found.items() if t.fits and t.time * 1.001 < planned} == {}


# ---- the page ----------------------------------------------------------------------------------------------------------------


def result(system: str, time: float, fits: bool = True, cluster: str = PAPER) -> Result:
    kind = "hapx" if system == HAPX else "baseline"
    return Result(Case(cluster, "VGG19", 8), system, kind, time, 2**30, fits, "flat", 0.0)


def test_the_verdict_is_what_the_numbers_say() -> None:
    fine = [result(HAPX, 1.0), result(NAMED, 2.5), result("ZeRO, even", 0.9995)]
    assert verdict(fine)[1]
    assert slower([*fine, result("experts by hand", 0.99)]) == ["VGG19 on 8 (paper): hapx 1000.0 ms, experts by hand 990.0 ms (1.01% slower)"]
    assert slower([*fine, result("experts by hand", 0.5, fits=False)]) == []
    assert not verdict([result(HAPX, 1.0), result(NAMED, 2.4)])[1]
    assert headline([result(HAPX, 1.0), result(NAMED, 3.0, fits=False)], fitting=True) is None
    assert headline([result(HAPX, 1.0, cluster=HOMOGENEOUS), result(NAMED, 3.0, cluster=HOMOGENEOUS)], fitting=False) is None


def test_unknown_cases_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--models", "VGG20"])
    assert stopped.value.code == 2
    assert "no case VGG20" in capsys.readouterr().err


def test_the_page_has_every_number_and_its_plots(tmp_path: Path) -> None:
    results = [result(HAPX, 1.0), result(NAMED, 2.5), result("ZeRO, even", 0.5, fits=False)]
    results += [replace(result("without SFB", 1.25), kind="ablation"), result(HAPX, 0.5, cluster=HOMOGENEOUS)]
    write_page(tmp_path / "page.md", results, verdict(results)[0], "python -m benchmarks.paper")
    page = (tmp_path / "page.md").read_text()
    assert "| VGG19 on 8 (paper) | 1000 | 2500 (2.50) | [500 (0.50), 1 GiB] | 1250 (1.25) |" in page
    assert "2.50x" in page
    for plot in ("page-throughput.svg", "page-ablation.svg"):
        assert f"({plot})" in page
        assert (tmp_path / plot).read_text().startswith("<?xml")
