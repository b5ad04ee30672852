"""Gradient scaling for fp16 training: torch's `GradScaler` whose check for infinite gradients covers all ranks.

In: a distributed model, and an optimizer of this rank's pieces of its parameters. Invariant: every rank skips the same steps and changes its
scale alike. Where parameters are stored in shards, a rank sees only the gradients of its own pieces: with `torch.amp.GradScaler`, a rank
whose pieces overflow would skip a step that the others take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from hapx.collectives.communicator import Communicator


class Distributed(Protocol):
    """A model on several ranks."""

    @property
    def everyone(self) -> Communicator:
        """All ranks of the model."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""

    def seed_with(self, scale: Callable[[], float]) -> None:
        """By what the loss is going to be multiplied."""


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a `hapx.HAP` model. Use it as torch's:

        scaler = hapx.GradScaler(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)                 # only needed for clipping
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer); scaler.update()    # skipped on all ranks if a gradient of any rank is infinite or NaN

    `unscale_`, or `step` where it was not called, is a collective call.

    Args:
        model: gives the ranks that must agree, and the device.
        options: those of `torch.amp.GradScaler` (init_scale, growth_interval, enabled, ...).
    """

    def __init__(self, model: Distributed, **options: Any):
        super().__init__(options.pop("device", model.device.type), **options)
        self._model = model
        if self.is_enabled():
            model.seed_with(self.get_scale)

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        """What every way to unscale or to check goes through: the result says per device whether a gradient is not finite."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        local = found_inf.reshape(1).clone()
        for there in found.values():
            local = torch.maximum(local, there.to(local.device).reshape(1))
        anywhere = self._model.everyone.all_reduce(local, "max")[0]
        return {device: anywhere.to(device) for device in found or {found_inf.device: found_inf}}
