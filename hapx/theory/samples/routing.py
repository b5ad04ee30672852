"""Routing of tokens to experts."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Sample, ids, sample


def routing() -> Iterator[Sample]:
    yield sample("one_hot", self=ids(4, 6, limit=5), num_classes=5)
