"""What `hapx show` says of a plan: every number is computed again here, from the plan and the cluster's own numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil, log2

import numpy as np
import pytest

import hapx
from hapx.errors import HapError
from hapx.layout import local_shape
from hapx.lower import Candidate
from hapx.plan import Plan
from hapx.predict import predictions
from hapx.report.memory import PARTS, memory_parts, memory_table
from hapx.report.messages import Traffic, traffic, traffic_table
from hapx.report.phases import CAUSES, phases, phases_table
from hapx.report.pricing import Pricing, cost_model
from hapx.report.show import SECTIONS, layers_table, overview
from hapx.report.split import split_of, time_table
from hapx.report.words import size_text, time_text
from hapx.restriction import AUTO, BASELINES
from hapx.simulate import simulate
from hapx.transposes import COLLECTIVES
from support.models import GPT, MLP
from support.plans import flat, mlp_batch_split, mlp_tensor_parallel, mlp_two_level, place, sharded

WIDTHS = (64, 256, 10)
INSIDE, BETWEEN = (1.25e9, 10e-6), (1.25e8, 100e-6)  # B/s and s of `support.plans.cluster`
FLOPS, MEMORY, LAUNCH = 0.5e10, 1e10, 5e-6  # of its devices: half of the peak, B/s, s
BUCKET = 25 * 2**20
MODULES = ("blocks.0", "", "blocks.1", "")


def named(plan: Plan) -> Plan:
    """With module paths, as captured graphs have them."""
    graph = plan.graphs[plan.first]
    return replace(plan, graphs={plan.first: replace(graph, nodes=tuple(replace(n, module=m) for n, m in zip(graph.nodes, MODULES, strict=True)))})


def free_weight() -> Plan:
    """Four devices, batch 4:2:1:1, the first weight in shards that are gathered for use and freed."""
    return named(mlp_batch_split(WIDTHS, (4, 2, 1, 1), stored={"layers.0.weight": place(sharded(flat(4), 0, 256))}, free=True))


def all_reduce(size: float, devices: int, link: tuple[float, float]) -> float:
    return 2 * (devices - 1) / devices * size / link[0] + 2 * ceil(log2(devices)) * link[1]


def synchronise(size: float, devices: int, link: tuple[float, float], part: int = 1) -> float:
    """An all-reduce of a part of a gradient; it pays the gradient's part of a bucket's latency."""
    return 2 * (devices - 1) / devices * size / part / link[0] + 2 * ceil(log2(devices)) * link[1] * min(1.0, size / BUCKET)


def gather(largest: float, devices: int, link: tuple[float, float]) -> float:
    """Padded: every piece is as large as the largest."""
    return (devices - 1) * largest / link[0] + ceil(log2(devices)) * link[1]


def row(found: tuple[Traffic, ...], layer: str, what: str, direction: str, collective: str) -> Traffic:
    (one,) = [t for t in found if (t.layer, t.what, t.direction, t.collective) == (layer, what, direction, collective)]
    return one


# ---- communication -------------------------------------------------------------------------------------------------------


def test_messages_of_one_axis() -> None:
    found = traffic(Pricing.of(free_weight()))
    weight, largest = 256 * 64 * 8, 128 * 64 * 8  # 4 of 8 samples, so half of 256 rows
    for direction, collective in (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")):
        t = row(found, "blocks.0", "weights", direction, collective)
        assert (t.size, t.times, t.crosses) == (weight, 1, False)
        assert t.seconds == pytest.approx(gather(largest, 4, INSIDE))
        assert t.volume == pytest.approx(3 * largest / INSIDE[0])
    bias = row(found, "blocks.0", "gradients", "synchronise", "all_reduce")
    assert (bias.size, bias.seconds) == (256 * 8, pytest.approx(synchronise(256 * 8, 4, INSIDE)))
    both = row(found, "blocks.1", "gradients", "synchronise", "all_reduce")  # weight and bias of a module are one row
    assert both.size == (10 * 256 + 10) * 8
    assert both.seconds == pytest.approx(synchronise(10 * 256 * 8, 4, INSIDE) + synchronise(80, 4, INSIDE))
    loss = row(found, "", "loss", "forward", "all_reduce")
    assert (loss.size, loss.seconds) == (8, pytest.approx(all_reduce(8, 4, INSIDE)))
    assert len(found) == 6
    assert [t.total for t in found] == sorted((t.total for t in found), reverse=True)


def test_table_of_one_axis() -> None:
    pricing = Pricing.of(free_weight())
    each, loss = gather(128 * 64 * 8, 4, INSIDE), all_reduce(8, 4, INSIDE)
    one, two = synchronise(2048, 4, INSIDE), synchronise(20480, 4, INSIDE) + synchronise(80, 4, INSIDE)
    lines = traffic_table(traffic(pricing), pricing.words).splitlines()
    of_bytes = [f"inside: bytes {1.5 * size / INSIDE[0] / seconds:.0%}" for size, seconds in ((20560, two), (2048, one))]
    assert re.split(r"  +", lines[0]) == ["layer", "what", "collective, forward / backward", "bytes", "time", "times", "total", "limited by"]
    assert [re.split(r"  +", line) for line in lines[2:]] == [
        ["blocks.0", "weights", "all-gather / all-gather + reduce-scatter", "128 KiB", time_text(each), "3", time_text(3 * each),
         f"inside: bytes {1 - 20e-6 / each:.0%}"],
        ["(model)", "loss", "all-reduce / -", "8 B", time_text(loss), "1", time_text(loss), "inside: latency 100%"],
        ["blocks.1", "gradients", "- / all-reduce", size_text(20560), time_text(two), "1", time_text(two), of_bytes[0]],
        ["blocks.0", "gradients", "- / all-reduce", "2 KiB", time_text(one), "1", time_text(one), of_bytes[1]],
    ]  # fmt: skip
    short = traffic_table(traffic(pricing), pricing.words, 1).splitlines()
    assert re.split(r"  +", short[2]) == re.split(r"  +", lines[2])
    assert short[3] == f"and 3 more that take {time_text(loss + one + two)} together"


def test_messages_of_two_axes() -> None:
    """Two machines of two: samples 6:2 over machines, hidden units over the devices inside."""
    plan = named(mlp_two_level(WIDTHS, (6, 2), 2))
    pricing = Pricing.of(plan)
    found = traffic(pricing)
    # both devices of a machine synchronise through one card, each its half
    card = (BETWEEN[0] / 2, BETWEEN[1])
    first = row(found, "blocks.0", "gradients", "synchronise", "all_reduce")
    assert first.crosses and first.size == (256 * 64 + 256) * 8 / 2
    assert first.seconds == pytest.approx(synchronise(256 * 64 * 8, 2, card, 2) + synchronise(256 * 8, 2, card, 2))
    inner = row(found, "", "activations", "forward", "all_reduce")
    assert not inner.crosses and inner.axis == 1
    assert inner.size == 6 * 10 * 8  # of the machine with more samples
    assert inner.seconds == pytest.approx(all_reduce(6 * 10 * 8, 2, INSIDE))
    text = traffic_table(found, pricing.words)
    assert re.findall(r"^blocks.0 +gradients +- / all-reduce +machines ", text, re.MULTILINE)
    assert "network: bytes" in text and "inside: latency" in text
    assert max(map(len, text.splitlines())) <= 120


def test_bytes_are_those_of_local_shapes() -> None:
    plan = free_weight()
    mesh, lengths = plan.stages[0].mesh, plan.stages[0].lengths[plan.first]
    for step in Pricing.of(plan).steps:
        for m in step.messages:
            ref = plan.graphs[plan.first].refs[m.tensor]
            whole = step.instruction.triple.post[0].placement
            sizes = [np.prod(local_shape(ref.shape, whole, mesh.sizes, lengths, (c,))) * 8 for c in range(4)]
            assert m.size == max(sizes)


# ---- time ----------------------------------------------------------------------------------------------------------------


def test_times_of_devices_sum_to_the_iteration() -> None:
    plan = free_weight()
    timeline = simulate(plan)
    for device in range(4):
        s = split_of(timeline, device)
        assert s.forward + s.backward + s.update + s.communication + s.synchronisation + s.waiting == pytest.approx(plan.iteration_time)
    exact = Pricing.of(plan)
    (first, *_) = exact.kinds
    forward = sum(s.cost.forward.at({})[0] for s in exact.steps if s.cost.forward is not None)
    lines = time_table(plan, timeline).splitlines()
    assert first == (0,)
    assert re.split(r"  +", lines[2])[:3] == ["0", "thing", time_text(forward)]
    assert [re.split(r"  +", line)[0] for line in lines[2:]] == ["0", "1", "2-3"]


def test_layers_with_their_seconds() -> None:
    plan = free_weight()
    flops, moved = 2 * 4 * 64 * 256, (4 * 64 + 256 * 64 + 256 + 4 * 256) * 8  # device 0 has 4 samples
    forward = max(flops / FLOPS, moved / MEMORY) + LAUNCH
    backward = max(flops / FLOPS, 2 * moved / MEMORY) + 2 * LAUNCH  # no gradient of the input: weight and bias
    # shards of unequal length are put together twice, gradients padded and put together; the bias passes a bucket
    copied = (8 * 256 + 2 * 128) * 64 * 8 / MEMORY + 5 * LAUNCH + 2 * 256 * 8 / MEMORY + 2 * LAUNCH
    sync = synchronise(256 * 8, 4, INSIDE)
    lines = layers_table(Pricing.of(plan)).splitlines()
    assert re.split(r"  +", lines[0]) == ["layer", "weights", "activations", "compute", "comm.", "sync"]
    cells = re.split(r"  +", lines[2])
    assert cells == [
        "blocks.0", "weight: stored 128:64:32:32", "batch split 4:2:1:1", time_text(forward + backward + copied),
        time_text(3 * gather(128 * 64 * 8, 4, INSIDE)), time_text(sync),
    ]  # fmt: skip


def test_phases_sum_to_the_cost_of_the_search() -> None:
    """t(Q, B) of the planner, at the plan's lengths, is the sum over its phases."""
    model = MLP((16, 4096, 8))
    plan = hapx.plan(model, CLUSTER, example_inputs=model.example(96), strategy=replace(BASELINES["auto"], mesh="flat"))
    found = phases(Pricing.of(plan))
    assert sum(p.total for p in found) == pytest.approx(plan.statistics["cost"], rel=1e-9)
    for p in found:
        assert sum(p.causes) == pytest.approx(p.seconds)
        assert min(p.causes) >= 0
    assert {p.direction for p in found} >= {"forward", "backward", "update"}


