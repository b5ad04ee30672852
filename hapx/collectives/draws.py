"""Tensors of random numbers that are functions of the global element index (see `hapx.collectives.rng`), not of a device's generator.

In: per dim, the global indices of what is local. Out: local tensors. Invariant: what a device makes is its slice of what a single device would make
with the same rng. Uniform numbers and integers are the same bits on every kind of device; normal numbers go through its logarithm and cosine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hapx.collectives.rng import Rng, draw, upper_bits

Indices = Sequence[Tensor | None]


def rand(shape: Sequence[int], dtype: torch.dtype, call: int, indices: Indices, rng: Rng, local_device: torch.device) -> Tensor:
    """Uniform on [0, 1): multiples of 2^-b, b the bits of the dtype's significand, as torch.rand.

    call: number of the call in the program; indices: per dim, the global indices of the local elements (None: all of them); shape: of the
    whole tensor; local_device: where it is made."""
    bits = round(1 - math.log2(torch.finfo(dtype).eps))
    return upper_bits(draw(call, indices, shape, rng, local_device), bits).to(dtype).mul_(2.0**-bits)


def randn(shape: Sequence[int], dtype: torch.dtype, call: int, indices: Indices, rng: Rng, local_device: torch.device) -> Tensor:
    """Standard normal, up to 6.7. Arguments as of `rand`. sqrt(-2 log u) cos(2 pi v), u on (0, 1] and v on [0, 1) the halves of one word (Box,
    Muller 1958, "A note on the generation of random normal deviates")."""
    wide = torch.promote_types(dtype, torch.float32)
    words = draw(call, indices, shape, rng, local_device)
    radius = upper_bits(words, 32).add_(1).to(wide).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    return words.bitwise_and_(2**32 - 1).to(wide).mul_(2 * math.pi * 2.0**-32).cos_().mul_(radius).to(dtype)


def randint(
    low: int, high: int, shape: Sequence[int], dtype: torch.dtype, call: int, indices: Indices, rng: Rng, local_device: torch.device
) -> Tensor:
    """Integers from `low` to `high` - 1, each as often as the others (to (high - low) / 2^63). Further arguments as of `rand`."""
    return upper_bits(draw(call, indices, shape, rng, local_device), 63).remainder_(high - low).add_(low).to(dtype)
