"""Composite operators against the plain torch operator: value and all gradients, in the states they claim."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from hapx.collectives import COMPOSITES, create_groups, run_threads
from hapx.errors import UnsupportedOperatorError
from hapx.plan import Axis, Form, Mesh
from hapx.states import INVARIANT, PARTIAL, REPLICATED
from support.local_tensors import Case, Held, indices_of, sharded

REP, INV, PAR = Held(REPLICATED), Held(INVARIANT), Held(PARTIAL)
REDUCTIONS = ("none", "mean", "sum")


def composite(name):
    return COMPOSITES[f"hapx.{name}"]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_registry_names_every_composite():
    names = {"embedding", "cross_entropy", "batch_norm", "mean", "mean_loss", "sum_loss", "nll_loss", "linear_sfb", "dropout", "attention_dropout"}
    names |= {"gather", "index", "instance_norm", "weight_norm", "alpha_dropout", "matmul_sfb", "addmm_sfb", "convolution_sfb", "embedding_sfb"}
    names |= {"rand", "randn", "randint"}
    assert set(COMPOSITES) == {f"hapx.{n}" for n in names}


# --- embedding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", [-1, 0, 4])
@pytest.mark.parametrize("lengths", [(7,), (4, 3), (0, 5, 2), (0, 0, 7, 0)])
def test_embedding_split_by_vocabulary(lengths, padding_idx):
    ids = torch.tensor([[0, 6, 4], [4, 3, 1]])

    def operator(comm, weight):
        return composite("embedding")(weight=weight, indices=ids, padding_idx=padding_idx, offset=sum(lengths[: comm.rank]))

    Case(((randn(7, 3), sharded(0, lengths), True),), PAR, operator, lambda w: torch.embedding(w, ids, padding_idx)).check(len(lengths))


def test_a_wrong_offset_is_found():
    ids = torch.tensor([0, 6, 4])
    case = Case(
        ((randn(7, 3), sharded(0, (4, 3)), True),),
        PAR,
        lambda comm, w: composite("embedding")(w, ids, -1, 3 * comm.rank),
        lambda w: torch.embedding(w, ids),
    )
    with pytest.raises(AssertionError, match="value differs"):
        case.check(2)


# --- cross entropy -----------------------------------------------------------------------------------------------------------

LOSSES = list(product(REDUCTIONS, (-100, 2), (0.0, 0.3), (False, True)))


def targets(*shape: int) -> torch.Tensor:
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(3))


def loss_case(where: str, lengths, shape, reduction, ignore, smoothing, weighted, wrong_count: int = 0) -> Case:
    target = targets(shape[0], *shape[2:])
    weight = torch.tensor([0.5, 1.0, 2.0, 0.0, 1.5], dtype=torch.float64) if weighted else None

    def operator(comm, logits):
        mine = target[indices_of(sharded(0, lengths).block, comm.rank)] if where == "batch" else target
        where_it_is = (
            {"batch": comm, "classes": None, "offset": 0}
            if where == "batch"
            else {"batch": None, "classes": comm, "offset": sum(lengths[: comm.rank])}
        )
        return composite("cross_entropy")(
            self=logits, target=mine, weight=weight, reduction=REDUCTIONS.index(reduction), ignore_index=ignore, label_smoothing=smoothing,
            count=shape[1] + wrong_count, **where_it_is,
        )  # fmt: skip

    def reference(logits):
        return F.cross_entropy(logits, target, weight, ignore_index=ignore, reduction=reduction, label_smoothing=smoothing)

    if where == "classes":
        return Case(((10 * randn(*shape), sharded(1, lengths), True),), INV, operator, reference)
    output = sharded(0, lengths) if reduction == "none" else PAR
    return Case(((10 * randn(*shape), sharded(0, lengths), True),), output, operator, reference)


@pytest.mark.parametrize(("reduction", "ignore", "smoothing", "weighted"), LOSSES)
def test_cross_entropy_split(reduction, ignore, smoothing, weighted):
    for where, lengths, shape in (
        ("batch", (4, 0, 2), (6, 5)),
        ("batch", (1, 5), (6, 5, 2, 3)),
        ("classes", (3, 0, 2), (6, 5)),
        ("classes", (1, 4), (4, 5, 3)),
    ):
        loss_case(where, lengths, shape, reduction, ignore, smoothing, weighted).check(len(lengths))


def test_large_logits_and_ignored_rows():
    target = torch.tensor([-100, -100])
    results = run_threads(
        2, lambda comm: composite("cross_entropy")(randn(2, 2), target, None, 1, -100, 0.0, None, comm, 2 * comm.rank, 4), timeout=20
    )
    assert all(r.isnan() for r in results)  # as on one device: 0 / 0
    logits, target = torch.tensor([[1e4, 0.0, -1e4, 1e4 - 1]], dtype=torch.float64), torch.tensor([3])
    results = run_threads(2, lambda c: composite("cross_entropy")(logits[:, 2 * c.rank :][:, :2], target, None, 2, -100, 0.0, None, c, 2 * c.rank, 4))
    assert all(torch.allclose(r, F.cross_entropy(logits, target), rtol=1e-15) for r in results)


def test_cross_entropy_on_a_two_by_two_mesh():
    """Rows split 3:1 over machines, classes 2:3 inside; and a wrong dual: the loss Replicated over the classes."""
    mesh = Mesh("2x2", (Axis("machines", 2, "machines"), Axis("devices", 2, "devices")), (0, 1, 2, 3), 0)
    logits, target = randn(4, 5).requires_grad_(), torch.tensor([1, -100, 4, 0])
    expected = F.cross_entropy(logits, target, label_smoothing=0.1)
    expected.backward()
    rows, columns = (slice(0, 3), slice(3, 4)), (slice(0, 2), slice(2, 5))

    def work(world):
        groups = create_groups(mesh, world)
        r, c = mesh.coordinates(world.rank)
        mine = logits.detach()[rows[r], columns[c]].clone().requires_grad_()
        loss = composite("cross_entropy")(mine, target[rows[r]], None, 1, -100, 0.1, groups[(0,)], groups[(1,)], columns[c].start, 5)
        loss.backward()
        return loss.detach(), mine.grad, logits.grad[rows[r], columns[c]]

    results = run_threads(4, work, timeout=20)
    assert torch.allclose(results[0][0] + results[2][0], expected.detach(), rtol=1e-13, atol=0)
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.allclose(found, true, rtol=1e-12, atol=1e-14) for _, found, true in results)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_probabilities_as_targets(reduction):
    target, lengths = randn(4, 5, seed=1).softmax(1), (3, 1)

    def operator(comm, logits):
        mine = target[indices_of(sharded(0, lengths).block, comm.rank)]
        return composite("cross_entropy")(logits, mine, None, REDUCTIONS.index(reduction), -100, 0.2, comm, None, 0, 5)

    Case(
        ((randn(4, 5), sharded(0, lengths), True),), PAR, operator, lambda x: F.cross_entropy(x, target, reduction=reduction, label_smoothing=0.2)
    ).check(2)
    with pytest.raises(UnsupportedOperatorError, match="split over classes"):
        run_threads(2, lambda comm: composite("cross_entropy")(randn(4, 3), target, None, 1, -100, 0.0, None, comm, 0, 5))


def test_wrong_losses_are_found():
    """A wrong number of classes, the mean of local means, and a loss that claims to be Replicated over the classes."""
    with pytest.raises(AssertionError, match="value differs"):
        loss_case("classes", (3, 0, 2), (6, 5), "mean", -100, 0.3, False, wrong_count=1).check(3)
    right = loss_case("batch", (5, 1), (6, 5), "mean", 2, 0.0, False)
    right.check(2)
    target = targets(6)

    def local_mean(comm, logits):
        mine = target[indices_of(sharded(0, (5, 1)).block, comm.rank)]
        return F.cross_entropy(logits, mine, ignore_index=2) / comm.size

    with pytest.raises(AssertionError, match="value differs"):
        Case(right.inputs, PAR, local_mean, right.reference).check(2)
    right = loss_case("classes", (3, 2), (6, 5), "mean", 2, 0.0, False)
    with pytest.raises(AssertionError, match="gradient of input 0 differs"):
        Case(right.inputs, REP, right.operator, right.reference).check(2)


# --- batch norm ----------------------------------------------------------------------------------------------------------------


def norm_case(lengths, shape, affine=True, offset=0.0, operator=None) -> tuple[Case, list, list]:
    """The case, the reference's running statistics, and by rank those of the composite."""
    running, found = [torch.zeros(shape[1], dtype=torch.float64), torch.ones(shape[1], dtype=torch.float64)], [None] * len(lengths)

    def local(comm, x, *parameters):
        own = [torch.zeros(shape[1], dtype=torch.float64), torch.ones(shape[1], dtype=torch.float64)]
        found[comm.rank] = own
        return composite("batch_norm")(x, *(parameters or (None, None)), *own, True, 0.1, 1e-5, comm)

    def reference(x, *parameters):
        running[0].zero_(), running[1].fill_(1)
        return F.batch_norm(x, *running, *parameters, training=True, momentum=0.1, eps=1e-5)

    inputs = ((randn(*shape) + offset, sharded(0, lengths), True),)
    if affine:
        inputs = (*inputs, (randn(shape[1], seed=1), REP, True), (randn(shape[1], seed=2), REP, True))
    return Case(inputs, sharded(0, lengths), operator or local, reference), running, found


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (6, 2, 3, 2)])
@pytest.mark.parametrize("lengths", [(6,), (5, 1), (4, 0, 2), (0, 0, 6)])
def test_batch_norm_split_by_samples(lengths, shape, affine):
    case, running, found = norm_case(lengths, shape, affine)
    case.check(len(lengths))
    for mean, var in found:
        assert torch.allclose(mean, running[0], rtol=1e-13, atol=1e-14) and torch.allclose(var, running[1], rtol=1e-13, atol=1e-14)