CLUSTER = {
    "name": "two-kinds",
    "machines": [{"name": "new", "device": "V100-SXM2-16GB", "devices": 1}, {"name": "old", "device": "P100-SXM2-16GB", "devices": 2}],
    "network": {"inter": {"bandwidth": "10 Gbit/s", "latency": "50 us"}, "intra": {"bandwidth": "150 GB/s", "latency": "5 us"}},
}


def test_what_bounds_phases() -> None:
    """Tensor parallelism: forward computes until the partial sums are added."""
    pricing = Pricing.of(named(mlp_tensor_parallel(WIDTHS, (160, 32, 32, 32), 8)))
    first, second, backward, update = phases(pricing)
    assert first.direction == "forward" and first.devices == (0,) and first.begins == ()
    products = [2 * 8 * 160 * 64 / FLOPS, 2 * 8 * 160 * 10 / FLOPS]
    memory = [(8 * 64 + 160 * 64 + 160 + 8 * 160) * 8 / MEMORY, (8 * 160 + 160 * 10 + 10 + 8 * 10) * 8 / MEMORY]
    gelu = 2 * 8 * 160 * 8 / MEMORY
    by_products = sum(f for f, b in zip(products, memory, strict=True) if f >= b)
    by_memory = gelu + sum(b for f, b in zip(products, memory, strict=True) if f < b)
    assert first.causes == pytest.approx((by_products, by_memory, 3 * LAUNCH, 0.0))
    assert CAUSES == ("products", "memory", "launches", "links")
    (reduced,) = second.begins
    assert (reduced.collective, second.waits) == ("all_reduce", pytest.approx(all_reduce(8 * 10 * 8, 4, INSIDE)))
    assert (backward.begins, update.direction) == ((), "update")
    lines = phases_table(pricing, (first, second, backward, update)).splitlines()
    assert re.split(r"  +", lines[2])[:2] == ["forward blocks.0 .. blocks.1", "-"]
    shares = sorted(((c / first.seconds, name) for c, name in zip(first.causes, CAUSES, strict=True)), reverse=True)
    assert lines[2].endswith("thing 0: " + ", ".join(f"{name} {share:.0%}" for share, name in shares[:2] if share >= 0.05))
    assert lines[3].endswith("inside: latency 98%") and "all-reduce of" in lines[3]


