"""Settings of all tests: one thread per process, property tests without deadlines (machines are shared), GPU tests skipped visibly,
slow tests left out unless `-m` asks for them, which the last lines say."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch

settings.register_profile("hapx", deadline=None)
settings.load_profile("hapx")


LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_slow(config, items)
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch  # seconds: only where a GPU test was collected

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def _leave_out_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow and not config.getoption("markexpr"):
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        config.stash[LEFT_OUT] = len(slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{count} slow tests were left out; to run them: python -m pytest -m slow")
