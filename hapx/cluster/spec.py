"""The cluster as data: machines with devices, the links between them, and what each type of device can do.

In: a YAML file, a dict of the same shape (`to_dict`), or an existing spec. Out: a frozen `ClusterSpec`, all numbers in SI units.
Invariant: every device names a type in `device_types`, devices are numbered machine by machine in the order of the file, and
`ClusterSpec.load(spec.to_dict()) == spec`. Validation lives in `hapx.cluster.schema`; this module needs nothing but Python.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from hapx.cluster.units import show

DEFAULT_EFFICIENCY = 0.5
DEFAULT_KERNEL_LATENCY = 5e-6

# Names of dtypes, as torch and as datasheets write them, to the keys of `DeviceType.flops`.
PRECISIONS: Mapping[str, str] = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16",
    "fp64": "fp64", "fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Link:
    """A network: bandwidth in B/s that one device can use, latency in s of one message. scalar_latency: of one message in a sum of single numbers,
    where it was measured (None: as any message)."""

    bandwidth: float
    latency: float
    scalar_latency: float | None = None

    @property
    def of_scalars(self) -> float:
        """Latency of one message of a single number."""
        return self.latency if self.scalar_latency is None else self.scalar_latency

    def __str__(self) -> str:
        return f"{show(self.bandwidth, 'bandwidth')}, {show(self.latency, 'time')}"


@dataclass(frozen=True, slots=True)
class DeviceType:
    """What one kind of device can do.

    Attributes:
        flops: peak FLOP/s per dtype ("fp32", "tf32", "bf16", "fp16", "fp64"); fp32 is always there.
        memory: bytes. memory_bandwidth: B/s.
        efficiency: share of the peak that real kernels reach; 0.5 is what large matrix products reach on most devices when nothing
            is known, 1.0 says that `flops` was measured.
        kernel_latency: s, fixed cost of one kernel.
        source: where the numbers come from.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory: int
    memory_bandwidth: float
    efficiency: float = DEFAULT_EFFICIENCY
    kernel_latency: float = DEFAULT_KERNEL_LATENCY
    source: str = "user"

    def speed(self, precision: str) -> float:
        """FLOP/s that kernels of `precision` ("fp32", "bfloat16", ...) really reach; the fp32 figure where the dtype is not listed,
        because a device without units for a dtype computes in fp32."""
        return self.flops.get(PRECISIONS.get(precision, precision), self.flops["fp32"]) * self.efficiency

    @property
    def is_cpu(self) -> bool:
        """Whether it is a processor, not an accelerator: its name begins with "CPU". Optimizers work on one parameter after the other there."""
        return self.name.lower().startswith("cpu")

    def measured(self, flops: Mapping[str, float], **changes: Any) -> DeviceType:
        """The same type with measured FLOP/s (efficiency 1.0). Dtypes that were not measured keep the speed they had, so that the
        fallback of `speed` does not change what they mean."""
        kept = {dtype: value * self.efficiency for dtype, value in self.flops.items() if dtype not in flops}
        return replace(self, flops={**kept, **flops}, efficiency=1.0, **changes)

    def __str__(self) -> str:
        peaks = ", ".join(f"{dtype} {show(value, 'flops')}" for dtype, value in self.flops.items())
        memory = f"{show(self.memory, 'size')} at {show(self.memory_bandwidth, 'bandwidth')}"
        return f"{self.name}: {peaks} (x {self.efficiency:g}), {memory}"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine: the type names of its devices in order, and the link between them (with one device, any: nothing uses it)."""

    name: str
    devices: tuple[str, ...]
    intra: Link


@dataclass(frozen=True, slots=True)
class Device:
    """A device: its number in the cluster, the number of its machine, and the name of its type."""

    index: int
    machine: int
    type: str


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster. `device_types`: those in use, by name. `inter`: link between machines. `mesh`: "auto", "flat", "two-level" or "2x4".
    `profile`: measured numbers as data; they are already applied to `device_types`."""

    name: str
    machines: tuple[Machine, ...]
    device_types: Mapping[str, DeviceType] = field(hash=False)
    inter: Link
    mesh: str = "auto"
    profile: Mapping[str, Any] | None = field(default=None, hash=False)

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any] | ClusterSpec) -> ClusterSpec:
        """Reads a YAML file or a dict of the same shape; a ClusterSpec is returned as it is. Raises ClusterSpecError."""
        if isinstance(source, ClusterSpec):
            return source
        from hapx.cluster.schema import load_cluster  # pydantic and PyYAML are only needed here

        return load_cluster(source)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices, numbered machine by machine: the number is the rank."""
        places = [(m, t) for m, machine in enumerate(self.machines) for t in machine.devices]
        return tuple(Device(i, m, t) for i, (m, t) in enumerate(places))

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each machine."""
        return tuple(tuple(d.index for d in self.devices if d.machine == m) for m in range(len(self.machines)))

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def type_of(self, device: int) -> DeviceType:
        """The type of a device, by the device's number."""
        return self.device_types[self.devices[device].type]

    def machine_of(self, device: int) -> Machine:
        """The machine of a device, by the device's number."""
        return self.machines[self.devices[device].machine]

    def link(self, devices: Iterable[int]) -> Link:
        """The slowest link that a group of devices shares: their machine's, or the one between machines."""
        machines = {self.devices[d].machine for d in devices}
        return self.inter if len(machines) > 1 else self.machines[machines.pop()].intra

    def part(self, devices: Sequence[int]) -> ClusterSpec:
        """The cluster of some of the devices, ascending, numbered anew. Each machine keeps its links."""
        assert list(devices) == sorted(set(devices)), devices
        chosen = [self.devices[d] for d in devices]
        machines = [replace(self.machines[m], devices=tuple(d.type for d in own)) for m, own in groupby(chosen, key=lambda d: d.machine)]
        types = {d.type: self.device_types[d.type] for d in chosen}
        return replace(self, machines=tuple(machines), device_types=types, mesh="auto", profile=None)

    def with_types(self, types: Mapping[str, DeviceType]) -> ClusterSpec:
        """The same cluster with other numbers for some of its device types (after a calibration). Profiled numbers of those types,
        which the new ones replace, are dropped from `profile`."""
        unknown = set(types) - set(self.device_types)
        assert not unknown, f"not in this cluster: {sorted(unknown)}"
        renamed = {name: replace(new, name=name) for name, new in types.items()}
        profile = dict(self.profile) if self.profile is not None else None
        if profile and "devices" in profile:
            profile["devices"] = {name: entry for name, entry in profile["devices"].items() if name not in types}
        return replace(self, device_types={**self.device_types, **renamed}, profile=profile)

    def to_dict(self) -> dict[str, Any]:
        """The cluster as plain data, in the shape of the YAML file."""
        shared = len({m.intra for m in self.machines}) == 1
        network = {"inter": _link_dict(self.inter)} | ({"intra": _link_dict(self.machines[0].intra)} if shared else {})
        data: dict[str, Any] = {
            "name": self.name,
            "machines": [{"name": m.name, "devices": list(m.devices)} | ({} if shared else {"intra": _link_dict(m.intra)}) for m in self.machines],
            "device_types": {name: _type_dict(t) for name, t in self.device_types.items()},
            "network": network,
            "mesh": self.mesh,
        }
        return data | ({"profile": plain(self.profile)} if self.profile is not None else {})

    def __str__(self) -> str:
        lines = [f"{self.name}: {_count(self.num_devices, 'device')} in {_count(len(self.machines), 'machine')}"]
        for (types, intra), group in groupby(self.machines, key=lambda m: (m.devices, m.intra)):
            names = [m.name for m in group]
            label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} machines)"
            lines.append(f"  {label}: {_devices_text(types)}" + (f"; inside {intra}" if len(types) > 1 else ""))
        if len(self.machines) > 1:
            lines.append(f"  between machines {self.inter}")
        lines.append(f"  mesh {self.mesh}" + ("; measured numbers" if self.profile else ""))
        return "\n".join(lines + [f"  {t}" for t in self.device_types.values()])


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _devices_text(types: tuple[str, ...]) -> str:
    """Says "8 x V100", or "1 x RTX-4090 + 1 x RTX-3060"."""
    return " + ".join(f"{len(list(run))} x {name}" for name, run in groupby(types))


def _link_dict(link: Link) -> dict[str, float]:
    scalars = {} if link.scalar_latency is None else {"scalar_latency": link.scalar_latency}
    return {"bandwidth": link.bandwidth, "latency": link.latency, **scalars}


def _type_dict(t: DeviceType) -> dict[str, Any]:
    return {
        "flops": dict(t.flops),
        "memory": t.memory,
        "memory_bandwidth": t.memory_bandwidth,
        "efficiency": t.efficiency,
        "kernel_latency": t.kernel_latency,
        "source": t.source,
    }


def plain(value: Any) -> Any:
    """Mappings as dicts and tuples as lists, all the way down: data that YAML and JSON can write."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value
