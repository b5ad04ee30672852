"""What the search did and proved, in words."""

from __future__ import annotations

import io
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import hapx
from hapx.plan import Plan
from hapx.progress import Progress
from hapx.report.progress import describe, shown
from hapx.report.search import COUNTS, proven_lines, statistics_text
from hapx.report.table import plan_table
from hapx.synth import astar
from support import small_stages
from support.models import MLP
from support.plans import mlp_batch_split

CLUSTER = {
    "name": "two-kinds",
    "machines": [{"name": "new", "device": "V100-SXM2-16GB", "devices": 2}, {"name": "old", "device": "P100-SXM2-16GB", "devices": 2}],
    "network": {"inter": {"bandwidth": "10 Gbit/s", "latency": "50 us"}, "intra": {"bandwidth": "150 GB/s", "latency": "5 us"}},
}


def with_gap(gap: float) -> Plan:
    return replace(mlp_batch_split((4, 6, 3), (2, 2)), statistics={"gap": gap})


@pytest.mark.parametrize(
    ("gap", "says"),
    [
        (0.0, "proven: on this mesh, at these ratios, no program costs less"),
        (1e-11, "proven: on this mesh, at these ratios, no program costs less"),
        (5e-4, "proven: on this mesh, at these ratios, no program costs more than 0.05 % less"),
        (0.21, "CUT: the search ended before its proof; on this mesh, at these ratios, a program may exist that costs up to 21 % less"),
    ],
)
def test_one_line_says_what_is_proven(gap: float, says: str) -> None:
    plan = with_gap(gap)
    assert proven_lines(plan) == [says]
    assert plan_table(plan).splitlines().count(says) == 1


def test_a_pipeline_is_not_proven() -> None:
    """What its single program would be (`gap`) says nothing about it."""
    plan = replace(small_stages.mlp(), statistics={"gap": 0.0, "inter_op_gap": 0.452})
    says = "not proven: by the additive cost, a pipeline may exist that takes up to 45 % less"
    assert proven_lines(plan) == [says]
    assert plan_table(plan).splitlines().count(says) == 1
    assert proven_lines(replace(plan, statistics={"gap": 0.0})) == []


def test_plans_by_hand_have_nothing_to_tell() -> None:
    plan = mlp_batch_split((4, 6, 3), (2, 2))
    assert proven_lines(plan) == []
    assert statistics_text(plan) == "search: the plan has no statistics"


def test_counts_and_views() -> None:
    model = MLP((16, 32, 8))
    plan = hapx.plan(model, CLUSTER, example_inputs=model.example(24))
    text = statistics_text(plan)
    lines = text.splitlines()
    for name, said in COUNTS.items():
        if name not in plan.statistics:
            assert name in ("layers", "asks")  # of pipelines
            continue
        (line,) = [x for x in lines if x.startswith(said)]
        assert line.removeprefix(said).replace(" ", "") == str(plan.statistics[name])
    assert plan.statistics["expansions"] > 0 and plan.statistics["bounded"] > 0
    assert [v["view"] for v in plan.statistics["tried"]] == list(plan.statistics["views"]) == ["flat", "2x2"]
    rows = [re.split(r"  +", x) for x in lines if x.startswith(("flat", "2x2"))]
    assert sorted(row[-1] == "chosen" for row in rows) == [False, True]
    for view, row in zip(plan.statistics["tried"], rows, strict=True):
        if row[-1] != "chosen":
            assert row[-1].endswith(f"{view['time'] / plan.iteration_time:.2f}x the time") or row[-1].startswith("dropped: its first program costs")
    assert max(map(len, lines)) <= 120
    dropped = [{**v, "programs": 0, "cost": None, "time": None, "hopeless": 1.5} for v in plan.statistics["tried"][1:]]
    text = statistics_text(replace(plan, statistics={**plan.statistics, "tried": (plan.statistics["tried"][0], *dropped)}))
    (row,) = [re.split(r"  +", x) for x in text.splitlines() if x.startswith("2x2")]
    assert row[1:4] == ["0", "-", "-"] and row[-1].startswith("dropped: its programs cost 1.50x the best before, at least")


def test_statistics_survive_saving(tmp_path: Path) -> None:
    model = MLP((16, 32, 8))
    plan = hapx.plan(model, CLUSTER, example_inputs=model.example(24))
    plan.save(tmp_path / "plan.json")
    assert statistics_text(Plan.load(tmp_path / "plan.json")) == statistics_text(plan)


# ---- progress ------------------------------------------------------------------------------------------------------------


def test_whoever_watches_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(astar, "EVERY", 1)
    seen: list[Progress] = []
    model = MLP((256, 1024, 1024, 128))
    watched = hapx.plan(model, CLUSTER, example_inputs=model.example(4096), micro_batches=1, progress=seen.append)
    assert watched == hapx.plan(model, CLUSTER, example_inputs=model.example(4096), micro_batches=1)  # and nothing else changes
    assert [p.view for p in seen if p.doing == "deriving rules"] == ["flat", "2x2"]
    assert {(p.number, p.of) for p in seen} == {(1, 2), (2, 2)}
    assert seen[0].best is None and seen[-1].best is not None
    counts = [p.expansions for p in seen]
    assert counts == sorted(counts) and counts[-1] <= watched.statistics["expansions"]
    inside = [p for p in seen if p.bound is not None]
    assert inside
    assert all(p.known is None or p.bound <= p.known * (1 + 1e-9) for p in inside if p.bound is not None)


NOW = Progress("searching", "2x4", 2, 3, 0.0931, 1200, 0.091, 0.095)


def test_words_for_what_is_done() -> None:
    assert describe(NOW) == "mesh 2x4 (2 of 3): searching, best 93.1 ms, 1200 expansions, bound 91 ms of 95 ms"
    assert describe(replace(NOW, doing="deriving rules", best=None, bound=None)) == "mesh 2x4 (2 of 3): deriving rules, 1200 expansions"
    stages = Progress("planning stages", "pipelines", 1, 1, None, 0, detail="submeshes asked: 12, best pipeline 93.1 ms")
    assert describe(stages) == "pipelines: submeshes asked: 12, best pipeline 93.1 ms"


def test_nothing_is_shown_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with shown(Console(file=out)) as watcher:
        assert watcher is None
    assert out.getvalue() == ""


def test_a_line_on_a_terminal_after_a_while() -> None:
    out = io.StringIO()
    with shown(Console(file=out, force_terminal=True, width=120), delay=0.0) as watcher:
        assert watcher is not None
        before = threading.active_count()
        watcher(NOW)
        assert threading.active_count() == before  # nothing that keeps the planner from making copies of the process
    assert "mesh 2x4 (2 of 3): searching, best 93.1 ms" in out.getvalue()
    early = io.StringIO()
    with shown(Console(file=early, force_terminal=True, width=120), delay=60.0) as watcher:
        assert watcher is not None
        watcher(NOW)
    assert early.getvalue() == ""
