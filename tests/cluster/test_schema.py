"""Bad cluster files: each is exactly one ClusterSpecError that names file, key path, value and what is allowed."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hapx.cluster import ClusterSpec, Link
from hapx.errors import ClusterSpecError

GOOD: dict[str, Any] = {
    "name": "good",
    "machines": [{"name": "a", "device": "T4", "devices": 2, "count": 2}, {"name": "b", "devices": ["card", "T4"]}],
    "device_types": {"card": {"flops": {"fp32": "35 TFLOP/s", "bf16": 7e13}, "memory": "24 GiB", "memory_bandwidth": "900 GB/s"}},
    "network": {"inter": {"bandwidth": "10.4 Gbit/s", "latency": "50 us"}, "intra": {"bandwidth": "150 GB/s", "latency": "5 us"}},
    "mesh": "auto",
    "profile": {"devices": {"card": {"flops": 1.5e13}}},
}
REMOVED = object()

# path to change, new value, what the message must say
FAULTS: list[tuple[tuple[Any, ...], Any, list[str]]] = [
    # unknown key
    (("meshes",), "flat", ["unknown key 'meshes'", "machines", "did you mean mesh?"]),
    (("machines", 0, "cuont"), 2, ["machines[0]", "unknown key 'cuont'", "count"]),
    (("network", "extra"), {}, ["network", "'extra'", "inter, intra"]),
    (("network", "inter", "speed"), 1, ["network.inter", "'speed'", "bandwidth, latency, scalar_latency"]),
    (("device_types", "card", "mem"), 1, ["device_types.card", "'mem'", "memory"]),
    (("device_types", "card", "flops", "fp8"), 1, ["device_types.card.flops", "'fp8'", "fp16"]),
    (("profile", "devices", "card", "speed"), 1, ["profile.devices.card", "'speed'", "flops"]),
    # unknown device
    (("machines", 0, "device"), "V100", ["machines[0].device", "unknown device 'V100'", "V100-SXM2-16GB"]),
    (("machines", 1, "devices"), ["card", "card", "cart"], ["machines[1].devices[2]", "unknown device 'cart'", "did you mean card?"]),
    (("profile", "devices", "T5"), {"flops": 1}, ["profile.devices.T5", "unknown device 'T5'"]),
    # wrong unit
    (("network", "inter", "bandwidth"), "10.4 Gb", ["network.inter.bandwidth", "unknown unit 'Gb'", "'10.4 Gb'", "Gbit/s"]),
    (("network", "inter", "bandwidth"), "10 GB", ["network.inter.bandwidth", "a unit of size", "GB/s"]),
    (("network", "inter", "latency"), "5 GiB", ["network.inter.latency", "wrong unit 'GiB'", "us"]),
    (("device_types", "card", "memory"), "24 GiB/s", ["device_types.card.memory", "a unit of bandwidth", "GiB"]),
    (("device_types", "card", "flops"), "35 TFLOPs/s", ["device_types.card.flops", "'TFLOPs/s'", "TFLOP/s"]),
    (("device_types", "card", "efficiency"), "50 %", ["device_types.card.efficiency", "no unit expected", "'50 %'"]),
    # negative, zero, too large, not finite
    (("network", "inter", "bandwidth"), 0, ["network.inter.bandwidth", "0 is not positive", "greater than 0"]),
    (("network", "inter", "latency"), "-5 us", ["network.inter.latency", "'-5 us' is not positive"]),
    (("machines", 0, "devices"), 0, ["machines[0].devices", "0 is not positive", "1 or more"]),
    (("machines", 0, "count"), -1, ["machines[0].count", "-1 is not positive"]),
    (("machines", 0, "count"), 10**6, ["machines[0].count", "too many", "at most"]),
    (("machines", 0, "count"), 40000, ["machines[0]", "too many devices", "at most"]),
    (("device_types", "card", "memory"), -1, ["device_types.card.memory", "-1 is not positive"]),
    (("device_types", "card", "memory"), 0.2, ["device_types.card.memory", "less than one"]),
    (("device_types", "card", "flops"), "-35e12", ["device_types.card.flops", "'-35e12' is not positive"]),
    (("device_types", "card", "efficiency"), 1.5, ["device_types.card.efficiency", "1.5 is too large", "at most 1"]),
    (("device_types", "card", "memory"), float("inf"), ["device_types.card.memory", "not a finite number"]),
    (("network", "intra", "latency"), float("nan"), ["network.intra.latency", "not a finite number"]),
    # missing field
    (("machines",), REMOVED, ["missing field 'machines'"]),
    (("machines", 0, "name"), REMOVED, ["machines[0]", "missing field 'name'"]),
    (("machines", 0, "device"), REMOVED, ["machines[0]", "missing field 'device'", "device: TYPE"]),
    (("machines", 1, "devices"), REMOVED, ["machines[1]", "missing field 'devices'"]),
    (("network",), REMOVED, ["network", "missing field 'intra'"]),
    (("network", "inter"), REMOVED, ["network", "missing field 'inter'"]),
    (("network", "inter", "latency"), REMOVED, ["network.inter", "missing field 'latency'"]),
    (("device_types", "card", "memory"), REMOVED, ["device_types.card", "missing field 'memory'"]),
    (("device_types", "card", "flops", "fp32"), REMOVED, ["device_types.card.flops", "missing field 'fp32'"]),
    # wrong type
    (("name",), 3, ["name", "a whole number (3)", "text", "quotes"]),
    (("machines",), {"a": 1}, ["machines", "a mapping", "a list of machines"]),
    (("machines", 0), "a", ["machines[0]", "text ('a')", "a mapping"]),
    (("machines", 0, "name"), True, ["machines[0].name", "true/false (True)", "text"]),
    (("machines", 0, "name"), " ", ["machines[0].name", "empty text"]),
    (("machines", 0, "devices"), "8", ["machines[0].devices", "text ('8')", "a whole number"]),
    (("machines", 0, "devices"), True, ["machines[0].devices", "true/false", "a whole number"]),
    (("machines", 0, "count"), 2.0, ["machines[0].count", "a number (2.0)", "whole"]),
    (("machines", 1, "devices"), ["card", 7], ["machines[1].devices[1]", "a whole number (7)", "device type"]),
    (("machines", 1, "device"), "T4", ["machines[1]", "both 'device' and a list"]),
    (("machines", 0, "intra"), "fast", ["machines[0].intra", "text ('fast')", "bandwidth"]),
    (("device_types",), ["card"], ["device_types", "a list", "a mapping"]),
    (("device_types", 7), {}, ["device_types", "wrong type of key", "(7)"]),
    (("device_types", "card", "memory"), None, ["device_types.card", "memory"]),
    (("device_types", "card", "memory"), [24], ["device_types.card.memory", "a list", "GiB"]),
    (("device_types", "card", "flops"), True, ["device_types.card.flops", "true/false", "FLOP/s"]),
    (("mesh",), 8, ["mesh", "a whole number, 8", "two-level"]),
    (("mesh",), "ring", ["mesh", "unknown mesh 'ring'", "2x4"]),
    (("mesh",), "2x4", ["mesh", "'2x4' does not have 6 devices"]),
    (("profile",), [], ["profile", "a list", "a mapping"]),
    (("profile", "when"), {1, 2}, ["profile", "set", "lists and mappings"]),
    (("profile", "links"), {1: 2}, ["profile", "wrong type of key"]),
    # duplicate machine name, empty list
    (("machines", 1, "name"), "a-1", ["machines[1].name", "duplicate machine name 'a-1'", "machines[0]"]),
    (("machines",), [], ["machines", "empty list", "at least one machine"]),
    (("machines", 1, "devices"), [], ["machines[1].devices", "empty list", "at least one"]),
]


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    data = deepcopy(GOOD)
    at: Any = data
    for key in path[:-1]:
        at = at[key]
    if value is REMOVED:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


def test_good_one_is_good() -> None:
    spec = ClusterSpec.load(GOOD)
    assert [m.name for m in spec.machines] == ["a-0", "a-1", "b"]
    assert spec.inter == Link(1.3e9, 50e-6)
    assert spec.device_types["card"].flops == {"bf16": 3.5e13, "fp32": 1.5e13}
    assert spec.device_types["card"].efficiency == 1.0
    assert ClusterSpec.load(spec.to_dict()) == spec


def test_a_machine_of_one_device_needs_no_link_inside() -> None:
    small: dict[str, Any] = {"name": "small", "machines": [{"name": "a", "device": "T4", "count": 2}], "network": {"inter": GOOD["network"]["inter"]}}
    found = ClusterSpec.load(small)
    assert found.link((0, 1)) == found.inter
    assert ClusterSpec.load(found.to_dict()) == found
    with pytest.raises(ClusterSpecError, match="missing field 'intra', the link inside machine 'b'"):
        ClusterSpec.load({**small, "machines": [*small["machines"], {"name": "b", "device": "T4", "devices": 2}]})


@pytest.mark.parametrize(("path", "value", "told"), FAULTS, ids=lambda v: ".".join(map(str, v)) if isinstance(v, tuple) else None)
def test_fault_in_a_dict(path: tuple[Any, ...], value: Any, told: list[str]) -> None:
    with pytest.raises(ClusterSpecError) as error:
        ClusterSpec.load(changed(path, value))
    message = str(error.value)
    assert message.startswith("cluster spec: ")
    assert "\n" not in message
    for text in told:
        assert text in message
    assert error.value.allowed
    assert error.value.__cause__ is None


def test_fault_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(changed(("machines", 0, "devices"), -3)))
    with pytest.raises(ClusterSpecError) as error:
        ClusterSpec.load(path)
    assert str(error.value) == f"{path}: machines[0].devices: -3 is not positive; allowed: a whole number, 1 or more"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("machines: [", [":1:12", "invalid YAML"]),
        ("name: a\nname: b\n", [":2:1", "duplicate key 'name'"]),
        ("network:\n  inter: {latency: 1, latency: 2}\n", [":2:23", "duplicate key 'latency'"]),
        ("a: 1\n---\nb: 2\n", ["invalid YAML"]),
        ("a: !!python/object/apply:os.getcwd []\n", ["invalid YAML", "python/object"]),
        ("a: *b\n", ["invalid YAML", "undefined alias"]),
        ("? [a]\n: 1\n", ["unhashable"]),
        ("day: 2020-13-45\n", ["invalid YAML"]),
        ("profile: &p {again: *p}\nmachines: [{name: a, device: T4}]\n", ["contains itself"]),
        ("", ["wrong type: nothing", "a mapping with name, machines"]),
        ("- a\n", ["wrong type: a list", "a mapping"]),
        ("just text", ["wrong type: text"]),
    ],
)
def test_text_that_is_no_cluster(tmp_path: Path, text: str, told: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ClusterSpecError) as error:
        ClusterSpec.load(path)
    for part in [str(path), *told]:
        assert part in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClusterSpecError, match=r"missing\.yaml: cannot be read: No such file"):
        ClusterSpec.load(tmp_path / "missing.yaml")
    with pytest.raises(ClusterSpecError, match="cannot be read"):
        ClusterSpec.load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(ClusterSpecError, match="invalid YAML"):
        ClusterSpec.load(tmp_path / "binary.yaml")
    with pytest.raises(ClusterSpecError, match="wrong type: int"):
        ClusterSpec.load(3)  # type: ignore[arg-type]


def test_yaml_numbers_in_any_spelling(tmp_path: Path) -> None:
    path = tmp_path / "spelled.yaml"
    path.write_text(
        "machines: [{name: m, device: card, devices: 2}]\n"
        "device_types: {card: {flops: 35e12, memory: 24_000_000_000, memory_bandwidth: 9e+11}}\n"
        "network: {intra: {bandwidth: .5e9, latency: 1e-5}}\nmesh: 1x2\n"
    )
    spec = ClusterSpec.load(path)
    card = spec.device_types["card"]
    assert (card.flops["fp32"], card.memory, card.memory_bandwidth) == (35e12, 24_000_000_000, 9e11)
    assert spec.machines[0].intra == Link(5e8, 1e-5)
    assert (spec.name, spec.mesh) == ("spelled", "1x2")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["T4", "5 us", "1 GB/s"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.sampled_from([*GOOD, "device", "intra"]), inner, max_size=3),
    max_leaves=8,
)


def test_measured_numbers_of_types_that_no_machine_has_are_left_out() -> None:
    spec = ClusterSpec.load(changed(("machines", 1, "devices"), ["T4"]))
    assert spec.profile is not None and set(spec.profile["devices"]) <= set(spec.device_types)
    assert ClusterSpec.load(spec.to_dict()) == spec


@given(path=st.sampled_from([path for path, _, _ in FAULTS]), value=JUNK)
def test_anything_loads_or_is_one_error(path: tuple[Any, ...], value: Any) -> None:
    try:
        spec = ClusterSpec.load(changed(path, value))
    except ClusterSpecError as error:
        assert error.where is not None and error.where.startswith("cluster spec")
    else:
        assert ClusterSpec.load(spec.to_dict()) == spec
