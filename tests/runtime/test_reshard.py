"""Tensors arrive in the layout asked for, between threads and between gloo ranks: activations and, on the way back, cotangents."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hapx.collectives import Messenger, ThreadMessenger, create_groups, create_messenger, run_threads
from hapx.errors import LaunchError
from hapx.pieces import Layout
from hapx.plan import Form
from hapx.reshard import reshard_plan
from hapx.runtime.reshard import Crossing, Resharder, lanes
from hapx.states import INVARIANT, Cut, Placement, Row, Sharded
from support.layouts import layouts, local_array, mesh_of, meshes, shapes
from support.pool import Pool, RankError, pool

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
SIZE = 6


def whole(crossing: Crossing, step: int) -> Tensor:
    """Values of a micro-batch."""
    shape = crossing.plan.shape
    return (torch.arange(int(np.prod(shape, dtype=int))) * 7 + 13 * step).remainder(101).reshape(shape).to(crossing.dtype)


def local(crossing: Crossing, layout: Layout, device: int, step: int) -> Tensor:
    """A device's part of them."""
    numbers = np.arange(int(np.prod(crossing.plan.shape, dtype=int))).reshape(crossing.plan.shape)
    return whole(crossing, step).reshape(-1)[torch.from_numpy(local_array(numbers, layout, device))]


def exercise(crossings: list[Crossing], messenger: Messenger, world, steps: int = 3, form: Form = Form.PADDED) -> int:
    """Moves several micro-batches forward, asked for ahead, and their cotangents back. Returns the number of tensors compared."""
    checks, me = 0, messenger.rank
    for channel, direction in enumerate((crossings, [c.reversed() for c in crossings])):
        source, target = direction[0].plan.source.mesh, direction[0].plan.target.mesh
        groups = create_groups(target, world)
        resharder = Resharder(direction, me, messenger, groups, channel, form=form)
        pending = [resharder.post() for _ in range(steps)] if me in target.devices else []
        handles = []
        for step in range(steps if me in source.devices else 0):
            tensors = [local(c, c.plan.source, me, step).requires_grad_(c.dtype.is_floating_point) for c in direction]
            handles += resharder.send(tensors)
        for step, asked in enumerate(pending):
            for c, got in zip(direction, resharder.finish(asked), strict=True):
                assert torch.equal(got, local(c, c.plan.target, me, step)) and got.dtype == c.dtype
                assert got.is_contiguous() and not got.requires_grad
                checks += 1
        for handle in handles:
            handle.wait()
    return checks


@st.composite
def boundaries(draw: st.DrawFn) -> list[Crossing]:
    """One to three tensors that cross between the same meshes."""
    source, target = draw(meshes(SIZE)), draw(meshes(SIZE))
    machines = draw(st.sampled_from([(), (0, 0, 0, 1, 1, 1)]))
    crossings = []
    for k in range(draw(st.integers(1, 3))):
        shape = draw(shapes())
        ends = [draw(layouts(shape, mesh)) for mesh in (source, target)]
        crossings.append(Crossing(f"x{k}", reshard_plan(shape, *ends, machines), draw(st.sampled_from(DTYPES[:2] if k else DTYPES))))
    return crossings


@settings(max_examples=100)
@given(boundaries(), st.sampled_from(list(Form)[1:]))
def test_tensors_move_between_threads(crossings, form):
    checks = run_threads(SIZE, lambda world: exercise(crossings, ThreadMessenger(world), world, 3, form), timeout=20)
    ends = len(crossings[0].plan.source.mesh.devices) + len(crossings[0].plan.target.mesh.devices)
    assert sum(checks) == 3 * len(crossings) * ends


# ---- named cases -----------------------------------------------------------------------------------------------------------------


def cut(axis: int, dim: int, lengths: tuple[int, ...], outer: int = 1, inner: int = 1) -> tuple[Sharded, dict]:
    own = Cut(Row("compute", 0, axis), sum(lengths))
    return Sharded(dim, outer, inner, own), {own: lengths}


def layout(mesh, *axes) -> Layout:
    """`axes`: None or a cut, per axis."""
    states = tuple(INVARIANT if a is None else a[0] for a in axes)
    return Layout(mesh, Placement(states), {k: v for a in axes if a is not None for k, v in a[1].items()})


def cases() -> dict[str, list[Crossing]]:
    """Boundaries on four devices."""
    left, right = mesh_of((2,), (0, 1)), mesh_of((2,), (2, 3))
    three, square = mesh_of((3,), (2, 0, 1)), mesh_of((2, 2), (0, 1, 2, 3))
    rows, heads = cut(0, 0, (5, 3)), cut(0, 1, (0, 2), outer=3, inner=2)
    shape = (8, 12)

    def crossing(name: str, source: Layout, target: Layout, dtype: torch.dtype, shape: tuple[int, ...] = shape) -> Crossing:
        return Crossing(name, reshard_plan(shape, source, target), dtype)

    return {
        "two to two, fused": [
            crossing("hidden", layout(left, rows), layout(right, heads), torch.float32),
            crossing("residual", layout(left, heads), layout(right, None), torch.float32),
            crossing("mask", layout(left, None), layout(right, rows), torch.bool),
            crossing("ids", layout(left, rows), layout(right, None), torch.int64),
            crossing("empty", layout(left, None), layout(right, None), torch.bfloat16, (0, 3)),
            crossing("scale", layout(left, None), layout(right, None), torch.bfloat16, ()),
        ],
        "three to four, overlapping": [
            crossing("hidden", layout(three, cut(0, 0, (0, 7, 1))), layout(square, cut(0, 0, (3, 5)), None), torch.float64),
            crossing("skip", layout(three, None), layout(square, cut(0, 1, (1, 1), 3, 2), cut(1, 1, (1, 1), 6)), torch.float64),
        ],
        "blocks in both dims": [
            crossing(
                "hidden",
                layout(mesh_of((2, 2), (3, 1, 0, 2)), cut(0, 0, (1, 3), outer=2), cut(1, 1, (1, 1), outer=3, inner=2)),
                layout(mesh_of((1, 2), (0, 3)), None, cut(1, 1, (5, 7))),
                torch.float32,
            )
        ],
        "one to two": [crossing("hidden", layout(mesh_of((1,), (3,)), None), layout(left, None), torch.float16)],
    }


