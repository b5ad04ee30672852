"""Calibration: the arithmetic on given numbers, and a real measurement on two ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from hapx.cluster import ClusterSpec
from hapx.cluster.spec import Link
from hapx.errors import LaunchError
from hapx.profile.calibrate import (
    LARGE_MESSAGE,
    REPEATS,
    SMALL_MESSAGE,
    Links,
    Measured,
    _Timer,
    alike,
    calibrate,
    measure_device,
    solve_link,
    with_devices,
    with_links,
)
from support.pool import pool

SPECS = Path(__file__).parents[2] / "cluster_specs"


def measured(*tflops: float) -> list[Measured]:
    return [Measured(t * 1e12, 1e11 * (i + 1), 1e-5) for i, t in enumerate(tflops)]


def test_similar_devices_are_one_group() -> None:
    assert alike({0: 1.0, 1: 4.0, 2: 3.6, 3: 0.95}) == [[1, 2], [0, 3]]
    assert alike({0: 1.0, 1: 0.9, 2: 0.8, 3: 0.7}) == [[0, 1], [2, 3]]  # by distance to the fastest of the group, not in a chain
    assert alike({}) == []


def test_equal_devices_keep_their_type_with_measured_numbers() -> None:
    cluster = ClusterSpec.load(SPECS / "laptop-4.yaml")
    result = with_devices(cluster, measured(4.0, 4.1, 3.9, 4.0))
    assert [d.type for d in result.devices] == ["my-core"] * 4
    kind = result.device_types["my-core"]
    assert kind.speed("float32") == 4.0e12
    assert kind.memory_bandwidth == 2.5e11
    assert (kind.efficiency, kind.source, kind.memory) == (1.0, "measured", cluster.device_types["my-core"].memory)


def test_unequal_devices_of_one_type_become_types_of_their_own() -> None:
    result = with_devices(ClusterSpec.load(SPECS / "laptop-4.yaml"), measured(4.0, 4.1, 1.0, 1.0))
    assert [d.type for d in result.devices] == ["my-core-1", "my-core-1", "my-core-2", "my-core-2"]
    assert [result.type_of(i).speed("float32") for i in range(4)] == pytest.approx([4.05e12, 4.05e12, 1e12, 1e12])
    assert ClusterSpec.load(result.to_dict()) == result


def test_processes_that_share_cores_are_one_type() -> None:
    cluster = with_devices(ClusterSpec.load(SPECS / "laptop-4.yaml"), measured(4.0, 2.0, 1.0, 1.0), near=1.0)
    assert [d.type for d in cluster.devices] == ["my-core"] * 4
    assert cluster.type_of(0).speed("float32") == 1.5e12


def test_types_of_different_names_stay_apart_even_if_they_are_equally_fast() -> None:
    cluster = ClusterSpec.load(SPECS / "a100x2_p100x2.yaml")
    result = with_devices(cluster, measured(5.0, 5.0, 5.0, 5.0))
    assert [d.type for d in result.devices] == [d.type for d in cluster.devices]


def test_links_replace_those_that_were_measured() -> None:
    two = ClusterSpec.load(SPECS / "a100x2_p100x2.yaml")
    inside, between = Link(1e9, 1e-5), Link(1e8, 1e-4)
    result = with_links(two, Links((inside, None), between))
    assert (result.machines[0].intra, result.machines[1].intra, result.inter) == (inside, two.machines[1].intra, between)
    one = ClusterSpec.load(SPECS / "laptop-4.yaml")
    assert with_links(one, Links((inside,), None)).inter == inside


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-4, 1e9), (5e-6, 1e11), (1e-3, 1e7)])
def test_a_link_is_recovered_from_two_times(latency: float, bandwidth: float) -> None:
    rounds, volume = 4, 1.5
    small, large = (rounds * latency + volume * n / bandwidth for n in (SMALL_MESSAGE, LARGE_MESSAGE))
    link = solve_link(small, large, rounds, volume)
    assert (link.latency, link.bandwidth) == (pytest.approx(latency, rel=1e-6), pytest.approx(bandwidth, rel=1e-6))


def test_a_noisy_link_stays_positive() -> None:
    link = solve_link(2e-3, 1e-3, 4, 1.5)
    assert link.latency > 0
    assert link.bandwidth > 0


def test_another_clock_is_what_counts() -> None:
    device, cpu = torch.device("cpu"), time.thread_time
    plain = measure_device(device, seconds=0.2, clock=cpu)
    slow = measure_device(device, seconds=0.2, clock=lambda: 1000 * cpu())
    for name in ("flops", "memory_bandwidth"):
        assert 100 < getattr(plain, name) / getattr(slow, name) < 10000
    assert 100 < slow.kernel_latency / plain.kernel_latency < 10000


def test_kernels_are_started_with_cold_caches_whose_filling_does_not_count() -> None:
    """The time between pieces of work is left out."""
    now = [0.0]

    def takes(seconds: float) -> None:
        now[0] += seconds

    timer = _Timer(torch.device("cpu"), lambda: now[0], lambda: None)
    assert timer.rate(10.0, lambda: takes(2.0), 1e-3, lambda: takes(7.0)) == pytest.approx(5.0)
    assert timer.rate(10.0, lambda: takes(2.0), 1e-3) == pytest.approx(5.0)


def test_the_pause_comes_between_repeats() -> None:
    pauses = []
    measure_device(torch.device("cpu"), seconds=0.01, pause=lambda: pauses.append(None))
    assert len(pauses) == 3 * REPEATS


def test_without_processes_all_devices_are_like_this_one() -> None:
    torch.set_num_threads(1)
    cluster = ClusterSpec.load(SPECS / "laptop-4.yaml")
    result = calibrate(cluster, seconds=0.1)
    assert result.machines[0].intra == cluster.machines[0].intra
    (kind,) = result.device_types.values()
    assert 1e8 < kind.speed("float32") < 1e13
    assert 1e-7 < kind.kernel_latency < 1e-2


def _calibrate(spec: dict[str, object]) -> dict[str, object]:
    return calibrate(ClusterSpec.load(spec), seconds=0.4).to_dict()


def _two_ranks(*machines: int) -> dict[str, object]:
    return {
        "machines": [{"name": f"m{i}", "device": "CPU-core", "devices": n} for i, n in enumerate(machines)],
        "network": {"inter": {"bandwidth": 1.0, "latency": 1.0}, "intra": {"bandwidth": 1.0, "latency": 1.0}},
    }


@pytest.mark.gloo
@pytest.mark.parametrize("machines", [(2,), (1, 1)])
def test_ranks_agree_on_what_they_measured(machines: tuple[int, ...]) -> None:
    first, second = pool(2).run(_calibrate, _two_ranks(*machines))
    assert first == second
    cluster = ClusterSpec.load(first)
    link = cluster.inter if len(machines) > 1 else cluster.machines[0].intra
    assert 1e6 < link.bandwidth < 1e12
    assert 1e-7 < link.latency < 0.1
    assert link.scalar_latency is not None
    assert 1e-7 < link.scalar_latency <= link.latency
    assert all(t.source == "measured" for t in cluster.device_types.values())


def _wrong_size(spec: dict[str, object]) -> str:
    with pytest.raises(LaunchError) as error:
        calibrate(ClusterSpec.load(spec))
    return str(error.value)


@pytest.mark.gloo
def test_a_wrong_number_of_processes() -> None:
    assert "2 processes were started" in pool(2).run(_wrong_size, _two_ranks(3))[0]
