"""Settings of all tests: one thread per process, property tests without deadlines (machines are shared), GPU tests skipped visibly."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch

settings.register_profile("hapx", deadline=None)
settings.load_profile("hapx")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch  # seconds: only where a GPU test was collected

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
