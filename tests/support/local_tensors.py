"""The meaning of the four states, written down once more and independently: cutting a whole tensor into local ones, putting local ones
together, and checking that a local program keeps the states it claims, forward and backward.

In: whole tensors, states (of one axis) and cuts. Out: nothing, or an AssertionError. Invariant checked: if the locals are in the claimed
states of reference tensors e, results and gradients are in the claimed states (dual states) of what one device computes from e.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hapx.collectives import Communicator, run_threads
from hapx.layout import Block
from hapx.states import Cut, Invariant, Partial, Replicated, Row, Sharded, State, dual

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Held:
    """A state along one axis, with its cut if it is Sharded."""

    state: State
    block: Block | None = None

    @property
    def dual(self) -> Held:
        return Held(dual(self.state), self.block)


def sharded(dim: int, lengths: Sequence[int], outer: int = 1, inner: int = 1) -> Held:
    """Sharded along `dim`, with these lengths."""
    cut = Cut(Row("compute", 0, 0), sum(lengths))
    return Held(Sharded(dim, outer, inner, cut), Block(dim, outer, tuple(lengths), inner))


def indices_of(block: Block, coordinate: int) -> Tensor:
    """Indices along the dim that a coordinate holds, in local order, element by element."""
    units, start = sum(block.lengths), sum(block.lengths[:coordinate])
    own = range(start, start + block.lengths[coordinate])
    return torch.tensor([(o * units + u) * block.inner + i for o in range(block.outer) for u in own for i in range(block.inner)], dtype=torch.long)


def cut(e: Tensor, held: Held, m: int, generator: torch.Generator) -> list[Tensor]:
    """Local tensors of e: for Partial a random split with both signs."""
    if isinstance(held.state, Sharded):
        assert held.block is not None
        return [e.index_select(held.block.dim, indices_of(held.block, k)) for k in range(m)]
    if isinstance(held.state, Partial):
        parts = [torch.randn(e.shape, dtype=e.dtype, generator=generator) for _ in range(m - 1)]
        return [*parts, e - sum(parts, torch.zeros_like(e))]
    return [e.clone() for _ in range(m)]


def whole(locals_: Sequence[Tensor], held: Held) -> Tensor:
    """e from its local tensors; equal ones must be equal bit by bit."""
    if isinstance(held.state, Partial):
        return sum(locals_[1:], locals_[0])
    if isinstance(held.state, Replicated | Invariant):
        for t in locals_[1:]:
            assert torch.equal(t, locals_[0]), "copies differ"
        return locals_[0]
    block = held.block
    assert block is not None
    shape = list(locals_[0].shape)
    shape[block.dim] = block.size
    e = torch.full(shape, torch.nan, dtype=locals_[0].dtype)
    for k, t in enumerate(locals_):
        e.index_copy_(block.dim, indices_of(block, k), t)
    return e


def assert_near(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    difference = float((actual - expected).abs().max()) if expected.numel() else 0.0
    assert difference <= TOLERANCE * scale, f"{what} differs by {difference}"


@dataclass(frozen=True)
class Case:
    """A local operator of `inputs` (tensor, state, needs gradient) that claims an output state, and what one device computes."""

    inputs: tuple[tuple[Tensor, Held, bool], ...]
    output: Held
    operator: Callable[..., Tensor]  # (communicator, *locals) -> local
    reference: Callable[..., Tensor]  # (*wholes) -> whole

    def prepare(self, m: int, seed: int = 0) -> tuple[list[list[Tensor]], list[Tensor], Tensor, list[Tensor | None]]:
        """Locals by input and rank, cotangents by rank, the reference's value and gradients."""
        generator = torch.Generator().manual_seed(seed)
        wholes = [t.clone().requires_grad_(needs) for t, _, needs in self.inputs]
        value = self.reference(*wholes)
        w = torch.randn(value.shape, dtype=torch.float64, generator=generator)
        gradients: list[Tensor | None] = [None] * len(wholes)
        needed = [k for k, (_, _, needs) in enumerate(self.inputs) if needs]
        if needed:
            for k, g in zip(needed, torch.autograd.grad((value * w).sum(), [wholes[k] for k in needed], allow_unused=True), strict=True):
                gradients[k] = torch.zeros_like(wholes[k]) if g is None else g
        locals_ = [cut(t, held, m, generator) for t, held, _ in self.inputs]
        return locals_, cut(w, self.output.dual, m, generator), value.detach(), gradients

    def run(self, comm: Communicator, locals_: list[list[Tensor]], cotangents: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        """On one rank: its result and its gradients. Inputs and cotangents are not contiguous."""
        mine = [scattered(by_rank[comm.rank]).requires_grad_(needs) for by_rank, (_, _, needs) in zip(locals_, self.inputs, strict=True)]
        result = self.operator(comm, *mine)
        if any(needs for _, _, needs in self.inputs):
            result.backward(scattered(cotangents[comm.rank]))
        return result.detach(), [t.grad for t in mine]

    def compare(self, results: Sequence[tuple[Tensor, list[Tensor | None]]], value: Tensor, gradients: Sequence[Tensor | None]) -> None:
        assert_near(whole([r for r, _ in results], self.output), value, "value")
        for k, (expected, (t, held, needs)) in enumerate(zip(gradients, self.inputs, strict=True)):
            if needs:
                found: list[Any] = [g[k] for _, g in results]
                assert expected is not None and all(g is not None for g in found), f"no gradient of input {k}"
                assert all(g.shape == mine.shape for g, mine in zip(found, cut(t, held, len(results), torch.Generator()), strict=True))
                assert_near(whole(found, held.dual), expected, f"gradient of input {k}")

    def check(self, m: int, seed: int = 0) -> None:
        """Runs it in m threads. AssertionError if a claim is wrong."""
        locals_, cotangents, value, gradients = self.prepare(m, seed)
        self.compare(run_threads(m, lambda comm: self.run(comm, locals_, cotangents), timeout=20), value, gradients)


def scattered(t: Tensor) -> Tensor:
    """The same values, every second element of memory."""
    return torch.stack([t.detach(), t.detach()], -1)[..., 0]
