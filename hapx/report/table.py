"""What `print(plan)` shows: devices, layers, predicted time.

In: a plan, and perhaps the plan of an even split to compare with. Out: text, plain ASCII, at most 120 columns wide. Every number comes from
the plan, the cost model or the simulator; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hapx.cluster.spec import ClusterSpec
from hapx.cost.remat import chosen_blocks
from hapx.layout import local_shape
from hapx.plan import Plan, Stage
from hapx.predict import Staged
from hapx.report.layers import layers
from hapx.report.render import new_table, render
from hapx.report.search import proven_lines
from hapx.report.segments import rows_table
from hapx.report.split import time_split
from hapx.report.stages import crossings_table, devices_line, idle_lines, schedule_text, stages_table, throughput_line
from hapx.report.words import Vocabulary, devices_text, share_text, size_text, time_text
from hapx.states import Property, Sharded


def plan_table(plan: Plan, against: Plan | None = None) -> str:
    """The plan as text. `against`: a plan of the same model on the same cluster (an even split, say) whose time is shown for comparison."""
    if plan.schedules:
        return stages_text(plan)
    sections = [title(plan), devices_table(plan), rows_table(plan), _layers(plan), times_text(plan, against)]
    return "\n\n".join(filter(None, sections))


def stages_text(plan: Plan) -> str:
    """A plan of stages: who computes what, when, and what crosses between them."""
    staged = Staged(plan)
    crossing = [crossings_table(staged)] if len(plan.stages) > 1 else []
    sections = [title(plan), stages_table(staged), *idle_lines(plan), schedule_text(staged), *crossing]
    return "\n\n".join([*sections, f"{times_text(plan)}\n{throughput_line(staged)}"])


def title(plan: Plan) -> str:
    """One line: cluster, mesh or stages, strategy; a second one where something is computed again."""
    cluster, mesh = plan.cluster, plan.stages[0].mesh
    axes = f" as {' x '.join(f'{a.size} {a.name}' for a in mesh.axes)}" if len(mesh.axes) > 1 else ""
    if plan.schedules:
        axes = f" in {len(plan.stages)} stages" if len(plan.stages) > 1 else " in one stage that accumulates"
    strategy = f"strategy {plan.restriction.name}, {plan.precision}, {plan.optimizer}"
    return f"plan for {cluster.name}: {cluster.num_devices} devices{axes}, {strategy}{_autocast(plan)}{_remat(plan)}"


def _autocast(plan: Plan) -> str:
    return f", autocast {plan.first.autocast}" if plan.first.autocast else ""


def _remat(plan: Plan) -> str:
    """What is computed again in backward."""
    graph = plan.graphs[plan.first]
    count, chosen = sum(r.kind == "checkpoint" for r in graph.regions), chosen_blocks(graph)
    parts = [f"{n} {what}" for n, what in ((chosen, "blocks"), (count - chosen, "checkpoints of the model")) if n]
    return f"\ncomputed again in backward: {' and '.join(parts)}" if parts and graph.mode == "train" else ""


# ---- devices -----------------------------------------------------------------------------------------------------------


_Row = tuple[int, str, str, str, int | None, str]


def devices_table(plan: Plan) -> str:
    """One row per group of devices that have equal shares."""
    stage, cluster = plan.stages[0], plan.cluster
    batch = batch_sizes(plan)
    rows: list[_Row] = []
    for d in stage.devices:
        machine = cluster.machine_of(d).name
        rows.append((d, machine, cluster.devices[d].type, share_text(plan.shares[d]), batch[d] if batch else None, _memory(plan, cluster, d)))
    table = new_table("device", "machine", "type", "share", "batch", "memory", right=("share", "batch"), whole=("device",))
    alike: dict[tuple[object, ...], list[_Row]] = {}
    for row in rows:
        alike.setdefault(row[2:], []).append(row)
    for members in alike.values():
        first = members[0]
        machines = list(dict.fromkeys(m[1] for m in members))
        where = machines[0] if len(machines) == 1 else f"{machines[0]} .. {machines[-1]}"
        each = " each" if len(members) > 1 else ""
        samples = "all" if first[4] is None else f"{first[4]}{each}"
        table.add_row(devices_text([m[0] for m in members]), where, first[2], first[3] + each, samples, first[5] + each)
    idle = (
        ""
        if batch or _splits(plan)
        else "\nnothing is split: every device computes the whole batch, because communication would cost more than it saves"
    )
    return render(table) + idle


def _splits(plan: Plan) -> bool:
    """Whether any instruction's work is divided."""
    return any(cut is not None for i in plan.stages[0].program.instructions for cut in i.triple.work)


