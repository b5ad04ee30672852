"""What the memory of each device consists of.

In: a `Pricing`. Out: bytes per kind of device by what they are for, and the moment of the peak. Invariant: the parts sum to `plan.memory`. What is
there all the time is counted by what it is; gradients, activations and temporaries are what is alive besides at the worst moment (see
`hapx.cost.liveness`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hapx.cost.liveness import peak
from hapx.cost.memory import states_of
from hapx.cost.terms import Vector
from hapx.ir import Kind
from hapx.report.pricing import Pricing
from hapx.report.render import new_table, render
from hapx.report.words import devices_text, size_text

PARTS = ("weights", "optimizer", "buffers", "inputs", "at the peak")


def memory_parts(pricing: Pricing) -> tuple[Mapping[str, Vector], tuple[str, ...]]:
    """By the names of PARTS, bytes per kind of device; per kind, the moment of the peak."""
    costs, refs, states = pricing.costs, pricing.graph.refs, states_of(pricing.plan.optimizer)
    stored = {s.name: s.copies[0].placement for s in pricing.plan.storage if s.name in refs}
    found = peak(pricing.plan.stages[0].program, pricing.graph, costs, stored)
    parts: dict[str, Vector] = {name: np.zeros(len(pricing.kinds)) for name in PARTS}
    for name, placement in stored.items():
        ref, part = refs[name], np.array(costs.view.fraction(placement).const)
        parts["buffers" if ref.kind is Kind.BUFFER else "weights"] += part * ref.bytes
        if costs.mode == "train" and ref.requires_grad:
            parts["optimizer"] += part * 4 * states * ref.size
    parts["inputs"] = found.stored - parts["weights"] - parts["optimizer"] - parts["buffers"]
    total = np.array([float(pricing.plan.memory[devices[0]]) for devices in pricing.kinds])
    parts["at the peak"] = total - found.stored
    return parts, found.moments


def memory_table(pricing: Pricing) -> str:
    """One row per group of devices whose memory is alike."""
    parts, moments = memory_parts(pricing)
    shown = [name for name in PARTS if parts[name].any()]
    columns = (*shown, "total", "of")
    table = new_table("device", "type", *columns, right=columns, whole=("device",))
    worst: dict[str, list[int]] = {}
    alike: dict[tuple[str, ...], list[int]] = {}
    for k, devices in enumerate(pricing.kinds):
        for device in devices:
            kind = pricing.plan.cluster.type_of(device)
            sizes = [*(size_text(parts[name][k]) for name in shown), size_text(pricing.plan.memory[device]), size_text(kind.memory)]
            alike.setdefault((kind.name, *sizes), []).append(device)
            worst.setdefault(moments[k], []).append(device)
    for (name, *sizes), members in alike.items():
        table.add_row(devices_text(members), name, *sizes)
    lines = (f"peak of device{'s' if len(own) > 1 else ''} {devices_text(own)}: {moment}" for moment, own in worst.items())
    return "\n".join([render(table), *lines])
