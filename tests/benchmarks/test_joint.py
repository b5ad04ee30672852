"""The comparison of the alternation with a global reference, on its first cases."""

from __future__ import annotations

import pytest

from benchmarks.joint import measure, page, tables


@pytest.mark.parametrize("seed", [0, 2])
def test_the_reference_is_no_worse_and_hardly_better(seed: int) -> None:
    result = measure(seed)
    print(f"case {seed} on {result.mesh}: {result.gap:.4%}")
    assert result.seed == seed and result.searches > 0
    assert 0 <= result.gap < 0.01


def test_its_tables() -> None:
    result = measure(1)
    gaps, *_ = tables([result])
    assert gaps.row_count > 0
    assert "python -m benchmarks.joint" in page([result], "python -m benchmarks.joint")