def test_batch_norm_does_not_cancel():
    """Mean 1e6 and variance 1: mean of squares minus square of mean would lose twelve digits."""
    case, _, _ = norm_case((4, 2), (6, 3), offset=1e6)
    locals_, cotangents, value, _ = case.prepare(2)
    results = run_threads(2, lambda comm: case.run(comm, locals_, cotangents)[0])
    assert torch.allclose(torch.cat(results), value, rtol=0, atol=1e-8)


def test_local_statistics_are_found():
    case, _, _ = norm_case((4, 2), (6, 3), operator=lambda comm, x, w, b: F.batch_norm(x, None, None, w, b, training=True))
    with pytest.raises(AssertionError, match="value differs"):
        case.check(2)


def test_batch_norm_evaluation_and_no_running_statistics():
    running = (randn(3), randn(3, seed=1).square() + 1)
    weight, bias = randn(3, seed=2), randn(3, seed=4)

    def local(comm, x, w, b):
        return composite("batch_norm")(x, w, b, *running, False, 0.1, 1e-5, comm)

    inputs = ((randn(6, 3, 2), sharded(0, (4, 2)), True), (weight, REP, True), (bias, REP, True))
    Case(inputs, sharded(0, (4, 2)), local, lambda x, w, b: F.batch_norm(x, *running, w, b, eps=1e-5)).check(2)

    def without(comm, x, w, b):
        return composite("batch_norm")(x, w, b, None, None, False, 0.1, 1e-5, comm)

    Case(inputs, sharded(0, (4, 2)), without, lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True, eps=1e-5)).check(2)


