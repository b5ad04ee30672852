"""Convolutions, embeddings and products with sufficient factors against the plain operator, with uneven and empty shares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hapx.collectives import COMPOSITES, run_threads
from hapx.collectives.threads import ThreadCommunicator
from hapx.plan import Form
from hapx.states import INVARIANT
from support.local_tensors import Case, Held, indices_of, sharded

INV = Held(INVARIANT)
FORMS = list(Form)[1:]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- convolution --------------------------------------------------------------------------------------------------------------

# name: shapes of input and weight, channels of the result, and the arguments of torch.convolution behind the bias
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, tuple[object, ...]]] = {
    "plain": ((4, 3, 5, 5), (6, 3, 3, 3), 6, ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    "strided, dilated": ((4, 3, 9), (2, 3, 3), 2, ([2], [2], [2], False, [0], 1)),
    "grouped": ((4, 4, 5, 4), (6, 2, 3, 2), 6, ([1, 1], [0, 1], [1, 1], False, [0, 0], 2)),
    "transposed": ((4, 4, 3, 3), (4, 3, 3, 3), 6, ([2, 2], [1, 1], [1, 1], True, [1, 0], 2)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str, form: Form) -> None:
    image, kernel, channels, options = CONVOLUTIONS[name]
    held = sharded(0, (3, 0, 1))
    inputs = ((randn(*image), held, True), (randn(*kernel, seed=1), INV, True), (randn(channels, seed=2), INV, True))

    def operator(comm: ThreadCommunicator, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        local: Tensor = COMPOSITES["hapx.convolution_sfb"](x, w, b, *options, [0] * (x.dim() - 2), (), comm, held.block, form.value)
        return local

    Case(inputs, held, operator, lambda x, w, b: torch.convolution(x, w, b, *options)).check(3)  # type: ignore[call-overload]


def test_padding_that_has_more_behind_than_in_front() -> None:
    held = sharded(0, (1, 2))
    inputs = ((randn(3, 2, 5, 4), held, True), (randn(3, 2, 2, 3, seed=1), INV, True))

    def operator(comm: ThreadCommunicator, x: Tensor, w: Tensor) -> Tensor:
        options = ([1, 1], [0, 1], [1, 1], False, [0, 0], 1)
        local: Tensor = COMPOSITES["hapx.convolution_sfb"](x, w, None, *options, [1, 0], (), comm, held.block)
        return local

    Case(inputs, held, operator, lambda x, w: F.conv2d(F.pad(x, (1, 1, 0, 1)), w)).check(2)


def test_filters_without_elements() -> None:
    """Another axis has left no output channels to this device: an empty result, and gradients that fit."""

    def work(comm: ThreadCommunicator) -> tuple[Tensor, ...]:
        x, w, b = (t.requires_grad_() for t in (randn(2, 3, 4), randn(0, 3, 3), randn(0)))
        options = ([1], [0], [1], False, [0], 1, [0], (2, 0, 2))
        y = COMPOSITES["hapx.convolution_sfb"](x, w, b, *options, comm, sharded(0, (2, 2)).block)
        y.sum().backward()
        return y, x.grad, w.grad, b.grad

    for y, *gradients in run_threads(2, work, timeout=5):
        assert y.shape == (2, 0, 2)
        assert [tuple(g.shape) for g in gradients] == [(2, 3, 4), (0, 3, 3), (0,)]
        assert all(not g.any() for g in gradients)


# --- embedding ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("padding_idx", "by_frequency"), [(-1, False), (4, False), (6, True)])
def test_embedding(padding_idx: int, by_frequency: bool, form: Form) -> None:
    ids = torch.tensor([[0, 6, 4], [4, 3, 1], [4, 4, 4], [5, 6, 6]])
    table = (randn(7, 3), INV, True)

    def plain(w: Tensor) -> Tensor:
        return torch.embedding(w, ids, padding_idx, by_frequency)

    for held in (sharded(0, (3, 0, 1)), sharded(1, (1, 2, 0)), sharded(0, (1, 0, 1), outer=2)):

        def operator(comm: ThreadCommunicator, w: Tensor, held: Held = held) -> Tensor:
            assert held.block is not None
            mine = ids.index_select(held.block.dim, indices_of(held.block, comm.rank))
            local: Tensor = COMPOSITES["hapx.embedding_sfb"](w, mine, padding_idx, by_frequency, 0, comm, held.block, form.value)
            return local

        Case((table,), held, operator, plain).check(3)


@pytest.mark.parametrize("lengths", [(4, 3), (7, 0)])
def test_embedding_of_which_another_axis_has_rows(lengths: tuple[int, ...]) -> None:
    """Devices 2i and 2i + 1 read different ids; devices i and i + 2 hold different rows."""
    ids, table = torch.tensor([0, 6, 4, 4]), randn(7, 3)
    cotangent = randn(4, 3, seed=1)

    def work(comm: ThreadCommunicator) -> tuple[Tensor, Tensor]:
        row, column = divmod(comm.rank, 2)
        pair = comm.subgroup([2 * row, 2 * row + 1])
        mine = table.split(list(lengths))[row].clone().requires_grad_()
        block = sharded(0, (3, 1)).block
        start, stop = (0, 3) if column == 0 else (3, 4)
        y = COMPOSITES["hapx.embedding_sfb"](mine, ids[start:stop], 4, False, sum(lengths[:row]), pair, block)
        y.backward(cotangent[start:stop])
        assert mine.grad is not None
        return y.detach(), mine.grad

    found = run_threads(4, work, timeout=5)
    whole = table.clone().requires_grad_()
    expected = torch.embedding(whole, ids, 4)
    expected.backward(cotangent)
    assert whole.grad is not None
    assert torch.allclose(torch.cat([found[0][0] + found[2][0], found[1][0] + found[3][0]]), expected)
    for device, (_, gradient) in enumerate(found):
        assert torch.allclose(gradient, whole.grad.split(list(lengths))[device // 2])


# --- matrix products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_matmul(form: Form) -> None:
    for held, shape in ((sharded(0, (3, 0, 1)), (4, 5)), (sharded(1, (1, 2, 0), outer=2), (3, 6, 5))):

        def operator(comm: ThreadCommunicator, x: Tensor, w: Tensor, held: Held = held) -> Tensor:
            local: Tensor = COMPOSITES["hapx.matmul_sfb"](x, w, comm, held.block, form.value)
            return local

        Case(((randn(*shape), held, True), (randn(5, 2, seed=1), INV, True)), held, operator, torch.matmul).check(3)


@pytest.mark.parametrize(("shape", "rows"), [((2,), False), ((1, 2), False), ((4, 2), True), ((4, 1), True)])
def test_addmm(shape: tuple[int, ...], rows: bool) -> None:
    held = sharded(0, (3, 0, 1))
    added: tuple[Tensor, Held, bool] = (randn(*shape, seed=2), held if rows else INV, True)
    numbers: tuple[Callable[..., Tensor], int, int] = (COMPOSITES["hapx.addmm_sfb"], 2, 3)

    def operator(comm: ThreadCommunicator, b: Tensor, x: Tensor, w: Tensor) -> Tensor:
        function, beta, alpha = numbers
        return function(b, x, w, beta, alpha, rows, comm, held.block)

    inputs = (added, (randn(4, 5), held, True), (randn(5, 2, seed=1), INV, True))
    Case(inputs, held, operator, lambda b, x, w: torch.addmm(b, x, w, beta=2, alpha=3)).check(3)


def test_a_broadcast_addend_that_is_taken_for_rows_is_found() -> None:
    held = sharded(0, (3, 1))
    inputs = ((randn(1, 2), INV, True), (randn(4, 5), held, True), (randn(5, 2, seed=1), INV, True))

    def operator(comm: ThreadCommunicator, b: Tensor, x: Tensor, w: Tensor) -> Tensor:
        local: Tensor = COMPOSITES["hapx.addmm_sfb"](b, x, w, 1, 1, True, comm, held.block)
        return local

    with pytest.raises(AssertionError, match="copies differ"):
        Case(inputs, held, operator, torch.addmm).check(2)


def test_without_communicators_they_are_the_plain_operators() -> None:
    x, w, ids = randn(4, 5), randn(5, 3, seed=1), torch.tensor([3, 0, 3])
    assert torch.equal(COMPOSITES["hapx.matmul_sfb"](x, w, None, None), x @ w)
    assert torch.equal(COMPOSITES["hapx.embedding_sfb"](w, ids, -1, False, 0, None, None), w[ids])
    image, kernel = randn(2, 3, 6), randn(4, 3, 2, seed=1)
    found = COMPOSITES["hapx.convolution_sfb"](image, kernel, None, [1], [0], [1], False, [0], 1, [0], (), None, None)
    assert torch.equal(found, F.conv1d(image, kernel))
