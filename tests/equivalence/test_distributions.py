"""Models that ask torch.distributions, or losses that look at their arguments, train as on one device; what is drawn from them, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.errors import CaptureError
from hapx.graph.capture import capture
from hapx.planner import plan_module
from hapx.restriction import Restriction
from support.clusters import ONE, THREE
from support.equivalence import assert_equivalent, compare, run_ranks, train_rank, uses_of
from support.models import _initialise

Loss = Callable[[Tensor, Tensor], Tensor]
UNEVEN = Restriction("4:2:1", mesh="flat", ratios=(4.0, 2.0, 1.0), split="batch")


class Model(nn.Module):
    """A loss of what a linear layer makes, and of a class per row."""

    def __init__(self, loss: Loss):
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 4), loss
        _initialise(self, 0, torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.linear(x), y)


def mixture(h: Tensor, y: Tensor) -> Tensor:
    means = D.Independent(D.Normal(h.unsqueeze(-1).expand(-1, -1, 2), 1.0), 1)
    return -D.MixtureSameFamily(D.Categorical(logits=h), means).log_prob(h.new_zeros(h.shape[0], 2)).mean()


def policy(h: Tensor, y: Tensor) -> Tensor:
    chosen = D.Categorical(logits=h)
    return -(chosen.log_prob(y) * torch.linspace(-1, 1, 4, dtype=h.dtype, device=h.device)[y]).mean() - 0.01 * chosen.entropy().mean()


LOSSES: dict[str, Loss] = {
    "normal": lambda h, y: -D.Normal(h, h.exp()).log_prob(y[:, None]).mean(),
    "divergence": lambda h, y: D.kl_divergence(D.Normal(h, h.exp()), D.Normal(torch.zeros_like(h), 1.0)).sum(-1).mean(),
    "policy": policy,
    "mixture": mixture,
    "multivariate": lambda h, y: -D.MultivariateNormal(h, 2 * torch.eye(4, dtype=h.dtype, device=h.device)).log_prob(torch.ones_like(h)).mean(),
    "beta": lambda h, y: -D.Beta(h.exp(), 1 + h.exp()).log_prob(torch.full_like(h, 0.3)).mean(),
    "dirichlet": lambda h, y: -D.Dirichlet(h.exp()).log_prob(torch.full_like(h, 0.25)).mean(),
    "counts": lambda h, y: -(D.NegativeBinomial(h.exp(), logits=h).log_prob(y[:, None]) + D.Poisson(h.exp()).log_prob(y[:, None])).mean(),
    "heavy tails": lambda h, y: -(D.StudentT(3.0, h, h.exp()).log_prob(y[:, None]) + D.Laplace(h, 1.0).log_prob(y[:, None])).mean(),
    "squashed": lambda h, y: -D.TransformedDistribution(D.Normal(h, 1.0), [D.TanhTransform()]).log_prob(torch.full_like(h, 0.3)).mean(),
    "variances": lambda h, y: F.gaussian_nll_loss(h, torch.zeros_like(h), h.exp(), full=True),
    "a variance per row": lambda h, y: nn.GaussianNLLLoss(reduction="sum")(h, torch.zeros_like(h), h.exp().mean(1)),
    "small variances": lambda h, y: nn.GaussianNLLLoss(eps=0.5)(h, torch.zeros_like(h), h.exp()),
}


def speech(h: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Two targets per row, in six steps that the row is spread over."""
    scores = (h[:, None] * torch.arange(1, 7, dtype=h.dtype, device=h.device)[:, None]).log_softmax(-1)
    targets, lengths = torch.stack([1 + y % 3, 1 + (y + 1) % 3], 1), (torch.full_like(y, 6) - y % 2, 1 + y % 2)
    loss = F.ctc_loss(scores.transpose(0, 1), targets, *lengths, **options)
    return loss if loss.dim() == 0 else (loss * y).mean()


def selected(h: Tensor, y: Tensor, more: int = 0) -> Tensor:
    """Targets that a mask selects of padded ones, as speech models of the transformers package do; not always the first ones."""
    scores = (h[:, None] * torch.arange(1, 7, dtype=h.dtype, device=h.device)[:, None]).log_softmax(-1)
    labels = torch.stack([1 + y % 3, 1 + (y + 1) % 3, y - 2], 1)
    labels = labels.masked_fill(torch.stack([y == 3, y == 1, y < 3], 1), -100)
    mask = labels >= 0
    lengths, targets = mask.sum(-1) + more, labels.masked_select(mask)
    labels.zero_()
    return F.ctc_loss(scores.transpose(0, 1), targets, torch.full_like(y, 6), lengths, reduction="sum")


