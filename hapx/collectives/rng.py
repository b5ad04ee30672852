"""Random numbers that do not depend on the device: a function of (seed, step, call, global element index).

In: plain integers and, per dim, the global indices of the local elements. Out: 64-bit words, or booleans made of them. Invariant: what a shard
gets is that slice of what the whole tensor gets, on every kind of device: only 64-bit integer arithmetic with wrap-around is used, and an
integer threshold.

The word of an element is mix(key + G * index) (mod 2^64), key a hash of (seed, step, call); a mask keeps it where its upper 53 bits are at
least p * 2^53. `mix` is the finalizer of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


@dataclass
class Rng:
    """Where the random numbers of a training run are: its seed, and the number of the forward pass. Evaluations count downwards from 0, so that
    training draws the same numbers with and without them. Plain ints are all of its state."""

    seed: int
    step: int = 0
    evaluated: int = 0

    def next_step(self) -> None:
        """To be called once per forward pass, on every rank."""
        self.step += 1

    def follow(self, other: Rng) -> None:
        """From now on the same numbers as the other's next passes."""
        self.seed, self.step, self.evaluated = other.seed, other.step, other.evaluated

    @contextmanager
    def evaluating(self, passes: int = 1) -> Iterator[None]:
        """Inside are the numbers of the next `passes` forward passes that train nothing; `step` is that of the first one."""
        self.evaluated += passes
        trained, self.step = self.step, -self.evaluated
        try:
            yield
        finally:
            self.step = trained


def _signed(word: int) -> int:
    word &= _WORD
    return word - 2**64 if word >> 63 else word


def _mix(word: int) -> int:
    """SplitMix64's finalizer, on a Python int."""
    word &= _WORD
    for shift, factor in _FACTORS:
        word = ((word ^ (word >> shift)) * factor) & _WORD
    return word ^ (word >> _LAST_SHIFT)


def _mix_(words: Tensor) -> Tensor:
    """The same, in place, on an int64 tensor; its right shift copies the sign, so the copies are masked away."""
    for shift, factor in _FACTORS:
        words.bitwise_xor_((words >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(_signed(factor))
    return words.bitwise_xor_((words >> _LAST_SHIFT).bitwise_and_(2 ** (64 - _LAST_SHIFT) - 1))


def key(rng: Rng, call: int) -> int:
    """Start of the stream of one call in one step."""
    word = 0
    for part in (rng.seed, rng.step, call):
        word = _mix(word + _GOLDEN + part)
    return word


def draw(call: int, indices: Sequence[Tensor | None], shape: Sequence[int], rng: Rng, device: torch.device) -> Tensor:
    """A random word (int64, all bits) for each of the elements at `indices` (per dim; None: all) of a tensor of global `shape`."""
    words = torch.full((), _signed(key(rng, call)), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        index = indices[dim]
        along = torch.arange(shape[dim], device=device) if index is None else index.to(device)
        words = words + (along * _signed(stride * _GOLDEN)).reshape(-1, *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return _mix_(words)


def upper_bits(words: Tensor, count: int) -> Tensor:
    """The upper `count` (at most 63) bits of each word, as an integer from 0 to 2^count - 1."""
    return (words >> (64 - count)).bitwise_and_(2**count - 1)


def keep_mask(p: float, call: int, indices: Sequence[Tensor | None], shape: Sequence[int], rng: Rng, device: torch.device) -> Tensor:
    """True with probability 1 - p, for the elements at `indices` (per dim; None: all) of a tensor of global `shape`."""
    return upper_bits(draw(call, indices, shape, rng, device), 53) >= round(p * 2**53)
