"""Communicators: the primitives between threads and between gloo ranks, sub-communicators, and what happens on failure."""

from __future__ import annotations

import time

import pytest
import torch

from hapx.collectives import Communicator, Conversion, ProcessGroupCommunicator, alone, create_groups, run_threads
from hapx.errors import LaunchError
from hapx.plan import Axis, Communication, Form, Mesh
from hapx.states import INVARIANT, PARTIAL, REPLICATED
from support.local_tensors import Case, Held, sharded
from support.pool import pool

FORMS = (Form.PADDED, Form.GROUPED, Form.POINT_TO_POINT)
LENGTHS = {1: [(2,)], 2: [(3, 1), (0, 2)], 3: [(3, 0, 1), (2, 2, 2), (0, 0, 4), (0, 0, 0)], 4: [(1, 0, 0, 5)]}


def values(rank: int, rows: int, dtype: torch.dtype, width: int = 2) -> torch.Tensor:
    """Small integers that every rank can compute for every other; not contiguous."""
    t = (torch.arange(rows * width) * 7 + 3 * rank) % 5
    return t.reshape(width, rows).T.to(dtype)


def exercise(comm: Communicator) -> int:
    """Every primitive against what each rank can compute by itself. Returns the number of checks."""
    m, checks = comm.size, 0
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool):
        everybody = [values(r, 4, dtype) for r in range(m)]
        mine = everybody[comm.rank].clone()
        total = sum((t.to(torch.int64) for t in everybody[1:]), everybody[0].to(torch.int64)).to(dtype)
        assert torch.equal(comm.all_reduce(mine), total)
        assert torch.equal(comm.all_reduce(mine, "max"), torch.stack([t.to(torch.float64) for t in everybody]).amax(0).to(dtype))
        assert torch.equal(comm.broadcast(mine, m - 1), everybody[m - 1]) and torch.equal(mine, everybody[comm.rank])
        for lengths in LENGTHS[m]:
            pieces = [values(r, n, dtype) for r, n in enumerate(lengths)]
            wholes = [values(r, sum(lengths), dtype) for r in range(m)]
            sum_ = sum((t.to(torch.int64) for t in wholes[1:]), wholes[0].to(torch.int64)).to(dtype)
            for form in FORMS:
                assert torch.equal(comm.all_gather(pieces[comm.rank], lengths, form), torch.cat(pieces)), (dtype, lengths, form)
                own = comm.reduce_scatter(wholes[comm.rank], lengths, form)
                assert own.dtype == dtype and torch.equal(own, sum_.split(list(lengths))[comm.rank]), (dtype, lengths, form)
                checks += 2
            # rank r sends lengths[k] rows to rank k
            received = comm.all_to_all(wholes[comm.rank], lengths, [lengths[comm.rank]] * m)
            assert torch.equal(received, torch.cat([t.split(list(lengths))[comm.rank] for t in wholes]))
    bucket = torch.full((5,), float(comm.rank + 1))
    handle = comm.all_reduce_async(bucket)
    assert handle.wait() is bucket and torch.equal(bucket, torch.full((5,), m * (m + 1) / 2))
    empty = torch.zeros(3, 0, dtype=torch.float64)
    assert comm.all_reduce(empty).shape == (3, 0) and comm.broadcast(empty, 0).shape == (3, 0)
    comm.barrier()
    return checks


def exercise_complex(comm: Communicator) -> int:
    """Complex numbers that are to be conjugated yet: what moves and what is added up is the conjugate. Returns the number of checks."""
    m, checks = comm.size, 0

    def number(rank: int, rows: int) -> torch.Tensor:
        parts = values(rank, rows, torch.float64), values(rank + 1, rows, torch.float64)
        return torch.complex(*parts).conj()

    for lengths in LENGTHS[m]:
        pieces, wholes = [number(r, n) for r, n in enumerate(lengths)], [number(r, sum(lengths)) for r in range(m)]
        total = sum(wholes[1:], wholes[0])
        own = total.split(list(lengths))[comm.rank]
        assert torch.equal(comm.all_reduce(wholes[comm.rank]), total)
        assert torch.equal(comm.broadcast(wholes[comm.rank], m - 1), wholes[m - 1])
        for form in FORMS:
            assert torch.equal(comm.all_gather(pieces[comm.rank], lengths, form), torch.cat(pieces)), (lengths, form)
            assert torch.equal(comm.reduce_scatter(wholes[comm.rank], lengths, form), own), (lengths, form)
            checks += 2
        received = comm.all_to_all(wholes[comm.rank], lengths, [lengths[comm.rank]] * m)
        assert torch.equal(received, torch.cat([t.split(list(lengths))[comm.rank] for t in wholes]))
    flats = [torch.full((2 * m,), complex(r, 1), dtype=torch.complex64) for r in range(m)]
    total = sum(flats[1:], flats[0])
    assert torch.equal(comm.reduce_scatter_async(flats[comm.rank].clone()).wait(), total[:2])
    assert torch.equal(comm.all_gather_async(flats[comm.rank]).wait(), torch.cat(flats))
    bucket = flats[comm.rank].clone()
    assert comm.all_reduce_async(bucket).wait() is bucket and torch.equal(bucket, total)
    return checks


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_complex_numbers_between_threads(m):
    assert run_threads(m, exercise_complex, timeout=20) == [6 * len(LENGTHS[m])] * m


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_primitives_between_threads(m):
    assert run_threads(m, exercise, timeout=20) == [9 * 6 * len(LENGTHS[m])] * m


