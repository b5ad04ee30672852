"""`hapx.HAP` over gloo, with hand-written plans: what a user's script sees."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.api import HAP
from hapx.errors import HapError, PlanError
from hapx.ir import Graph
from hapx.plan import Plan, ProgramKey
from support.equivalence import Trace, compare, make_optimizer, train_single
from support.models import MLP
from support.plans import cluster, mlp_batch_split, mlp_tensor_parallel, mlp_two_level
from support.pool import pool

WIDTHS = (5, 8, 3)
pytestmark = pytest.mark.gloo


def model() -> MLP:
    return MLP(WIDTHS)


def inputs(step: int) -> tuple[Tensor, ...]:
    return model().example(8, seed=step)


def both_modes(lengths: tuple[int, ...]) -> Plan:
    """A plan with a training and an evaluation program."""
    train, evaluate = mlp_batch_split(WIDTHS, lengths), mlp_batch_split(WIDTHS, lengths, mode="eval")
    a, b = train.stages[0], evaluate.stages[0]
    stage = replace(a, programs={**a.programs, **b.programs}, lengths={**a.lengths, **b.lengths}, nodes={**a.nodes, **b.nodes})
    return replace(train, graphs={**train.graphs, **evaluate.graphs}, stages=(stage,))


def train(plan: Plan, local: bool, example: bool) -> Trace:
    rank = dist.get_rank()
    module = MLP(WIDTHS, seed=rank)  # only rank 0's values count
    options: dict[str, Any] = {"example_inputs": inputs(0)} if example else {}
    hap = HAP(module, plan.cluster, plan=plan, inputs="local" if local else "global", **options)
    optimizer = make_optimizer("sgd", hap.parameters())
    trace = Trace()
    for step in range(3):
        optimizer.zero_grad()
        batch = inputs(step)
        if local:
            start = sum(hap.batch_sizes[:rank])
            batch = tuple(t[start : start + hap.batch_sizes[rank]] for t in batch)
        loss = hap(*batch)
        loss.backward()
        trace.losses.append(float(loss.detach()))
        trace.gradients.append(hap.full_gradients())
        optimizer.step()
    trace.state.update(hap.full_state_dict())
    return trace


@pytest.mark.parametrize(
    "plan, local",
    [
        (mlp_batch_split(WIDTHS, (6, 2)), False),
        (mlp_batch_split(WIDTHS, (6, 2)), True),
        (mlp_tensor_parallel(WIDTHS, (5, 3), 8), True),
        (mlp_two_level(WIDTHS, (5, 3), 2), True),
    ],
    ids=["batch", "batch, local", "hidden, local", "machines, local"],
)
def test_hap_trains_like_one_device(plan: Plan, local: bool) -> None:
    expected = train_single(model, inputs, 3, "sgd")
    for rank, trace in enumerate(pool(plan.cluster.num_devices).run(train, plan, local, local)):
        compare(trace, expected, f"rank {rank}")


def looks() -> dict[str, Any]:
    hap = HAP(model(), cluster([2]), plan=both_modes((6, 2)), example_inputs=inputs(0))
    reference = model()
    found = {
        "names": [n for n, _ in hap.named_parameters()] == [n for n, _ in reference.named_parameters()],
        "keys": list(hap.state_dict()) == list(reference.state_dict()),
        "no prefix": not any(n.startswith("module") for n in hap.state_dict()),
        "sizes": hap.batch_sizes,
        "sizes for 4": hap.batch_sizes_for(4),
        "code": hap.code,
        "text": str(hap),
    }
    hap.eval()
    with torch.no_grad():
        found["eval"] = float(hap(*inputs(3)))
    found["modes"] = (hap.training, hap.module.training)
    hap.train()
    hap.load_state_dict(hap.state_dict())
    hap.load_full_state_dict(reference.state_dict())
    with hap.no_sync():
        hap(*inputs(0)).backward()
    hap.zero_grad()
    (hap(*inputs(1)) * 3).backward()
    found["norm"] = float(hap.clip_grad_norm_(0.1))
    found["gradients"] = hap.full_gradients()
    return found


def test_what_a_user_sees() -> None:
    reference = model()
    with torch.no_grad():
        evaluated = float(reference(*inputs(3)))
    (reference(*inputs(1)) * 3).backward()
    norm = float(nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    for found in pool(2).run(looks):
        assert found["names"]
        assert found["keys"]
        assert found["no prefix"]
        assert found["sizes"] == (6, 2)
        assert found["sizes for 4"] == (3, 1)
        assert "torch.ops.aten.linear.default" in found["code"]
        assert "of 2: MLP" in found["text"]
        assert found["eval"] == pytest.approx(evaluated, rel=1e-12)
        assert found["modes"] == (False, False)
        assert found["norm"] == pytest.approx(norm, rel=1e-12)
        for name, p in reference.named_parameters():
            assert torch.allclose(found["gradients"][name], p.grad, rtol=1e-10, atol=1e-14)


def samples(shuffle: bool) -> tuple[list[list[int]], list[list[int]], int]:
    hap = HAP(model(), cluster([2]), plan=mlp_batch_split(WIDTHS, (6, 2)))
    sampler = hap.sampler(list(range(19)), 8, shuffle=shuffle)
    first = list(sampler)
    sampler.set_epoch(1)
    return first, list(sampler), len(sampler)


@pytest.mark.parametrize("shuffle", [False, True])
def test_sampler_shares_the_same_batches(shuffle: bool) -> None:
    (a, a2, count), (b, b2, _) = pool(2).run(samples, shuffle)
    assert count == 3
    assert [len(x) for x in a] == [6, 6, 2]
    assert [len(x) for x in b] == [2, 2, 1]
    assert sorted(i for batch in a + b for i in batch) == list(range(19))
    assert sorted(i for batch in a2 + b2 for i in batch) == list(range(19))
    if not shuffle:
        assert a[0] + b[0] == list(range(8))
    assert (a2 != a) == shuffle


def planner_by_hand() -> types.ModuleType:
    """Stands for `hapx.planner` on rank 0: data parallel, three quarters of the batch on the first rank."""
    module = types.ModuleType("hapx.planner")

    def lengths(n: int) -> tuple[int, int]:
        return n * 3 // 4, n - n * 3 // 4

    def plan_module(module: nn.Module, cluster: Any, example_inputs: Any, **options: Any) -> Plan:
        assert module.training
        return mlp_batch_split(WIDTHS, lengths(len(example_inputs[0])))

    def extend(plan: Plan, graph: Graph, key: ProgramKey) -> Plan:
        more = mlp_batch_split(WIDTHS, lengths(graph.batch), mode=key.mode)
        assert more.graphs[key].hash == graph.hash
        a, b = plan.stages[0], more.stages[0]
        stage = replace(a, programs={**a.programs, **b.programs}, lengths={**a.lengths, **b.lengths}, nodes={**a.nodes, **b.nodes})
        return replace(plan, graphs={**plan.graphs, **more.graphs}, stages=(stage,))

    module.plan_module, module.extend = plan_module, extend  # type: ignore[attr-defined]
    return module


def other_shapes(local: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    kept = sys.modules.get("hapx.planner")
    sys.modules["hapx.planner"] = planner_by_hand()
    try:
        hap = HAP(model(), cluster([2]), inputs="local" if local else "global")
        optimizer = make_optimizer("adamw", hap.parameters())  # before the plan: pieces come into the same parameters
        found: dict[str, Any] = {"losses": []}

        def share(batch: tuple[Tensor, ...], sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
            start = sum(sizes[:rank])
            return tuple(t[start : start + sizes[rank]] for t in batch) if local else batch

        for n, sizes in ((8, (4, 4)), (5, (4, 1)), (8, (6, 2))):
            optimizer.zero_grad()
            loss = hap(*share(model().example(n, seed=n), sizes))
            loss.backward()
            optimizer.step()
            found["losses"].append(float(loss.detach()))
        hap.eval()
        x, targets = share(model().example(3), (2, 1))
        with torch.no_grad():
            found["losses"].append(float(hap(x=x, targets=targets)))
        found["state"] = hap.full_state_dict()
        found["programs"] = [(k.mode, k.shapes[0][0]) for k in hap.plan.graphs]
        found["sizes"] = [hap.batch_sizes, hap.batch_sizes_for(3)]
    finally:
        del sys.modules["hapx.planner"]
        if kept is not None:
            sys.modules["hapx.planner"] = kept
    return found


@pytest.mark.parametrize("local", [False, True])
def test_other_shapes_get_programs_of_their_own(local: bool) -> None:
    reference = model()
    optimizer = make_optimizer("adamw", reference.parameters())
    losses = []
    for n in (8, 5, 8):
        optimizer.zero_grad()
        loss = reference(*model().example(n, seed=n))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        losses.append(float(reference(*model().example(3))))
    for found in pool(2).run(other_shapes, local):
        assert found["losses"] == pytest.approx(losses, rel=1e-11)
        assert found["programs"] == [("train", 8), ("train", 5), ("eval", 3)]
        assert found["sizes"] == [(6, 2), (2, 1)]
        for name, t in reference.state_dict().items():
            assert torch.allclose(found["state"][name], t, rtol=1e-9, atol=1e-9), name


class Other(MLP):
    """The same parameters, another computation."""

    def features(self, x: Tensor) -> Tensor:
        return self.layers[1](F.gelu(self.layers[0](x), approximate="tanh"))


def error_texts() -> list[str]:
    rank, texts = dist.get_rank(), []

    def attempt(work: Any) -> None:
        try:
            work()
            texts.append("no error")
        except HapError as error:
            texts.append(f"{type(error).__name__}: {error}")

    hap = HAP(model(), cluster([2]), plan=mlp_batch_split(WIDTHS, (6, 2)))
    attempt(lambda: hap(*model().example(8 + rank)))
    attempt(lambda: hap(*inputs(0)) if rank == 0 else hap(None))
    attempt(lambda: hap(*inputs(0)))
    attempt(lambda: hap.to(torch.float32))
    attempt(lambda: HAP(Other(WIDTHS), cluster([2]), plan=mlp_batch_split(WIDTHS, (6, 2)), example_inputs=inputs(0)))
    attempt(lambda: HAP(Other(WIDTHS), cluster([2]), plan=mlp_batch_split(WIDTHS, (6, 2)))(*inputs(0)))
    attempt(lambda: HAP(model(), cluster([2]), plan=mlp_batch_split(WIDTHS, (6, 2)), inputs="some"))  # type: ignore[arg-type]
    attempt(lambda: HAP(MLP((5, 9, 3)), cluster([2]), plan=mlp_batch_split(WIDTHS, (6, 2))))
    return texts


def test_errors_are_clear_and_on_every_rank() -> None:
    first, second = pool(2).run(error_texts)
    for rank, texts in enumerate((first, second)):
        assert "LaunchError: the ranks are about to run different steps: rank 0: train x torch.float64[8, 5]" in texts[0]
        assert ("LaunchError: the ranks are about" if rank == 0 else "CaptureError") in texts[1]
        assert texts[2] == "no error"  # nothing is out of step after an error
        assert "planned for" in texts[3]
        for text in texts[4:6]:
            assert "PlanError" in text
            assert "another computation" in text
        assert "'some'" in texts[6]
        assert "PlanError: the plan is for another model" in texts[7]


class Conditional(nn.Module):
    """Its loss depends on much that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.bn, self.b, self.beta, self.unread = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), 1.0, 0

    def forward(self, x: Tensor, y: Tensor, weight: float = 1.0) -> Tensor:
        return F.cross_entropy(self.b(self.bn(self.a(x))), y) * weight + self.beta * self.a(x).square().mean()


