"""The simulator: consistent with the additive cost where nothing overlaps, shorter where gradients are synchronised beside backward."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from hapx.buckets import BUCKET_BYTES
from hapx.cluster.spec import ClusterSpec, Link
from hapx.cost.model import CostModel
from hapx.graph.capture import capture
from hapx.ir import Graph, OpCall
from hapx.plan import VERSION, Instruction, Plan, Program, Stage
from hapx.planner import plan_graphs
from hapx.predict import Staged
from hapx.restriction import AUTO, Restriction
from hapx.simulate import WAYS, iteration_time, simulate, simulate_program, stage_times
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Cut
from support.clusters import slow_devices
from support.models import CNN
from support.theories import cluster, converted, data_parallel, described, device_type, flat, mlp, placed, split, triple, two_level

FAST, SLOW = device_type("fast", 4e12, latency=1e-6), device_type("slow", 1e12, latency=2e-6)
FOUR = cluster([("fast",), ("fast",), ("slow",), ("slow",)], [FAST, SLOW])
LENGTHS = [(16, 16, 16, 16), (24, 24, 8, 8), (32, 32, 0, 0), (30, 26, 5, 3)]


def graph() -> Graph:
    return mlp(batch=64, width=512, hidden=2048)


def model(g: Graph, program: Program, spec: ClusterSpec = FOUR) -> CostModel:
    return CostModel(described(g, program.mesh), spec, "fp32", "sgd", "train")


def additive(program: Program, g: Graph, cost: CostModel, lengths: Mapping[Cut, tuple[int, ...]]) -> float:
    """The planner's cost: per direction, collectives that cut plus the slowest kind of every phase; plus synchronisation and update."""
    exact = cost.at_lengths(lengths)
    total, pending = 0.0, {"forward": np.zeros(len(exact.kinds)), "backward": np.zeros(len(exact.kinds))}
    for i in program.instructions:
        step = exact.instruction(i.triple) if isinstance(i.triple.body, OpCall) else _convert(exact, g, i)
        for c in step.communication:
            value = c.term.at({})
            if c.direction == "synchronise":
                total += value.max()
            elif c.cuts:
                total += value.max() + pending[c.direction].max()
                pending[c.direction] = np.zeros(len(exact.kinds))
            else:
                pending[c.direction] = pending[c.direction] + value
        for direction, term in (("forward", step.forward), ("backward", step.backward)):
            if term is not None:
                pending[direction] = pending[direction] + term.at({})
    return total + sum(p.max() for p in pending.values()) + float(_update(program, g, exact).max())


def _convert(cost: CostModel, g: Graph, i: Instruction):
    post = i.triple.post[0]
    return cost.conversion(g.refs[post.tensor], i.triple.body, post.placement)  # type: ignore[arg-type]


def _update(program: Program, g: Graph, exact: CostModel) -> np.ndarray:
    return sum((exact.update(g.refs[p.tensor], p.placement).at({}) for p in program.needs), np.zeros(len(exact.kinds)))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_without_synchronisation_it_is_the_additive_cost(lengths: tuple[int, ...]):
    """Slow devices are the slowest in every phase here, or the fast ones are: nothing can be hidden."""
    g = graph()
    program = data_parallel(g, flat(4), synchronised=False)
    cost, where = model(g, program), {Cut(program.mesh.row(0), 64): lengths}
    total = simulate_program(program, g, cost, where).total
    assert total <= additive(program, g, cost, where) * (1 + 1e-12)
    if lengths != (24, 24, 8, 8):
        # the loss is cloned before backward begins, where the kind whose kernels start late may be another one than in backward
        launch = max(cost.launch) - min(cost.launch)
        assert total == pytest.approx(additive(program, g, cost, where), rel=1e-9, abs=1.001 * launch)


@pytest.mark.parametrize("lengths", LENGTHS[:3])
def test_costs_in_shares_and_at_lengths_agree(lengths: tuple[int, ...]):
    """The search and the balancer see shares, the simulator lengths: the same numbers where a kind's coordinates have equal lengths."""
    g = graph()
    program = data_parallel(g, flat(4), synchronised=False)
    cost, where = model(g, program), {Cut(program.mesh.row(0), 64): lengths}
    shares, exact = cost.lengths_to_shares(where), cost.at_lengths(where)
    compared = 0
    for i in program.instructions:
        if isinstance(i.triple.body, OpCall):
            x, y = cost.instruction(i.triple), exact.instruction(i.triple)
            for a, b in ((x.forward, y.forward), (x.backward, y.backward), (x.memory, y.memory)):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert a.at(shares) == pytest.approx(b.at({}))
                    compared += 1
    assert compared >= 10


