"""The same model on another cluster: what a machine less, a card more or a faster network would change.

In: a plan (it has its model and its cluster inside) and changes. Out: the changed clusters, and a table of their plans beside the given one, for the
same global batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from hapx.cluster.catalogue import CATALOGUE, suggest
from hapx.cluster.spec import ClusterSpec
from hapx.cost.remat import without_blocks
from hapx.errors import ClusterSpecError, HapError
from hapx.inter_op import plan_of_micro_batches
from hapx.plan import Plan
from hapx.planner import plan_graphs, views
from hapx.progress import Watcher
from hapx.report.render import new_table, render
from hapx.report.words import ranges_text, shares_text, size_text, time_text
from hapx.restriction import Restriction
from hapx.setting import Setting

ALIKE = 1e-3  # relative difference of times that is none


def changed(cluster: ClusterSpec, drop: Sequence[str] = (), add: Sequence[str] = (), bandwidth: str | None = None) -> ClusterSpec:
    """The cluster without some devices, with more machines, with another network between machines.

    drop: a machine ("p100-0"), all machines of a name ("p100"), or all devices of a type or of types that begin so ("P100"). add:
    "2xA100-SXM4-40GB" is one more machine with two of them ("2xA100": of the first type that begins so, see `taken_as`). bandwidth: of the links
    between machines, "25 Gbit/s". Raises ClusterSpecError for names that mean nothing."""
    data = cluster.to_dict()
    for name in drop:
        data["machines"] = _without(data["machines"], name)
    for text in add:
        data["machines"].append(_machine(cluster, {m["name"] for m in data["machines"]}, text))
    if bandwidth is not None:
        data["network"]["inter"]["bandwidth"] = bandwidth
    data["mesh"] = "auto"
    if not data["machines"]:
        raise ClusterSpecError("no device is left", where="--drop", hint="drop fewer devices")
    if bandwidth is not None and len(cluster.machines) == len(data["machines"]) == 1:
        raise ClusterSpecError("one machine has no links between machines", where="--bandwidth", hint="add a machine, or leave the option out")
    return ClusterSpec.load(data)


def slowest_type(plan: Plan) -> str | None:
    """The device type with the least FLOP/s in the plan's precision; None where all are of one type."""
    types = plan.cluster.device_types
    used = dict.fromkeys(d.type for d in plan.cluster.devices)
    return min(used, key=lambda name: types[name].speed(plan.precision)) if len(used) > 1 else None


def fewer(plan: Plan) -> dict[str, ClusterSpec]:
    """Clusters without the slowest type of device, and without each other type and all machines of a name in turn, by what the table calls them."""
    cluster, slowest = plan.cluster, slowest_type(plan)
    types = sorted({d.type for d in cluster.devices}, key=lambda name: name != slowest)
    names = [re.sub(r"-\d+$", "", m.name) for m in cluster.machines]
    found: dict[str, ClusterSpec] = {}
    for name in dict.fromkeys([*types, *names]):
        try:
            left = changed(cluster, [name])
        except ClusterSpecError:  # nothing would be left
            continue
        if all(left.to_dict() != other.to_dict() for other in found.values()):
            found[f"without {name}{' (the slowest)' if name == slowest else ''}"] = left
    return found


def whatif_table(plan: Plan, clusters: Mapping[str, ClusterSpec], progress: Watcher | None = None) -> str:
    """The plan, and one row per cluster, planned anew with the same restriction; then what is faster. `clusters`: by what the table calls them."""
    table = new_table("cluster", "devices", "mesh", "iteration", "time", "memory", "shares", right=("devices", "iteration", "time", "memory"))
    _row(table, "as it is", plan, plan)
    said = [*_micro_batches_line(plan), *idle_lines(plan)]
    for name, cluster in clusters.items():
        again = replanned(plan, cluster, progress)
        if isinstance(again, HapError):
            table.add_row(name, str(cluster.num_devices), "-", "-", "-", "-", "-")
            said.append(f"{name}: {again}")
            continue
        _row(table, name, again, plan)
        if cluster.num_devices < plan.cluster.num_devices:
            said.append(f"{name}: {verdict(plan, again)}")
    return "\n\n".join([render(table), "\n".join(said)]).strip()


def replanned(plan: Plan, cluster: ClusterSpec, progress: Watcher | None = None, rule: Restriction | None = None) -> Plan | HapError:
    """The plan of the same model on another cluster, or why there is none. rule: instead of the plan's own restriction. A plan of micro-batches
    knows the graph of one of them: it is planned with as many, in stages or in one."""
    graph = without_blocks(plan.graphs[plan.first])  # what is computed again is chosen anew
    rule = rule or plan.restriction
    try:
        if plan.schedules:
            asked = Setting(graph, plan.first, cluster, rule, plan.precision, plan.optimizer, progress=progress)
            return plan_of_micro_batches(asked)
        return plan_graphs([graph], cluster, strategy=rule, optimizer=plan.optimizer, precision=plan.precision, progress=progress, old=plan)
    except HapError as error:
        return error


def _micro_batches_line(plan: Plan) -> list[str]:
    if not plan.schedules:
        return []
    number = len(plan.schedules[plan.first].micro_batches)
    return [
        f"planned again with {number} micro-batches each, as the plan has; `hapx plan` also looks at other numbers and at the whole batch at once"
    ]


