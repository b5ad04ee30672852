"""The spec as data: numbering, links, round trips, replaced numbers, and every shipped cluster file."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import yaml

from hapx.cluster import ClusterSpec, Device, DeviceType, Link, Machine
from hapx.cluster.catalogue import CATALOGUE, suggest

FILES = sorted((Path(__file__).parents[2] / "cluster_specs").glob("*.yaml"))
COUNTS = {
    "a100x2_p100x2": 4, "a100x8": 8, "a6000x2_2080tix2": 4, "h100x8_a100x8": 16, "laptop-4": 4, "rtx4090_rtx3060": 2, "v100x2_p100x6": 64,
}  # fmt: skip


def two_machines() -> ClusterSpec:
    card = DeviceType("card", {"fp32": 10e12, "fp16": 40e12}, 2**34, 500e9)
    slow = DeviceType("slow", {"fp32": 1e12}, 2**33, 100e9)
    fast_link, slow_link = Link(1e10, 1e-6), Link(5e9, 2e-6)
    return ClusterSpec(
        "two", (Machine("a", ("card", "slow"), fast_link), Machine("b", ("slow",), slow_link)), {"card": card, "slow": slow}, Link(1e9, 1e-4)
    )


def test_all_shipped_files_are_covered() -> None:
    assert {f.stem for f in FILES} == set(COUNTS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_shipped_file_loads_and_round_trips(path: Path) -> None:
    spec = ClusterSpec.load(path)
    assert spec.num_devices == COUNTS[path.stem]
    assert spec.name == path.stem
    assert ClusterSpec.load(str(path)) == spec
    assert ClusterSpec.load(spec.to_dict()) == spec
    assert ClusterSpec.load(yaml.safe_load(yaml.safe_dump(spec.to_dict()))) == spec
    assert hash(ClusterSpec.load(spec.to_dict())) == hash(spec)
    assert spec.name in str(spec)


def test_paper_testbed() -> None:
    spec = ClusterSpec.load(next(f for f in FILES if f.stem == "v100x2_p100x6"))
    assert [m.name for m in spec.machines] == ["v100-0", "v100-1"] + [f"p100-{i}" for i in range(6)]
    assert spec.devices[0] == Device(0, 0, "V100-SXM2-16GB")
    assert spec.devices[16] == Device(16, 2, "P100-SXM2-16GB")
    assert spec.inter == Link(1.3e9, 50e-6)
    assert set(spec.device_types) == {"V100-SXM2-16GB", "P100-SXM2-16GB"}
    assert spec.type_of(15).speed("fp16") == 62.5e12


def test_numbering_and_links() -> None:
    spec = two_machines()
    assert spec.devices == (Device(0, 0, "card"), Device(1, 0, "slow"), Device(2, 1, "slow"))
    assert spec.machine_of(2).name == "b"
    assert spec.link((0, 1)) == Link(1e10, 1e-6)
    assert spec.link((2,)) == Link(5e9, 2e-6)
    assert spec.link((0, 2)) == spec.inter
    assert ClusterSpec.load(spec.to_dict()) == spec
    assert ClusterSpec.load(spec) is spec
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_frozen_and_compared_by_value() -> None:
    spec = two_machines()
    with pytest.raises(FrozenInstanceError):
        spec.name = "other"  # type: ignore[misc]
    assert spec == two_machines()
    assert spec != replace(spec, mesh="flat")
    faster = replace(spec.device_types["card"], flops={"fp32": 11e12})
    assert spec.with_types({"card": faster}) != spec


def test_text() -> None:
    assert str(two_machines()) == (
        "two: 3 devices in 2 machines\n"
        "  a: 1 x card + 1 x slow; inside 10 GB/s, 1 us\n"
        "  b: 1 x slow\n"
        "  between machines 1 GB/s, 100 us\n"
        "  mesh auto\n"
        "  card: fp32 10 TFLOP/s, fp16 40 TFLOP/s (x 0.5), 16 GiB at 500 GB/s\n"
        "  slow: fp32 1 TFLOP/s (x 0.5), 8 GiB at 100 GB/s"
    )


def test_speed_by_precision() -> None:
    card = two_machines().device_types["card"]
    assert card.speed("fp32") == card.speed("float32") == 5e12
    assert card.speed("float16") == 20e12
    assert card.speed("bf16") == 5e12  # not listed: computed in fp32


def test_measured_types_keep_what_was_not_measured() -> None:
    card = two_machines().device_types["card"]
    measured = card.measured({"fp32": 6e12}, kernel_latency=1e-6)
    assert (measured.speed("fp32"), measured.speed("fp16"), measured.kernel_latency) == (6e12, 20e12, 1e-6)
    assert measured.efficiency == 1.0
    assert measured.measured({"fp32": 6e12}, kernel_latency=1e-6) == measured


def test_with_types_replaces_numbers_and_survives_a_round_trip() -> None:
    data = two_machines().to_dict() | {"profile": {"devices": {"card": {"flops": "7 TFLOP/s"}, "slow": {"flops": 9e11}}, "note": [1, None]}}
    spec = ClusterSpec.load(data)
    assert spec.type_of(0).speed("fp32") == 7e12
    assert spec.type_of(0).speed("fp16") == 20e12
    assert ClusterSpec.load(spec.to_dict()) == spec
    changed = spec.with_types({"card": spec.type_of(0).measured({"fp32": 3e12})})
    assert changed.type_of(0).speed("fp32") == 3e12
    assert changed.type_of(1).speed("fp32") == 9e11
    assert changed.profile == {"devices": {"slow": {"flops": 9e11}}, "note": [1, None]}
    assert ClusterSpec.load(changed.to_dict()) == changed


def test_profile_is_a_copy() -> None:
    data = two_machines().to_dict() | {"profile": {"devices": {}, "seen": [1]}}
    spec = ClusterSpec.load(data)
    data["profile"]["seen"].append(2)
    assert spec.profile == {"devices": {}, "seen": [1]}


def test_own_type_overrides_part_of_the_catalogue() -> None:
    spec = ClusterSpec.load(
        {
            "machines": [{"name": "m", "device": "T4"}],
            "device_types": {"T4": {"memory": "15 GiB"}, "unused": {"flops": "1e12", "memory": 1, "memory_bandwidth": 1}},
            "network": {"intra": {"bandwidth": 1, "latency": 1}},
        }
    )
    assert set(spec.device_types) == {"T4"}
    assert spec.device_types["T4"] == replace(CATALOGUE["T4"], memory=15 * 2**30, source="user")
    assert spec.inter == spec.machines[0].intra
    assert spec.name == "cluster"


def test_catalogue_is_complete_and_sane() -> None:
    assert len(CATALOGUE) >= 24
    for name, t in CATALOGUE.items():
        assert t.name == name
        assert t.source != "user" and len(t.source) > 8
        assert 2**30 <= t.memory <= 2**38
        assert 5e9 <= t.memory_bandwidth <= 1e13
        assert list(t.flops)[0] == "fp32" and all(1e9 < f < 1e16 for f in t.flops.values())
        assert t.flops["fp32"] <= t.flops.get("tf32", t.flops["fp32"]) <= t.flops.get("bf16", 1e16)
        assert t.flops.get("fp64", 0.0) <= t.flops["fp32"]


@pytest.mark.parametrize(
    ("name", "expected"), [("rtx4090", "RTX-4090"), ("V100-SMX2-16GB", "V100-SXM2-16GB"), ("h200", "H200-SXM-141GB"), ("a6000", "A6000")]
)
def test_suggestions(name: str, expected: str) -> None:
    assert expected in (suggest(name, CATALOGUE) or "")


def test_no_suggestion_where_nothing_is_near() -> None:
    assert suggest("toaster", CATALOGUE) is None
