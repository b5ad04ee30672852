"""Instance norm whose running statistics are means over all devices' samples, and weight norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hapx.collectives import COMPOSITES
from hapx.states import REPLICATED
from support.local_tensors import Case, Held, sharded

instance_norm, weight_norm = COMPOSITES["hapx.instance_norm"], COMPOSITES["hapx.weight_norm"]
WHOLE = Held(REPLICATED)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def statistics() -> tuple[Tensor, Tensor]:
    return randn(3, seed=7), randn(3, seed=8).square() + 1


@pytest.mark.parametrize("shape", [(6, 3, 4), (6, 3, 2, 3)])
@pytest.mark.parametrize("lengths", [(6,), (5, 1), (4, 0, 2), (0, 0, 6)])
def test_instance_norm_split_by_samples(lengths: tuple[int, ...], shape: tuple[int, ...]) -> None:
    expected = statistics()
    found = [statistics() for _ in lengths]

    def local(comm, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        found[comm.rank] = statistics()
        return instance_norm(x, w, b, *found[comm.rank], True, 0.3, 1e-5, comm)

    def reference(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        fresh = statistics()
        result = F.instance_norm(x, *fresh, w, b, True, 0.3, 1e-5)
        for old, new in zip(expected, fresh, strict=True):
            old.copy_(new)
        return result

    held = sharded(0, lengths)
    inputs = ((randn(*shape), held, True), (randn(3, seed=1), WHOLE, True), (randn(3, seed=2), WHOLE, True))
    Case(inputs, held, local, reference).check(len(lengths))
    assert not torch.equal(expected[0], statistics()[0])
    for own in found:
        for a, b in zip(own, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-13, atol=1e-14)


def test_instance_norm_alone_or_with_given_statistics_is_torchs() -> None:
    x, (mean, var) = randn(4, 3, 5), statistics()
    expected = F.instance_norm(x, mean, var, use_input_stats=False)
    assert torch.equal(instance_norm(x, None, None, mean, var, False, 0.1, 1e-5, None), expected)


@pytest.mark.parametrize("dim, norms", [(0, (4, 1, 1)), (2, (1, 1, 5)), (-1, ())])
def test_weight_norm_is_torchs(dim: int, norms: tuple[int, ...]) -> None:
    v, g = randn(4, 3, 5).requires_grad_(), randn(*norms, seed=1).requires_grad_()
    found, expected = weight_norm(v, g, dim), torch._weight_norm(v, g, dim)
    assert torch.allclose(found, expected, rtol=1e-14)
    cotangent = randn(4, 3, 5, seed=2)
    for a, b in zip(torch.autograd.grad(found, (v, g), cotangent), torch.autograd.grad(expected, (v, g), cotangent), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)
