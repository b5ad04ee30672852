"""What a model returns beside its loss: in the module's own containers, as this rank's share or whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hapx.api import HAP
from hapx.errors import LaunchError
from hapx.graph.capture import capture
from hapx.ir import Container, Ref
from hapx.runtime.results import Results, rebuild
from support.clusters import THREE
from support.models import MLP
from support.pool import pool

WIDTHS = (6, 12, 4)


class Cache:
    """Something that is no data."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


@dataclass
class Output:
    logits: Tensor
    loss: Tensor
    hidden: tuple[Any, ...] = ()
    cache: Cache | None = None
    nothing: Tensor | None = None


class Pair(NamedTuple):
    loss: Tensor
    rest: Any


class Talkative(MLP):
    """Returns much; one of its layers is used twice, one parameter never."""

    def __init__(self) -> None:
        super().__init__(WIDTHS)
        self.scale = nn.Parameter(torch.full((4,), 1.5, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor, targets: Tensor) -> Output:
        logits = self.features(x) * self.scale
        loss = (logits * self.scale - targets).square().mean()
        hidden = (x, Cache(x), {"mean": logits.mean(), "twice": [logits, None]})
        return Output(logits, loss, hidden, Cache(logits))


def example(step: int = 0) -> tuple[Tensor, ...]:
    return Talkative().example(8, seed=step)


def test_the_container_is_part_of_the_graph() -> None:
    graph = capture(Talkative(), example())
    assert [(o.role, o.target) for o in graph.outputs] == [
        ("loss", None), ("result", "logits"), ("result", "hidden.0"), ("result", "hidden.2.mean"), ("result", "hidden.2.twice.0"),
    ]  # fmt: skip
    twice = Container("list", (("0", Ref("hidden.2.twice.0")), ("1", None)))
    hidden = Container("tuple", (("0", Ref("hidden.0")), ("1", None), ("2", Container("dict", (("mean", Ref("hidden.2.mean")), ("twice", twice))))))
    items = (("logits", Ref("logits")), ("loss", Ref("")), ("hidden", hidden), ("nothing", None))
    assert graph.returns == Container(f"{Output.__module__}:Output", items)
    assert capture(MLP(WIDTHS), example()).returns is None


def test_containers_are_made_again() -> None:
    pair = Container(f"{__name__}:Pair", (("loss", Ref("")), ("rest", Container("list", (("0", None), ("1", Ref("1.1")))))))
    assert rebuild(pair, {"": 1, "1.1": 2}) == Pair(1, [None, 2])  # type: ignore[arg-type]
    for unknown in ("no.such.module:Output", f"{__name__}:Nothing", f"{__name__}:Cache", f"{__name__}:Output"):  # the last lacks a field
        found = rebuild(Container(unknown, (("loss", Ref("")),)), {"": 1})
        assert type(found) is Results
        assert found.loss == 1


def run(strategy: str, gather: bool, local: bool) -> tuple[Output, float, dict[str, Tensor], tuple[int, ...]]:
    """One training step, then an evaluation."""
    rank = dist.get_rank()
    hap = HAP(Talkative(), THREE, example_inputs=example(), strategy=strategy, gather_outputs=gather, inputs="local" if local else "global")
    batch = example()
    if local:
        batch = tuple(t.split(hap.batch_sizes)[rank] for t in batch)
    output = hap(*batch)
    assert output.logits.requires_grad and not output.hidden[0].requires_grad  # as on one device
    with pytest.raises(LaunchError, match=r"^backward: a result other than the loss has no gradient"):
        (output.loss + output.logits.sum()).backward(retain_graph=True)
    hap.zero_grad()
    output = hap(*batch)
    output.loss.backward()
    gradients = hap.full_gradients()
    hap.eval()
    with torch.no_grad():
        evaluated = float(hap(*batch).loss)
    return _detached(output), evaluated, gradients, hap.batch_sizes


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Output):
        return Output(**{k: _detached(v) for k, v in vars(value).items()})
    if isinstance(value, dict):
        return {k: _detached(v) for k, v in value.items()}
    return type(value)(map(_detached, value)) if isinstance(value, tuple | list) else value


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("strategy", "gather", "local"),
    [("dp-proportional", False, True), ("dp-proportional", True, False), ("tensor-parallel", True, False)],
)
def test_results_are_those_of_one_device(strategy: str, gather: bool, local: bool) -> None:
    reference = Talkative()
    expected = reference(*example())
    expected.loss.backward()
    loss = float(expected.loss.detach())
    answers = pool(3).run(partial(run, strategy, gather, local))
    start = 0
    for rank, (output, evaluated, gradients, sizes) in enumerate(answers):
        own = slice(None) if gather else slice(start, start := start + sizes[rank])
        assert type(output).__name__ == "Output"
        assert math.isclose(float(output.loss), loss, rel_tol=1e-12)
        assert math.isclose(evaluated, loss, rel_tol=1e-12)
        x, nothing, more = output.hidden
        pairs = [(output.logits, expected.logits[own]), (x, example()[0]), (more["twice"][0], expected.logits[own])]
        for found, wanted in [*pairs, (more["mean"], expected.logits.mean())]:
            assert torch.allclose(found, wanted.detach(), rtol=1e-12, atol=1e-14)
        assert (nothing, more["twice"][1], output.cache, output.nothing) == (None, None, None, None)
        assert set(gradients) == {n for n, p in reference.named_parameters() if p.grad is not None}
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, reference.get_parameter(name).grad, rtol=1e-10, atol=1e-14), name