# --- means ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "keepdim", "count"), [(None, False, 24), ((0,), False, 6), ((0, 1), True, 24)])
def test_mean_of_a_split_dim(dim, keepdim, count):
    def operator(comm, x):
        return composite("mean")(self=x, dim=dim, keepdim=keepdim, count=count, dtype=None)

    reference = (lambda x: x.mean()) if dim is None else (lambda x: x.mean(dim, keepdim))
    Case(((randn(6, 4), sharded(0, (5, 0, 1)), True),), PAR, operator, reference).check(3)


def test_mean_in_half_precision_does_not_overflow():
    x = torch.full((4000,), 60.0, dtype=torch.float16)
    assert composite("mean")(x, None, False, 4000, None) == 60 and composite("mean")(x, (0,), True, 4000, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("loss", ["mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "soft_margin_loss"])
def test_the_mean_of_a_loss_is_its_local_sum_over_the_global_count(loss):
    held = sharded(0, (5, 0, 1))

    def operator(comm, x, y):
        return composite("mean_loss")(operator=f"aten.{loss}.default", self=x, target=y, reduction=1, count=24)

    inputs = ((randn(6, 4), held, True), (randn(6, 4, seed=1).abs() + 0.1, held, False))
    Case(inputs, PAR, operator, getattr(torch.ops.aten, loss).default).check(3)


@pytest.mark.parametrize("loss", ["multi_margin_loss", "multilabel_margin_loss"])
def test_the_sum_of_a_loss_is_that_of_its_local_rows(loss):
    function = getattr(torch.ops.aten, loss).default
    target = torch.randint(0, 4, (6,) if loss == "multi_margin_loss" else (6, 4), generator=torch.Generator().manual_seed(3))
    held = sharded(0, (5, 0, 1))

    def operator(comm, x, y):
        return composite("sum_loss")(operator=f"aten.{loss}.default", self=x, target=y, reduction=2)

    Case(((randn(6, 4), held, True), (target, held, False)), PAR, operator, lambda x, y: function(x, y, reduction=2)).check(3)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 2, 3)])
