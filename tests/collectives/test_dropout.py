"""Dropout masks: functions of the global position, well distributed; a shard's mask is its slice."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hapx.collectives import COMPOSITES, Rng
from hapx.collectives.rng import _mix, _mix_, _signed, keep_mask
from hapx.states import REPLICATED
from support.local_tensors import Case, Held, indices_of, sharded

dropout, attention_dropout = COMPOSITES["hapx.dropout"], COMPOSITES["hapx.attention_dropout"]
CPU = torch.device("cpu")


def mask(n: int, p: float = 0.5, seed: int = 0, step: int = 0, call: int = 0) -> torch.Tensor:
    return keep_mask(p, call, (None,), (n,), Rng(seed, step), CPU)


def test_the_mix_is_splitmix64():
    """First outputs of SplitMix64 with seed 1234567 (from its reference implementation)."""
    words = [(1234567 + 0x9E3779B97F4A7C15 * k) % 2**64 for k in (1, 2, 3)]
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [_mix(w) for w in words] == expected
    assert [w % 2**64 for w in _mix_(torch.tensor([_signed(w) for w in words])).tolist()] == expected


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_have_the_right_frequency(p):
    n = 200_000
    kept = mask(n, p).double()
    deviation = math.sqrt(p * (1 - p) / n)
    assert abs(kept.mean() - (1 - p)) < 4 * deviation
    # also in every residue class of a power of two, where simple counters have patterns
    by_class = kept.reshape(-1, 64).mean(0)
    assert (by_class - (1 - p)).abs().max() < 5 * deviation * 8


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"call": 1}, {"seed": 2**63 + 5}])
def test_masks_of_different_streams_are_independent(other):
    n = 200_000
    a, b = mask(n).double() - 0.5, mask(n, **other).double() - 0.5
    assert abs((a * b).mean() * 4) < 4 / math.sqrt(n)
    for lag in (1, 2, 64, 768):
        assert abs((a[lag:] * b[:-lag]).mean() * 4) < 4.5 / math.sqrt(n)
        assert abs((a[lag:] * a[:-lag]).mean() * 4) < 4.5 / math.sqrt(n)


def test_swapping_step_and_call_gives_another_mask():
    assert not torch.equal(mask(100, step=1, call=2), mask(100, step=2, call=1))


def test_a_mask_is_the_same_for_ever():
    """A change of the function would change every resumed run."""
    assert "".join("01"[k] for k in mask(32, 0.5, seed=42, step=7, call=3).tolist()) == "10010000001010000110011011110111"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_masks_are_the_same_on_a_gpu():
    shape, rng = (300, 700), Rng(2**62 + 11, 5)
    on_gpu = keep_mask(0.3, 6, (None, torch.arange(3, 600)), shape, rng, torch.device("cuda"))
    assert torch.equal(on_gpu.cpu(), keep_mask(0.3, 6, (None, torch.arange(3, 600)), shape, rng, CPU))


def test_the_mask_of_a_shard_is_its_slice():
    shape, rng = (6, 4, 10), Rng(5, 2)
    whole = keep_mask(0.3, 1, (None,) * 3, shape, rng, CPU)
    first, last = torch.tensor([1, 4, 5]), torch.tensor([0, 7])
    part = keep_mask(0.3, 1, (first, None, last), shape, rng, CPU)
    assert torch.equal(part, whole[first][:, :, last])
    assert keep_mask(0.3, 1, (None, torch.tensor([], dtype=torch.long), None), shape, rng, CPU).shape == (6, 0, 10)


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_dropout_of_a_split_tensor(p):
    held, rng = sharded(1, (3, 0, 1), outer=2), Rng(1)

    def operator(comm, x):
        return dropout(input=x, p=p, call=4, indices=(None, indices_of(held.block, comm.rank)), shape=(5, 8), rng=rng)

    def reference(x):
        return dropout(x, p, 4, (None, None), (5, 8), rng)

    x = torch.randn(5, 8, dtype=torch.float64)
    Case(((x, held, True),), held, operator, reference).check(3)
    result = reference(x)
    kept = keep_mask(p, 4, (None, None), (5, 8), rng, CPU)
    assert torch.allclose(result, torch.where(kept, x / (1 - p), 0.0) if p < 1 else torch.zeros_like(x), rtol=1e-15)
    if p in (0.0, 1.0):
        assert torch.equal(result, F.dropout(x, p))


def test_a_mask_of_the_local_position_is_found():
    held = sharded(0, (3, 3))
    x = torch.randn(6, 8, dtype=torch.float64)
    case = Case(
        ((x, held, True),),
        held,
        lambda comm, x: dropout(x, 0.5, 0, (None, None), (3, 8), Rng(1)),
        lambda x: dropout(x, 0.5, 0, (None, None), (6, 8), Rng(1)),
    )
    with pytest.raises(AssertionError, match="value differs"):
        case.check(2)


def test_steps():
    rng = Rng(3)
    before = mask(64, seed=rng.seed, step=rng.step)
    rng.next_step()
    assert rng == Rng(3, 1) and not torch.equal(before, mask(64, seed=rng.seed, step=rng.step))


# --- attention -------------------------------------------------------------------------------------------------------------------


def qkv(heads: int = 4, key_heads: int = 4, length: int = 5) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, length, 3, dtype=torch.float64, generator=g) for h in (heads, key_heads, key_heads)]


BOOLEAN = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)
ADDED = torch.where(BOOLEAN, torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), -math.inf)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": BOOLEAN}, {"attn_mask": ADDED}, {"scale": 0.3}, {"enable_gqa": True}],
    ids=lambda o: "".join(o) or "plain",
)
def test_attention_without_dropout_is_torchs(options):
    tensors = [t.requires_grad_() for t in qkv(key_heads=2 if "enable_gqa" in options else 4)]
    full = {"attn_mask": None, "is_causal": False, "scale": None, "enable_gqa": False} | options
    found = attention_dropout(*tensors, dropout_p=0.0, call=0, indices=(None,) * 4, shape=(2, 4, 5, 5), rng=Rng(0), **full)
    expected = F.scaled_dot_product_attention(*tensors, **full)
    w = torch.randn(found.shape, dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-13)
    for a, b in zip(torch.autograd.grad((found * w).sum(), tensors), torch.autograd.grad((expected * w).sum(), tensors), strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_attention_dropout_split_by_batch_heads_or_queries(dim):
    """Queries split: keys and values whole, the causal mask by global position."""
    lengths = ((2, 0), (1, 3), (4, 1))[dim]
    held, rng = sharded(dim, lengths), Rng(9)
    others = held if dim < 2 else Held(REPLICATED)

    def call(tensors, indices):
        return attention_dropout(*tensors, None, 0.4, True, None, False, 2, indices, (2, 4, 5, 5), rng)

    def operator(comm, *tensors):
        return call(tensors, [indices_of(held.block, comm.rank) if d == dim else None for d in range(4)])

    q, k, v = qkv()
    Case(((q, held, True), (k, others, True), (v, others, True)), held, operator, lambda *t: call(t, (None,) * 4)).check(2)


def test_attention_dropout_drops_weights():
    q, k, _ = qkv()
    v = torch.eye(5, dtype=torch.float64).expand(2, 4, 5, 5)
    weights = attention_dropout(q, k, v, None, 0.5, False, None, False, 7, (None,) * 4, (2, 4, 5, 5), Rng(1))
    kept = keep_mask(0.5, 7, (None,) * 4, (2, 4, 5, 5), Rng(1), CPU)
    assert torch.equal(weights != 0, kept)
    plain = F.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(weights, plain * kept * 2, rtol=1e-12)


# --- of channels, and of self-normalising networks ---------------------------------------------------------------------------


def test_channels_are_dropped_whole():
    x = torch.rand(8, 16, 3, 5, dtype=torch.float64) + 1
    y = dropout(x, 0.4, 0, (None, None), (8, 16), Rng(1))
    kept = (y != 0).flatten(2)
    assert torch.equal(kept.all(2), kept.any(2)) and 0 < int(kept.any(2).sum()) < 128
    assert torch.allclose(y[y != 0], (x / 0.6)[y != 0])


@pytest.mark.parametrize("features", [False, True])
def test_alpha_dropout_is_torchs_but_for_the_mask(features):
    x = torch.randn(64, 32, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shape = x.shape[:2] if features else x.shape
    y = COMPOSITES["hapx.alpha_dropout"](x, 0.3, 0, (None,) * len(shape), shape, Rng(3))
    reference = F.feature_alpha_dropout(x, 0.3, True) if features else F.alpha_dropout(x, 0.3, True)
    dropped, scale = _constants(reference, x)
    assert _constants(y, x) == pytest.approx((dropped, scale), rel=1e-12)
    assert abs(float(y.mean())) < 0.1 and abs(float(y.var()) - 1) < 0.1


def _constants(y: torch.Tensor, x: torch.Tensor) -> tuple[float, float]:
    """(value of what is dropped, slope of what is kept) of y = slope x + shift or a constant."""
    values, counts = y.flatten().unique(return_counts=True)
    constant = values[counts.argmax()]
    rows = (y != constant).nonzero()[:2]
    (a, b) = (tuple(r) for r in rows.tolist())
    return float(constant), float((y[a] - y[b]) / (x[a] - x[b]))


def test_alpha_dropout_of_everything_and_of_nothing():
    x = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    alpha = COMPOSITES["hapx.alpha_dropout"]
    assert torch.equal(alpha(x, 0, 0, (None, None), (4, 3), Rng(0)), x)
    gone = alpha(x, 1, 0, (None, None), (4, 3), Rng(0))
    assert torch.equal(gone, torch.zeros(4, 3, dtype=torch.float64)) and torch.equal(F.alpha_dropout(x, 1, True), gone)
