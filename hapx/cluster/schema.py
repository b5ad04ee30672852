"""Reads a cluster file: YAML or a dict of the same shape -> `ClusterSpec`, or one `ClusterSpecError`.

Two steps. pydantic models check the shape: keys, types, units, positive numbers. `_Builder` then resolves what crosses sections: device
names (own types before the catalogue), machine names, links, measured numbers. Invariant: whatever the input, the outcome is a valid spec
or exactly one ClusterSpecError that names the file, the key path, the value, and what is allowed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from hapx.cluster.catalogue import CATALOGUE, suggest
from hapx.cluster.fields import (
    FILLED,
    MAX_DEVICES,
    MESHES,
    NAMED,
    Bandwidth,
    Bytes,
    Count,
    Devices,
    Mesh,
    Peaks,
    PeaksWithFp32,
    Seconds,
    Share,
    Text,
    fault,
    shown,
)
from hapx.cluster.spec import ClusterSpec, DeviceType, Link, Machine, plain
from hapx.cluster.units import type_name
from hapx.errors import ClusterSpecError

# ---- sections --------------------------------------------------------------------------------------------------------


class _Section(BaseModel):
    """A mapping with known keys. Unknown and missing keys are reported here, in the file's words."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, data: Any) -> Any:
        fields = cls.model_fields
        if not isinstance(data, Mapping):
            raise fault(f"wrong type: {type_name(data)} ({shown(data)})", f"a mapping with {', '.join(fields)}")
        for key in data:
            if key not in fields:
                raise fault(f"unknown key {shown(key)}", ", ".join(fields), suggest(str(key), tuple(fields)))
        for key, info in fields.items():
            if info.is_required() and key not in data:
                raise fault(f"missing field {key!r}", f"a mapping with {', '.join(fields)}")
        return dict(data)


class _Link(_Section):
    bandwidth: Bandwidth
    latency: Seconds
    scalar_latency: Seconds | None = None

    def link(self) -> Link:
        return Link(self.bandwidth, self.latency, self.scalar_latency)


class _Machine(_Section):
    name: Text
    count: Count | None = None
    device: Text | None = None
    devices: Devices | None = None
    intra: _Link | None = None

    @model_validator(mode="after")
    def _one_way(self) -> _Machine:
        either = "device: TYPE with devices: NUMBER, or devices: [TYPE, ...]"
        if self.device is None and not isinstance(self.devices, tuple):
            raise fault("missing field 'device'" if self.devices is not None else "missing field 'devices'", either)
        if self.device is not None and isinstance(self.devices, tuple):
            raise fault("both 'device' and a list of 'devices'", either)
        return self

    def types(self) -> tuple[str, ...]:
        if isinstance(self.devices, tuple):
            return self.devices
        assert self.device is not None
        return (self.device,) * (self.devices or 1)

    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.count is None else tuple(f"{self.name}-{i}" for i in range(self.count))


class _DeviceType(_Section):
    """Everything is optional here: what a type of the catalogue leaves out comes from the catalogue."""

    flops: PeaksWithFp32 | None = None
    memory: Bytes | None = None
    memory_bandwidth: Bandwidth | None = None
    efficiency: Share | None = None
    kernel_latency: Seconds | None = None
    source: Text | None = None


class _Measured(_Section):
    """Measured numbers of one device type."""

    flops: Peaks | None = None
    memory: Bytes | None = None
    memory_bandwidth: Bandwidth | None = None
    kernel_latency: Seconds | None = None


class _Profile(_Section):
    """Measured numbers. What is not `devices` is kept as data."""

    model_config = ConfigDict(extra="allow", frozen=True)
    devices: Annotated[dict[str, _Measured], NAMED] = {}

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise fault(f"wrong type: {type_name(data)} ({shown(data)})", "a mapping, as written by `hapx profile`")
        _check_plain(data)
        return dict(data)


