"""The image models in `examples/models` have the published sizes, are captured on `meta`, and split wherever they compute."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from examples.models import vgg19, wide_resnet
from hapx.graph.capture import capture
from hapx.planner import plan_module
from hapx.states import Sharded
from hapx.theory.derive import derive
from hapx.theory.registry import lookup
from support.clusters import FOUR
from support.equivalence import assert_equivalent
from support.theories import flat

MILLIONS = {"250M": 254, "500M": 495, "1B": 1006, "2B": 1965, "4B": 4001, "6.8B": 6728, "13B": 12633}


def size(module: nn.Module) -> int:
    return round(sum(p.numel() for p in module.parameters()) / 1e6)


def test_vgg19_has_nineteen_layers() -> None:
    module, (images, targets) = vgg19.build()
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in module.modules()) == 19
    assert size(module) == 140 and images.shape == (1024, 3, 32, 32) and targets.shape == (1024,)
    assert all(t.is_meta for t in (images, targets, *module.parameters()))


@pytest.mark.parametrize("name", MILLIONS)
def test_wide_resnets_have_the_sizes_of_their_names(name: str) -> None:
    module, (images, _) = getattr(wide_resnet, f"build_{name.lower().replace('.', '_')}")()
    assert size(module) == MILLIONS[name]
    # the stem, three convolutions in each block, the classifier; projections of shortcuts do not count
    convolutions = sum(isinstance(m, nn.Conv2d) for m in module.modules())
    assert convolutions - 4 + 1 == wide_resnet.SIZES[name].layers
    assert images.is_meta and images.shape == (1536, 3, 224, 224)


def small_wide_resnet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return wide_resnet.make(wide_resnet.SIZES["250M"], 64, side=64)


@pytest.mark.parametrize("build", [vgg19.build, small_wide_resnet])
def test_every_operator_of_weight_may_be_split(build: object) -> None:
    module, inputs = build()  # type: ignore[operator]
    graph = capture(module, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an operator without a rule
        theory = derive(graph, flat(4))
    for node, triples in zip(graph.nodes, theory.triples, strict=True):
        split = any(isinstance(s, Sharded) for t in triples for p in (*t.pre, *t.post) for s in p.placement.states)
        assert split or sum(o.size for o in node.outputs) == 1, f"{node.call.target} is only replicated"
        assert lookup(node.call) is not None


def small_vgg() -> nn.Module:
    torch.manual_seed(0)
    return vgg19.VGG19(side=8, hidden=16, dropout=0.0, stages=((4,), (8, 8))).double()


def batch(step: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(10, 3, 8, 8, generator=generator, dtype=torch.float64), torch.randint(0, 10, (10,), generator=generator)


def test_a_small_vgg_trains_as_on_one_device() -> None:
    plan = plan_module(small_vgg(), FOUR, batch(0))
    uses = assert_equivalent(small_vgg, batch, plan)
    assert uses.unequal and uses.sharded_flops > 0.9