def test_synchronisation_hides_behind_backward_but_not_entirely(monkeypatch: pytest.MonkeyPatch):
    g = graph()
    program = data_parallel(g, flat(4))
    spec = cluster([("fast",), ("fast",), ("slow",), ("slow",)], [FAST, SLOW], inter=Link(1e11, 1e-6))
    cost, where = model(g, program, spec), {Cut(program.mesh.row(0), 64): (24, 24, 8, 8)}
    late = simulate_program(program, g, cost, where)
    monkeypatch.setattr(import_module("hapx.simulate"), "BUCKET_BYTES", 1)  # every parameter a bucket
    early = simulate_program(program, g, cost, where)
    unsynchronised = simulate_program(data_parallel(g, flat(4), synchronised=False), g, cost, where)
    assert unsynchronised.total < early.total <= late.total <= additive(program, g, cost, where) * (1 + 1e-12)


def test_a_full_bucket_runs_beside_backward():
    """w2's gradient is there before the first layer's backward, which hides its synchronisation."""
    g = mlp(batch=64, width=2048, hidden=8192)  # 64 MB per parameter: one bucket each
    program = data_parallel(g, flat(4))
    # parameters are converted just before their first use, as the planner does
    steps = program.instructions
    program = replace(program, instructions=(steps[0], steps[1], *steps[3:5], steps[2], *steps[5:]))
    spec = cluster([("fast",), ("fast",), ("slow",), ("slow",)], [FAST, SLOW], inter=Link(1e12, 1e-6))
    timeline = simulate_program(program, g, model(g, program, spec), {Cut(program.mesh.row(0), 64): (24, 24, 8, 8)})
    spans = timeline.spans[2]
    buckets = [s for s in spans if s.name.startswith("synchronise")]
    assert [s.name for s in buckets] == ["synchronise bucket 0", "synchronise bucket 1"]
    last = next(s for s in spans if s.name == "aten.linear h backward")
    assert buckets[0].start < last.stop
    assert buckets[0].stop <= buckets[1].start
    assert buckets[1].start >= last.stop


def test_a_collective_starts_when_the_last_device_arrives():
    g = graph()
    program = data_parallel(g, flat(4), synchronised=False)
    timeline = simulate_program(program, g, model(g, program), {Cut(program.mesh.row(0), 64): (16, 16, 16, 16)})
    ends = {d: next(s.stop for s in spans if s.name == "aten.sum loss") for d, spans in timeline.spans.items()}
    starts = {d: next(s.start for s in spans if s.stream == "communication") for d, spans in timeline.spans.items()}
    assert ends[0] < ends[2]
    assert set(starts.values()) == {ends[2]}


def test_an_inner_collective_does_not_wait_for_other_machines():
    g, mesh = mlp(batch=64, width=512, hidden=2048), two_level(2, 2)
    rows, columns = split(mesh, 0, 0, 64), split(mesh, 1, 1, 2048)
    weight = split(mesh, 1, 0, 2048)
    where = {"x": placed(rows, REPLICATED), "w1": placed(REPLICATED, weight), "h": placed(rows, columns), "a": placed(rows, columns)}
    where |= {"w2": placed(REPLICATED, columns), "y": placed(rows, PARTIAL)}
    work = (rows.cut, columns.cut)
    steps = [triple(g, 0, where, work), triple(g, 1, where, work), triple(g, 2, where, work), converted("y", where["y"], placed(rows, REPLICATED))]
    program = replace(data_parallel(g, flat(4)), mesh=mesh, instructions=tuple(map(Instruction, steps)), needs=())
    spec = cluster([("fast", "fast"), ("slow", "slow")], [FAST, SLOW])
    lengths = {rows.cut: (32, 32)}
    timeline = simulate_program(program, g, model(g, program, spec), lengths)
    starts = {d: next(s.start for s in spans if s.stream == "inside") for d, spans in timeline.spans.items()}
    assert starts[0] == starts[1] < starts[2] == starts[3]
    assert timeline.total == pytest.approx(additive(program, g, model(g, program, spec), lengths))


def test_an_inner_collective_does_not_wait_for_gradients_on_their_way():
    """The gradient of w2 goes between machines while that of w1 is scattered inside of them."""
    g, mesh = mlp(batch=64, width=2048, hidden=8192), two_level(2, 2)  # 64 MB per parameter: one bucket each
    rows, inner = split(mesh, 0, 0, 64), split(mesh, 1, 0, 8192)
    whole = placed(rows, REPLICATED)
    used = placed(REPLICATED, REPLICATED)
    where = {"x": whole, "w1": used, "h": whole, "a": whole, "w2": used, "y": whole}
    work = (rows.cut, None)
    steps = [
        converted("w1", placed(INVARIANT, inner), used), triple(g, 0, where, work), triple(g, 1, where, work),
        converted("w2", placed(INVARIANT, REPLICATED), used), triple(g, 2, where, work),
    ]  # fmt: skip
    program = replace(data_parallel(g, flat(4)), mesh=mesh, instructions=tuple(map(Instruction, steps)), needs=())
    spec = cluster([("fast", "fast"), ("slow", "slow")], [FAST, SLOW])
    timeline = simulate_program(program, g, model(g, program, spec), {rows.cut: (32, 32)})
    sent = next(s for s in timeline.spans[2] if s.name == "synchronise bucket 0" and s.stream == "communication")
    scattered = next(s for s in timeline.spans[2] if s.stream == "inside" and s.name.endswith("w1 backward"))
    assert sent.start < scattered.start < scattered.stop < sent.stop


