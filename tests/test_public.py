"""The names that users import."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types

import pytest

import hapx


@pytest.mark.parametrize(
    "name",
    [
        "ClusterSpec",
        "Plan",
        "Restriction",
        "HapError",
        "PlanError",
        "ClusterSpecError",
        "simulate",
        "HAP",
        "plan",
        "GradScaler",
        "mark_layer_boundary",
    ],
)
def test_public_names_are_there(name: str) -> None:
    assert name in hapx.__all__
    assert name in dir(hapx)
    assert callable(getattr(hapx, name))


def test_every_public_name_resolves() -> None:
    for name in hapx.__all__:
        assert getattr(hapx, name) is not None


@pytest.mark.parametrize("name", ["plan", "simulate"])
def test_functions_stay_functions_when_the_submodules_of_their_names_are_imported(name: str) -> None:
    module = importlib.import_module(f"hapx.{name}")
    assert isinstance(module, types.ModuleType)
    assert isinstance(getattr(hapx, name), types.FunctionType)
    assert getattr(hapx, name).__name__ == name


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hapx.nothing


@pytest.mark.parametrize(
    ("before", "given", "found"),
    [("", None, "32"), ("", "1", "1"), ("import torch; torch.cuda.is_initialized = lambda: True", None, None)],
    ids=["as many as there may be", "what the user says", "CUDA runs already"],
)
def test_importing_asks_for_queues_before_cuda_starts(before: str, given: str | None, found: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"} | (
        {"CUDA_DEVICE_MAX_CONNECTIONS": given} if given else {}
    )
    code = f"{before}\nimport hapx, os; print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'))"
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(found)
