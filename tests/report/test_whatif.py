"""What another cluster would change: changed clusters, and their plans in one table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hapx
from hapx.cli import app
from hapx.cluster.spec import ClusterSpec
from hapx.errors import ClusterSpecError, InsufficientMemoryError
from hapx.plan import Plan
from hapx.report.whatif import changed, describe, fewer, idle_lines, replanned, slowest_line, slowest_type, taken_as, verdict, whatif_table
from hapx.report.words import time_text
from hapx.restriction import AUTO
from support.clusters import slow_devices
from support.models import GPT, MLP

CLUSTER = {
    "name": "two-kinds",
    "machines": [{"name": "new", "device": "V100-SXM2-16GB", "devices": 2}, {"name": "old", "count": 2, "device": "P100-SXM2-16GB", "devices": 2}],
    "network": {"inter": {"bandwidth": "10 Gbit/s", "latency": "50 us"}, "intra": {"bandwidth": "150 GB/s", "latency": "5 us"}},
}


def names(cluster: ClusterSpec) -> list[tuple[str, tuple[str, ...]]]:
    return [(m.name, m.devices) for m in cluster.machines]


def test_drop_by_machine_by_name_and_by_type() -> None:
    cluster = ClusterSpec.load(CLUSTER)
    assert [n for n, _ in names(changed(cluster, ["old-0"]))] == ["new", "old-1"]
    assert [n for n, _ in names(changed(cluster, ["old"]))] == ["new"]
    by_type = changed(cluster, ["p100"])
    assert [n for n, _ in names(by_type)] == ["new"] and set(by_type.device_types) == {"V100-SXM2-16GB"}


def test_add_a_machine_and_change_the_network() -> None:
    cluster = changed(ClusterSpec.load(CLUSTER), add=["3xRTX-4090"], bandwidth="25 Gbit/s")
    assert names(cluster)[-1] == ("added-0", ("RTX-4090",) * 3)
    assert cluster.inter.bandwidth == 25e9 / 8
    assert cluster.num_devices == 9
    assert cluster.machines[-1].intra == cluster.machines[0].intra


@pytest.mark.parametrize(
    ("drop", "add", "says"),
    [
        (["k80"], [], "no machine or device type 'k80'"),
        ([], ["2xK9"], "no known device type"),
        ([], ["x"], "device type"),
        ([], ["0xA100"], "a number and a device type"),
        (["new", "old"], [], "no device is left"),
    ],
)
def test_changes_that_mean_nothing(drop: list[str], add: list[str], says: str) -> None:
    with pytest.raises(ClusterSpecError, match=says):
        changed(ClusterSpec.load(CLUSTER), drop, add)


def test_table_and_command(tmp_path: Path) -> None:
    model = MLP((16, 32, 8))
    plan = hapx.plan(model, CLUSTER, example_inputs=model.example(24))
    assert slowest_type(plan) == "P100-SXM2-16GB"
    said = describe(["old"], [], "40 Gbit/s")
    assert said == "without old, links of 40 Gbit/s"
    table = whatif_table(plan, {said: changed(plan.cluster, ["old"], [], "40 Gbit/s")})
    assert "as it is" in table and said in table and "1.00x" in table
    plan.save(tmp_path / "plan.json")
    run = CliRunner().invoke(app, ["whatif", str(tmp_path / "plan.json"), "--bandwidth", "40 Gbit/s"])
    assert run.exit_code == 0, run.output
    assert "links of 40 Gbit/s" in run.output and "without P100-SXM2-16GB (the slowest)" in run.output
    wrong = CliRunner().invoke(app, ["whatif", str(tmp_path / "plan.json"), "--drop", "k80"])
    assert wrong.exit_code == 2 and "k80" in wrong.output


def test_a_type_that_could_be_several() -> None:
    cluster = ClusterSpec.load(CLUSTER)
    assert names(changed(cluster, add=["2xA100"]))[-1] == ("added-0", ("A100-PCIE-40GB",) * 2)
    assert taken_as(cluster, ["2xA100", "RTX-4090"]) == [
        "2xA100 is taken as 2xA100-PCIE-40GB; there are also A100-PCIE-80GB, A100-SXM4-40GB, A100-SXM4-80GB"
    ]


def test_all_machines_may_be_exchanged() -> None:
    """The links inside of a new machine are those of the cluster as it was."""
    cluster = ClusterSpec.load(
        CLUSTER
        | {"machines": [{"name": "old", "count": 2, "device": "P100-SXM2-16GB", "devices": 2, "intra": {"bandwidth": "1 GB/s", "latency": "1 us"}}]}
    )
    (machine,) = changed(cluster, ["old"], ["2xRTX-4090"]).machines
    assert machine.intra == cluster.machines[0].intra


def test_a_machine_alone_has_no_network() -> None:
    one = changed(ClusterSpec.load(CLUSTER), ["old"])
    with pytest.raises(ClusterSpecError, match="no links between machines"):
        changed(one, bandwidth="25 Gbit/s")
    assert changed(one, add=["P100-SXM2-16GB"], bandwidth="25Gbit/s").inter.bandwidth == 25e9 / 8


def test_without_each_type_and_machine_in_turn() -> None:
    found = fewer(ClusterPlan(CLUSTER).plan)
    assert {name: c.num_devices for name, c in found.items()} == {"without P100-SXM2-16GB (the slowest)": 2, "without V100-SXM2-16GB": 4}
    three = CLUSTER | {"machines": [*CLUSTER["machines"], {"name": "spare", "device": "P100-SXM2-16GB", "devices": 1}]}  # type: ignore[misc]
    found = fewer(ClusterPlan(three).plan)
    assert {name: c.num_devices for name, c in found.items()} == {
        "without P100-SXM2-16GB (the slowest)": 2, "without V100-SXM2-16GB": 5, "without old": 3, "without spare": 6,
    }  # fmt: skip
    alike = CLUSTER | {"machines": [{"name": "new", "device": "V100-SXM2-16GB", "devices": 2}]}
    assert fewer(ClusterPlan(alike).plan) == {}


class ClusterPlan:
    """A plan of a small model on a cluster."""

    def __init__(self, cluster: dict[str, object]):
        model = MLP((16, 32, 8))
        self.plan = hapx.plan(model, cluster, example_inputs=model.example(24))


def test_is_it_faster_without_the_slowest() -> None:
    """A tiny model on a slow network: fewer devices are no slower. The answer is that of the plan without them."""
    plan = ClusterPlan(CLUSTER).plan
    fewer_devices = changed(plan.cluster, ["P100-SXM2-16GB"])
    assert plan.stages[0].mesh.name == "3x2"  # two devices have no such mesh, only the flat one
    flat = replanned(plan, fewer_devices, rule=replace(AUTO, mesh="flat"))
    again = replanned(plan, fewer_devices)
    assert isinstance(again, Plan) and isinstance(flat, Plan)
    said = f"{time_text(flat.iteration_time)}: {verdict(plan, flat)}"
    assert slowest_line(plan) == f"without the slowest type of device, P100-SXM2-16GB, on a mesh like this: {said}"
    slow, fast = replace(again, iteration_time=plan.iteration_time * 2), replace(again, iteration_time=plan.iteration_time * 0.75)
    assert verdict(plan, slow) == "slower, 2.00x the time"
    assert verdict(plan, fast) == "faster, 25.0% less time with 4 devices fewer"
    assert verdict(plan, replace(again, iteration_time=plan.iteration_time)) == "just as fast with 4 devices fewer"
    table = whatif_table(plan, {"less": changed(plan.cluster, ["P100-SXM2-16GB"])})
    assert f"less: {verdict(plan, again)}" in table
    row = next(line for line in table.splitlines() if line.startswith("less "))
    assert time_text(again.iteration_time) in row and f"{again.iteration_time / plan.iteration_time:.2f}x" in row


def test_devices_without_work_are_named() -> None:
    plan = ClusterPlan(CLUSTER).plan
    idle = replace(plan, shares=(0.5, 0.5, 0.0, 0.0, 0.0, 0.0))
    assert idle_lines(idle) == ["the plan gives devices 2-5 (P100-SXM2-16GB) no share of the work already"]
    assert idle_lines(replace(plan, shares=(1 / 6,) * 6)) == []


def test_a_plan_that_another_cluster_cannot_have() -> None:
    """A mesh by name that the smaller cluster lacks: the row says so."""
    model = MLP((16, 32, 8))
    plan = hapx.plan(model, CLUSTER, example_inputs=model.example(24), strategy=replace(AUTO, mesh="3x2"))
    table = whatif_table(plan, {"less": changed(plan.cluster, ["old-1", "old-0"])})
    assert "less: mesh: the cluster 'two-kinds' has no mesh view '3x2'" in table


def test_a_pipeline_is_planned_again_with_its_micro_batches() -> None:
    """Over a slow link; with a quick one there is one stage, on one device a stage that accumulates, with too little memory nothing."""
    model = GPT(vocab=13, width=32, heads=4, layers=1, context=16)
    cluster = slow_devices(["fast"], ["slow"], inter="2 Mbit/s", speed=1e8)
    plan = hapx.plan(model, cluster, model.example(16), micro_batches=4)
    assert len(plan.stages) == 2
    same = replanned(plan, changed(cluster, bandwidth="2 Mbit/s"))
    assert isinstance(same, Plan) and same.iteration_time == pytest.approx(plan.iteration_time)
    quick = replanned(plan, changed(cluster, bandwidth="100 Gbit/s"))
    assert isinstance(quick, Plan) and len(quick.schedules[quick.first].micro_batches) == 4
    assert quick.iteration_time < plan.iteration_time
    alone = replanned(plan, changed(cluster, ["slow"]))
    assert isinstance(alone, Plan) and alone.cluster.num_devices == 1 and len(alone.schedules[alone.first].micro_batches) == 4
    for again in (quick, alone):
        again.verify()
    full = replace(cluster, device_types={n: replace(t, memory=1000) for n, t in cluster.device_types.items()})
    none = replanned(plan, full)
    assert isinstance(none, InsufficientMemoryError) and "no plan of 4 micro-batches fits into memory" in str(none)
    lines = whatif_table(plan, {"less": changed(cluster, ["slow"])}).splitlines()
    assert "planned again with 4 micro-batches each" in "".join(lines)
    assert f"less: {verdict(plan, alone)}" in lines
    assert [line.split()[3:5] for line in lines if line.startswith("as it is")] == [["2", "2"]]
