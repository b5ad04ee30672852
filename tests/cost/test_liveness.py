"""The peak of memory by liveness: small programs by hand, nothing leaks, and the parts that the walk is made of."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hapx.buckets import BUCKET_BYTES
from hapx.cost.buckets import Buckets, Use
from hapx.cost.heap import Heap
from hapx.cost.liveness import Peak, peak
from hapx.cost.model import CostModel
from hapx.cost.transients import Shards, exchange_buffers, gather_buffers, scatter_buffers
from hapx.ir import Graph, Kind, TensorRef
from hapx.plan import Form
from hapx.planner import plan_graphs
from hapx.states import INVARIANT, Placement
from hapx.theory.derive import derive
from support.clusters import FOUR, ONE, THREE, TWO_MACHINES
from support.theories import GraphBuilder


def chain(widths: tuple[int, ...] = (64, 128, 32), rows: int = 16, layers: bool = True) -> Graph:
    """Linear layers without bias and ReLU between them, summed."""
    b = GraphBuilder()
    b.tensor("x", (rows, widths[0]))
    before = "x"
    for i, (a, w) in enumerate(pairwise(widths)):
        b.parameter(f"w{i}", w, a)
        b.call(f"h{i}", "aten.linear.default", (rows, w), input=before, weight=f"w{i}", bias=None)
        before = f"h{i}"
        if i < len(widths) - 2:
            b.call(f"r{i}", "aten.relu.default", (rows, w), self=before)
            before = f"r{i}"
    b.call("loss", "aten.sum.default", (), self=before, dtype=None)
    return b.graph("loss")


def peak_of(graph: Graph, cluster: object = ONE, strategy: str = "dp-even", optimizer: str = "sgd") -> Peak:
    plan = plan_graphs([graph], cluster, strategy=strategy, optimizer=optimizer)  # type: ignore[arg-type]
    stage, key = plan.stages[0], plan.first
    costs = CostModel(derive(plan.graphs[key], stage.mesh), plan.cluster, plan.precision, plan.optimizer, key.mode)
    stored = {s.name: s.copies[0].placement for s in plan.storage}
    found = peak(stage.programs[key], plan.graphs[key], costs.at_lengths(stage.lengths[key]), stored)
    assert max(found.total) == pytest.approx(max(plan.memory), abs=1)
    return found


def test_a_chain_on_one_device_by_hand():
    """Bytes, float32. Also on one device the batch is a slice and gradients go through a bucket."""
    found = peak_of(chain())
    x, w0, w1, h0, h1 = (4 * n for n in (16 * 64, 128 * 64, 32 * 128, 16 * 128, 16 * 32))
    assert found.stored[0] == x + w0 + w1
    loss, bucket = 4, w0 + w1
    forward = x + h0 + h0  # x is kept, h0 dies when r0 is there
    second = x + h0 + loss + w1 + h0  # r0 is kept; the weight's gradient and the cotangent of r0, while that of h1 is a view of the loss's
    relu = x + h0 + loss + w1 + h0 + h0
    first = x + loss + w1 + h0 + w0
    filled = loss + w1 + w0 + bucket  # gradients are copied when the last one is there
    assert found.total[0] - found.stored[0] == max(forward, second, relu, first, filled) == filled
    assert found.moments == ("gradient of w0 into its bucket",)
    assert found.left[0] == bucket + loss
    assert h1 < h0


@pytest.mark.parametrize("cluster", [ONE, THREE, FOUR, TWO_MACHINES], ids=lambda c: f"{c.num_devices} devices")
@pytest.mark.parametrize("strategy", ["dp-even", "zero", "auto"])
def test_what_is_left_are_gradients_and_results(cluster: object, strategy: str):
    """Nothing leaks: every activation, cotangent and gathered parameter is freed."""
    graph = chain((64, 128, 128, 32))
    found = peak_of(graph, cluster, strategy, "adamw")
    parameters = found.stored - 4 * graph.refs["x"].size
    assert found.left == pytest.approx(parameters / 3 + 4, rel=0.02)  # parameter, two states; gradients are as large as the parameter
    assert (found.total > found.stored + found.left - 1).all()


def test_adamw_needs_more_than_sgd():
    small, large = (peak_of(chain(), optimizer=name) for name in ("sgd", "adamw"))
    parameters = 4 * (128 * 64 + 32 * 128)
    assert large.stored[0] - small.stored[0] == 2 * parameters
    # all updates at once on an accelerator: a temporary as large as all parameters beside all gradients; so is the one bucket when it is filled
    assert large.total[0] == large.stored[0] + 2 * parameters + 4
    assert large.moments == ("gradient of w0 into its bucket",)


def test_evaluation_keeps_nothing():
    from dataclasses import replace

    graph = replace(chain((64, 128, 128, 32)), mode="eval")
    found = peak_of(graph)
    assert found.total[0] - found.stored[0] == 2 * 4 * 16 * 128  # a layer's operand and its result
    assert found.left[0] == 4


# ---- parts -------------------------------------------------------------------------------------------------------------------


def test_a_heap_frees_a_storage_with_its_last_holder():
    heap = Heap(np.array([10.0, 0.0]))
    a = heap.new(np.array([5.0, 1.0]))
    a.holders += 1
    heap.note("first")
    heap.release(a)
    heap.note("second", np.array([0.0, 7.0]))
    heap.release(a)
    levels = heap.levels()
    assert levels.after.tolist() == [[10.0, 0.0], [15.0, 1.0], [10.0, 0.0]]
    assert levels.noted.tolist() == [[15.0, 1.0], [15.0, 8.0]]
    highest, worst = levels.highest()
    assert (highest.tolist(), worst.tolist()) == ([15.0, 8.0], [0, 1])
    highest, worst = levels.highest(1)
    assert (highest.tolist(), worst.tolist()) == ([15.0, 1.0], [0, 0])
    highest, worst = levels.highest(0)
    assert (highest.tolist(), worst.tolist()) == ([10.0, 0.0], [-1, -1])


def test_a_bucket_comes_with_its_last_gradient():
    whole = Placement((INVARIANT,))
    sizes = [BUCKET_BYTES // 4, BUCKET_BYTES // 8, BUCKET_BYTES // 4 // 2]  # elements: a whole bucket, then two halves

    def use(i: int, n: int) -> Use:
        return Use((i, (0,)), whole, TensorRef(f"w{i}", (n,), "float32", Kind.PARAMETER, True))

    buckets = Buckets([use(i, n) for i, n in enumerate(sizes)], lambda placement, size: np.array([size, size]))
    assert buckets.fill((2, (0,))).tolist() == [0.0, 0.0]
    assert buckets.fill((1, (0,))).tolist() == [BUCKET_BYTES] * 2
    assert buckets.fill((0, (0,))).tolist() == [BUCKET_BYTES] * 2


def test_padding_costs_what_the_largest_shard_makes_of_it():
    own, whole = np.array([6.0, 2.0]), np.array([8.0, 8.0])
    uneven = Shards(own, whole, np.array([6.0, 6.0]), np.array([True, True]), 2, strided=False)
    assert gather_buffers(uneven, Form.PADDED).tolist() == [12.0, 18.0]  # 2 x 6 received; the smaller one pads its own to 6 first
    assert gather_buffers(uneven, Form.GROUPED).tolist() == [0.0, 0.0]
    assert scatter_buffers(uneven, Form.PADDED).tolist() == [18.0, 22.0]  # padded pieces and all of them in one row, less the own result
    assert scatter_buffers(uneven, Form.GROUPED).tolist() == [2.0, 6.0]
    even = Shards(np.array([4.0]), np.array([8.0]), np.array([4.0]), np.array([False]), 2, strided=True)
    assert gather_buffers(even, Form.PADDED).tolist() == [8.0]  # the whole is copied into its order
    assert scatter_buffers(even, Form.POINT_TO_POINT).tolist() == [12.0]
    assert exchange_buffers(np.array([3.0]), np.array([5.0])).tolist() == [8.0]
