"""A plan of several stages for people: who computes which layers, when, and what crosses between them.

In: a `Staged` plan. Out: tables, plain ASCII. Every number is of the timetable, the cost model or the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from hapx.ir import Graph
from hapx.plan import Plan
from hapx.predict import Staged
from hapx.report.folding import fold
from hapx.report.render import WIDTH, new_table, render
from hapx.report.words import Vocabulary, ranges_text, share_text, size_text, time_text
from hapx.reshard import bytes_between
from hapx.schedules import grid, in_flight
from hapx.states import Property

BLOCKS = 4  # of lines that the picture of a schedule may have
LABEL = 10  # columns before its rows
NAMED = 3  # tensors that a crossing names


def stages_table(staged: Staged) -> str:
    """One row per stage. Seconds are of one micro-batch, memory is of the device that has most, with all its stages."""
    plan = staged.plan
    kept = in_flight(plan.schedules[plan.first])
    numbers = ("work", "forward", "backward", "in flight")
    table = new_table("stage", "devices", "layers", "mesh", *numbers, "memory", right=numbers, whole=("devices", "memory"))
    for i, stage in enumerate(plan.stages):
        times = staged.times[i]
        seconds = [time_text(times.forward), time_text(times.backward)]
        table.add_row(
            str(i), devices_text(plan, stage.devices), layers_text(plan, i), stage.mesh.name, share_text(staged.work[i]), *seconds, str(kept[i]),
            _memory(plan, stage.devices),
        )  # fmt: skip
    return render(table)


def devices_text(plan: Plan, devices: tuple[int, ...]) -> str:
    """ "0-3: 4 V100", line by line where types differ."""
    types = [plan.cluster.devices[d].type for d in devices]
    runs = [(name, len(list(run))) for name, run in groupby(types)]
    return "\n".join([f"{ranges_text(devices)}: {runs[0][1]} {runs[0][0]}", *(f"  {count} {name}" for name, count in runs[1:])])


def devices_line(plan: Plan, devices: tuple[int, ...]) -> str:
    """ "0-5: 4 V100 + 2 P100"."""
    return " + ".join(" ".join(line.split()) for line in devices_text(plan, devices).splitlines())


def _memory(plan: Plan, devices: tuple[int, ...]) -> str:
    fullest = max(devices, key=lambda d: plan.memory[d] / plan.cluster.type_of(d).memory)
    capacity = plan.cluster.type_of(fullest).memory
    return f"{size_text(plan.memory[fullest])} of {size_text(capacity)} ({plan.memory[fullest] / capacity:.0%})"


def idle_lines(plan: Plan) -> list[str]:
    """Devices that no stage is on."""
    idle = [d.index for d in plan.cluster.devices if not plan.stages_of(d.index)]
    return [f"idle: {devices_text(plan, tuple(idle))}"] if idle else []


# ---- layers ------------------------------------------------------------------------------------------------------------


def layers_text(plan: Plan, stage: int) -> str:
    """The modules of a stage, down to the first number of their paths: "tok, pos, blocks.0-5"; "part of" one that other stages have, too."""
    return layers_of(plan, [s.nodes[plan.first] for s in plan.stages], stage)


def layers_of(plan: Plan, nodes: Sequence[tuple[int, int]], stage: int) -> str:
    """`layers_text` of a stage, where stages run these nodes [start, stop) of the plan's graph."""
    graph = plan.graphs[plan.first]
    found = [_modules(graph, *own) for own in nodes]
    others = {m for i, own in enumerate(found) for m in own if i != stage}
    rows = [(m, m in others and any(p.isdigit() for p in m.split("."))) for m in found[stage]]
    texts = [f"part of {path}" if rows[members[0]][1] else path for path, members in sorted(fold(rows), key=lambda g: g[1])]
    return ", ".join(texts) or "(model)"


def _modules(graph: Graph, start: int, stop: int) -> list[str]:
    paths = dict.fromkeys(n.module for n in graph.nodes[start:stop] if n.module)
    return list(dict.fromkeys(map(_short, paths)))


def _short(module: str) -> str:
    parts = module.split(".")
    number = next((k for k, p in enumerate(parts) if p.isdigit()), 0)
    return ".".join(parts[: number + 1])


# ---- time --------------------------------------------------------------------------------------------------------------


def schedule_text(staged: Staged) -> str:
    """The schedule as a picture in time, its bubbles, what it keeps."""
    plan = staged.plan
    schedule = plan.schedules[plan.first]
    samples = f"micro-batches: {len(schedule.micro_batches)} of {schedule.micro_batches[0]} samples"
    shortest = min(s.duration for spans in staged.timetable.spans for s in spans if s.stream == "compute")
    name = len(f"F{len(schedule.micro_batches) - 1}" + ("@0" if len(plan.stages) > len(plan.groups) else ""))
    columns = min(BLOCKS * (WIDTH - LABEL), round(staged.timetable.total / shortest * (name + 1)))
    groups = [f"group {g}: device{'s' if len(d) > 1 else ''} {ranges_text(d)}" for g, d in enumerate(plan.groups)]
    return "\n".join([f"{samples}; {'; '.join(groups)}", grid(schedule, staged.seconds, columns=columns)])


def crossings_table(staged: Staged) -> str:
    """What crosses from stage to stage for one micro-batch, and its cotangents on the way back."""
    plan, numbers = staged.plan, ("bytes", "time", "bytes back", "time back")
    table = new_table("crossing", "tensors", "leave", "arrive", *numbers, right=numbers, whole=("crossing",))
    for a, b in sorted(pair for pair in staged.transfers if pair[0] < pair[1]):
        own = [x for x in plan.boundaries(plan.first) if (x.source[0], x.target[0]) == (a, b)]
        names = [x.tensor for x in own[:NAMED]] + ([f"{len(own) - NAMED} more"] if len(own) > NAMED else [])
        ends = [_layouts(plan, [x.source for x in own]), _layouts(plan, [x.target for x in own])]
        ways = []
        for pair in ((a, b), (b, a)):
            size = sum(n for r, itemsize in staged.transfers.get(pair, ()) for n in bytes_between(r, itemsize).values())
            ways += [size_text(size), time_text(staged.crossing[pair])] if pair in staged.transfers else ["-", "-"]
        table.add_row(f"{a} > {b}", ", ".join(names), *ends, *ways)
    return render(table)


def _layouts(plan: Plan, ends: Sequence[tuple[int, Property]]) -> str:
    refs = plan.graphs[plan.first].refs
    return "; ".join(dict.fromkeys(Vocabulary.of(plan, i).placement(refs[p.tensor], p.placement) for i, p in ends))


def slowest_stage(staged: Staged, among: Sequence[int] | None = None) -> int:
    """The stage that takes longest for a micro-batch. among: not of all stages, but of these."""
    return max(range(len(staged.times)) if among is None else among, key=lambda i: staged.times[i].micro)


def throughput_line(staged: Staged) -> str:
    """Samples per second, and the stage that takes longest."""
    plan = staged.plan
    rate = sum(plan.schedules[plan.first].micro_batches) / plan.iteration_time
    slowest = slowest_stage(staged)
    micro = time_text(staged.times[slowest].micro)
    return f"{rate:.{0 if rate >= 100 else 1}f} samples per second; the slowest stage is {slowest}: {micro} per micro-batch"