def test_only_the_last_micro_batch_waits_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm adds up over all machines, in backward too. Gradients on their way between them hold that up, but only once per iteration."""
    monkeypatch.setattr(import_module("hapx.simulate"), "BUCKET_BYTES", 64)
    slow = slow_devices(["fast", "fast"], ["fast", "fast"], inter="100 kbit/s", speed=1e8)
    model = CNN()
    whole = plan_graphs(
        [capture(model, model.example(8))], slow, strategy=Restriction("dp", split="batch", storage="as-used", mesh="flat"), advise=False
    )
    (candidate,) = Staged(whole).candidates
    exact = candidate.costs.at_lengths(candidate.lengths)
    program, g = candidate.program, candidate.theory.graph
    each = stage_times(program, g, exact)
    costs = [exact.step(i.triple) for i in program.instructions]
    compute = sum(float(t.at({}).max()) for c in costs for t in (c.forward, c.backward) if t is not None)
    wires = {way: sum(float(x.term.at({}).max()) for c in costs for x in c.communication if x.direction == way) for way in WAYS}
    assert wires["backward"] > 0 and wires["synchronise"] > 3 * wires["backward"]
    assert each.micro == pytest.approx(compute + wires["forward"] + wires["backward"], rel=1e-6)
    assert each.micro + each.iteration == pytest.approx(iteration_time(program, g, exact))
    assert each.iteration < wires["synchronise"] + float(_update(program, g, exact).max())  # a part is hidden


def test_zero_lengths_do_no_work_but_join_every_collective():
    g = graph()
    program = data_parallel(g, flat(4), synchronised=False)
    timeline = simulate_program(program, g, model(g, program), {Cut(program.mesh.row(0), 64): (32, 32, 0, 0)})
    collectives = {d: [s.name for s in spans if s.stream == "communication"] for d, spans in timeline.spans.items()}
    assert collectives[0] == collectives[3] != []
    assert timeline.busy()[3] < timeline.busy()[0]


def test_the_trace_can_be_read(tmp_path: Path):
    g = graph()
    program = data_parallel(g, flat(4))
    timeline = simulate_program(program, g, model(g, program), {Cut(program.mesh.row(0), 64): (24, 24, 8, 8)})
    timeline.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {0, 1, 2, 3}
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(timeline.total * 1e6)
    for thread in (0, 1):
        mine = sorted((e for e in slices if e["pid"] == 0 and e["tid"] == thread), key=lambda e: e["ts"])
        assert mine
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(mine))  # nothing overlaps on a stream
    assert str(timeline).startswith("one iteration: ")


def plan() -> tuple[Plan, Graph, Program]:
    g = graph()
    program = data_parallel(g, flat(4))
    lengths = {Cut(program.mesh.row(0), 64): (24, 24, 8, 8)}
    stage = Stage((0, 1, 2, 3), {program.key: (0, 1)}, program.mesh, {}, {program.key: lengths}, {program.key: program})
    return Plan(VERSION, {program.key: g}, FOUR, AUTO, (), (stage,), {}, 0.0, (), (), "fp32", "sgd", {}), g, program


def test_a_plan_is_simulated_as_its_first_training_program():
    found, g, program = plan()
    expected = simulate_program(program, g, model(g, program), {Cut(program.mesh.row(0), 64): (24, 24, 8, 8)})
    assert simulate(found).total == expected.total > 0


def test_in_eval_mode_only_forward_runs():
    g = graph()
    program = data_parallel(g, flat(4))
    cost = CostModel(described(g, program.mesh), FOUR, "fp32", "sgd", "eval")
    timeline = simulate_program(program, g, cost, {Cut(program.mesh.row(0), 64): (24, 24, 8, 8)})
    assert not any("backward" in e.name or "update" in e.name or "synchronise" in e.name for e in timeline.events)
    assert timeline.total > 0


def test_buckets_are_closed_before_they_exceed_their_limit():
    full_buckets = import_module("hapx.simulate")._full_buckets
    big, half = BUCKET_BYTES + 1, BUCKET_BYTES // 2
    assert full_buckets([0, half, 0, half, half, big]) == {5, 3, 1}  # backward: the big one alone, two halves together, the rest
    assert full_buckets([4, 4, 4]) == {0}
    assert full_buckets([0, 0]) == frozenset()
