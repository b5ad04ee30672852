"""Clusters that small models are worth distributing on: slow devices, quick links."""

from __future__ import annotations

from collections.abc import Sequence

from hapx.cluster.spec import ClusterSpec

SPEEDS = {"fast": 4, "medium": 3, "slow": 1}


def slow_devices(*machines: Sequence[str], inter: str = "1 Gbit/s", intra: str = "10 GB/s", speed: float = 1e6) -> ClusterSpec:
    """A machine per list of devices ("fast": 4, "medium": 3, "slow": 1 times `speed` FLOP/s), so slow that computing decides."""
    return ClusterSpec.load(
        {
            "name": "slow-devices",
            "machines": [{"name": f"m{i}", "devices": list(devices)} for i, devices in enumerate(machines)],
            "device_types": {k: {"flops": v * speed, "memory": "2 GiB", "memory_bandwidth": "10 GB/s"} for k, v in SPEEDS.items()},
            "network": {"inter": {"bandwidth": inter, "latency": "1 us"}, "intra": {"bandwidth": intra, "latency": "1 us"}},
        }
    )


ONE = slow_devices(["fast"])
TWO = slow_devices(["fast", "slow"])
THREE = slow_devices(["fast", "medium", "slow"])
FOUR = slow_devices(["fast", "fast", "slow", "slow"])
TWO_MACHINES = slow_devices(["medium", "medium"], ["slow", "slow"], inter="100 Mbit/s")  # speeds 3:1
