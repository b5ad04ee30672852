"""Step costs: triples, composites and conversions on meshes over clusters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hapx.buckets import BUCKET_BYTES
from hapx.cluster.spec import DeviceType
from hapx.cost.model import CostModel
from hapx.errors import HapError
from hapx.ir import Graph, OpCall
from hapx.plan import Axes, Communication, Form, LocalBlock, Mesh, Triple
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Cut, Placement
from support.theories import GraphBuilder, cluster, converted, described, device_type, flat, mlp, placed, split, triple, two_level

FAST, SLOW = device_type("fast", 4e12, latency=1e-6), device_type("slow", 1e12, memory=8 * 10**9)
FOUR = cluster([("fast",), ("fast",), ("slow",), ("slow",)], [FAST, SLOW])
BOXES = cluster([("fast", "fast"), ("slow", "slow")], [FAST, SLOW])


def model(graph: Graph, mesh: Mesh | None = None, spec=FOUR, optimizer: str = "adamw", mode: str = "train") -> CostModel:
    return CostModel(described(graph, mesh or flat(4)), spec, "fp32", optimizer, mode)  # type: ignore[arg-type]


def big() -> Graph:
    return mlp(batch=1024, width=2048, hidden=8192)


def rows(graph: Graph, mesh: Mesh):
    return split(mesh, 0, 0, graph.batch)


def first_linear(graph: Graph, mesh: Mesh, split_rows: bool = True) -> Triple:
    state = rows(graph, mesh) if split_rows else REPLICATED
    where = {"x": placed(state), "w1": placed(REPLICATED), "h": placed(state)}
    return triple(graph, 0, where, (state.cut if split_rows else None,))


def test_kinds_speeds_and_capacity():
    cost = model(mlp())
    assert cost.kinds == ((0, 1), (2, 3))
    assert cost.sizes == (2, 2)
    assert cost.speeds == pytest.approx([0.4, 0.1])
    assert (cost.speeds * cost.sizes).sum() == pytest.approx(1.0)
    assert cost.capacity == pytest.approx([0.9 * 16e9, 0.9 * 8e9])


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(HapError, match="unknown optimizer"):
        model(mlp(), optimizer="sophia-2")


def test_a_product_takes_flops_over_speed_plus_the_kernel():
    g, mesh = big(), flat(4)
    cost = model(g)
    flops = 2.0 * 1024 * 2048 * 8192
    term = cost.instruction(first_linear(g, mesh)).forward
    shares = cost.lengths_to_shares({Cut(mesh.row(0), 1024): (400, 400, 112, 112)})
    assert term is not None
    assert term.at(shares) == pytest.approx([flops * 400 / 1024 / 4e12 + 1e-6, flops * 112 / 1024 / 1e12])
    whole = cost.instruction(first_linear(g, mesh, split_rows=False)).forward
    assert whole is not None
    assert whole.cuts == ()
    assert whole.at({}) == pytest.approx([flops / 4e12 + 1e-6, flops / 1e12])


def test_a_small_product_is_bound_by_memory():
    g, mesh = mlp(batch=8, width=16, hidden=32), flat(4)
    term = model(g).instruction(first_linear(g, mesh, split_rows=False)).forward
    assert term is not None
    bytes_moved = 4 * (8 * 16 + 32 * 16 + 8 * 32)
    assert term.at({}) == pytest.approx([bytes_moved / 1e11 + 1e-6, bytes_moved / 1e11])


def test_in_eval_mode_nothing_is_kept_and_nothing_goes_back():
    g, mesh = big(), flat(4)
    cost = model(g, mode="eval")
    state = rows(g, mesh)
    step = cost.instruction(triple(g, 1, {"h": placed(state), "a": placed(state)}, (state.cut,)))
    assert step.forward is not None
    assert step.backward is None
    assert step.memory is None
    sync = converted("w1", placed(INVARIANT), placed(REPLICATED))
    assert cost.conversion(g.refs["w1"], sync.body, placed(REPLICATED)).communication == ()
    assert cost.storage(g.refs["w1"], placed(INVARIANT)).at({}) == pytest.approx([g.refs["w1"].bytes] * 2)


def test_kept_outputs_are_counted_where_they_are_made():
    g, mesh = big(), flat(4)
    cost, state = model(g), rows(g, mesh)
    relu = cost.instruction(triple(g, 1, {"h": placed(state), "a": placed(state)}, (state.cut,)))
    assert relu.memory is not None
    shares = cost.lengths_to_shares({state.cut: (512, 256, 256, 0)})
    assert relu.memory.at(shares) == pytest.approx([g.refs["a"].bytes / 2, g.refs["a"].bytes / 4])
    assert cost.instruction(first_linear(g, mesh)).memory is None  # relu keeps its result, not its operand


def test_a_partial_output_counts_when_it_has_become_a_sum():
    g, mesh = big(), flat(4)
    cost = model(g)
    where = {"a": placed(split(mesh, 0, 1, 8192)), "w2": placed(split(mesh, 0, 1, 8192)), "y": placed(PARTIAL)}
    assert cost.instruction(triple(g, 2, where, (Cut(mesh.row(0), 8192),))).memory is None
    summed = converted("y", placed(PARTIAL), placed(REPLICATED))
    step = cost.conversion(g.refs["y"], summed.body, placed(REPLICATED))
    assert step.memory is not None
    assert step.memory.at({}) == pytest.approx([g.refs["y"].bytes] * 2)
    assert [c.direction for c in step.communication] == ["forward", "backward"]


@pytest.mark.parametrize(
    "source,target",
    [("R", "S"), ("R", "P"), ("S", "P"), ("R", "I"), ("I", "P")],
)
def test_free_conversions_cost_nothing(source: str, target: str):
    g, mesh = big(), flat(4)
    state = {"R": REPLICATED, "S": rows(g, mesh), "P": PARTIAL, "I": INVARIANT}
    before, after = placed(state[source]), placed(state[target])
    step = model(g).conversion(g.refs["a"], converted("a", before, after).body, after)
    assert (step.forward, step.backward, step.communication, step.memory) == (None, None, (), None)


def test_synchronisation_of_a_gradient_is_apart_and_shares_the_latency_of_its_bucket():
    g = mlp(batch=8, width=16, hidden=32)
    step = model(g).conversion(g.refs["w1"], converted("w1", placed(INVARIANT), placed(REPLICATED)).body, placed(REPLICATED))
    (sync,) = step.communication
    size = g.refs["w1"].bytes
    assert sync.direction == "synchronise"
    assert sync.term.at({}) == pytest.approx([1.5 * size / 1e9 + 4 * 1e-4 * size / BUCKET_BYTES] * 2)
    large = big()
    (sync,) = model(large).conversion(large.refs["w1"], converted("w1", placed(INVARIANT), placed(REPLICATED)).body, placed(REPLICATED)).communication
    assert sync.term.at({}) == pytest.approx([1.5 * large.refs["w1"].bytes / 1e9 + 4e-4] * 2)


def test_gradients_of_both_axes_share_the_links_between_machines():
    """Two machines of two devices: the inner axis sums all of it, the outer one half of it on each device, whichever comes first in the path."""
    g, mesh = big(), two_level(2, 2)
    cost = model(g, mesh, BOXES)
    size = g.refs["w1"].bytes

    def seconds(*order: int) -> list[float]:
        path, at = [], placed(INVARIANT, INVARIANT)
        for axis in order:
            path.append(Communication(axis, INVARIANT, REPLICATED, Form.NONE, True))
            at = at.with_state(axis, REPLICATED)
        found = cost.conversion(g.refs["w1"], tuple(path), at).communication
        assert [c.direction for c in found] == ["synchronise"] * len(order)
        return [float(c.term.at({}).max()) for c in found]

    (inner,), (outer,) = seconds(1), seconds(0)
    assert outer == pytest.approx(size / 0.5e9 + 2e-4), "two groups share the card"
    assert seconds(1, 0) == pytest.approx([inner, (outer - 2e-4) / 2 + 2e-4])
    assert seconds(0, 1) == pytest.approx([outer, inner])


def test_a_value_is_summed_in_backward_not_at_the_end():
    g = big()
    step = model(g).conversion(g.refs["a"], converted("a", placed(INVARIANT), placed(REPLICATED)).body, placed(REPLICATED))
    assert [c.direction for c in step.communication] == ["backward"]


def test_gathered_parameters_are_kept_or_gathered_again():
    g, mesh = big(), flat(4)
    stored = placed(split(mesh, 0, 0, 2048, kind="storage"))
    cost, ref = model(g), g.refs["w2"]
    keep = cost.conversion(ref, converted("w2", stored, placed(REPLICATED)).body, placed(REPLICATED))
    free = cost.conversion(ref, converted("w2", stored, placed(REPLICATED), free=True).body, placed(REPLICATED))
    assert [c.direction for c in keep.communication] == ["forward", "backward"]
    assert [c.direction for c in free.communication] == ["forward", "backward", "backward"]
    assert keep.memory is not None
    assert keep.memory.at({}) == pytest.approx([ref.bytes] * 2)
    assert free.memory is None
    shares = cost.lengths_to_shares({Cut(mesh.row(0, "storage"), 2048): (1024, 512, 512, 0)})
    assert keep.communication[0].term.at(shares).max() == pytest.approx(3 * ref.bytes / 2 / 1e9 + 2e-4)
    assert cost.storage(ref, stored).at(shares) == pytest.approx([4 * ref.bytes / 2, 4 * ref.bytes / 4])
    assert cost.update(ref, stored).at(shares) == pytest.approx(cost.storage(ref, stored).at(shares) * 4 / 1e11)


def test_grouped_gathers_do_not_depend_on_the_shares():
    g, mesh = big(), flat(4)
    stored = placed(split(mesh, 0, 0, 2048, kind="storage"))
    step = model(g).conversion(g.refs["w2"], converted("w2", stored, placed(REPLICATED), form=Form.GROUPED).body, placed(REPLICATED))
    assert step.communication[0].term.cuts == ()


def test_inner_axes_do_not_cut_and_are_priced_per_kind():
    g, mesh = big(), two_level(2, 2)
    cost = model(g, mesh, BOXES)
    before = placed(split(mesh, 0, 0, 1024), PARTIAL)
    after = before.with_state(1, INVARIANT)
    (inner,) = cost.conversion(g.refs["y"], converted("y", before, after).body, after).communication
    assert not inner.cuts
    shares = cost.lengths_to_shares({Cut(mesh.row(0), 1024): (768, 256)})
    assert inner.term.at(shares) == pytest.approx(np.array([0.75, 0.25]) * g.refs["y"].bytes / 1e10 + 2e-5)
    (outer,) = cost.conversion(
        g.refs["y"], converted("y", placed(PARTIAL, INVARIANT), placed(INVARIANT, INVARIANT)).body, placed(INVARIANT, INVARIANT)
    ).communication
    assert outer.cuts
    assert outer.term.at({}) == pytest.approx([g.refs["y"].bytes / 0.5e9 + 2e-4] * 2)  # two groups share the card


def test_sufficient_factors_gather_in_backward_and_make_the_gradient_whole():
    g, mesh = big(), flat(4)
    cost, state = model(g), rows(g, mesh)
    plain = first_linear(g, mesh)
    call = g.nodes[0].call
    body = OpCall("hapx.linear_sfb", (*call.args, ("gather", Axes((0,))), ("block", LocalBlock(0, placed(state))), ("form", "padded")))
    where = (plain.pre[0], plain.pre[1].__class__("w1", placed(INVARIANT)))
    sfb = cost.instruction(Triple(0, where, plain.post, body, plain.work))
    assert [(c.direction, c.cuts) for c in sfb.communication] == [("backward", True)] * 2
    shares = cost.lengths_to_shares({state.cut: (256, 256, 256, 256)})
    volumes = [0.75 * g.refs[n].bytes / 1e9 + 2e-4 for n in ("x", "h")]
    assert [c.term.at(shares).max() for c in sfb.communication] == pytest.approx(volumes)
    ordinary = cost.instruction(plain)
    assert sfb.forward == ordinary.forward
    assert sfb.backward is not None and ordinary.backward is not None
    assert sfb.backward.at(shares)[1] == pytest.approx(4 * ordinary.backward.at(shares)[1])


def losses(classes: tuple[int, ...], batch: tuple[int, ...], logits: Placement, target: Placement) -> tuple[Graph, Triple]:
    b = GraphBuilder()
    b.tensor("t", (64,), dtype="int64")
    b.parameter("l", 64, 1000)
    b.call("loss", "aten.cross_entropy_loss.default", (), self="l", target="t", weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0)
    g = b.graph("loss")
    done = triple(g, 0, {"l": logits, "t": target, "loss": placed(INVARIANT)})
    assert isinstance(done.body, OpCall)
    body = OpCall("hapx.cross_entropy", (*done.body.args, ("batch", Axes(batch)), ("classes", Axes(classes)), ("offset", 0), ("count", 1000)))
    return g, Triple(0, done.pre, done.post, body, (None,))


def test_vocabulary_parallel_cross_entropy_reduces_rows():
    mesh = flat(4)
    g, by_class = losses((0,), (), placed(split(mesh, 0, 1, 1000)), placed(REPLICATED))
    step = model(g).instruction(by_class)
    assert [c.term.at({}).max() for c in step.communication] == pytest.approx([1.5 * 4 * 64 * k / 1e9 + 4e-4 for k in (1, 2)])
    assert step.memory is not None
    assert step.memory.at({Cut(mesh.row(0), 1000): np.array([0.5, 0.1])}) == pytest.approx([64 * 4000 * 0.5, 64 * 4000 * 0.1])


def test_a_mean_over_a_split_batch_sums_the_count():
    mesh = flat(4)
    g, by_row = losses((), (0,), placed(split(mesh, 0, 0, 64)), placed(split(mesh, 0, 0, 64)))
    (count,) = model(g).instruction(by_row).communication
    assert count.direction == "forward"
    assert count.term.at({}).max() == pytest.approx(4e-4, rel=1e-3)


def test_alike_nodes_share_their_terms():
    b = GraphBuilder()
    name = b.tensor("x", (8, 16))
    for i in range(3):
        b.parameter(f"w{i}", 16, 16)
        name = b.call(f"h{i}", "aten.linear.default", (8, 16), input=name, weight=f"w{i}", bias=None)
    g = b.graph(name)
    cost, whole = model(g), placed(REPLICATED)
    steps = [cost.instruction(triple(g, i, dict.fromkeys(g.refs, whole))) for i in range(3)]
    assert steps[1] is not steps[0]  # the first one's input needs no gradient
    assert steps[1] is not steps[2]  # the last one's result is not kept
    again = cost.instruction(triple(g, 1, dict.fromkeys(g.refs, whole)))
    assert again is steps[1]


def test_half_precision_products_run_at_their_own_speed():
    b = GraphBuilder()
    b.tensor("x", (4096, 4096), dtype="bfloat16")
    b.tensor("w", (4096, 4096), dtype="bfloat16")
    b.call("y", "aten.mm.default", (4096, 4096), "bfloat16", self="x", mat2="w")
    g = b.graph("y")
    quick = device_type("q", 1e12)
    quick = quick.measured({"bf16": 8e12})
    cost = model(g, flat(1), cluster([("q",)], [quick]))
    term = cost.instruction(triple(g, 0, {n: placed(REPLICATED) for n in g.refs})).forward
    assert term is not None
    assert term.at({}) == pytest.approx([2 * 4096**3 / 8e12])


def test_at_concrete_lengths_terms_are_constants():
    g, mesh = big(), flat(4)
    cost = model(g)
    lengths = {Cut(mesh.row(0), 1024): (400, 400, 112, 112)}
    exact = cost.at_lengths(lengths)
    a, b = (c.instruction(first_linear(g, mesh)).forward for c in (cost, exact))
    assert a is not None and b is not None
    assert b.cuts == ()
    assert b.at({}) == pytest.approx(a.at(cost.lengths_to_shares(lengths)))
    unequal = cost.at_lengths({Cut(mesh.row(0), 1024): (400, 399, 113, 112)})
    assert unequal.kinds == ((0,), (1,), (2,), (3,))


def test_every_operator_runs_at_the_speed_of_its_own_dtype():
    """Under autocast products are in bfloat16: faster where a device has units for it, as before where it has none."""
    old = device_type("old", 4e12)
    new = DeviceType("new", {"fp32": 4e12, "bf16": 16e12}, 16 * 10**9, 1e12, 1.0, 0.0)
    times = {}
    for dtype in ("float32", "bfloat16"):
        b = GraphBuilder()
        b.tensor("x", (512, 2048), dtype=dtype)
        b.parameter("w", 2048, 2048)
        b.call("y", "aten.linear.default", (512, 2048), dtype, input="x", weight="w", bias=None)
        b.call("loss", "aten.sum.default", (), dtype, self="y", dtype=None)
        g = b.graph("loss")
        if dtype == "bfloat16":
            g = replace(g, nodes=(replace(g.nodes[0], casts=(("w", "bfloat16"),)), *g.nodes[1:]))
        term = model(g, flat(2), cluster([("old",), ("new",)], [old, new])).instruction(
            triple(g, 0, {n: placed(REPLICATED) for n in ("x", "w", "y")}, (None,))
        )
        assert term.forward is not None
        times[dtype] = term.forward.at({})
    assert times["bfloat16"][0] == pytest.approx(times["float32"][0])
    assert times["bfloat16"][1] == pytest.approx(times["float32"][1] / 4)


def test_a_cast_of_a_parameter_moves_bytes_and_keeps_none():
    g = mlp()
    cast = replace(g, nodes=(replace(g.nodes[0], casts=(("w1", "bfloat16"),)), *g.nodes[1:]))
    where = {"x": placed(REPLICATED), "w1": placed(REPLICATED), "h": placed(REPLICATED)}
    plain, with_cast = (model(one).instruction(triple(one, 0, where, (None,))) for one in (g, cast))
    assert plain.forward is not None
    assert with_cast.forward is not None
    written_and_read = 2 * 2 * 16 * 32
    assert with_cast.forward.at({})[0] - plain.forward.at({})[0] == pytest.approx(written_and_read / 1e11)
    assert with_cast.memory == plain.memory
