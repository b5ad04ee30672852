"""Writes into slices."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Sample, ids, sample, t


def writes() -> Iterator[Sample]:
    yield sample("slice_scatter", self=t(4, 6), src=t(4, 3), dim=1, start=1, end=4)
    yield sample("slice_scatter", self=t(4, 6), src=t(2, 6), dim=0, step=2)
    yield sample("slice_scatter", self=t(4, 6, grad=False), src=t(4, 5), dim=-1, start=1)
    yield sample("slice_scatter", self=ids(4, 6, limit=9), src=ids(4, 5, limit=9), dim=1, start=1)
    yield sample("select_scatter", self=t(4, 5, 6), src=t(4, 6), dim=1, index=2)
    yield sample("select_scatter", self=ids(4, 6, limit=9), src=ids(4, limit=9), dim=-1, index=0)
