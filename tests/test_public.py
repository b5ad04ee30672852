"""The names that users import."""

from __future__ import annotations

import importlib
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