@pytest.mark.parametrize("name", cases())
def test_named_cases_between_threads(name):
    crossings = cases()[name]
    checks = run_threads(4, lambda world: exercise(crossings, ThreadMessenger(world), world), timeout=20)
    ends = len(crossings[0].plan.source.mesh.devices) + len(crossings[0].plan.target.mesh.devices)
    assert sum(checks) == 3 * len(crossings) * ends


def exercise_processes(name: str) -> int:
    crossings = cases()[name]
    both = lanes(crossings, 0) | lanes([c.reversed() for c in crossings], 1)
    return exercise(crossings, create_messenger(both), None)


@pytest.mark.gloo
@pytest.mark.parametrize("name", cases())
def test_named_cases_between_gloo_ranks(name):
    crossings = cases()[name]
    ends = len(crossings[0].plan.source.mesh.devices) + len(crossings[0].plan.target.mesh.devices)
    assert sum(pool(4).run(exercise_processes, name)) == 3 * len(crossings) * ends


def test_tensors_of_one_dtype_share_a_message_and_a_gather():
    left, right = mesh_of((2,), (0, 1)), mesh_of((2,), (2, 3))
    plan = reshard_plan((8, 12), layout(left, cut(0, 0, (4, 4))), layout(right, None))
    crossings = [Crossing(name, plan, dtype) for name, dtype in (("a", torch.float32), ("ids", torch.int64), ("b", torch.float32))]

    def work(world):
        messenger, comm = ThreadMessenger(world), create_groups(right, world)
        messages, gathers = [], []
        messenger.isend = record(messenger.isend, messages)
        for c in comm.values():
            c.all_gather = record(c.all_gather, gathers)
        resharder = Resharder(crossings, world.rank, messenger, comm)
        if world.rank < 2:
            resharder.send([local(c, c.plan.source, world.rank, 0) for c in crossings])
        else:
            resharder.finish(resharder.post())
        return [(to, t.dtype, t.numel()) for t, to, _ in messages], [(t.dtype, lengths) for t, lengths, _ in gathers]

    found = run_threads(4, work)
    for sender, receiver in ((0, 2), (1, 3)):
        assert found[sender] == ([(receiver, torch.float32, 96), (receiver, torch.int64, 48)], [])
        assert found[receiver] == ([], [(torch.float32, [96, 96]), (torch.int64, [48, 48])])


def record(function, calls: list):
    """The function, and a list of its arguments."""

    def recorded(*args):
        calls.append(args)
        return function(*args)

    return recorded


def test_a_contiguous_tensor_arrives_without_a_copy():
    left, right = mesh_of((2,), (0, 1)), mesh_of((2,), (2, 3))
    crossing = Crossing("x", reshard_plan((8, 2), layout(left, cut(0, 0, (5, 3))), layout(right, cut(0, 0, (4, 4)))), torch.float32)

    def work(world):
        resharder = Resharder([crossing], world.rank, ThreadMessenger(world), {})
        if world.rank < 2:
            resharder.send([local(crossing, crossing.plan.source, world.rank, 0)])
            return True
        pending = resharder.post()
        (got,) = resharder.finish(pending)
        return got.data_ptr() == pending.buffers[0][1].data_ptr() and torch.equal(got, local(crossing, crossing.plan.target, world.rank, 0))

    assert run_threads(4, work) == [True] * 4


@pytest.mark.parametrize("t", [torch.zeros(4, 12), torch.zeros(5, 12, dtype=torch.float64)], ids=["shape", "dtype"])
def test_a_tensor_that_is_not_as_planned_is_refused(t):
    crossing = cases()["two to two, fused"][0]
    allowed = r"rank 0: hidden is torch.float.* where it leaves its stage; allowed: torch.float32 of shape \[5, 12\]"
    with pytest.raises(LaunchError, match=allowed):
        run_threads(1, lambda world: Resharder([crossing], 0, ThreadMessenger(world), {}).send([t]))


# ---- failure ---------------------------------------------------------------------------------------------------------------------


def die_between_micro_batches() -> None:
    crossings = cases()["two to two, fused"]
    messenger, me = create_messenger([]), torch.distributed.get_rank()
    resharder = Resharder(crossings, me, messenger, create_groups(crossings[0].plan.target.mesh))
    pending = [resharder.post() for _ in range(2)] if me >= 2 else []
    for step in range(2):
        if me == 0 and step == 1:
            os._exit(3)
        if me < 2:
            for handle in resharder.send([local(c, c.plan.source, me, step) for c in crossings]):
                handle.wait()
        else:
            resharder.finish(pending[step])


@pytest.mark.gloo
def test_a_killed_sender_is_one_clear_error_on_its_receivers():
    own, start = Pool(4), time.monotonic()
    try:
        with pytest.raises(RankError) as caught:
            own.run(die_between_micro_batches)
    finally:
        own.stop()
    failures = caught.value.failures
    assert "status 3" in failures[0] and all("LaunchError: another rank has ended or does not answer" in failures[rank] for rank in (2, 3))
    assert time.monotonic() - start < 30
