"""Image operators: what modules become has rules, and the traps of groups, windows and running statistics are avoided."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hapx.graph.capture import capture
from hapx.ir import OpCall
from hapx.plan import LocalSize
from hapx.states import Sharded
from hapx.theory.derive import derive
from hapx.theory.probe import truth
from hapx.theory.samples import Sample, sample, t
from hapx.theory.samples.normalization import CONSTANTS, statistics
from hapx.theory.settings import line
from support.claims import bodies, claims
from support.theories import flat, two_level
from support.vision import VISION

SIGNAL, IMAGE, VOLUME = (4, 6, 8), (4, 6, 8, 8), (4, 4, 4, 4, 4)
Body = nn.Module | Callable[[Tensor], Tensor]


class Wrapped(nn.Module):
    """A body between a parameter and a mean."""

    def __init__(self, body: Body):
        super().__init__()
        self.body = body
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.scale).float().mean()


BODIES: dict[str, tuple[Body, tuple[int, ...]]] = {
    "transposed": (nn.ConvTranspose2d(6, 4, 3, 2, 1, 1, groups=2), IMAGE),
    "transposed 3d": (nn.ConvTranspose3d(4, 4, 2, 2), VOLUME),
    "same": (nn.Conv2d(6, 4, 3, padding="same"), IMAGE),
    "circular": (nn.Conv1d(6, 4, 3, padding=1, padding_mode="circular"), SIGNAL),
    "reflected": (nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), IMAGE),
    "weight norm": (nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 5, 3)), IMAGE),
    "batch norm": (nn.BatchNorm2d(6), IMAGE),
    "batch norm, no statistics": (nn.BatchNorm3d(4, affine=False, track_running_stats=False), VOLUME),
    "group norm": (nn.GroupNorm(3, 6), IMAGE),
    "instance norm": (nn.InstanceNorm2d(6), IMAGE),
    "instance norm, statistics": (nn.InstanceNorm1d(6, affine=True, track_running_stats=True), SIGNAL),
    "local response": (nn.LocalResponseNorm(3), IMAGE),
    "max 3d": (nn.MaxPool3d(2), VOLUME),
    "average 3d": (nn.AvgPool3d(2), VOLUME),
    "unpool": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), IMAGE),
    "adaptive 3d": (nn.AdaptiveAvgPool3d(2), VOLUME),
    "adaptive max": (nn.AdaptiveMaxPool2d(2), IMAGE),
    "power mean": (nn.LPPool2d(2, 2), IMAGE),
    "pixels": (lambda x: F.pixel_unshuffle(F.pixel_shuffle(x[:, :4], 2), 2), IMAGE),
    "channels": (nn.ChannelShuffle(2), IMAGE),
    "nearest": (nn.Upsample(scale_factor=2), VOLUME),
    "linear": (nn.Upsample(size=5, mode="linear"), SIGNAL),
    "bicubic": (nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE),
    "trilinear": (nn.Upsample(scale_factor=2, mode="trilinear"), VOLUME),
    "exact": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), IMAGE),
    "antialiased": (lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True), IMAGE),
    "area": (lambda x: F.interpolate(x, size=4, mode="area"), IMAGE),
    "mirrored": (nn.ReflectionPad2d(1), IMAGE),
    "repeated": (nn.ReplicationPad3d(1), VOLUME),
    "filled": (nn.ConstantPad2d(1, 0.5), IMAGE),
    "columns": (lambda x: F.fold(F.unfold(x, 3), (8, 8), 3), IMAGE),
    "windows": (lambda x: x.unfold(2, 4, 4).unfold(3, 4, 4), IMAGE),
    "grid": (lambda x: F.grid_sample(x, F.affine_grid(x[:, :2, 0, :3], x.shape, align_corners=False), align_corners=False), IMAGE),
    "dropped channels": (nn.Sequential(nn.Dropout2d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()), IMAGE),
    "activations": (nn.Sequential(nn.PReLU(6), nn.Hardswish(inplace=True), nn.Hardsigmoid(), nn.ReLU6(inplace=True), nn.GLU(1)), IMAGE),
}


@pytest.mark.parametrize("name", BODIES)
def test_modules_have_rules_and_split_their_batch(name: str) -> None:
    body, shape = BODIES[name]
    graph = capture(Wrapped(body), (torch.zeros(shape),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an operator without a rule
        theory = derive(graph, flat(2))
    for node, triples in zip(graph.nodes, theory.triples, strict=True):
        of_batch = any((p.tensor, s) in theory.batch for tr in triples for p in (*tr.pre, *tr.post) for s in p.placement.states)
        counts = all(o.size == 1 for o in node.outputs)  # how often a norm ran
        of_weight = not any(graph.refs[n].shape[:1] == shape[:1] for n in node.call.refs())
        assert of_batch or counts or of_weight, node


@pytest.mark.parametrize("mesh", [flat(4), two_level(2, 2)], ids=lambda m: m.name)
@pytest.mark.parametrize("name", VISION)
def test_no_operator_of_a_model_is_only_replicated(name: str, mesh: object) -> None:
    model = VISION[name]()
    graph = capture(model, model.example(5))  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theory = derive(graph, mesh)  # type: ignore[arg-type]
    for node, triples in zip(graph.nodes, theory.triples, strict=True):
        split = any(isinstance(s, Sharded) for tr in triples for p in (*tr.pre, *tr.post) for s in p.placement.states)
        assert split or all(o.size == 1 for o in node.outputs), f"{node.call.target} is only replicated"


def test_chance_is_drawn_apart() -> None:
    graph = capture(Wrapped(nn.FractionalMaxPool2d(2, output_ratio=0.5)), (torch.zeros(IMAGE),))
    assert [n.call.target for n in graph.nodes if n.tags] == ["aten.rand.default"], "where it pools is drawn before"
    graph = capture(Wrapped(nn.RReLU()), (torch.zeros(IMAGE),))
    assert [n.call.target for n in graph.nodes if n.tags] == ["aten.rand.default"], "its slopes are"


# --- traps ---------------------------------------------------------------------------------------------------------------------


def convolution(groups: int, inputs: int, outputs: int) -> Sample:
    return sample("conv2d", input=t(3, inputs, 5, 4), weight=t(outputs, inputs // groups, 3, 3), bias=t(outputs), groups=groups)


def test_channels_of_groups_are_split_in_whole_groups_or_in_every_group_alike() -> None:
    found = claims(convolution(2, 6, 8))
    assert {"S1[2x3] S0[2x4] S0[2x4] -> S1[2x4]", "R S0[2x4] S0[2x4] -> S1[2x4]", "S1[2x3] S1[3] P -> P"} <= found
    assert not any(rule.startswith(("S1[6]", "R S0[8]")) for rule in found)


def test_depthwise_convolution_splits_its_channels_and_sums_nothing() -> None:
    found = claims(convolution(6, 6, 6))
    assert "S1[6] S0[6] S0[6] -> S1[6]" in found
    assert not any(rule.endswith("-> P") and "S" in rule for rule in found)


def test_whole_groups_are_fewer_groups_on_every_device() -> None:
    case = truth(convolution(4, 8, 12))
    triples = [tr for tr in derive(case.graph, line(2).mesh).triples[0] if isinstance(tr.body, OpCall) and isinstance(tr.body["groups"], LocalSize)]
    assert [str(tr.body["groups"].placement) for tr in triples] == ["S0[4]"]  # type: ignore[union-attr]
    assert all(tr.body["groups"].size == 4 for tr in triples)  # type: ignore[union-attr]


def test_windows_that_overlap_need_their_dim_whole() -> None:
    def pool(**constants: object) -> set[str]:
        return {r for r in claims(sample("max_pool2d", self=t(2, 3, 8, 6), **constants)) if r.startswith(("S2", "S3"))}

    assert pool(kernel_size=(2, 3)) == {"S2[4x2] -> S2[4]", "S3[2x3] -> S3[2]"}
    assert pool(kernel_size=(3, 2), stride=(2, 2), padding=(1, 0)) == {"S3[3x2] -> S3[3]"}
    assert pool(kernel_size=(2, 2), stride=(1, 1)) == set()


def test_positions_in_an_image_need_all_of_it() -> None:
    found = claims(sample("max_pool2d_with_indices", self=t(2, 3, 8, 6), kernel_size=(2, 2)))
    assert found == {"R -> R R", "I -> I R", "S0[2] -> S0[2] S0[2]", "S1[3] -> S1[3] S1[3]"}


def test_an_image_filled_with_something_is_not_linear() -> None:
    assert "P -> P" in claims(sample("pad", self=t(2, 3, 4), pad=(1, 1)))
    assert "P -> P" not in claims(sample("pad", self=t(2, 3, 4), pad=(1, 1), value=0.5))


def test_running_statistics_of_instances_are_means_over_all_samples() -> None:
    tensors = {"input": t(4, 6, 5), "weight": t(6), "bias": t(6)}
    updated = sample("instance_norm", **tensors, **statistics(6), use_input_stats=True, **CONSTANTS)
    assert bodies(updated)["S0[4] R R R R -> S0[4]"] == "hapx.instance_norm"
    assert not any(r.startswith("S1") for r in claims(updated)), "a slice of a buffer is a copy"
    stored = sample("instance_norm", **tensors, **statistics(6, stored=True), use_input_stats=True, **CONSTANTS)
    assert "S1[6] S0[6] S0[6] S0[6] S0[6] -> S1[6]" in claims(stored)
    without = sample("instance_norm", **tensors, running_mean=None, running_var=None, use_input_stats=True, **CONSTANTS)
    assert bodies(without)["S0[4] R R -> S0[4]"] == "aten.instance_norm.default"
    assert not any(r.startswith("S2") for r in claims(without)), "statistics are of the whole image"
