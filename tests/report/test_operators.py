"""The page of operators in the documentation is what the registry says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hapx.report.operators import audited, page

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"


def test_the_page_is_up_to_date() -> None:
    """In a process of its own: rows are in the order of the registry, which tests that take entries out of it change."""
    made = subprocess.run([sys.executable, "-W", "ignore", "-m", "hapx.report.operators"], capture_output=True, text=True, check=True)
    assert PAGE.read_text() == made.stdout, "python -m hapx.report.operators > docs/operators.md"


def test_many_overloads_are_audited() -> None:
    found = re.search(r"(\d+) overloads of (\d+) entries are audited: (\d+) with", page())
    assert found is not None
    total, _, split = map(int, found.groups())
    assert total >= 250 and split >= 250


def test_work_that_is_only_repeated_does_not_count() -> None:
    seen = audited()
    assert seen["aten.relu.default"] and seen["aten.sum.default"] and not seen["aten.arange.default"]
