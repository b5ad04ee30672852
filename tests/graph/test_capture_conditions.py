"""What a captured program takes for constant is noticed when it changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hapx.errors import PlanError
from hapx.graph.capture_conditions import ENOUGH, Seen, UnreadAttributeWarning, Watch, renew
from hapx.graph.capture_inputs import bind_inputs
from hapx.plan import ProgramKey

KEY = ProgramKey("train", ((4, 3),))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.beta, self.step = nn.Linear(3, 3), nn.Dropout(0.1), 1.0, 0
        self.table = torch.ones(3)

    def forward(self, x: Tensor, scale: float = 1.0, *, how: str = "sum") -> Tensor:
        return getattr(self.drop(self.linear(x)) * self.table * self.beta * scale, how)()


def of(model: nn.Module, *args: object, dtype: torch.dtype = torch.float32, **kwargs: object) -> dict[str, object]:
    x = torch.zeros(4, 3, dtype=dtype)
    call = {"x": x, **kwargs} if kwargs else (x, *args)
    return Watch(model).conditions(bind_inputs(model, call))


def changed(before: dict[str, object], now: dict[str, object]) -> tuple[str, ...]:
    seen = Seen()
    seen.accept(KEY, before)
    return seen.changed(KEY, now)


def test_nothing_has_changed() -> None:
    model = Model()
    before = of(model, 0.5)
    with torch.no_grad():
        model.linear.weight.add_(1.0)
    model.eval()
    model.train()
    assert changed(before, of(model, 0.5)) == ()
    assert changed(before, of(model, scale=0.5)) == ()  # by another way
    assert Seen().changed(KEY, before) == ()


CHANGES = pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: setattr(m, "beta", 0.5), "beta"),
        (lambda m: setattr(m.drop, "p", 0.2), "drop.p"),
        (lambda m: m.drop.eval(), "drop.training"),
        (lambda m: m.linear.bias.requires_grad_(False), "linear.bias.requires_grad"),
        (lambda m: setattr(m, "table", torch.ones(3)), "table"),
        (lambda m: m.table.fill_(2.0), "table"),
        (lambda m: setattr(m, "drop", nn.Identity()), "module 'drop'"),
        (lambda m: m.linear.register_forward_hook(lambda *_: None), "module 'linear'"),
        (lambda m: setattr(m, "gamma", 2.0), "gamma"),
        (lambda m: delattr(m, "beta"), "beta"),
        (lambda m: (setattr(m, "gamma", m.beta), delattr(m, "beta")), "gamma"),
        (lambda m: setattr(m, "table", 1.0), "table"),
        (lambda m: setattr(m.linear, "bias", None), "linear.bias.requires_grad"),
        (lambda m: m.linear.add_module("more", nn.Identity()), "module 'linear.more'"),
    ],
    ids=[
        "attribute", "of a submodule", "flag", "frozen", "other tensor", "filled tensor", "other module", "hook", "new attribute", "no attribute",
        "other name", "no tensor", "no parameter", "new module",
    ],
)  # fmt: skip


@CHANGES
def test_changes_of_the_model_are_noticed(change: object, name: str) -> None:
    model = Model()
    before = of(model)
    change(model)  # type: ignore[operator]
    assert name in changed(before, of(model))


@CHANGES
def test_a_watch_reads_again_what_has_changed(change: object, name: str) -> None:
    model = Model()
    watch, call = Watch(model), bind_inputs(model, (torch.zeros(4, 3),))
    before = watch.conditions(call)
    assert before == of(model) and watch.conditions(call) is before
    change(model)  # type: ignore[operator]
    now = watch.conditions(call)
    assert now == of(model) != before and name in changed(before, now)
    assert watch.conditions(call) is now


def test_a_watch_tells_calls_apart() -> None:
    model = Model()
    watch = Watch(model)
    half, more = (watch.conditions(bind_inputs(model, (torch.zeros(4, 3), scale))) for scale in (0.5, 0.7))
    assert changed(half, more) == ("argument scale",)
    assert watch.conditions(bind_inputs(model, (torch.zeros(4, 3), 0.7))) is more


def test_changes_of_the_call_are_noticed() -> None:
    model = Model()
    before = of(model, 0.5)
    assert changed(before, of(model, 0.7)) == ("argument scale",)
    assert changed(before, of(model)) == ("argument scale",)
    assert changed(before, of(model, scale=0.5, how="mean")) == ("argument how",)
    assert changed(before, of(model, 0.5, dtype=torch.float64)) == ("the dtype of input 'x'",)


def test_it_says_what_was_and_what_is() -> None:
    model, seen = Model(), Seen()
    seen.accept(KEY, of(model, 0.5))
    model.beta = 0.25
    now = of(model)
    assert seen.says(KEY, now) == "argument scale was 0.5 and is left out; beta was 1.0 and is 0.25"
    assert seen.news(now) == " with another argument scale, beta"
    seen.accept(KEY, now)
    assert seen.changed(KEY, now) == () and seen.news(now) == ""


def test_what_changes_often_without_effect_is_left_out_in_the_end() -> None:
    model, seen = Model(), Seen()
    seen.accept(KEY, of(model))
    for step in range(1, ENOUGH):
        model.step = step
        assert seen.changed(KEY, of(model)) == ("step",)
        seen.accept(KEY, of(model))
    model.step = ENOUGH
    with pytest.warns(UnreadAttributeWarning, match="step changed 3 times"):
        seen.accept(KEY, of(model))
    model.step = ENOUGH + 1
    assert seen.changed(KEY, of(model)) == ()
    model.beta = 0.5
    assert seen.changed(KEY, of(model)) == ("beta",)


def test_arguments_dtypes_and_flags_are_always_looked_at() -> None:
    model, seen = Model(), Seen()
    seen.accept(KEY, of(model, 0.0))
    for step in range(1, 2 * ENOUGH):
        model.drop.train(step % 2 == 0)
        model.linear.bias.requires_grad_(step % 2 == 0)
        now = of(model, float(step), dtype=(torch.float32, torch.float64)[step % 2])
        expected = ("argument scale", "drop.training", "linear.bias.requires_grad", "the dtype of input 'x'")
        assert seen.changed(KEY, now) == expected
        seen.accept(KEY, now)


def test_a_copy_gets_what_was_changed() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    model.beta, model.table = 0.5, torch.zeros(3)
    model.drop.eval()
    model.linear.bias.requires_grad_(False)
    renew(twin, model)
    assert twin.beta == 0.5 and not twin.drop.training and twin.training and not twin.linear.bias.requires_grad
    assert twin.table is model.table
    assert twin.linear.weight is not model.linear.weight
    model.drop = nn.Identity()
    with pytest.raises(PlanError, match="submodules or hooks of the model were changed"):
        renew(twin, model)