class _Network(_Section):
    inter: _Link | None = None
    intra: _Link | None = None


class _Cluster(_Section):
    name: Text | None = None
    machines: Annotated[list[_Machine], FILLED]
    device_types: Annotated[dict[str, _DeviceType], NAMED] = {}
    network: _Network = _Network()
    mesh: Mesh = "auto"
    profile: _Profile | None = None


def _check_plain(value: object) -> None:
    """Raises where a profile holds something that a plan cannot carry as data."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise fault(f"wrong type of key: {type_name(key)} ({shown(key)})", "text", "put it in quotes")
            _check_plain(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_plain(entry)
    elif not (value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))):
        raise fault(f"wrong type: {type_name(value)} ({shown(value)})", "text, finite numbers, true/false, lists and mappings")


# ---- what crosses sections -------------------------------------------------------------------------------------------


class _Builder:
    """From the validated sections to the spec. `origin`: the file's name, for messages."""

    def __init__(self, raw: Mapping[str, Any], origin: str):
        self.raw, self.origin = raw, origin
        self.data = _Cluster.model_validate(raw)

    def fail(self, path: str, what: str, allowed: str | None = None, hint: str | None = None) -> NoReturn:
        raise ClusterSpecError(what, where=f"{self.origin}: {path}" if path else self.origin, allowed=allowed, hint=hint)

    def build(self, name: str) -> ClusterSpec:
        own = {n: self.own_type(n, given) for n, given in self.data.device_types.items()}
        known = {**CATALOGUE, **own}
        machines = self.machines(known)
        used = dict.fromkeys(t for m in machines for t in m.devices)
        types = self.measured({n: known[n] for n in used}, known)
        raw = self.raw.get("profile")
        profile: dict[str, Any] | None = None if raw is None else plain(raw)
        if profile and profile.get("devices"):  # measured numbers of types that no machine has say nothing about this cluster
            profile["devices"] = {n: numbers for n, numbers in profile["devices"].items() if n in used}
        spec = ClusterSpec(self.data.name or name, machines, types, self.inter(machines), self.data.mesh, profile)
        self.check_mesh(spec)
        return spec

    def own_type(self, name: str, given: _DeviceType) -> DeviceType:
        numbers = {k: v for k, v in given.model_dump().items() if v is not None}
        if name in CATALOGUE:
            return replace(CATALOGUE[name], **{"source": "user", **numbers})
        for key in ("flops", "memory", "memory_bandwidth"):
            if key not in numbers:
                self.fail(
                    f"device_types.{name}",
                    f"missing field {key!r}",
                    "a new device type needs flops, memory and memory_bandwidth",
                    suggest(name, CATALOGUE),
                )
        return DeviceType(name, **numbers)

    def machines(self, known: Mapping[str, DeviceType]) -> tuple[Machine, ...]:
        result: list[Machine] = []
        seen: dict[str, int] = {}
        for i, given in enumerate(self.data.machines):
            for k, type_ in enumerate(given.types()):
                if type_ not in known:
                    path = f"machines[{i}].device" if given.device is not None else f"machines[{i}].devices[{k}]"
                    self.unknown_device(path, type_, known)
            intra = given.intra or self.data.network.intra
            if intra is None and len(given.types()) == 1:  # nothing uses it
                intra = self.data.network.inter
            if intra is None:
                self.fail("network", f"missing field 'intra', the link inside machine {given.name!r}", "network.intra, or intra of each machine")
            for name in given.names():
                if name in seen:
                    self.fail(
                        f"machines[{i}].name",
                        f"duplicate machine name {name!r}, also machines[{seen[name]}]",
                        "names that differ; count: N makes NAME-0 to NAME-(N-1)",
                    )
                seen[name] = i
                result.append(Machine(name, given.types(), intra.link()))
            if sum(len(m.devices) for m in result) > MAX_DEVICES:
                self.fail(f"machines[{i}]", "too many devices", f"at most {MAX_DEVICES} in all")
        return tuple(result)

    def unknown_device(self, path: str, name: str, known: Mapping[str, DeviceType]) -> NoReturn:
        hint = suggest(name, known)
        listing = "a type of device_types or of the catalogue (`hapx devices` lists it)"
        self.fail(path, f"unknown device {name!r}", listing, hint)

    def measured(self, types: dict[str, DeviceType], known: Mapping[str, DeviceType]) -> dict[str, DeviceType]:
        """The device types with the numbers of the profile in their place."""
        for name, given in (self.data.profile.devices if self.data.profile else {}).items():
            if name not in known:
                self.unknown_device(f"profile.devices.{name}", name, known)
            if name in types:
                numbers = {k: v for k, v in given.model_dump().items() if v is not None}
                flops = numbers.pop("flops", None)
                types[name] = types[name].measured(flops, **numbers) if flops else replace(types[name], **numbers)
        return types

    def inter(self, machines: tuple[Machine, ...]) -> Link:
        if self.data.network.inter is not None:
            return self.data.network.inter.link()
        if len(machines) > 1:
            self.fail("network", "missing field 'inter', the link between machines", "inter: {bandwidth: ..., latency: ...}")
        return machines[0].intra  # one machine: there is no other network

    def check_mesh(self, spec: ClusterSpec) -> None:
        if "x" in spec.mesh and math.prod(map(int, spec.mesh.split("x"))) != spec.num_devices:
            self.fail("mesh", f"{spec.mesh!r} does not have {spec.num_devices} devices, as the cluster does", MESHES)