def exercise_processes() -> int:
    return exercise(ProcessGroupCommunicator()) + exercise_complex(ProcessGroupCommunicator())


@pytest.mark.gloo
def test_primitives_between_gloo_ranks():
    assert pool(3).run(exercise_processes) == [(9 + 1) * 6 * len(LENGTHS[3])] * 3


CONVERTED = {
    "R": Held(REPLICATED),
    "I": Held(INVARIANT),
    "P": Held(PARTIAL),
    "S0": sharded(0, (2, 0, 1), outer=2),
    "S1": sharded(1, (0, 3, 1), inner=2),
}


def conversion_case(source: str, target: str, form: Form) -> Case:
    def operator(comm, x):
        a, b = CONVERTED[source], CONVERTED[target]
        return Conversion(Communication(0, a.state, b.state, form, True), comm, a.block, b.block, "x")(x)

    e = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return Case(((e, CONVERTED[source], True),), CONVERTED[target], operator, lambda x: x.clone())


def cases() -> list[tuple[str, str, Form]]:
    return [(a, b, form) for a in CONVERTED for b in CONVERTED if a != b for form in FORMS]


def convert_processes() -> list:
    comm = ProcessGroupCommunicator()
    found = []
    for a, b, form in cases():
        case = conversion_case(a, b, form)
        locals_, cotangents, _, _ = case.prepare(3)
        result, gradients = case.run(comm, locals_, cotangents)
        found.append((result.tolist(), result.shape, [g.tolist() for g in gradients], gradients[0].shape))
    return found


@pytest.mark.gloo
def test_conversions_between_gloo_ranks():
    by_rank = pool(3).run(convert_processes)
    assert len(by_rank[0]) == 60
    for k, (a, b, form) in enumerate(cases()):
        case = conversion_case(a, b, form)
        _, _, value, gradients = case.prepare(3)
        results = []
        for found in by_rank:
            result, shape, grads, grad_shape = found[k]
            results.append(
                (torch.tensor(result, dtype=torch.float64).reshape(shape), [torch.tensor(grads[0], dtype=torch.float64).reshape(grad_shape)])
            )
        case.compare(results, value, gradients)


# --- sub-communicators ------------------------------------------------------------------------------------------------------


def grid(a: int, b: int, devices: tuple[int, ...] | None = None) -> Mesh:
    return Mesh(f"{a}x{b}", (Axis("machines", a, "machines"), Axis("devices", b, "devices")), devices or tuple(range(a * b)), 0)


def describe(groups: dict[tuple[int, ...], Communicator], device: int) -> dict[tuple[int, ...], tuple[int, int, list[int]]]:
    """Own rank, size and, as told by the others, the members."""
    return {axes: (c.rank, c.size, c.all_gather(torch.tensor([device]), (1,) * c.size).tolist()) for axes, c in sorted(groups.items())}


def test_threads_of_a_two_by_two_mesh():
    found = run_threads(4, lambda world: describe(create_groups(grid(2, 2), world), world.rank), timeout=20)
    assert found[0] == {(0,): (0, 2, [0, 2]), (0, 1): (0, 4, [0, 1, 2, 3]), (1,): (0, 2, [0, 1])}
    assert found[3] == {(0,): (1, 2, [1, 3]), (0, 1): (3, 4, [0, 1, 2, 3]), (1,): (1, 2, [2, 3])}


def describe_processes() -> list:
    rank = torch.distributed.get_rank()
    meshes = (grid(3, 1), grid(1, 2, (0, 2)), grid(1, 3, (2, 0, 1)))
    return [describe(create_groups(mesh), rank) for mesh in meshes]


@pytest.mark.gloo
def test_groups_of_gloo_ranks():
    found = pool(3).run(describe_processes)
    everybody = [0, 1, 2]
    assert found[1][0] == {(0,): (1, 3, everybody), (0, 1): (1, 3, everybody), (1,): (0, 1, [1])}
    assert found[2][1] == {(0,): (0, 1, [2]), (0, 1): (1, 2, [0, 2]), (1,): (1, 2, [0, 2])} and found[1][1] == {}
    assert found[0][2] == {(0,): (0, 1, [0]), (0, 1): (1, 3, [2, 0, 1]), (1,): (1, 3, [2, 0, 1])}


def test_a_device_alone():
    comm, t = alone(), torch.randn(3)
    assert torch.equal(comm.all_reduce(t), t) and comm.all_reduce(t) is not t and comm.size == 1


# --- failure -------------------------------------------------------------------------------------------------------------------


def test_one_failure_ends_all_threads():
    def work(comm):
        if comm.rank == 1:
            raise KeyError("the reason")
        return comm.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(KeyError, match="the reason"):
        run_threads(3, work)
    assert time.monotonic() - start < 30


def test_different_collectives_are_told_apart():
    def work(comm):
        return comm.all_reduce(torch.ones(1)) if comm.rank else comm.broadcast(torch.ones(1), 0)

    with pytest.raises(LaunchError, match="different collectives: broadcast 0"):
        run_threads(2, work)


def test_a_rank_that_stays_away_is_not_waited_for():
    def work(comm):
        return comm.all_reduce(torch.ones(1)) if comm.rank else None

    with pytest.raises(LaunchError, match=r"did not come within 0\.1 s"):
        run_threads(2, work, timeout=0.1)
