"""Normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hapx.theory.samples.draw import Draw, Sample, positive, sample, t


def rows() -> Iterator[Sample]:
    yield sample("layer_norm", input=t(3, 4, 6), normalized_shape=(6,), weight=t(6), bias=t(6))
    yield sample("layer_norm", input=t(4, 6), normalized_shape=(6,), weight=t(6), bias=None)
    yield sample("layer_norm", input=t(4, 6), normalized_shape=(6,), weight=None, bias=None)
    yield sample("layer_norm", input=t(3, 4, 6), normalized_shape=(4, 6), weight=t(4, 6), bias=t(4, 6))
    yield sample("rms_norm", input=t(3, 4, 6), normalized_shape=(6,), weight=t(6))
    yield sample("rms_norm", input=t(4, 6), normalized_shape=(6,), weight=None)
    yield sample("_weight_norm", v=t(4, 3, 2), g=t(4, 1, 1))
    yield sample("_weight_norm", v=t(4, 6), g=t(1, 6), dim=1)
    yield sample("_weight_norm", v=t(4, 3), g=t(), dim=-1)


def statistics(channels: int, stored: bool = False) -> dict[str, Draw]:
    """Running statistics; `stored`: as buffers of the model, which the call may change."""
    mean, var = t(channels, grad=False), positive(channels, grad=False)
    return {"running_mean": mean.stored() if stored else mean, "running_var": var.stored() if stored else var}


NONE: dict[str, Any] = {"running_mean": None, "running_var": None}
CONSTANTS = {"momentum": 0.3, "eps": 1e-5, "cudnn_enabled": False}


def channels() -> Iterator[Sample]:
    """Batch and instance norm: training and evaluation, with and without running statistics, with and without weights."""
    for training in (True, False):
        given: dict[str, Any] = {"training": training, **CONSTANTS}
        yield sample("batch_norm", input=t(4, 6, 5), weight=t(6), bias=t(6), **statistics(6), **given)
        yield sample("batch_norm", input=t(8, 6), weight=None, bias=None, **statistics(6), **given)
    yield sample("batch_norm", input=t(4, 6, 2, 3), weight=t(6), bias=t(6), **statistics(6, stored=True), **given | {"training": True})
    yield sample("batch_norm", input=t(4, 6, 5), weight=t(6), bias=t(6), **NONE, **given | {"training": True})
    for measured in (True, False):
        given = {"use_input_stats": measured, **CONSTANTS}
        yield sample("instance_norm", input=t(4, 6, 5), weight=t(6), bias=t(6), **statistics(6), **given)
        yield sample("instance_norm", input=t(4, 6, 3, 2), weight=None, bias=None, **statistics(6), **given)
    given = {"use_input_stats": True, **CONSTANTS}
    yield sample("instance_norm", input=t(4, 6, 5), weight=t(6), bias=t(6), **statistics(6, stored=True), **given)
    yield sample("instance_norm", input=t(4, 6, 5), weight=t(6), bias=t(6), **NONE, **given)
    yield sample("instance_norm", input=t(4, 6, 3, 2), weight=None, bias=None, **NONE, **given)


def groups() -> Iterator[Sample]:
    yield sample("group_norm", input=t(3, 6, 5), num_groups=3, weight=t(6), bias=t(6))
    yield sample("group_norm", input=t(3, 8, 2, 3), num_groups=4, weight=None, bias=None)
    yield sample("group_norm", input=t(3, 8, 4), num_groups=1, weight=t(8), bias=t(8))
    yield sample("group_norm", input=t(3, 6), num_groups=2, weight=t(6), bias=None)
