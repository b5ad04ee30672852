"""What the memory of each device consists of.

In: a `Pricing`. Out: bytes per kind of device by what they are for. Invariant: the parts sum to `plan.memory`; what the cost model counts beyond
stored tensors, activations and gathered weights is "transient".
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hapx.cost.memory import states_of
from hapx.cost.terms import Vector
from hapx.ir import Kind, OpCall
from hapx.report.pricing import Pricing
from hapx.report.render import new_table, render
from hapx.report.words import ranges_text, size_text

PARTS = ("weights", "gradients", "optimizer", "buffers", "activations", "gathered weights", "transient")


def memory_parts(pricing: Pricing) -> Mapping[str, Vector]:
    """By the names of PARTS, bytes per kind of device."""
    costs, refs, states = pricing.costs, pricing.graph.refs, states_of(pricing.plan.optimizer)
    parts: dict[str, Vector] = {name: np.zeros(len(pricing.kinds)) for name in PARTS}
    for stored in pricing.plan.storage:
        if stored.name not in refs:  # of a further program
            continue
        ref = refs[stored.name]
        held = costs.storage(ref, stored.copies[0].placement).at({})
        if ref.kind is Kind.BUFFER:
            parts["buffers"] += held
        elif costs.mode == "train" and ref.requires_grad:
            of = {"weights": ref.bytes, "gradients": ref.bytes, "optimizer": 4 * states * ref.size}
            for name, size in of.items():
                parts[name] += held * size / max(sum(of.values()), 1)
        else:
            parts["weights"] += held
    for step in pricing.steps:
        if step.cost.memory is None:
            continue
        parameter = not isinstance(step.instruction.triple.body, OpCall) and refs[step.instruction.triple.post[0].tensor].kind is Kind.PARAMETER
        parts["gathered weights" if parameter else "activations"] += step.cost.memory.at({})
    total = np.array([float(pricing.plan.memory[devices[0]]) for devices in pricing.kinds])
    rest = total - sum(parts.values())
    parts["transient"] = np.where(np.abs(rest) > 1.0, rest, 0.0)  # plan.memory is in whole bytes
    return parts


def memory_table(pricing: Pricing) -> str:
    """One row per group of devices whose memory is alike."""
    parts = memory_parts(pricing)
    shown = [name for name in PARTS if parts[name].any()]
    columns = (*shown, "total", "of")
    table = new_table("device", "type", *columns, right=columns)
    alike: dict[tuple[str, ...], list[int]] = {}
    for k, devices in enumerate(pricing.kinds):
        for device in devices:
            kind = pricing.plan.cluster.type_of(device)
            sizes = [*(size_text(parts[name][k]) for name in shown), size_text(pricing.plan.memory[device]), size_text(kind.memory)]
            alike.setdefault((kind.name, *sizes), []).append(device)
    for (name, *sizes), members in alike.items():
        table.add_row(ranges_text(members), name, *sizes)
    return render(table)
