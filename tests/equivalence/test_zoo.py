"""The models of `examples/models`: they build at full size without memory, every operator has a rule, and tiny ones train as one device does.

Losses that are sums of terms (a mixture's balancing loss) and discrete decisions (which expert a token goes to) are the subject of the last tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hapx.graph.capture import capture
from hapx.ir import Graph, OpCall
from hapx.plan import Plan
from hapx.planner import plan_graphs
from hapx.restriction import BASELINES, Restriction
from hapx.states import Sharded
from hapx.theory.derive import derive
from support.clusters import FOUR
from support.equivalence import assert_equivalent, train_single
from support.plans import flat
from support.zoo import TINY, Balanced, Tiny, load, masked_text

# ---- full size ----------------------------------------------------------------------------------------------------------------

FULL: dict[str, tuple[Callable[[], Any], float]] = {
    "vit": (lambda: load("vit").build(), 85.2e6),
    "bert": (lambda: load("bert").build(), 111.4e6),
    "bert_moe, 2 experts": (lambda: load("bert_moe").build(experts=2), 139.7e6),
    "bert_moe": (lambda: load("bert_moe").build(), 3708e6),
    **{f"gpt3, {size}": (partial(lambda s: load("gpt3").build(s), size), n) for size, n in (("1.3B", 1.315e9), ("6.7B", 6.66e9), ("39B", 39.1e9))},
    "llama, 1B": (lambda: load("llama").build(), 1.236e9),
    "llama, 8B": (lambda: load("llama").llama_8b(), 8.030e9),
}


@pytest.mark.parametrize("name", FULL)
def test_builds_on_meta(name: str) -> None:
    make, parameters = FULL[name]
    module, inputs = make()
    assert sum(p.numel() for p in module.parameters()) == pytest.approx(parameters, rel=1e-3)
    assert all(t.is_meta for t in (*module.parameters(), *module.buffers(), *inputs))


def test_gpt3_sizes_are_what_they_are_called() -> None:
    for name, (width, layers, _) in load("gpt3").SIZES.items():
        size = float(name[:-1]) * (1e9 if name.endswith("B") else 1e6)
        assert 12 * width**2 * layers + 51200 * width == pytest.approx(size, rel=0.05), name


def reduced(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Two layers of full width, on `meta`, and a small batch."""
    module: Any
    with torch.device("meta"):
        tokens = torch.zeros(8, 128, dtype=torch.int64)
        if name == "vit":
            return load(name).ViT(32, 4, 768, 12, 2, 10), (torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64))
        if name == "bert":
            module = load(name).BERT(33280, 768, 128, [load(name).Layer(768, 12) for _ in range(2)])
        elif name == "bert_moe":
            module = load(name).BERTMoE(33280, 768, 128, heads=12, layers=2, experts=128)
        elif name == "gpt3":
            module = load(name).GPT(51200, 8192, 64, 2, 128)
        else:
            module = load(name).Llama(replace(load(name).SIZES["8B"], layers=2), 128)
        return module, (tokens, tokens.clone())


@cache
def graph_of(name: str) -> Graph:
    return capture(*reduced(name))


@pytest.mark.parametrize("name", TINY)
def test_every_operator_has_a_rule(name: str) -> None:
    """An operator without one would be a warning, which is an error here."""
    graph = graph_of(name)
    theory = derive(graph, flat(4))
    products = ("aten.linear", "aten.einsum", "aten.scaled_dot_product_attention", "aten.conv2d")
    for node, triples in zip(graph.nodes, theory.triples, strict=True):
        if node.call.op in products:
            assert any(any(w is not None for w in t.work) for t in triples), node


# ---- tiny ----------------------------------------------------------------------------------------------------------------------

SHARES: dict[str, tuple[Any, int]] = {"even": ("even", 8), "4:4:1:1": ((4.0, 4.0, 1.0, 1.0), 10), "5:2:1:0": ((5.0, 2.0, 1.0, 0.0), 8)}


def restricted(strategy: str, ratios: Any) -> Restriction:
    return replace(BASELINES[strategy], mesh="flat", ratios=ratios)


@cache
def tiny_graph(tiny: Tiny, batch: int) -> Graph:
    return capture(tiny.model(), tiny.inputs(batch, 0))


def planned(tiny: Tiny, batch: int, rule: Restriction) -> Plan:
    """As by `plan_module` without micro-batches, which would capture the same graph for every rule."""
    plan = plan_graphs([tiny_graph(tiny, batch)], FOUR, strategy=rule)
    plan.verify()
    return plan


