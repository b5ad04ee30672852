"""Random tensors: functions of the global position, distributed as they should be; a shard holds its slice."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hapx.collectives import COMPOSITES
from hapx.collectives.rng import Rng

Draw = Callable[..., Tensor]
rand, randn, randint = (COMPOSITES[f"hapx.{name}"] for name in ("rand", "randn", "randint"))
CPU = torch.device("cpu")
KINDS: dict[str, tuple[Draw, torch.dtype]] = {
    "rand": (rand, torch.float32), "randn": (randn, torch.float64), "randint": (partial(randint, -2, 9), torch.int64),
}  # fmt: skip
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def drawn(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, indices: Any = None, device: torch.device = CPU, step: int = 1) -> Tensor:
    return draw(shape=shape, dtype=dtype, call=3, indices=indices or (None,) * len(shape), rng=Rng(7, step), local_device=device)


@pytest.mark.parametrize("name", KINDS)
def test_a_shard_holds_its_slice(name: str) -> None:
    draw, dtype = KINDS[name]
    whole = drawn(draw, (6, 4, 10), dtype)
    first, last = torch.tensor([1, 4, 5]), torch.tensor([0, 7])
    assert torch.equal(drawn(draw, (6, 4, 10), dtype, (first, None, last)), whole[first][:, :, last])
    assert drawn(draw, (6, 4), dtype, (torch.tensor([], dtype=torch.long), None)).shape == (0, 4)
    assert drawn(draw, (), dtype).shape == ()
    assert not torch.equal(drawn(draw, (6, 4, 10), dtype, step=2), whole)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_uniform_numbers(dtype: torch.dtype) -> None:
    """Moments, borders, and in every residue class of a power of two, where simple counters have patterns."""
    n = 256 * 1024
    x = drawn(rand, (n,), dtype)
    assert x.dtype == dtype and float(x.min()) >= 0 and float(x.max()) < 1
    x = x.double()
    middle = 0.5 - torch.finfo(dtype).eps / 4  # of multiples of a number below 1
    assert abs(float(x.mean()) - middle) < 4 / math.sqrt(12 * n)
    assert abs(float(x.var()) - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    assert float((x.reshape(-1, 64).mean(0) - middle).abs().max()) < 5 * 8 / math.sqrt(12 * n)
    for lag in (1, 2, 64, 1024):
        assert abs(float(((x[lag:] - middle) * (x[:-lag] - middle)).mean()) * 12) < 4.5 / math.sqrt(n)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_normal_numbers(dtype: torch.dtype) -> None:
    n = 256 * 1024
    z = drawn(randn, (n,), dtype)
    assert z.dtype == dtype and bool(z.isfinite().all())
    z = z.double()
    moments = {1: (0.0, 1), 2: (1.0, 2), 3: (0.0, 15), 4: (3.0, 96)}  # and their variances
    for k, (expected, variance) in moments.items():
        assert abs(float((z**k).mean()) - expected) < 4 * math.sqrt(variance / n) + (0.01 if dtype == torch.bfloat16 else 0), k
    for bound, share in ((1.0, 0.317311), (2.0, 0.045500), (3.0, 0.0026998)):
        slack = 4 * math.sqrt(share * (1 - share) / n) + (0.002 if dtype == torch.bfloat16 else 0)
        assert abs(float((z.abs() > bound).double().mean()) - share) < slack
    assert abs(float((z[1:] * z[:-1]).mean())) < 4.5 / math.sqrt(n)


def test_integers() -> None:
    n = 110_000
    x = drawn(partial(randint, -2, 9), (n,), torch.int64)
    assert sorted(x.unique().tolist()) == list(range(-2, 9))
    counts = (x + 2).bincount(minlength=11).double()
    assert float(((counts - n / 11) ** 2 / (n / 11)).sum()) < 29.6  # chi squared, 10 degrees of freedom: 0.1 %
    assert drawn(partial(randint, 0, 2), (5,), torch.bool).dtype == torch.bool


def test_numbers_are_the_same_for_ever() -> None:
    """A change of the functions would change every resumed run."""
    assert [round(float(x), 6) for x in drawn(rand, (3,), torch.float64)] == [0.442155, 0.718243, 0.268207]
    assert [round(float(x), 6) for x in drawn(randn, (3,), torch.float64)] == [0.011409, 0.162047, -1.154365]
    assert drawn(partial(randint, 0, 1000), (3,), torch.int64).tolist() == [542, 23, 980]


def test_evaluations_do_not_change_what_training_draws() -> None:
    rng = Rng(3)
    rng.next_step()
    seen = []
    for _ in range(2):
        with rng.evaluating(2):
            seen += [rng.step, rng.step + 1]
    assert rng.step == 1 and len(set(seen)) == 4 and max(seen) < 0
    with pytest.raises(ZeroDivisionError), rng.evaluating():
        1 / 0  # noqa: B018
    assert rng.step == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_the_same_on_a_gpu(name: str) -> None:
    draw, dtype = KINDS[name]
    device = torch.device("cuda")
    some = (None, torch.arange(3, 600))
    on_gpu, here = drawn(draw, (300, 700), dtype, some, device).cpu(), drawn(draw, (300, 700), dtype, some)
    assert torch.equal(on_gpu, here) if name != "randn" else torch.allclose(on_gpu, here, rtol=1e-12, atol=1e-14)