def _memory(plan: Plan, cluster: ClusterSpec, device: int) -> str:
    capacity = cluster.type_of(device).memory
    used = plan.memory[device]
    return f"{size_text(used)} of {size_text(capacity)} ({used / capacity:.0%})"


def batch_sizes(plan: Plan) -> tuple[int, ...] | None:
    """Samples of the global batch per device (by number in the cluster) in the first training program; None if the batch is not split."""
    stage = plan.stages[0]
    words = Vocabulary.of(plan)
    split = _most_split(stage, words)
    if split is None:
        return None
    p, dim = split
    ref = words.graph.refs[p.tensor]
    per_sample = max(ref.shape[dim] // max(words.graph.batch, 1), 1)
    sizes = [0] * plan.cluster.num_devices
    for d in stage.devices:
        sizes[d] = local_shape(ref.shape, p.placement, stage.mesh.sizes, words.lengths, stage.mesh.coordinates(d))[dim] // per_sample
    return tuple(sizes)


def _most_split(stage: Stage, words: Vocabulary) -> tuple[Property, int] | None:
    """The property whose batch dim is split by most axes, and that dim."""
    best: tuple[int, Property, int] | None = None
    for instruction in stage.program.instructions:
        for p in instruction.triple.post:
            ref = words.graph.refs[p.tensor]
            dims = [s.dim for s in p.placement.states if isinstance(s, Sharded) and words.dim(ref, s) == "batch"]
            if dims and ref.shape[dims[0]] % max(words.graph.batch, 1) == 0 and (best is None or len(dims) > best[0]):
                best = (len(dims), p, dims[0])
    return None if best is None else best[1:]


# ---- layers and time ---------------------------------------------------------------------------------------------------


def _layers(plan: Plan) -> str:
    table = new_table("layer", "weights", "activations", "communication, forward / backward")
    for row in layers(plan):
        table.add_row(row.module or "(model)", "\n".join(row.weights) or "-", "\n".join(row.activations) or "-", "\n".join(row.communication) or "-")
    return render(table)


def times_text(plan: Plan, against: Plan | None = None) -> str:
    """The predicted time and what it consists of, what was proven, what planning took."""
    lines = [f"predicted iteration: {time_split(plan)}"]
    if against is not None:
        faster = against.iteration_time / plan.iteration_time
        lines += [f"{against.restriction.name:>19}: {time_split(against)}", f"this plan is {faster:.2f}x as fast as {against.restriction.name}"]
    baselines = plan.statistics.get("baselines")
    if isinstance(baselines, dict) and baselines:
        known = [f"{name} {time_text(t)}" for name, t in baselines.items() if isinstance(t, int | float)]
        lines.append(f"baselines: {', '.join(known)}")
    lines += [*coverage_lines(plan.statistics.get("coverage")), *proven_lines(plan), *fewer_lines(plan)]
    told = {name: plan.statistics.get(f"{name}_time") for name in ("capture", "theory", "search", "simulation")}
    spent = {name: t for name, t in told.items() if isinstance(t, int | float)}
    if spent:
        clock = plan.statistics.get("planning_time")
        parts = ", ".join(f"{name} {time_text(t)}" for name, t in spent.items())
        whole = f" {time_text(clock)}; over all cores" if isinstance(clock, int | float) else ""
        lines.append(f"planning took{whole}: {parts}")
    return "\n".join(lines)


def fewer_lines(plan: Plan) -> list[str]:
    """Devices that would be faster without the others, by `plan.statistics["fewer"]`."""
    found = plan.statistics.get("fewer")
    if not isinstance(found, Mapping):
        return []
    devices, seconds = tuple(found["devices"]), float(found["seconds"])
    where = f"device{'s' if len(devices) > 1 else ''} {devices_line(plan, devices)}"
    less = f"{time_text(seconds)}, {1 - seconds / plan.iteration_time:.0%} less"
    return [f"FASTER WITH FEWER: {where} alone would take {less}; a cluster file without the others makes that plan"]


def coverage_lines(found: Any) -> list[str]:
    """What of the model runs whole on every device for lack of a rule, by `plan.statistics["coverage"]`."""
    if not isinstance(found, Mapping):
        return []
    if not found["operators"]:
        return ["every operator is covered by a rule"]
    named = [f"{target} {own['flops']:.1%} of the FLOPs, {own['bytes']:.1%} of the bytes" for target, own in found["operators"].items()]
    return [
        f"without a rule, so whole on every device: {found['flops']:.1%} of the FLOPs, {found['bytes']:.1%} of the bytes",
        *(f"  {text}" for text in named),
    ]
