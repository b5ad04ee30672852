"""Models that draw random tensors train as one device does that draws the same numbers: plain PyTorch, whose random functions are replaced by their
definitions over hapx's streams. The numbers depend on the seed, the step and the call, not on the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hapx.api import HAP
from hapx.collectives.draws import rand, randint, randn
from hapx.collectives.rng import Rng
from hapx.ir import Graph
from hapx.planner import plan_module
from hapx.restriction import Restriction
from support.clusters import THREE, TWO_MACHINES
from support.devices import brought
from support.drawing import DRAWING
from support.equivalence import TOLERANCE, Trace, compare, make_optimizer, run_ranks, train_rank, uses_of
from support.pool import pool
from support.staged import staged_plan, train_staged

CPU = torch.device("cpu")
SEED = 11
MODEL = Restriction("model", mesh="flat", split="model", ratios=(4.0, 2.0, 1.0))
STRATEGIES: list[Any] = ["auto", "dp-even", "zero", pytest.param(MODEL, id="model")]


class Streams(TorchFunctionMode):
    """Random functions of torch, as what they are defined to be, of hapx's numbers. calls: of the draws, in order."""

    def __init__(self, calls: Iterator[int], rng: Rng):
        super().__init__()
        self.calls, self.rng = calls, rng

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = getattr(self, func.__name__, None)
        return func(*args, **kwargs) if own is None else own(*args, **kwargs)

    def drawn(self, function: Callable[..., Tensor], shape: Any, dtype: torch.dtype) -> Tensor:
        shape = tuple(shape)
        return function(shape=shape, dtype=dtype, call=next(self.calls), indices=(None,) * len(shape), rng=self.rng, local_device=CPU)

    def rand(self, *shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        shape = shape[0] if isinstance(shape[0], list | torch.Size) else shape
        return self.pairs(rand, shape, dtype) if dtype.is_complex else self.drawn(rand, shape, dtype)

    def pairs(self, function: Callable[..., Tensor], shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.complex(*(self.drawn(function, shape, dtype.to_real()) for _ in range(2)))

    def randn(self, shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        return self.drawn(randn, shape, dtype)

    def randn_like(self, x: Tensor) -> Tensor:
        return self.pairs(randn, x.shape, x.dtype) * 0.5**0.5 if x.is_complex() else self.drawn(randn, x.shape, x.dtype)

    def randint(self, low: int, high: int, shape: Any, device: Any = None) -> Tensor:
        return self.drawn(partial(randint, low, high), shape, torch.int64)

    def normal(self, mean: float, std: float, shape: Any, dtype: torch.dtype, device: Any = None) -> Tensor:
        return mean + std * self.drawn(randn, shape, dtype)

    def bernoulli_(self, x: Tensor, p: float) -> Tensor:
        return x.copy_(self.drawn(rand, x.shape, torch.float32) < p)

    def uniform_(self, x: Tensor, low: float, high: float) -> Tensor:
        return x.copy_(low + (high - low) * self.drawn(rand, x.shape, x.dtype))

    def exponential_(self, x: Tensor) -> Tensor:
        return x.copy_(-torch.log1p(-self.drawn(rand, x.shape, x.dtype)))

    def gumbel_softmax(self, logits: Tensor, tau: float, **options: Any) -> Tensor:
        return ((logits - torch.log(-torch.log1p(-self.drawn(rand, logits.shape, logits.dtype)))) / tau).softmax(-1)

    def multinomial(self, p: Tensor, count: int) -> Tensor:
        assert count == 1
        races = -torch.log1p(-self.drawn(rand, (len(p), 1, p.shape[1]), p.dtype))
        return (p[:, None] / races).argmax(-1)

    def rrelu(self, x: Tensor, lower: float, upper: float, training: bool, inplace: bool) -> Tensor:
        return torch.where(x > 0, x, x * (lower + (upper - lower) * self.drawn(rand, x.shape, x.dtype)))


def example(model: str, step: int, batch: int = 7) -> tuple[Tensor, ...]:
    return DRAWING[model]().example(batch, seed=step)


def train_streams(model: str, steps: int, graph: Graph, parts: int = 1, batch: int = 7, seed: int = 0) -> Trace:
    """On one device, with plain PyTorch and hapx's numbers. graph: of a plan; parts: micro-batches."""
    draws = [i for i, node in enumerate(graph.nodes) if "random" in node.tags]
    module, trace = DRAWING["stochastic depth" if model == "recomputed" else model](), Trace()
    optimizer = make_optimizer("sgd", module.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        (x,) = example(model, step, batch)
        total = 0.0
        for k, part in enumerate(x.chunk(parts)):
            left = iter(draws)
            with Streams(left, Rng(seed, step * parts + k + 1)):
                loss = module(part) / parts
            assert next(left, None) is None, "not all draws of the graph were used"
            loss.backward()
            total += float(loss.detach())
        trace.losses.append(total)
        trace.gradients.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
    trace.state.update({n: t.clone() for n, t in module.state_dict().items()})
    return trace


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", DRAWING)
def test_draws_are_those_of_one_device(model: str, strategy: str | Restriction) -> None:
    plan = plan_module(DRAWING[model](), THREE, example(model, 0), strategy=strategy)
    print(uses := uses_of(plan))
    assert strategy == "auto" or uses.sharded_flops > 0.5
    expected = train_streams(model, 3, plan.graphs[plan.first])
    assert len(set(expected.losses)) == 3
    for rank, trace in enumerate(run_ranks(plan, train_rank, plan, DRAWING[model], partial(example, model), 3, "sgd")):
        compare(trace, expected, f"rank {rank}")


@pytest.mark.parametrize("model", DRAWING)
def test_draws_of_micro_batches_over_stages(model: str) -> None:
    """Every micro-batch draws its own numbers."""
    plan = staged_plan(DRAWING[model](), example(model, 0, 8), TWO_MACHINES, [(0, 1), (2, 3)], number=2)
    expected = train_streams(model, 3, plan.graphs[plan.first], 2, 8)
    inputs = partial(example, model, batch=8)
    for rank, trace in enumerate(run_ranks(plan, partial(train_staged, plan, DRAWING[model], inputs, 3, "sgd"))):
        compare(trace, expected, f"rank {rank}", TOLERANCE)


def train_and_evaluate(model: str, local: bool) -> tuple[Trace, list[float], Graph]:
    """With `HAP`, as users do, an evaluation after every step; the seed is the first rank's."""
    module, first = DRAWING[model](), example(model, 0)
    torch.manual_seed(SEED + dist.get_rank())
    hap = HAP(module, THREE, example_inputs=first, strategy="dp-proportional", inputs="local" if local else "global")
    optimizer, trace, evaluated = make_optimizer("sgd", hap.parameters()), Trace(), []
    for step in range(3):
        optimizer.zero_grad()
        (x,) = example(model, step)
        own = x.split(hap.batch_sizes_for(len(x)))[dist.get_rank()] if local else x
        hap.train()
        loss = hap(own)
        loss.backward()
        trace.losses.append(float(loss.detach()))
        trace.gradients.append(brought(hap.full_gradients()))
        hap.eval()
        with torch.no_grad():
            evaluated += [float(hap(own)), float(hap(own))]
        optimizer.step()
    trace.state.update(brought(hap.full_state_dict()))
    return trace, evaluated, hap.plan.graphs[hap.plan.first]


@pytest.mark.gloo
@pytest.mark.parametrize("model, local", [("vae", True), ("diffusion", False)])
def test_evaluation_draws_numbers_of_its_own(model: str, local: bool) -> None:
    """Other ones every time, and training goes on as it would without."""
    results = pool(3).run(train_and_evaluate, model, local)
    expected = train_streams(model, 3, results[0][2], seed=SEED)
    for rank, (trace, evaluated, _) in enumerate(results):
        compare(trace, expected, f"rank {rank}")
        assert len(set(evaluated)) == 6
        assert evaluated == pytest.approx(results[0][1], rel=1e-12)
