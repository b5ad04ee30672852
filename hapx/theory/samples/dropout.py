"""Dropout of whole channels, and dropout that keeps mean and variance."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Reason, Sample, sample, t, words


def dropouts() -> Iterator[Sample]:
    for name in words("feature_dropout alpha_dropout feature_alpha_dropout"):
        for p, train in ((0.4, True), (0.4, False)):
            yield sample(name, Reason.RANDOM, input=t(4, 6, 3), p=p, train=train)