LOSSES |= {
    "speech, selected": selected,
    "covariances": lambda h, y: (torch.cov(h.T) - torch.eye(4, dtype=h.dtype, device=h.device)).square().mean() + h[:, 0].cov(correction=0),
    "correlations": lambda h, y: torch.corrcoef(h.T).square().mean() + torch.complex(h, h.flip(1)).T.corrcoef().imag.square().mean(),
    "speech": speech,
    "speech, summed": partial(speech, reduction="sum"),
    "speech, each": partial(speech, reduction="none", zero_infinity=True),
}
DRAWN: dict[str, Loss] = {
    "reparametrised": lambda h, y: (D.Normal(h, h.exp()).rsample() - y[:, None]).square().mean(),
    "sampled policy": lambda h, y: -(D.Categorical(logits=h).log_prob(D.Categorical(logits=h).sample()) * y).mean(),
    "straight through": lambda h, y: (D.OneHotCategoricalStraightThrough(logits=h).rsample() * h).square().mean(),
    "relaxed": lambda h, y: D.RelaxedBernoulli(h.new_tensor(0.7), logits=h).rsample().square().mean(),
}


def inputs(step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(9, 4, generator=generator, dtype=torch.float64), torch.randint(4, (9,), generator=generator)


@pytest.mark.parametrize("strategy", ["auto", pytest.param(UNEVEN, id="4:2:1")])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_those_of_one_device(loss: str, strategy: str | Restriction) -> None:
    model = partial(Model, LOSSES[loss])
    plan = plan_module(model(), THREE, inputs(0), strategy=strategy, micro_batches=1)
    uses = assert_equivalent(model, inputs, plan, steps=2)
    assert strategy == "auto" or uses.sharded_flops > 0.75


def test_selected_targets_of_other_lengths_are_no_loss() -> None:
    """Torch would take them of the next row."""
    model = Model(partial(selected, more=1))
    (alone,) = run_ranks(plan := plan_module(model, ONE, inputs(0)), train_rank, plan, lambda: model, inputs, 1, "sgd")
    assert math.isnan(alone.losses[0])


def test_what_else_is_done_with_what_is_selected_is_refused() -> None:
    for use in (lambda flat: flat.float().mean(), lambda flat: torch.cat([flat, flat]).sum(), lambda flat: flat + 1):
        with pytest.raises(CaptureError, match=r"(?s)test_distributions\.py.*depends on the values of a tensor"):
            capture(Model(lambda h, y: (h * use(y[:, None].masked_select(y[:, None] > 1))).sum()), inputs(0))  # noqa: B023


@pytest.mark.parametrize("loss", DRAWN)
def test_draws_are_those_of_the_executor_alone(loss: str) -> None:
    model = partial(Model, DRAWN[loss])
    alone, plan = (plan_module(model(), cluster, inputs(0), strategy=rule) for cluster, rule in ((ONE, "auto"), (THREE, UNEVEN)))
    assert uses_of(plan).sharded_flops > 0.8
    (expected,) = run_ranks(alone, train_rank, alone, model, inputs, 2, "sgd")
    for rank, trace in enumerate(run_ranks(plan, train_rank, plan, model, inputs, 2, "sgd")):
        compare(trace, expected, f"rank {rank}")


def test_distributions_look_at_values_as_before_once_a_model_is_captured() -> None:
    """(torch's own exporter switches that off for good, when it is first loaded.)"""
    before = D.Distribution._validate_args
    D.Distribution.set_default_validate_args(True)
    try:
        capture(Model(LOSSES["normal"]), inputs(0))
        with pytest.raises(ValueError, match="scale"):
            D.Normal(torch.zeros(2), torch.tensor([1.0, -1.0]))
    finally:
        D.Distribution.set_default_validate_args(before)


def test_who_asks_for_checks_is_told_that_they_cannot_be_captured() -> None:
    with pytest.raises(CaptureError, match=r"(?s)test_distributions\.py.*depends on the values"):
        capture(Model(lambda h, y: -D.Normal(h, h.exp(), validate_args=True).log_prob(h).mean()), inputs(0))


@pytest.mark.parametrize("wrong, told", [({"reduction": "most"}, "most is not valid"), ({"var": torch.ones(3)}, "var is of incorrect size")])
def test_wrong_arguments_of_stand_ins_are_told(wrong: dict[str, object], told: str) -> None:
    def loss(h: Tensor, y: Tensor) -> Tensor:
        return F.gaussian_nll_loss(h, torch.zeros_like(h), **{"var": h.exp(), **wrong})  # type: ignore[arg-type]

    with pytest.raises(CaptureError, match=rf"(?s)test_distributions\.py.*{told}"):
        capture(Model(loss), inputs(0))
