"""A plan that fits is found where one exists, what is accepted fits by its peak, and what is suggested otherwise is true."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from hapx.advice import advised
from hapx.batches import Batches
from hapx.cluster.spec import ClusterSpec
from hapx.cost.memory import RESERVE
from hapx.errors import InsufficientMemoryError
from hapx.graph.captures import Captures, first_rows
from hapx.ir import Graph
from hapx.plan import Plan, key_of
from hapx.planner import plan_graphs, plan_module
from hapx.predict import predictions
from hapx.restriction import Restriction
from hapx.setting import Setting
from hapx.theory.normalise import MixedSamplesWarning
from support.models import GPT
from support.theories import GraphBuilder

DP = Restriction("dp", mesh="flat", ratios="even", storage="as-used", split="batch", remat="none")
ZERO = replace(DP, name="zero-even", storage="sharded")
UNEVEN = replace(DP, name="dp-uneven", ratios="balanced")


def devices(*memory: int) -> ClusterSpec:
    """A device per number of bytes, all of one speed, in one machine with quick links."""
    types = {f"card{m}": {"flops": "1e9", "memory": m, "memory_bandwidth": "10 GB/s"} for m in memory}
    machines = [{"name": "m", "devices": [f"card{m}" for m in memory], "intra": {"bandwidth": "100 GB/s", "latency": "1 us"}}]
    return ClusterSpec.load(
        {"name": "c", "machines": machines, "device_types": types, "network": {"inter": {"bandwidth": "1 GB/s", "latency": "1 us"}}}
    )


def layers(rows: int, width: int, depth: int = 3) -> Graph:
    """Linear layers and GELU, summed."""
    b = GraphBuilder()
    b.tensor("x", (rows, width))
    before = "x"
    for i in range(depth):
        b.parameter(f"w{i}", width, width)
        b.call(f"h{i}", "aten.linear.default", (rows, width), input=before, weight=f"w{i}", bias=None)
        b.call(f"g{i}", "aten.gelu.default", (rows, width), self=f"h{i}", approximate="none")
        before = f"g{i}"
    b.call("loss", "aten.sum.default", (), self=before, dtype=None)
    return b.graph("loss")


ROOMY = 2**40


def peak(graph: Graph, rule: Restriction, devices_: int = 2) -> int:
    """Of the fullest device, where memory is plenty."""
    return max(plan_graphs([graph], devices(*[ROOMY] * devices_), strategy=rule).memory)


def card(used: float) -> int:
    """Memory of a device of which so much can be used."""
    return round(used / (1 - RESERVE)) + 1


def fits(plan: Plan) -> bool:
    assert predictions(plan)[1] == plan.memory
    return all(used <= (1 - RESERVE) * plan.cluster.type_of(d).memory * (1 + 1e-9) for d, used in enumerate(plan.memory))


def test_only_sharded_storage_fits():
    graph = layers(rows=8, width=256)
    small, large = peak(graph, ZERO), peak(graph, DP)
    assert small < 0.8 * large
    on = devices(*[card((small + large) / 2)] * 2)
    with pytest.raises(InsufficientMemoryError):
        plan_graphs([graph], on, strategy=DP)
    assert fits(plan_graphs([graph], on, strategy=replace(DP, name="stored anyhow", storage="auto")))
    assert fits(plan_graphs([graph], on))


def test_only_uneven_shares_fit():
    """A small card that cannot hold half of the activations."""
    graph = layers(rows=1024, width=32)
    even = peak(graph, DP)
    on = devices(card(2 * even), card(0.75 * even))
    with pytest.raises(InsufficientMemoryError, match="device 1"):
        plan_graphs([graph], on, strategy=DP)
    plan = plan_graphs([graph], on, strategy=UNEVEN)
    assert fits(plan)
    assert plan.shares[0] > plan.shares[1] > 0


def test_only_both_fit():
    """Neither shards of parameters with equal shares nor unequal shares of whole parameters fit, but both together."""
    graph = layers(rows=768, width=128)
    both = replace(ZERO, name="both", ratios="balanced", storage="auto")
    sharded, whole = peak(graph, ZERO), peak(graph, DP)
    found = []
    for used in (0.8, 0.7):
        on = devices(card(1.2 * whole), card(used * sharded))
        outcomes = []
        for rule in (ZERO, UNEVEN, both):
            try:
                outcomes.append(fits(plan_graphs([graph], on, strategy=rule)))
            except InsufficientMemoryError:
                outcomes.append(None)
        found.append(tuple(outcomes))
    assert (None, None, True) in found, found


def test_the_last_byte_is_used():
    """What fits is decided by the peak, not by the sum of everything that is ever kept."""
    for graph in (layers(rows=512, width=64, depth=4), layers(rows=8, width=256)):
        used = peak(graph, DP)
        assert fits(plan_graphs([graph], devices(*[card(used)] * 2), strategy=DP))
        with pytest.raises(InsufficientMemoryError):
            plan_graphs([graph], devices(*[card(0.97 * used)] * 2), strategy=DP)


def test_the_error_says_what_lacks_and_what_helps():
    """Every suggestion is carried out."""
    graph = layers(rows=8, width=256)
    memory = card(0.9 * peak(graph, DP))
    with pytest.raises(
        InsufficientMemoryError, match=r"devices 0, 1: no program fits: .* needs [\d.]+ MiB there .* [\d.]+ KiB lack; what fits: "
    ) as raised:
        plan_graphs([graph], devices(memory, memory), strategy=DP)
    hint = raised.value.hint or ""
    assert 'strategy="auto"' in hint and fits(plan_graphs([graph], devices(memory, memory), strategy="auto"))
    assert "SGD with momentum instead of adamw" in hint
    assert fits(plan_graphs([graph], devices(memory, memory), strategy=DP, optimizer="sgd-momentum"))
    assert "remat" not in hint  # there are no blocks
    needed = re.search(r"([\d.]+) MiB on each card", hint)
    assert needed is not None
    assert fits(plan_graphs([graph], devices(*[round(float(needed[1]) * 2**20 * 1.01)] * 2), strategy=DP))


def test_a_smaller_batch_is_tried():
    model, rule = GPT(13, 16, 2, 2, 16), replace(DP, name="dp", remat="none")

    def planned(batch: int, memory: int) -> Plan:
        return plan_module(model, devices(memory, memory), model.example(batch), strategy=rule)

    memory = card(max(planned(8, ROOMY).memory) * 1.05)
    with pytest.raises(InsufficientMemoryError, match="a batch of 8") as raised:
        planned(32, memory)
    assert 'remat="blocks"' not in (raised.value.hint or "") or fits(
        plan_module(model, devices(memory, memory), model.example(32), strategy=replace(rule, remat="blocks"))
    )
    assert fits(planned(8, memory))


class Normed(nn.Module):
    """Convolutions with batch norms between them: as micro-batches they train otherwise than as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_micro_batches_that_would_train_otherwise_are_named():
    """They are never chosen unasked; asked for, they are planned. More of them than were asked for are named, too."""
    inputs = (torch.zeros(32, 8, 16, 16),)

    def planned(memory: int, micro_batches: int | str) -> Plan:
        return plan_module(Normed(), devices(memory, memory), inputs, micro_batches=micro_batches)

    memory = card(max(plan_module(Normed(), devices(ROOMY, ROOMY), inputs, remat="blocks", micro_batches=1).memory) * 0.4)
    with pytest.raises(InsufficientMemoryError, match="a batch of") as raised:
        planned(memory, "auto")
    named = re.search(r"micro_batches=(\d+) \(with which aten.batch_norm.default sees one micro-batch only\)", raised.value.hint or "")
    assert named is not None, raised.value.hint
    number = int(named[1])
    with pytest.warns(MixedSamplesWarning):
        assert fits(planned(memory, number))
    with pytest.raises(InsufficientMemoryError, match=f"micro_batches={number} "):
        planned(memory, number // 2)


@pytest.mark.parametrize(
    "times, rows, numbers, optimizers",
    [(1.2, [16, 8, 4], [2, 4, 8, 16, 32], ["sgd-momentum", "sgd"]), (2.0, [16, 8, 4], [2, 4, 8, 16, 32], ["sgd"]), (5.0, [4], [8, 16, 32], [])],
)
def test_what_cannot_help_is_not_tried(times, rows, numbers, optimizers):
    """A quarter of a batch needs no less than a quarter of the memory; other optimizers save no more than states take."""
    model, tried = GPT(13, 16, 2, 2, 16), []

    def attempt(setting: Setting) -> InsufficientMemoryError | None:
        tried.append((setting.graph.batch, setting.optimizer, setting.repeats))
        return error

    error = InsufficientMemoryError("too much", times=times)
    captures = Captures(model, model.example(32))
    graph = captures.whole()
    setting = Setting(graph, key_of(graph), devices(2**20, 2**20), DP, "fp32", "adamw")
    assert not [*Batches(captures, graph, 1, in_parts=True).that_fit(setting, error, attempt)]
    assert [b for b, _, n in tried if n == 1] == rows and [n for _, _, n in tried if n > 1] == numbers
    tried.clear()
    advised(error, setting, attempt)
    assert [o for _, o, _ in tried if o != "adamw"] == optimizers


def test_rows_of_example_inputs():
    x, y = torch.zeros(8, 3), torch.zeros(3)
    a, b = first_rows([x, {"y": y, "x": x}], 8, 2)
    assert (a.shape, b["y"].shape, b["x"].shape) == ((2, 3), (3,), (2, 3))
    assert first_rows((7, x), 8, 4)[0] == 7
