"""What is said to lack memory cannot be held by all devices together; what has a plan is never said to lack it."""

from __future__ import annotations

from dataclasses import replace

import torch

from hapx.cluster.spec import ClusterSpec
from hapx.graph.capture import capture
from hapx.ir import Graph, Kind
from hapx.planner import key_of, plan_graphs
from hapx.restriction import AUTO
from hapx.scarcity import lacks_memory
from hapx.setting import Setting
from hapx.theory.discover import discover
from support.clusters import FOUR
from support.models import MLP


def with_memory(size: float) -> ClusterSpec:
    return replace(FOUR, device_types={name: replace(kind, memory=size) for name, kind in FOUR.device_types.items()})


def setting(graph: Graph, memory: float) -> Setting:
    return Setting(graph, key_of(graph), with_memory(memory), AUTO, "fp32", "adamw")


def test_lacking_memory() -> None:
    model = MLP((64, 64, 64, 64), dtype=torch.float32)
    graph = discover(capture(model, model.example(8)))
    held = sum(16.0 * ref.size for ref in graph.of_kind(Kind.PARAMETER))  # with gradients and the optimizer's state, in float32
    assert lacks_memory(setting(graph, 0.9 * held / 4))
    roomy = 2.5 * held / 4
    assert not lacks_memory(setting(graph, roomy))
    plan = plan_graphs([graph], with_memory(roomy), advise=False)
    assert max(plan.memory) <= roomy
    assert not lacks_memory(setting(graph, 1e9))
