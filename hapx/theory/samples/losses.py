"""Embedding, losses, dropout."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Reason, Sample, Values, ids, positive, sample, t


def losses() -> Iterator[Sample]:
    yield sample("embedding", weight=t(7, 6), indices=ids(4, 5, limit=7))
    yield sample("embedding", weight=t(7, 6), indices=ids(4, limit=7), padding_idx=2)
    yield sample("embedding", weight=t(7, 6), indices=ids(4, limit=3), scale_grad_by_freq=True)
    for reduction in (1, 0, 2):
        yield sample("cross_entropy_loss", self=t(4, 7), target=ids(4, limit=7), weight=None, reduction=reduction, ignore_index=2)
    yield sample("cross_entropy_loss", self=t(4, 7), target=ids(4, limit=7), weight=positive(7, grad=False), ignore_index=2, label_smoothing=0.1)
    yield sample("cross_entropy_loss", self=t(3, 7, 4), target=ids(3, 4, limit=7), label_smoothing=0.1)
    yield sample("cross_entropy_loss", self=t(7), target=ids(limit=7))
    for reduction in (0, 1, 2):
        yield sample("cross_entropy_loss", self=t(4, 7), target=t(4, 7, values=Values.SHARES, grad=False), reduction=reduction)
    yield sample("cross_entropy_loss", self=t(4, 7, grad=False), target=ids(4, limit=7))
    for reduction in (1, 0, 2):
        yield sample("mse_loss", self=t(4, 6), target=t(4, 6, grad=False), reduction=reduction)
    yield sample("mse_loss", self=t(4, 6), target=t(4, 6))
    for p, train in ((0.4, True), (0.4, False), (0.0, True)):
        yield sample("dropout", Reason.RANDOM, input=t(4, 6), p=p, train=train)
