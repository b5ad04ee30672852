"""The device on which ranks of the tests compute: the CPU, or with HAPX_TEST_DEVICE=cuda (`make gpu`) a GPU, which ranks share where there are more
of them than GPUs. Results are compared on the CPU.

Ranks that are threads take turns on one GPU. Ranks that are processes talk over NCCL (`benchmarks.gpus`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

ON_GPU = os.environ.get("HAPX_TEST_DEVICE", "cpu") == "cuda"
BACKEND = "nccl" if ON_GPU else "gloo"


def device() -> torch.device:
    """Of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")


def placed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.to(device()) for name, t in tensors.items()}


def brought(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """To the CPU, where results are compared."""
    return {name: t.cpu() for name, t in tensors.items()}


if ON_GPU:
    assert torch.cuda.is_available(), "HAPX_TEST_DEVICE is cuda, and there is no GPU"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # float32 is float32
