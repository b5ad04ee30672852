"""Whether a part of the devices, with only quick links between them, would be faster than all of them.

In: a setting of the whole model, a plan of all devices. Out: the plan, whose statistics name such a part. Every plan uses all devices that its
cluster file names; where links are slow and models small one machine, or one device, may take less time, and people should know.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from hapx.cluster.spec import ClusterSpec
from hapx.errors import InsufficientMemoryError, PlanError
from hapx.inter_op import at_full_speed
from hapx.plan import Plan
from hapx.planner import plan_spmd, views
from hapx.setting import Counters, Setting
from hapx.stages.submeshes import shape_of
from hapx.theory.discover import discover

WORTH = 0.05  # of the time: what less would be gained is not told
ROUGH = 0.01  # how far from the optimum programs of parts may be: only whether they are faster is wanted


def with_fewer(asked: Setting, plan: Plan) -> Plan:
    """The plan, with the fastest part of the devices in `plan.statistics["fewer"]` (devices, seconds) if it is faster than all of them, run by one
    program on the flat mesh. A part that would be slower even at full speed is not planned."""
    if asked.rule.mesh not in ("auto", "flat") or isinstance(asked.rule.ratios, tuple):
        return plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is to be said of the model was said before
        found = _fastest(asked, (1 - WORTH) * plan.iteration_time, cost := Counters())
    told = {"fewer": {"devices": found[0], "seconds": found[1]}} if found is not None else {}
    return replace(plan, statistics={**cost.added_to(plan.statistics), **told})


def _fastest(asked: Setting, best: float, counters: Counters) -> tuple[tuple[int, ...], float] | None:
    """The part that takes least, with its seconds; None where none takes less than `best`."""
    settings = {devices: _of_part(asked, devices) for devices in parts(asked.cluster)}
    least = {devices: at_full_speed(setting) for devices, setting in settings.items()}
    possible = sorted((devices for devices in settings if least[devices] < best), key=least.__getitem__)
    if not possible:
        return None
    graph, found = discover(asked.graph), None
    for devices in possible:
        if least[devices] >= best:
            break
        with suppress(InsufficientMemoryError, PlanError):
            setting = replace(settings[devices], graph=graph)
            seconds = plan_spmd(setting, counters, views(setting.cluster, setting.rule)[:1])[0].time
            best, found = (seconds, (devices, seconds)) if seconds < best else (best, found)
    return found


def _of_part(asked: Setting, devices: tuple[int, ...]) -> Setting:
    rule, cluster = replace(asked.rule, segments="none"), asked.cluster.part(devices)
    return replace(asked, rule=rule, cluster=cluster, progress=None, old=None, start={}, within=ROUGH)


def parts(cluster: ClusterSpec) -> Iterator[tuple[int, ...]]:
    """Machines, their devices of each type, and one of these; of those that no cost can tell apart the first."""
    seen = {shape_of(cluster, range(cluster.num_devices))}
    for members in cluster.members:
        kinds = dict.fromkeys(cluster.devices[d].type for d in members)
        alike = [tuple(d for d in members if cluster.devices[d].type == kind) for kind in kinds]
        for devices in (members, *alike, *(own[:1] for own in alike)):
            if (shape := shape_of(cluster, devices)) not in seen:
                seen.add(shape)
                yield devices
