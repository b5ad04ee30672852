"""The page of operators in the documentation is what the registry says."""

from __future__ import annotations

import re
from pathlib import Path

from hapx.report.operators import audited, page

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "python -m hapx.report.operators > docs/operators.md"


def test_many_overloads_are_audited() -> None:
    found = re.search(r"(\d+) overloads of (\d+) entries are audited: (\d+) with", page())
    assert found is not None
    total, _, split = map(int, found.groups())
    assert total >= 250 and split >= 250


def test_work_that_is_only_repeated_does_not_count() -> None:
    seen = audited()
    assert seen["aten.relu.default"] and seen["aten.sum.default"] and not seen["aten.arange.default"]
