"""Random tensors."""

from __future__ import annotations

from collections.abc import Iterator

from hapx.theory.samples.draw import Reason, Sample, dtype, sample


def draws() -> Iterator[Sample]:
    for name in ("rand", "randn"):
        yield sample(name, Reason.RANDOM, size=(4, 6, 3), dtype=dtype("float64"))
        yield sample(name, Reason.RANDOM, size=(4, 6), dtype=dtype("float32"))
    yield sample("randint.low", Reason.RANDOM, low=-3, high=11, size=(4, 6, 3), dtype=dtype("int64"))