def verdict(plan: Plan, again: Plan) -> str:
    """Whether a plan for fewer devices is faster."""
    gone = plan.cluster.num_devices - again.cluster.num_devices
    ratio = again.iteration_time / plan.iteration_time
    devices = f"{gone} device{'s' if gone > 1 else ''} fewer"
    if ratio < 1 - ALIKE:
        return f"faster, {1 - ratio:.1%} less time with {devices}"
    return f"just as fast with {devices}" if ratio < 1 + ALIKE else f"slower, {ratio:.2f}x the time"


def idle_lines(plan: Plan) -> list[str]:
    """Devices that the plan gives nothing to do."""
    idle = [d for d, share in enumerate(plan.shares) if share == 0]
    types = ", ".join(dict.fromkeys(plan.cluster.devices[d].type for d in idle))
    return [f"the plan gives device{'s' if len(idle) > 1 else ''} {ranges_text(idle)} ({types}) no share of the work already"] if idle else []


def slowest_line(plan: Plan, progress: Watcher | None = None) -> str | None:
    """Whether it is faster without the slowest type of device, on a mesh like the plan's (`whatif_table` tries all); None where all are alike."""
    slowest = slowest_type(plan)
    if slowest is None:
        return None
    cluster = changed(plan.cluster, [slowest])
    again = replanned(plan, cluster, progress, replace(plan.restriction, mesh=_mesh_like(plan, cluster)))
    answer = str(again) if isinstance(again, HapError) else f"{time_text(again.iteration_time)}: {verdict(plan, again)}"
    return "\n".join([f"without the slowest type of device, {slowest}, on a mesh like this: {answer}", *idle_lines(plan)])


def _mesh_like(plan: Plan, cluster: ClusterSpec) -> str:
    """The view of another cluster whose groups are as large as those of the plan's mesh; "flat" where it has none."""
    inner = plan.stages[0].mesh.sizes[1:]
    name = f"{cluster.num_devices // inner[0]}x{inner[0]}" if inner else "flat"
    known = [mesh.name for mesh in views(replace(cluster, mesh="auto"), replace(plan.restriction, mesh="auto"))]
    return name if name in known else "flat"


def _row(table: Any, name: str, plan: Plan, now: Plan) -> None:
    times = f"{plan.iteration_time / now.iteration_time:.2f}x" if now.iteration_time else "-"
    number = len(plan.stages)
    devices, mesh = str(plan.cluster.num_devices), f"{number} stages" if number > 1 else plan.stages[0].mesh.name
    table.add_row(name, devices, mesh, time_text(plan.iteration_time), times, size_text(max(plan.memory)), shares_text(plan.shares))


def _without(machines: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    def of_name(machine: dict[str, Any]) -> bool:
        return bool(re.fullmatch(re.escape(name) + r"(-\d+)?", machine["name"], re.IGNORECASE))

    if any(map(of_name, machines)):
        return [m for m in machines if not of_name(m)]
    types = list(dict.fromkeys(t for m in machines for t in m["devices"]))
    gone = {t for t in types if t.lower().startswith(name.lower())}
    if not gone:
        known = ", ".join([*(m["name"] for m in machines), *types])
        raise ClusterSpecError(f"there is no machine or device type {name!r}", where="--drop", allowed=known)
    left = [m | {"devices": [t for t in m["devices"] if t not in gone]} for m in machines]
    return [m for m in left if m["devices"]]


def _machine(cluster: ClusterSpec, names: Set[str], text: str) -> dict[str, Any]:
    count, fitting = _fitting(cluster, text)
    number = 0
    while f"added-{number}" in names:
        number += 1
    return {"name": f"added-{number}", "devices": [fitting[0]] * count, "intra": _inside(cluster.to_dict())}


def _fitting(cluster: ClusterSpec, text: str) -> tuple[int, list[str]]:
    """ "2xA100": the number, and the device types that are called or begin so. Raises ClusterSpecError where there are none."""
    parts = re.fullmatch(r"(?:(\d+)\s*x\s*)?(\S+)", text.strip(), re.IGNORECASE)
    if parts is None or parts[1] == "0":
        raise ClusterSpecError(f"{text!r}", where="--add", allowed='a number and a device type, as in "2xA100-SXM4-40GB"')
    known = {**cluster.device_types, **CATALOGUE}
    fitting = [name for name in known if name.lower() == parts[2].lower()] or [n for n in known if n.lower().startswith(parts[2].lower())]
    if not fitting:
        allowed = suggest(parts[2], known) or "a name from `hapx devices` or of the cluster file"
        raise ClusterSpecError(f"{parts[2]!r} is no known device type", where="--add", allowed=allowed)
    return int(parts[1] or 1), fitting


def taken_as(cluster: ClusterSpec, add: Sequence[str]) -> list[str]:
    """Notes on additions whose device type could have been several."""
    found = [(text, _fitting(cluster, text)) for text in add]
    return [f"{text} is taken as {count}x{names[0]}; there are also {', '.join(names[1:])}" for text, (count, names) in found if len(names) > 1]


def _inside(data: Mapping[str, Any]) -> Any:
    """The link inside a new machine: that of all machines, or of the first."""
    shared = data["network"].get("intra")
    return shared if shared is not None else data["machines"][0]["intra"]


def describe(drop: Sequence[str], add: Sequence[str], bandwidth: str | None) -> str:
    """The changes as the table calls them."""
    return ", ".join([*(f"without {d}" for d in drop), *(f"with {a}" for a in add), *([f"links of {bandwidth}"] if bandwidth else [])])
