"""The same model on another cluster: what a machine less, a card more or a faster network would change.

In: a plan (it has its model and its cluster inside) and changes. Out: the changed clusters, and a table of their plans beside the given one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hapx.cluster.catalogue import CATALOGUE, suggest
from hapx.cluster.spec import ClusterSpec
from hapx.cost.remat import without_blocks
from hapx.errors import ClusterSpecError, InsufficientMemoryError, PlanError
from hapx.plan import Plan
from hapx.planner import plan_graphs
from hapx.report.render import new_table, render
from hapx.report.words import shares_text, size_text, time_text


def changed(cluster: ClusterSpec, drop: Sequence[str] = (), add: Sequence[str] = (), bandwidth: str | None = None) -> ClusterSpec:
    """The cluster without some devices, with more machines, with another network between machines.

    drop: a machine ("p100-0"), all machines of a name ("p100"), or all devices of a type or of types that begin so ("P100"). add:
    "2xA100-SXM4-40GB" is one more machine with two of them. bandwidth: of the links between machines, "25 Gbit/s". Raises ClusterSpecError for
    names that mean nothing."""
    data = cluster.to_dict()
    for name in drop:
        data["machines"] = _without(data["machines"], name)
    for text in add:
        data["machines"].append(_machine(cluster, data, text))
    if bandwidth is not None:
        data["network"]["inter"]["bandwidth"] = bandwidth
    data["mesh"] = "auto"
    if not data["machines"]:
        raise ClusterSpecError("no device is left", where="--drop", hint="drop fewer devices")
    return ClusterSpec.load(data)


def slowest_type(plan: Plan) -> str | None:
    """The device type with the least FLOP/s in the plan's precision; None where all are of one type."""
    types = plan.cluster.device_types
    used = dict.fromkeys(d.type for d in plan.cluster.devices)
    return min(used, key=lambda name: types[name].speed(plan.precision)) if len(used) > 1 else None


def whatif_table(plan: Plan, clusters: Mapping[str, ClusterSpec]) -> str:
    """The plan, and one row per cluster, planned anew with the same restriction; then what is faster. `clusters`: by what the table calls them."""
    table = new_table("cluster", "devices", "mesh", "iteration", "speed", "memory", "shares", right=("devices", "iteration", "speed", "memory"))
    _row(table, "as it is", plan, plan)
    said, graph = [], without_blocks(plan.graphs[plan.first])  # what is computed again is chosen anew
    for name, cluster in clusters.items():
        try:
            again = plan_graphs([graph], cluster, strategy=plan.restriction, optimizer=plan.optimizer, precision=plan.precision, old=plan)
        except (InsufficientMemoryError, PlanError) as error:
            table.add_row(name, str(cluster.num_devices), "-", "-", "-", "-", "-")
            said.append(f"{name}: {error}")
            continue
        _row(table, name, again, plan)
        if again.iteration_time < plan.iteration_time and cluster.num_devices < plan.cluster.num_devices:
            said.append(f"{name}: faster with fewer devices")
    return "\n\n".join([render(table), *said])


def _row(table: Any, name: str, plan: Plan, now: Plan) -> None:
    speed = f"{now.iteration_time / plan.iteration_time:.2f}x" if plan.iteration_time else "-"
    devices, mesh = str(plan.cluster.num_devices), plan.stages[0].mesh.name
    table.add_row(name, devices, mesh, time_text(plan.iteration_time), speed, size_text(max(plan.memory)), shares_text(plan.shares))


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


def _machine(cluster: ClusterSpec, data: Mapping[str, Any], text: str) -> dict[str, Any]:
    parts = re.fullmatch(r"(?:(\d+)\s*x\s*)?(\S+)", text.strip(), re.IGNORECASE)
    if parts is None or parts[1] == "0":
        raise ClusterSpecError(f"{text!r}", where="--add", allowed='a number and a device type, as in "2xA100-SXM4-40GB"')
    known = {**CATALOGUE, **cluster.device_types}
    fitting = [name for name in known if name.lower() == parts[2].lower()] or [n for n in known if n.lower().startswith(parts[2].lower())]
    if len(fitting) != 1:
        near = suggest(parts[2], known)
        allowed = ", ".join(fitting) if fitting else near or "a name from `hapx devices` or of the cluster file"
        raise ClusterSpecError(
            f"{parts[2]!r} is {'several' if fitting else 'no known'} device type{'s' if fitting else ''}", where="--add", allowed=allowed
        )
    names, number = {m["name"] for m in data["machines"]}, 0
    while f"added-{number}" in names:
        number += 1
    return {"name": f"added-{number}", "devices": [fitting[0]] * int(parts[1] or 1), "intra": _inside(data)}


def _inside(data: Mapping[str, Any]) -> Any:
    """The link inside a new machine: that of all machines, or of the first."""
    shared = data["network"].get("intra")
    return shared if shared is not None else data["machines"][0]["intra"]


def describe(drop: Sequence[str], add: Sequence[str], bandwidth: str | None) -> str:
    """The changes as the table calls them."""
    return ", ".join([*(f"without {d}" for d in drop), *(f"with {a}" for a in add), *([f"links of {bandwidth}"] if bandwidth else [])])