# ---- reading ---------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML without duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_cluster(source: str | os.PathLike[str] | Mapping[str, Any]) -> ClusterSpec:
    """The cluster of a file, or of a dict of the same shape. Raises ClusterSpecError."""
    if isinstance(source, Mapping):
        return _parse(source, "cluster spec", "cluster")
    if not isinstance(source, str | os.PathLike):
        raise ClusterSpecError(f"wrong type: {type(source).__name__}", where="cluster spec", allowed="a path, a dict, or a hapx.ClusterSpec")
    path = Path(source)
    return _parse(_read(path), str(path), path.stem)


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        return yaml.load(text, _Loader)  # a SafeLoader
    except OSError as error:
        raise ClusterSpecError(f"cannot be read: {error.strerror or error}", where=str(path), allowed="the path of a cluster file (YAML)") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        what = error.problem or "cannot be parsed"
        if what.startswith("duplicate key"):
            raise ClusterSpecError(what, where=where, allowed="each key once") from None
        raise ClusterSpecError(f"invalid YAML: {what}", where=where, allowed="YAML, as in cluster_specs/") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not UTF-8, control characters, impossible dates, endless nesting
        raise ClusterSpecError(f"invalid YAML: {str(error).splitlines()[0]}", where=str(path), allowed="YAML text in UTF-8") from None


def _parse(raw: Any, origin: str, name: str) -> ClusterSpec:
    try:
        return _Builder(raw, origin).build(name)
    except ValidationError as error:
        raise _translate(error, origin) from None
    except RecursionError:
        raise ClusterSpecError("a section contains itself", where=origin, allowed="data without cycles") from None


def _translate(error: ValidationError, origin: str) -> ClusterSpecError:
    """The first fault pydantic found, as ours."""
    fault = error.errors(include_url=False)[0]
    told = fault.get("ctx", {})
    path = list(fault["loc"]) + ([told["key"]] if told.get("key") is not None else [])
    where = f"{origin}: {_path(path)}" if path else origin
    what = told.get("what") or f"{fault['msg']} ({shown(fault['input'])})"
    return ClusterSpecError(what, where=where, allowed=told.get("allowed"), hint=told.get("hint"))


def _path(parts: list[Any]) -> str:
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts)
    return text.removeprefix(".")
