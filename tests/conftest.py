"""Settings of all tests: one thread per process, property tests without deadlines (machines are shared), GPU tests skipped visibly,
slow tests left out unless `-m` asks for them, and tests of hub models (they need the extra `hub`) unless they are named, which the last
lines say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch

settings.register_profile("hapx", deadline=None)
settings.load_profile("hapx")


LEFT_OUT = pytest.StashKey[dict[str, int]]()
HUB = Path(__file__).parent / "hub"
HOW = {"slow": "python -m pytest -m slow", "hub": "make hub"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out(config, items)
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch  # seconds: only where a GPU test was collected

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    expression = config.getoption("markexpr")
    named = "hub" in expression or any(Path(arg.partition("::")[0]).resolve().is_relative_to(HUB) for arg in config.args)
    left_out = {"slow": not expression, "hub": not named}
    counts = config.stash.setdefault(LEFT_OUT, {})
    for marker in (m for m, leave in left_out.items() if leave):
        gone = [item for item in items if item.get_closest_marker(marker)]
        if gone:
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
            config.hook.pytest_deselected(items=gone)
            counts[marker] = len(gone)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of a worker that runs a part of the tests (pytest-xdist): what it says to the process that started it."""
    said = getattr(session.config, "workeroutput", None)
    if said is not None:
        said["left out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Workers collect the same tests, so they leave out the same ones."""
    node.config.stash.setdefault(LEFT_OUT, {}).update(getattr(node, "workeroutput", {}).get("left out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for marker, count in config.stash.get(LEFT_OUT, {}).items():
        terminalreporter.write_line(f"{count} {marker} tests were left out; to run them: {HOW[marker]}")