def test_negative_log_likelihood_split_by_samples(shape, weighted, reduction):
    held = sharded(0, (5, 0, 1))
    target = torch.randint(0, 5, (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(3))
    weight = randn(5, seed=2).abs() if weighted else None

    def operator(comm, x, y):
        return composite("nll_loss")(self=x, target=y, weight=weight, reduction=reduction, ignore_index=1, batch=comm, offset=0)

    def reference(x, y):
        return torch.ops.aten.nll_loss_nd(x, y, weight, reduction, 1)

    Case(((randn(*shape), held, True), (target, held, False)), PAR if reduction else held, operator, reference).check(3)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("lengths", [(5,), (3, 0, 2)])
def test_negative_log_likelihood_split_by_classes(lengths, reduction):
    target = torch.tensor([4, 1, 0, 3, 2, 1])
    weight = randn(5, seed=2).abs()

    def operator(comm, x):
        offset = sum(lengths[: comm.rank])
        return composite("nll_loss")(self=x, target=target, weight=weight, reduction=reduction, ignore_index=1, batch=None, offset=offset)

    def reference(x):
        return torch.ops.aten.nll_loss_nd(x, target, weight, reduction, 1)

    Case(((randn(6, 5), sharded(1, lengths), True),), PAR, operator, reference).check(len(lengths))


# --- reading rows that are elsewhere -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(7,), (4, 3), (0, 5, 2)])
def test_gather_along_a_split_dim(lengths):
    index = torch.tensor([[0, 6, 4], [4, 3, 1]])

    def operator(comm, x):
        return composite("gather")(self=x, dim=1, index=index, offset=sum(lengths[: comm.rank]))

    Case(((randn(5, 7), sharded(1, lengths), True),), PAR, operator, lambda x: x.gather(1, index)).check(len(lengths))


@pytest.mark.parametrize("lengths", [(7,), (4, 3), (0, 5, 2)])
@pytest.mark.parametrize("dim", [0, 2])
def test_advanced_indexing_of_a_split_dim_counts_negative_indices_from_the_end_of_the_whole(lengths, dim):
    rows, columns = torch.tensor([[0], [-1], [3]]), torch.tensor([1, -7, 6, 2])
    shape = (7, 2, 7, 3)

    def operator(comm, x):
        offsets = [None, None, None]
        offsets[dim] = sum(lengths[: comm.rank])
        return composite("index")(self=x, indices=(rows, None, columns), offsets=offsets, sizes=shape)

    Case(((randn(*shape), sharded(dim, lengths), True),), PAR, operator, lambda x: x[rows, :, columns]).check(len(lengths))


# --- sufficient factor broadcasting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", list(Form)[1:])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_with_sufficient_factors(bias, form):
    for held, shape in ((sharded(0, (3, 0, 1)), (4, 5)), (sharded(1, (1, 2, 0), outer=2), (3, 6, 5)), (sharded(0, (1, 0, 1), inner=2), (4, 2, 5))):
        inputs = ((randn(*shape), held, True), (randn(2, 5, seed=1), INV, True)) + (((randn(2, seed=2), INV, True),) if bias else ())

        def operator(comm, x, w, b=None, held=held):
            return composite("linear_sfb")(input=x, weight=w, bias=b, gather=comm, block=held.block, form=form.value)

        Case(inputs, held, operator, F.linear).check(3)


def test_frozen_weights_gather_nothing():
    def work(comm):
        x = randn(2, 3).requires_grad_()
        y = composite("linear_sfb")(x, randn(4, 3), None, comm, sharded(0, (2, 2)).block)
        if comm.rank == 0:  # alone: a collective would time out
            y.sum().backward()
            return x.grad
        return None

    assert torch.allclose(run_threads(2, work, timeout=2)[0], randn(4, 3).sum(0).expand(2, 3))


def test_a_plain_linear_with_invariant_weights_is_found():
    held = sharded(0, (3, 1))
    inputs = ((randn(4, 5), held, True), (randn(2, 5, seed=1), INV, True))
    with pytest.raises(AssertionError, match="copies differ"):
        Case(inputs, held, lambda comm, x, w: F.linear(x, w), F.linear).check(2)


def test_without_communicators_they_are_the_plain_operators():
    x, w, t = randn(4, 5), randn(3, 5, seed=1), targets(4)
    assert torch.equal(composite("linear_sfb")(x, w, None, None, None), F.linear(x, w))
    assert torch.equal(composite("batch_norm")(x, None, None, None, None, True, 0.1, 1e-5, None), F.batch_norm(x, None, None, training=True))
    loss = composite("cross_entropy")(x, t, None, 1, -100, 0.0, None, None, 0, 5)
    assert math.isclose(loss, F.cross_entropy(x, t), rel_tol=1e-14)
    one = composite("cross_entropy")(x[0], t[0], None, 1, -100, 0.1, None, None, 0, 5)
    assert math.isclose(one, F.cross_entropy(x[0], t[0], label_smoothing=0.1), rel_tol=1e-14)