def under_other_conditions() -> tuple[float, float, list[str]]:
    """The loss as planned, that after what does not matter has changed, and what is said where it does."""
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    hap = HAP(Conditional(), cluster([2]), example_inputs=batch, strategy="dp-even")
    first = float(hap(*batch).detach())
    hap.module.unread = 1
    same = float(hap(*batch, weight=1.0).detach())
    said = []

    def refused(*args: Any) -> None:
        with pytest.raises(PlanError) as error:
            hap(*args)
        said.append(str(error.value))

    refused(*batch, 0.5)
    hap.module.beta = 0.2
    refused(*batch)
    hap.module.beta = 1.0
    hap.module.bn.eval()
    refused(*batch)
    hap.train()
    hap.module.a.weight.requires_grad_(False)
    refused(*batch)
    hap.module.a.weight.requires_grad_(True)
    assert float(hap(*batch).detach()) == pytest.approx(first, rel=1e-6)
    return first, same, said


def test_a_call_that_computes_something_else_is_refused() -> None:
    """Shapes and mode alone do not say what a model computes: it must never be what it computed when it was planned."""
    for first, same, said in pool(2).run(under_other_conditions):
        assert first == pytest.approx(same, rel=1e-6)
        expected = ["argument weight was 1.0 and is 0.5", "beta was 1.0 and is 0.2", "bn.training was True and is False"]
        expected.append("a.weight.requires_grad was True and is False")
        for text, what in zip(said, expected, strict=True):
            assert "the model computes something else than was planned" in text
            assert what in text
