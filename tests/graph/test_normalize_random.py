"""Random operators, written as the draws they are made of: what they give is distributed as torch's, and only draws are random."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import ks_2samp
from torch import Tensor, nn

from hapx.collectives.communicator import create_groups
from hapx.collectives.threads import ThreadCommunicator
from hapx.graph.capture import capture
from hapx.planner import plan_module
from hapx.runtime.executor import Executor
from support.clusters import ONE
from support.equivalence import run_ranks

Draw = Callable[[Tensor], Tensor]
DRAWS = {"aten.rand.default", "aten.randn.default", "aten.randint.low"}
ROWS, COLUMNS = 60, 50

FORMS: dict[str, Draw] = {
    "rand": lambda x: torch.rand(ROWS, COLUMNS, dtype=x.dtype),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn((ROWS, COLUMNS)),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint": lambda x: torch.randint(7, (ROWS, COLUMNS)),
    "randint, low": lambda x: torch.randint(-3, 7, (ROWS, COLUMNS), dtype=torch.int32),
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "random_": lambda x: torch.empty(ROWS, COLUMNS).random_(8),
    "random_ of integers": lambda x: torch.empty(ROWS, COLUMNS, dtype=torch.int64).random_(8),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of booleans": lambda x: torch.empty(ROWS, COLUMNS, dtype=torch.bool).bernoulli_(0.3),
    "bernoulli_ by a tensor": lambda x: torch.empty_like(x).bernoulli_(x[0].sigmoid()),
    "bernoulli, p": lambda x: torch.bernoulli(x, 0.3),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-2, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(2, 3),
    "normal of numbers": lambda x: torch.normal(2.0, 3.0, (ROWS, COLUMNS)),
    "normal by a mean": lambda x: torch.normal(x, 0.5),
    "normal by a spread": lambda x: torch.normal(1.0, x.abs()),
    "normal by both": lambda x: torch.normal(x, x[:1].abs() + 0.1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "gumbel_softmax": lambda x: (y := F.gumbel_softmax(x, tau=0.5).log())[:, ::2] - y[:, 1::2],
    "gumbel_softmax, hard": lambda x: F.gumbel_softmax(x, hard=True).argmax(-1),
    "randperm": lambda x: torch.randperm(ROWS * COLUMNS)[: ROWS * COLUMNS // 2],
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 1),
    "multinomial, several": lambda x: torch.multinomial(x.softmax(-1), 9, replacement=True),
    "multinomial, without replacement": lambda x: torch.multinomial(x.softmax(-1), 9),
    "multinomial of a vector": lambda x: torch.multinomial(x.flatten().softmax(-1), 100),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.6, training=True),
    "rrelu, in place": lambda x: F.rrelu(x * 1.0, 0.1, 0.6, training=True, inplace=True),
    "half": lambda x: torch.rand(ROWS, COLUMNS, dtype=torch.bfloat16),
}


class Drawn(nn.Module):
    """A linear layer, so that there is something to train, and the numbers drawn as a second result."""

    def __init__(self, draw: Draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(COLUMNS, 1).double(), draw

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).mean(), self.draw(x)


def example() -> Tensor:
    return torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def drawn(name: str) -> tuple[Tensor, Tensor]:
    """What hapx gives, and torch."""
    model, x = Drawn(FORMS[name]), example()
    plan = plan_module(model, ONE, (x,))
    graph = plan.graphs[plan.first]
    assert {n.call.target for n in graph.nodes if "random" in n.tags} <= DRAWS
    assert any("random" in n.tags for n in graph.nodes)

    def run(threads: ThreadCommunicator) -> Tensor:
        executor = Executor(plan, 0, model, create_groups(plan.stages[0].mesh, threads))
        outputs = executor.run(plan.first, {graph.input_names[0]: x})
        (result,) = (o.tensor for o in graph.outputs if o.role == "result")
        return outputs[result].detach()

    (found,) = run_ranks(plan, run)
    torch.manual_seed(0)
    return found, model(x)[1].detach()


@pytest.mark.parametrize("name", FORMS)
def test_numbers_are_distributed_as_torchs(name: str) -> None:
    """The two samples of Kolmogorov and Smirnov: a wrong distribution gives p below 1e-9 at these sizes."""
    found, expected = drawn(name)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert ks_2samp(found.double().flatten().numpy(), expected.double().flatten().numpy(), method="asymp").pvalue > 1e-3
    if "replacement" in name or name in ("randperm", "multinomial of a vector"):
        rows = found.reshape(-1, found.shape[-1])
        assert all(len(set(row.tolist())) == len(row) for row in rows)


def test_parameters_are_those_of_the_place() -> None:
    """Probabilities, means and spreads that differ from place to place."""
    x = example()
    found, _ = drawn("bernoulli_ by a tensor")
    p = x[0].sigmoid()
    assert bool(((found.mean(0) - p).abs() < 4.5 * (p * (1 - p) / ROWS).sqrt()).all())
    found, _ = drawn("normal by both")
    z = (found - x) / (x[:1].abs() + 0.1)
    assert abs(float(z.mean())) < 4 / z.numel() ** 0.5 and abs(float(z.var()) - 1) < 4 * (2 / z.numel()) ** 0.5
    found, _ = drawn("rrelu")
    slopes = (found / x)[x < 0]
    assert torch.equal(found[x > 0], x[x > 0]) and 0.1 <= float(slopes.min()) < 0.11 and 0.59 < float(slopes.max()) < 0.6


@pytest.mark.parametrize("inplace", [False, True])
def test_slopes_are_no_chance_in_evaluation(inplace: bool) -> None:
    model, x = Drawn(lambda x: F.rrelu(x * 1.0, 0.1, 0.5, training=False, inplace=inplace)), example()
    graph = capture(model, (x,))
    assert not any(n.tags for n in graph.nodes)
    (node,) = (n for n in graph.nodes if n.call.op == "aten.leaky_relu")
    assert node.call["negative_slope"] == pytest.approx(0.3)


def test_two_calls_draw_different_numbers() -> None:
    graph = capture(Drawn(lambda x: torch.rand_like(x) - torch.rand_like(x)), (example(),))
    assert [n.call.target for n in graph.nodes].count("aten.rand.default") == 2


def test_no_gradient_flows_through_a_mean() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(COLUMNS, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return (torch.normal(h, 1.0) * h).mean()

    graph = capture(Mean(), (example(),))
    assert "aten.detach.default" in [n.call.target for n in graph.nodes]
    (node,) = (n for n in graph.nodes if "random" in n.tags)
    assert not node.outputs[0].requires_grad