@pytest.mark.parametrize(
    ("shares", "strategy"),
    [
        pytest.param(shares, strategy, marks=[pytest.mark.slow] if shares == "even" and strategy != "zero" else [])
        for shares, strategy in product(SHARES, ("auto", "tensor-parallel", "zero"))
    ],
)
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_train_as_one_device(name: str, strategy: str, shares: str) -> None:
    (ratios, batch), tiny = SHARES[shares], TINY[name]
    plan = planned(tiny, batch, restricted(strategy, ratios))
    uses = assert_equivalent(tiny.model, partial(tiny.inputs, batch), plan, steps=2, optimizer="adamw")
    assert uses.sharded_flops > 0.95
    assert uses.unequal or shares == "even"
    assert uses.zero_length or shares != "5:2:1:0"
    assert uses.stored_sharded > 20 or strategy != "zero"


# ---- losses that are sums of terms ------------------------------------------------------------------------------------------------


def batch_only(ratios: Any) -> Restriction:
    return Restriction("batch", mesh="flat", split="batch", ratios=ratios)


@pytest.mark.parametrize("shares", SHARES)
def test_a_balancing_loss_over_the_whole_batch(shares: str) -> None:
    (ratios, batch), tiny = SHARES[shares], Tiny(lambda: Balanced(0.5), masked_text)
    plan = planned(tiny, batch, batch_only(ratios))
    uses = assert_equivalent(tiny.model, partial(tiny.inputs, batch), plan)
    assert uses.sharded_flops > 0.95
    without = train_single(Tiny(lambda: Balanced(0.0), masked_text).model, partial(tiny.inputs, batch), 1, "sgd")
    with_it = train_single(tiny.model, partial(tiny.inputs, batch), 1, "sgd")
    assert with_it.losses[0] - without.losses[0] > 0.1


@pytest.mark.parametrize("shares", SHARES)
def test_a_balancing_loss_per_group(shares: str) -> None:
    """Of BERT-MoE, with a weight that counts; its groups are sequences, which are shared out unevenly."""
    ratios, batch = SHARES[shares]
    tiny = Tiny(lambda: load("bert_moe").BERTMoE(13, 16, 6, heads=4, layers=2, experts=4, weight=1.0), masked_text)
    plan = planned(tiny, batch, batch_only(ratios))
    uses = assert_equivalent(tiny.model, partial(tiny.inputs, batch), plan)
    assert uses.sharded_flops > 0.95
    assert uses.unequal or shares == "even"


# ---- discrete decisions ------------------------------------------------------------------------------------------------------------


class Undecided(Balanced):
    """The gate gives every expert the same score: each choice is a tie."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.register_buffer("nothing", torch.zeros(()))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        combine, balance = load("bert_moe").route(self.experts.gate(x) * self.nothing, 3)
        sent = torch.einsum("gsec,gsm->egcm", (combine > 0).to(x.dtype), x)
        made = torch.einsum("egch,ehm->egcm", torch.einsum("egcm,emh->egch", sent, self.experts.up).relu(), self.experts.down)
        scores = self.head(x + torch.einsum("gsec,egcm->gsm", combine, made))
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-100) + balance


@pytest.mark.parametrize("strategy", ["tensor-parallel", "zero"])
def test_equal_devices_decide_ties_alike(strategy: str) -> None:
    tiny = Tiny(Undecided, masked_text)
    plan = planned(tiny, 20, restricted(strategy, (4.0, 4.0, 1.0, 1.0)))
    uses = assert_equivalent(tiny.model, partial(tiny.inputs, 20), plan)
    assert uses.sharded_flops > 0.9


# ---- experts ------------------------------------------------------------------------------------------------------------------------


def test_tensor_parallel_mixtures_split_experts() -> None:
    """Whole groups on every device, experts apart: every device makes the part of the result that its experts make."""
    plan = planned(TINY["bert_moe"], 8, restricted("tensor-parallel", "even"))
    split = {}
    for instruction in plan.stages[0].program.instructions:
        triple = instruction.triple
        if isinstance(triple.body, OpCall) and triple.body.op == "aten.einsum":
            split[str(triple.body["equation"])] = [
                s.dim if isinstance(s, Sharded) else str(s) for p in (*triple.pre, *triple.post) for s in p.placement.states
            ]
    assert split["egcm,emh->egch"] == [0, 0, 0], split
