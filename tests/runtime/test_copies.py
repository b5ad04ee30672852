"""Copies of a `hapx.HAP`, and what it shows of the module's inside: averages of weights, containers around it, summaries."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hapx.api import HAP
from hapx.errors import LaunchError
from support.clusters import TWO
from support.pool import pool

pytestmark = pytest.mark.gloo
STEPS = 3


class Net(nn.Module):
    """With a batch norm, so that buffers are averaged and evaluation differs from training."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh()).double()
        self.head = nn.Linear(16, 4).double()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.body(x)), targets)


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + step)
    return torch.randn(8, 6).double(), torch.randn(8, 4).double()


def trained(model: nn.Module, inner: Callable[[Any], dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses in training and in evaluation, of the model and of the average; both states."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        losses.append(float(loss.detach()))
    model.eval()
    average.eval()
    with torch.no_grad():
        losses += [float(model(*batch(9))), float(average(*batch(9)))]
    return losses, inner(model), inner(average.module)


def on_ranks(strategy: str) -> Any:
    hap = HAP(Net(dist.get_rank()), TWO, example_inputs=batch(0), strategy=strategy)
    return trained(hap, lambda m: m.full_state_dict())


@pytest.mark.parametrize("strategy", ["zero", "dp-proportional"])
def test_an_average_of_weights_is_that_of_one_device(strategy: str) -> None:
    losses, state, average = trained(Net(), lambda m: dict(m.state_dict()))
    assert losses[-1] != losses[-2]
    for told, own, mean in pool(2).run(on_ranks, strategy):
        assert told == pytest.approx(losses, rel=1e-12)
        for found, expected in ((own, state), (mean, average)):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def copies() -> None:
    module = Net()
    hap = HAP(module, TWO, example_inputs=batch(0), strategy="zero")
    twin = copy.deepcopy(hap)
    assert isinstance(twin, HAP) and twin.module is not module and twin.plan is hap.plan
    before = hap.full_state_dict()
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
    twin(*batch(1)).backward()
    assert all(p.grad is None for p in hap.parameters()) and all(p.grad is not None for p in twin.parameters())
    optimizer.step()
    after, moved = hap.full_state_dict(), twin.full_state_dict()
    assert all(torch.equal(after[n], before[n]) for n in before)
    assert not torch.equal(moved["head.weight"], before["head.weight"])
    frozen = copy.deepcopy(hap).eval().requires_grad_(False)  # as timm's ModelEmaV3 keeps its average
    hap.eval()
    with torch.no_grad():
        assert float(frozen(*batch(2))) == float(hap(*batch(2)))
    assert copy.copy(hap).module is module
    with pytest.raises(LaunchError, match=r"holds connections, which no file can; save model\.full_state_dict\(\)"):
        torch.save(hap, io.BytesIO())
    with pytest.raises(LaunchError, match="no plan yet"):
        copy.deepcopy(HAP(Net(), TWO))


def inside() -> None:
    module = Net()
    names = [n for n, _ in module.named_parameters()], [n for n, _ in module.named_buffers()], [n for n, _ in module.named_modules()]
    hap = HAP(module, TWO, example_inputs=batch(0), strategy="zero")
    assert names == ([n for n, _ in hap.named_parameters()], [n for n, _ in hap.named_buffers()], [n for n, _ in hap.named_modules()])
    assert hap.head is module.head and hap.body[0].weight.shape == (8, 6)
    assert "(head): Linear" in repr(hap)
    outer = nn.ModuleDict({"net": hap})
    assert [n for n, _ in outer.named_parameters()] == [f"net.{n}" for n in names[0]]
    state = {n: t.clone() for n, t in outer.state_dict().items()}
    with torch.no_grad():
        hap.head.weight.zero_()
    outer.load_state_dict(state)
    assert torch.equal(module.head.weight, state["net.head.weight"])
    assert hap.apply(lambda m: m.eval() if isinstance(m, nn.BatchNorm1d) else None) is hap and not module.body[1].training
    with pytest.raises(
        LaunchError, match=r"HAP\.apply: a function has written into body\.0\.weight, head\.weight, of which this rank may have a piece"
    ):
        hap.apply(lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None)


@pytest.mark.parametrize("check", [copies, inside])
def test_a_copy_has_tensors_of_its_own_and_the_modules_inside_is_seen(check: Callable[[], None]) -> None:
    pool(2).run(check)
