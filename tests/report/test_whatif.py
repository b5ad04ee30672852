"""What another cluster would change: changed clusters, and their plans in one table."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import hapx
from hapx.cli import app
from hapx.cluster.spec import ClusterSpec
from hapx.errors import ClusterSpecError
from hapx.report.whatif import changed, describe, slowest_type, whatif_table
from support.models import MLP

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