# ---- memory --------------------------------------------------------------------------------------------------------------


def test_memory_parts_sum_to_the_memory_of_the_plan() -> None:
    plan = free_weight()
    pricing = Pricing.of(plan)
    parts, moments = memory_parts(pricing)
    for k, devices in enumerate(pricing.kinds):
        assert sum(parts[name][k] for name in PARTS) == pytest.approx(plan.memory[devices[0]], abs=1)
    rows = 128 * 64 + 256 + 10 * 256 + 10  # elements on device 0: half of the first weight, the rest whole
    assert parts["weights"][0] == pytest.approx(rows * 8)
    assert parts["optimizer"][0] == pytest.approx(rows * 8)  # two numbers of four bytes
    assert not parts["buffers"].any() and (parts["inputs"] > 0).all() and (parts["at the peak"] > 0).all()
    text = memory_table(pricing)
    cells = re.split(r"  +", text.splitlines()[2])
    assert cells[:4] == ["0", "thing", *[size_text(rows * 8)] * 2]
    assert cells[-2:] == [size_text(plan.memory[0]), "4 GiB"]
    assert moments[0] in text


# ---- the whole -----------------------------------------------------------------------------------------------------------


STRATEGIES = {
    "auto": replace(AUTO, max_stages=1),
    "zero": BASELINES["zero"],
    "tensor-parallel": BASELINES["tensor-parallel"],
    "sfb": replace(AUTO, name="sfb", sfb="always", mesh="flat", split="batch", max_stages=1),
    "blocks": replace(AUTO, name="blocks", remat="blocks", mesh="flat", max_stages=1),
    "freed": replace(BASELINES["zero"], name="freed", storage="sharded-free"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_kind_of_program_is_explained(name: str) -> None:
    """Composites, rematerialised blocks, sufficient factors, weights that are freed: every collective has a name, sums are those of the plan."""
    model = GPT(96, 64, 4, 2, 16)
    plan = hapx.plan(model, CLUSTER, example_inputs=model.example(12), strategy=STRATEGIES[name])
    pricing = Pricing.of(plan)
    for step in pricing.steps:
        assert len(step.messages) == len(step.cost.communication)
        for m, c in zip(step.messages, step.cost.communication, strict=True):
            assert m.collective in COLLECTIVES
            assert (m.direction, m.cuts) == (c.direction, c.cuts)
            assert m.seconds == pytest.approx(float(c.term.at({}).max())) and 0 <= m.volume <= m.seconds
    assert sum(p.total for p in phases(pricing)) >= plan.iteration_time * (1 - 1e-9)  # overlap only shortens it
    parts, _ = memory_parts(pricing)
    total = sum(parts[part] for part in PARTS)
    assert [round(total[k]) for k, devices in enumerate(pricing.kinds) for _ in devices] == pytest.approx(
        [plan.memory[d] for devices in pricing.kinds for d in devices], abs=1
    )
    for text in (overview(plan), *(section(plan) for section in SECTIONS.values())):
        assert max(map(len, text.splitlines())) <= 120
    if name == "sfb":
        assert "factors" in traffic_table(traffic(pricing), pricing.words)


def test_plans_of_several_stages_are_not_explained() -> None:
    plan = free_weight()
    with pytest.raises(HapError, match="2 stages"):
        Pricing.of(replace(plan, stages=plan.stages * 2))


@pytest.mark.parametrize("plan", [free_weight(), named(mlp_two_level(WIDTHS, (6, 2), 2))], ids=["flat", "2x2"])
def test_the_text_is_ascii_and_not_wider_than_120_columns(plan: Plan) -> None:
    for text in (overview(plan), *(section(plan) for section in SECTIONS.values())):
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 120
        assert all(line == line.rstrip() for line in text.splitlines())
    heads = [section.splitlines()[0] for section in overview(plan).split("\n\n")]
    assert heads[0].startswith("plan for by-hand: 4 devices")
    assert any(h.startswith("predicted iteration: ") for h in heads)
    assert "memory" in heads and any(h.startswith("communication, the most expensive of ") for h in heads)


def test_pricing_is_the_planners() -> None:
    """The recording links change no number: memory and time are those of the plan."""
    plan = free_weight()
    time, memory, _ = predictions(plan)
    costs = cost_model(plan)
    assert [type(links).__name__ for links in costs.links] == ["RecordingLinks"]
    graph = plan.graphs[plan.first]
    again = Candidate(costs.theory, costs, plan.stages[0].program, {}, plan.stages[0].lengths[plan.first], {}, 0.0, 0.0)
    assert again.mesh == plan.stages[0].mesh and costs.graph is graph
    assert (time, memory) == (plan.iteration_time, plan.memory)
