"""Expert parallelism is found where it pays: experts apart, tokens sent to them and back. Nothing in the planner knows of experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hapx.cluster.spec import ClusterSpec
from hapx.ir import OpCall
from hapx.plan import Communication, Instruction, Plan
from hapx.planner import plan_module
from hapx.restriction import Restriction
from hapx.states import Sharded
from hapx.transposes import forward_collective
from support.clusters import slow_devices
from support.equivalence import assert_equivalent
from support.plans import place
from support.zoo import Tiny, load, masked_text

PAPER = ClusterSpec.load(Path(__file__).parents[2] / "cluster_specs" / "v100x2_p100x6.yaml")
FIRST = "egcm,emh->egch"  # the first product of a mixture, with the dispatched tokens and a weight


def four_machines() -> ClusterSpec:
    """Two machines with a V100, two with a P100, the paper's network between them."""
    machines = [{"name": name, "count": 2, "device": f"{name}-SXM2-16GB", "devices": 1} for name in ("V100", "P100")]
    network = {"inter": {"bandwidth": "10.4 Gbit/s", "latency": "50 us"}, "intra": {"bandwidth": "80 GB/s", "latency": "5 us"}}
    return ClusterSpec.load({"name": "four", "machines": machines, "network": network})


def two_layers(experts: int, batch: int) -> tuple[Any, tuple[Tensor, Tensor]]:
    """A dense layer and a mixture, of BERT's width, on `meta`."""
    with torch.device("meta"):
        tokens = torch.zeros(batch, 128, dtype=torch.int64)
        return load("bert_moe").BERTMoE(33280, 768, 128, heads=12, layers=2, experts=experts), (tokens, tokens.clone())


def instructions(plan: Plan, equation: str) -> list[Instruction]:
    found = plan.stages[0].program.instructions
    return [i for i in found if isinstance(i.triple.body, OpCall) and i.triple.body.get("equation") == equation]


def sent(plan: Plan, tensor: str) -> list[Communication]:
    """The all-to-all communications of a tensor."""
    paths = [i.triple.body for i in plan.stages[0].program.instructions if not isinstance(i.triple.body, OpCall) and i.triple.pre[0].tensor == tensor]
    return [c for path in paths for c in path if forward_collective(c.source, c.target) == "all_to_all"]


def apart(plan: Plan) -> list[tuple[str, int]]:
    """Weights of mixtures that are stored and used in shards of whole experts, with the axis."""
    stored = {s.name: s.copies[0].placement for s in plan.storage}
    found = []
    for product in instructions(plan, FIRST):
        tokens, weight = product.triple.pre
        for axis, state in enumerate(weight.placement.states):
            whole = isinstance(state, Sharded) and state.dim == 0 and tokens.placement.states[axis] == state
            found += [(weight.tensor, axis)] if whole and stored[weight.tensor].states[axis] == state else []
    return found


def expert_parallel(plan: Plan) -> list[str]:
    """Of those the ones to which tokens are sent, and back, along that axis."""
    found, own = [], apart(plan)
    returned = [i.triple.pre[1].tensor for i in instructions(plan, "gsec,egcm->gsm")]
    for product, back in zip(instructions(plan, FIRST), returned, strict=True):
        tokens, weight = product.triple.pre
        for axis in range(len(weight.placement.states)):
            there = any(c.axis == axis and isinstance(c.target, Sharded) and c.target.dim == 0 for c in sent(plan, tokens.tensor))
            home = any(c.axis == axis and isinstance(c.source, Sharded) and c.source.dim == 0 for c in sent(plan, back))
            if (weight.tensor, axis) in own and there and home:
                found.append(weight.tensor)
    return found


def test_many_experts_and_a_slow_network() -> None:
    module, inputs = two_layers(16, 256)
    plan = plan_module(module, four_machines(), inputs, strategy=Restriction(ratios="speed"))
    assert expert_parallel(plan) == ["layers.1.experts.up"]
    (dispatch,) = instructions(plan, "gsec,gsm->egcm")
    batch = dispatch.triple.pre[1].placement.states[0]
    assert isinstance(batch, Sharded) and (batch.dim, batch.cut.units) == (0, 256), "everything else is divided by sequences"
    (product,) = instructions(plan, FIRST)
    (cut,) = [s.cut for s in product.triple.pre[1].placement.states if isinstance(s, Sharded)]
    lengths = plan.stages[0].lengths[plan.first][cut]
    print(lengths)
    assert sum(lengths) == 16 and lengths[0] > lengths[-1] > 0, "faster devices have more experts"


