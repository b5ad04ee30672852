"""Gathered parameters that are freed after forward: memory goes, gradients stay."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F

from hapx.collectives import Conversion, create_groups, freeing, run_threads
from hapx.collectives.freed import reading
from hapx.plan import Axis, Communication, Form, Mesh
from hapx.states import REPLICATED
from support.local_tensors import indices_of, sharded

HELD = sharded(0, (3, 0, 1), outer=2)
M = 3


class Counting:
    """A communicator that counts gathers."""

    def __init__(self, comm):
        self.comm, self.rank, self.size, self.gathers = comm, comm.rank, comm.size, 0

    def all_gather(self, *args):
        self.gathers += 1
        return self.comm.all_gather(*args)

    def reduce_scatter(self, *args):
        return self.comm.reduce_scatter(*args)


def conversion(comm, free: bool, held=HELD) -> Conversion:
    return Conversion(Communication(0, held.state, REPLICATED, Form.PADDED, True, free), comm, held.block, None, "w")


def weight(rows: int = 8, columns: int = 4) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def program(comm, free: bool, rounds: int = 1):
    """A gathered weight in one chain: square use, its transpose, and a view of it."""
    counting = Counting(comm)
    own = weight()[indices_of(HELD.block, comm.rank)].clone().requires_grad_()
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with freeing():
        gathered = conversion(counting, free)(own)
        h = F.linear(x, gathered).tanh()
        h = (h @ gathered).tanh() @ gathered[2:6].T
        storage = weakref.ref(gathered.untyped_storage())
        del gathered
    facts = (storage() is None, counting.gathers)
    for k in range(rounds):
        h.square().sum().backward(retain_graph=k + 1 < rounds)
    return *facts, counting.gathers, x.grad, own.grad


def test_memory_goes_and_gradients_stay():
    kept, freed = (run_threads(M, lambda comm, free=free: program(comm, free), timeout=20) for free in (False, True))
    for a, b in zip(kept, freed, strict=True):
        assert a[:3] == (False, 1, 1)  # autograd keeps it
        assert b[:3] == (True, 1, 2)  # gone after forward, gathered once more for three uses
        assert torch.equal(a[3], b[3]) and torch.equal(a[4], b[4])


def test_gradients_are_those_of_one_device():
    w, x = weight().requires_grad_(), torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ((((F.linear(x, w).tanh() @ w).tanh()) @ w[2:6].T).square().sum() * M).backward()  # every device uses it: cotangents add up
    for rank, result in enumerate(run_threads(M, lambda comm: program(comm, True), timeout=20)):
        assert torch.allclose(result[4], w.grad[indices_of(HELD.block, rank)], rtol=1e-12, atol=1e-12)


def test_backward_twice():
    once, twice = (run_threads(M, lambda comm, n=n: program(comm, True, n), timeout=20) for n in (1, 2))
    for a, b in zip(once, twice, strict=True):
        assert torch.allclose(2 * a[4], b[4], rtol=1e-14) and b[0]


def test_two_axes_keep_no_intermediate():
    """Sharded on both axes of a 2x2 mesh and gathered axis by axis: what the first gather gave is not kept for the second."""
    mesh = Mesh("2x2", (Axis("machines", 2, "machines"), Axis("devices", 2, "devices")), (0, 1, 2, 3), 0)
    rows, columns = sharded(0, (5, 3)), sharded(1, (1, 3))

    def work(world):
        r, c = mesh.coordinates(world.rank)
        over = [Counting(create_groups(mesh, world)[(axis,)]) for axis in (0, 1)]
        own = weight()[indices_of(rows.block, r)][:, indices_of(columns.block, c)].clone().requires_grad_()
        x = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
        with freeing():
            half = conversion(over[1], True, columns)(own)
            full = conversion(over[0], True, rows)(half)
            y = (x @ full).square()
            storages = [weakref.ref(t.untyped_storage()) for t in (half, full)]
            del half, full
        facts = [s() is None for s in storages], [c.gathers for c in over]
        y.sum().backward()
        return *facts, [c.gathers for c in over], x.grad, own.grad

    w, x = weight().requires_grad_(), torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
    (x @ w).square().sum().backward()
    for rank, (released, before, after, x_grad, grad) in enumerate(run_threads(4, work, timeout=20)):
        r, c = mesh.coordinates(rank)
        assert (released, before, after) == ([True, True], [1, 1], [2, 2])
        assert torch.allclose(x_grad, x.grad, rtol=1e-13)
        assert torch.allclose(grad, 4 * w.grad[indices_of(rows.block, r)][:, indices_of(columns.block, c)], rtol=1e-13)


def test_other_tensors_are_saved_as_they_are():
    """Memory that is used again for another tensor is not taken for the freed parameter."""

    def work(comm):
        own = weight()[indices_of(HELD.block, comm.rank)].clone().requires_grad_()
        x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        with freeing():
            y = F.linear(x, conversion(comm, True)(own))
            others = [torch.full((8, 4), float(k), dtype=torch.float64) for k in range(20)]  # one of them likely gets that memory
            z = sum((x @ o.T).sum() for o in others)
        (y.sum() * 0 + z).backward()
        return x.grad

    expected = torch.full((5, 4), 8.0 * sum(range(20)), dtype=torch.float64)
    assert all(torch.equal(g, expected) for g in run_threads(M, work, timeout=20))


def test_a_parameter_changed_before_backward_is_refused():
    def work(comm):
        own = weight()[indices_of(HELD.block, comm.rank)].clone().requires_grad_()
        x = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
        with freeing():
            y = F.linear(x, conversion(comm, True)(own))
        with torch.no_grad():
            own.add_(1)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="changed in place after the forward pass"):
        run_threads(M, work, timeout=20)


def test_nothing_is_freed_outside():
    def work(comm):
        own = weight()[indices_of(HELD.block, comm.rank)].clone().requires_grad_()
        counting = Counting(comm)
        y = F.linear(torch.ones(5, 4, dtype=torch.float64, requires_grad=True), conversion(counting, True)(own))
        y.sum().backward()
        return counting.gathers

    assert run_threads(M, work, timeout=20) == [1] * M


def linear_noting(storages):
    """F.linear, which notes the storage of its weight."""

    def linear(x, w, bias=None):
        storages.append(weakref.ref(w.untyped_storage()))
        return F.linear(x, w, bias)

    return linear


def cast_program(comm, free: bool):
    """A gathered weight that is read in bfloat16: neither the gathered one nor its copy is kept."""
    counting = Counting(comm)
    own = weight()[indices_of(HELD.block, comm.rank)].clone().requires_grad_()
    x = torch.ones(5, 4, dtype=torch.bfloat16, requires_grad=True)
    with freeing():
        gathered = conversion(counting, free)(own)
        storages = [weakref.ref(gathered.untyped_storage())]
        y = reading(linear_noting(storages), (x, gathered), {1: torch.bfloat16})
        del gathered
    gone = [s() is None for s in storages]
    y.float().square().sum().backward()
    return gone, counting.gathers, x.grad, own.grad


@pytest.mark.parametrize("free, gone, gathers", [(True, [True, True], 2), (False, [False, True], 1)])
def test_a_weight_read_in_another_dtype_is_cast_again(free, gone, gathers):
    for found in run_threads(M, lambda comm: cast_program(comm, free), timeout=20):
        assert found[:2] == (gone, gathers)
        whole = weight().requires_grad_()
        x = torch.ones(5, 4, dtype=torch.bfloat16, requires_grad=True)
        F.linear(x, whole.bfloat16()).float().square().sum().backward()
        assert torch.equal(found[2], x.grad)
        assert found[3].dtype == torch.float64
        assert found[3].isfinite().all()
        assert bool(found[3].numel() == 0 or found[3].abs().max() > 0)


def test_a_copy_is_not_kept_outside_of_freeing():
    w, bias, x = weight().requires_grad_(), torch.ones(len(weight()), requires_grad=True), torch.ones(5, 4, dtype=torch.bfloat16, requires_grad=True)
    storages: list = []
    y = reading(linear_noting(storages), (x, w, bias), {1: torch.bfloat16, 2: torch.bfloat16})
    assert storages[0]() is None
    y.sum().backward()
    assert torch.equal(w.grad, torch.full_like(w, 5.0)) and torch.equal(bias.grad, torch.full_like(bias, 5.0))
    assert torch.equal(x.grad, w.detach().bfloat16().sum(0).expand(5, 4))


def test_a_parameter_that_was_changed_in_between_is_noticed():
    w, x = weight().requires_grad_(), torch.ones(5, 4, dtype=torch.bfloat16, requires_grad=True)
    y = reading(F.linear, (x, w), {1: torch.bfloat16})
    with torch.no_grad():
        w.mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place after the forward pass"):
        y.sum().backward()


def test_without_a_gradient_there_is_nothing_to_keep():
    w, x = weight().requires_grad_(), torch.ones(5, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(reading(F.linear, (x, w), {1: torch.bfloat16}), F.linear(x, w.bfloat16()))
