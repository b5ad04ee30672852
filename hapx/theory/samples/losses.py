"""Embedding, losses, dropout."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Reason, Sample, Values, ids, positive, sample, signs, t, unit, words


def losses() -> Iterator[Sample]:
    yield sample("embedding", weight=t(7, 6), indices=ids(4, 5, limit=7))
    yield sample("embedding", weight=t(7, 6), indices=ids(4, limit=7), padding_idx=2)
    yield sample("embedding", weight=t(7, 6), indices=ids(4, limit=3), scale_grad_by_freq=True)
    for reduction in (1, 0, 2):
        yield sample("cross_entropy_loss", self=t(4, 7), target=ids(4, limit=7), weight=None, reduction=reduction, ignore_index=2)
    for reduction in (1, 0, 2):
        weighted = {"weight": positive(7, grad=False), "ignore_index": 2, "label_smoothing": 0.1, "reduction": reduction}
        yield sample("cross_entropy_loss", self=t(4, 7), target=ids(4, limit=7), **weighted)
    yield sample("cross_entropy_loss", self=t(3, 7, 4), target=ids(3, 4, limit=7), label_smoothing=0.1)
    yield sample("cross_entropy_loss", self=t(7), target=ids(limit=7))
    for reduction in (0, 1, 2):
        yield sample("cross_entropy_loss", self=t(4, 7), target=t(4, 7, values=Values.SHARES, grad=False), reduction=reduction)
    yield sample("cross_entropy_loss", self=t(4, 7, grad=False), target=ids(4, limit=7))
    for p, train in ((0.4, True), (0.4, False), (0.0, True)):
        yield sample("dropout", Reason.RANDOM, input=t(4, 6), p=p, train=train)


def class_losses() -> Iterator[Sample]:
    """Negative log likelihood."""
    for reduction in (1, 0, 2):
        yield sample("nll_loss_nd", self=t(4, 7), target=ids(4, limit=7), reduction=reduction, ignore_index=2)
        weight = positive(7, grad=False)
        yield sample("nll_loss_nd", self=t(3, 7, 4), target=ids(3, 4, limit=7), weight=weight, reduction=reduction, ignore_index=2)
    yield sample("nll_loss_nd", self=t(7), target=ids(limit=7))
    yield sample("nll_loss", self=t(4, 7), target=ids(4, limit=7), weight=positive(7, grad=False))
    yield sample("nll_loss2d", self=t(3, 7, 2, 4), target=ids(3, 2, 4, limit=7), ignore_index=2)


def row_by_row() -> Iterator[Sample]:
    """Losses of rows or elements, with every reduction."""
    for reduction in (1, 0, 2):
        for name in words("mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss"):
            yield sample(name, self=t(4, 6), target=t(4, 6, grad=False), reduction=reduction)
        yield sample("mse_loss", self=t(4, 6), target=t(4, 6), reduction=reduction)
        yield sample("l1_loss", self=t(4, 6), target=t(4, 6), reduction=reduction)
        for log_target in (False, True):
            yield sample("kl_div", self=t(4, 6), target=positive(4, 6), reduction=reduction, log_target=log_target)
        yield sample("hinge_embedding_loss", self=t(4, 6), target=signs(4, 6), reduction=reduction)
        for full in (False, True):
            constants = {"log_input": not full, "full": full, "eps": 1e-8, "reduction": reduction}
            yield sample("poisson_nll_loss", input=positive(4, 6), target=positive(4, 6, grad=False), **constants)
        yield sample("margin_ranking_loss", input1=t(4, 6), input2=t(4, 6), target=signs(4, 6), margin=0.1, reduction=reduction)
        for weight in (None, positive(6, grad=False), positive(4, 6, grad=False)):
            yield sample("binary_cross_entropy", self=unit(4, 6), target=unit(4, 6, grad=False), weight=weight, reduction=reduction)
            many = {"weight": weight, "pos_weight": positive(6, grad=False), "reduction": reduction}
            yield sample("binary_cross_entropy_with_logits", self=t(4, 6), target=unit(4, 6, grad=False), **many)
        yield sample("cosine_embedding_loss", input1=t(4, 6), input2=t(4, 6), target=signs(4), margin=0.1, reduction=reduction)
        yield sample("cosine_embedding_loss", input1=t(6), input2=t(6), target=signs(), reduction=reduction)
        for swap in (False, True):
            yield sample("triplet_margin_loss", anchor=t(4, 6), positive=t(4, 6), negative=t(4, 6), swap=swap, reduction=reduction)
        for weight in (None, positive(7, grad=False)):
            yield sample("multi_margin_loss", self=t(4, 7), target=ids(4, limit=7), weight=weight, reduction=reduction)
        yield sample("multilabel_margin_loss", self=t(4, 7), target=ids(4, 7, limit=7), reduction=reduction)
    yield sample("multi_margin_loss", self=t(7), target=ids(limit=7))
    yield sample("multilabel_margin_loss", self=t(7), target=ids(7, limit=7))


def in_order() -> Iterator[Sample]:
    """Targets that are found in order in longer inputs."""
    lengths = {"input_lengths": ids(4, limit=7), "target_lengths": ids(4, limit=4)}
    yield sample("hapx_ops.ctc", log_probs=t(7, 4, 5), targets=ids(4, 3, limit=4), **lengths, blank=4, zero_infinity=True)