def test_few_experts_and_many_tokens() -> None:
    """Then the weights are the smaller thing to send."""
    module, inputs = two_layers(8, 512)
    plan = plan_module(module, four_machines(), inputs, strategy=Restriction(ratios="speed"))
    assert expert_parallel(plan) == []
    for product in instructions(plan, FIRST):
        assert product.triple.pre[1].placement == place("R")
        assert isinstance(product.triple.pre[0].placement.states[0], Sharded)


def test_the_cluster_of_the_paper() -> None:
    """Two experts for each of 64 devices; a flat mesh."""
    module, inputs = two_layers(128, 2048)
    plan = plan_module(module, PAPER, inputs, strategy=Restriction(mesh="flat"))
    assert expert_parallel(plan) == ["layers.1.experts.up"]
    assert plan.statistics["unproven"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "whole"), [("flat", 0), ("8x8", 1)])
def test_all_layers_on_the_cluster_of_the_paper(mesh: str, whole: int) -> None:
    """whole: mixtures, the first ones, whose tokens are whole on every machine anyway, and are not sent (on 8x8 sending them takes 1 % longer)."""
    module, inputs = load("bert_moe").build()
    plan = plan_module(module, PAPER, inputs, strategy=Restriction(mesh=mesh))
    print(plan.statistics)
    weights = [f"layers.{i}.experts.up" for i in range(1, 12, 2)]
    assert apart(plan) == [(name, 0) for name in weights]
    assert expert_parallel(plan) == weights[whole:]


TINY = Tiny(lambda: load("bert_moe").BERTMoE(13, 16, 6, heads=4, layers=2, experts=8), masked_text)


@pytest.mark.parametrize("ratios, batch", [("even", 8), ((4.0, 4.0, 1.0, 1.0), 10)])
def test_such_plans_train_as_one_device(ratios: Any, batch: int) -> None:
    """Scaled down: experts apart, on even and on uneven shares."""
    cluster = slow_devices(["fast"], ["fast"], ["slow"], ["slow"], inter="10 Mbit/s", speed=1e7)
    plan = plan_module(TINY.model(), cluster, TINY.inputs(batch, 0), strategy=Restriction("small", mesh="flat", ratios=ratios))
    for equation in (FIRST, "egch,ehm->egcm"):
        (product,) = instructions(plan, equation)
        state = product.triple.pre[1].placement.states[0]
        assert isinstance(state, Sharded) and state.dim == 0
    (combine,) = instructions(plan, "gsec,egcm->gsm")
    assert sent(plan, combine.triple.pre[1].tensor)
    for optimizer in ("sgd", "adamw"):
        uses = assert_equivalent(TINY.model, partial(TINY.inputs, batch), plan, optimizer=optimizer)
    assert uses.unequal or ratios == "even"


def test_on_two_axes_what_is_found_is_near_the_bound() -> None:
    """Where values are used several times and each place of one has its price elsewhere, programs that look best at first are 30 % off."""
    module, inputs = two_layers(128, 2048)
    plan = plan_module(module, PAPER, inputs, strategy=Restriction(mesh="8x8", ratios="even"))
    print(plan.statistics["gap"])
    assert plan.statistics["gap"] < 0.02


class DenseMixture(nn.Module):
    """All experts see all tokens; the gate weighs the best two. 4 experts, 6 tokens, widths 8 and 16: cuts of few units."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(8, 4, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)
        random = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(0.2 * torch.randn(4, 8, 16, dtype=torch.float64, generator=random))
        self.down = nn.Parameter(0.2 * torch.randn(4, 16, 8, dtype=torch.float64, generator=random))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best, which = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, which, best / best.sum(-1, keepdim=True))
        made = torch.einsum("benf,efd->bend", nn.functional.silu(torch.einsum("bnd,edf->benf", x, self.up)), self.down)
        mixed = (made * weights.permute(0, 2, 1)[..., None]).sum(1)
        return nn.functional.cross_entropy(self.head(mixed.mean(1)), targets)


def test_cuts_of_few_units_are_tried_with_level_lengths() -> None:
    """Largest remainders give a slow device 2 of 16 units for a share of 1.45, beside which the programs that cut there look slow: with what is found
    elsewhere a strategy by name, which looks at nothing else, was 6.7 % faster."""
    devices = slow_devices(["fast", "fast"], ["slow", "slow", "slow"], inter="50 Mbit/s", speed=1e7)
    inputs = torch.zeros(12, 6, 8, dtype=torch.float64), torch.zeros(12, dtype=torch.int64)
    times = {s: plan_module(DenseMixture(), devices, inputs, strategy=s).iteration_time for s in ("auto", "tensor-parallel")}
    assert times["auto"] < 0.97 * times["tensor-parallel"]
