"""What the next best program without a choice would cost."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

import hapx
from hapx.plan import Communication, Plan
from hapx.report.alternatives import Part, alternatives, choices, instead, why_text, without
from hapx.report.pricing import Pricing
from hapx.report.words import time_text
from hapx.restriction import BASELINES
from hapx.states import Invariant, Replicated
from support.models import MLP

CLUSTER = {
    "name": "two-kinds",
    "machines": [{"name": "new", "device": "V100-SXM2-16GB", "devices": 2}, {"name": "old", "device": "P100-SXM2-16GB", "devices": 2}],
    "network": {"inter": {"bandwidth": "100 Gbit/s", "latency": "5 us"}, "intra": {"bandwidth": "150 GB/s", "latency": "5 us"}},
}


@cache
def planned(mesh: str) -> Plan:
    """Batches so large that they are split."""
    model = MLP((256, 1024, 1024, 128))
    return hapx.plan(model, CLUSTER, example_inputs=model.example(8192), strategy=replace(BASELINES["auto"], mesh=mesh))


@pytest.mark.parametrize("mesh", ["flat", "2x2"])
def test_the_most_expensive_choices_come_first(mesh: str) -> None:
    pricing = Pricing.of(planned(mesh))
    found = choices(pricing)
    assert [c.seconds for c in found] == sorted((c.seconds for c in found), reverse=True)
    for choice in found:  # what a choice takes are the seconds of its instructions
        steps = [s for s in pricing.steps if s.module in choice.modules]
        if choice.says.startswith("computed"):
            times = [t.at({}).max() for s in steps for t in (s.cost.forward, s.cost.backward) if t is not None]
            assert 0 < choice.seconds <= sum(times) * (1 + 1e-9)
        else:
            messages = [m for s in steps for m in s.messages if choice.says.startswith(m.what)]
            assert 0 < choice.seconds <= sum(m.seconds for m in messages) * (1 + 1e-9)


@pytest.mark.parametrize("mesh", ["flat", "2x2"])
def test_alternatives_are_sound_plans_without_the_choice(mesh: str) -> None:
    plan = planned(mesh)
    pricing = Pricing.of(plan)
    for found in alternatives(Part(pricing.plan)):
        assert found.plan is not None, found.none
        found.plan.verify()
        assert found.plan.stages[0].mesh == plan.stages[0].mesh
        # the plan is the best one at its ratios, so without something it cannot cost less there; other ratios gain little
        assert found.plan.statistics["cost"] >= plan.statistics["cost"] * 0.99
        forbidden = found.choice.forbidden
        for triple in (i.triple for i in found.plan.stages[0].program.instructions):
            if isinstance(triple.body, tuple):
                assert forbidden.of(triple.post[0].tensor).isdisjoint((c.axis, type(c.source), type(c.target)) for c in triple.body)
            else:
                assert not forbidden.triple(triple)


def test_without_gradient_synchronisation() -> None:
    """The gradients of a layer are not summed over devices: its weights are split, or whole for a layer that every device computes whole."""
    plan = planned("flat")
    (choice, *_) = [c for c in choices(Pricing.of(plan)) if c.says == "gradients: all-reduce"]
    found = without(Part(plan), choice)
    assert found.plan is not None

    def synchronised(p: Plan) -> set[str]:
        steps: list[tuple[str, Communication]] = [
            (i.triple.post[0].tensor, c) for i in p.stages[0].program.instructions if isinstance(i.triple.body, tuple) for c in i.triple.body
        ]
        return {name for name, c in steps if isinstance(c.source, Invariant) and isinstance(c.target, Replicated)}

    tensors = {name for name, *_ in choice.forbidden.changes}
    assert tensors <= synchronised(plan)
    assert tensors.isdisjoint(synchronised(found.plan))
    assert instead(plan, found.plan, choice)


def test_the_table() -> None:
    plan = planned("flat")
    found = alternatives(Part(plan))
    text = why_text(Part(plan))
    assert text.startswith("why: the most expensive choices")
    assert max(map(len, text.splitlines())) <= 120 and text.isascii()
    for a in found:
        assert a.plan is not None
        numbers = time_text(a.choice.seconds), time_text(a.plan.iteration_time), f"{a.plan.iteration_time / plan.iteration_time - 1:+.1%}"
        assert re.search(" .* ".join(map(re.escape, numbers[:2])) + " +" + re.escape(numbers[2]), text), text


def test_where_there_is_no_other_way() -> None:
    """A strategy that allows nothing else."""
    model = MLP((256, 512, 128))
    plan = hapx.plan(model, CLUSTER, example_inputs=model.example(4096), strategy="dp-even")
    found = alternatives(Part(plan), most=20)
    assert [a.none for a in found if a.choice.says == "gradients: all-reduce"] == ["there is no other way"] * 2
    assert "there is no other way" in why_text(Part(plan))
