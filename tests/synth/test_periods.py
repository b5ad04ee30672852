"""Steps that repeat themselves: how often they did before a level, and what beams make of it."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor, nn

import hapx
import hapx.synth.domain
from hapx.synth.astar import Statistics, Width, beam
from hapx.synth.domain import Synthesis
from hapx.synth.periods import Repetition
from hapx.synth.problem import Problem
from support.clusters import TWO
from support.models import GPT
from support.problems import problem_of

LAYERS = 8


@pytest.fixture(scope="module")
def deep() -> tuple[Problem, Synthesis]:
    model = GPT(13, 16, 2, LAYERS, 16)
    problem, costs = problem_of(model, model.example(8), "rtx4090_rtx3060", "flat")
    shares = dict.fromkeys(problem.cuts, costs.speeds)
    return problem, Synthesis(problem, shares, None)


def test_rounds_before_and_after_a_level(deep) -> None:
    problem, _ = deep
    repetition, kinds = Repetition(problem.steps), [s.kind for s in problem.steps]
    several = [level for level in range(len(kinds)) if repetition.done(level) > 1]
    for level in several:
        period, done, left = repetition.before(level), repetition.done(level), repetition.rounds(level)
        assert all(kinds[level + i * period] is kinds[level] for i in range(-done, left))
        assert repetition.done(level - period) == done - 1
    assert max(map(repetition.done, several)) >= LAYERS - 2
    assert all(repetition.done(level) == 0 for level in range(len(kinds)) if repetition.before(level) == 0)


class Word(nn.Module):
    """A layer per letter."""

    def __init__(self, word: str):
        super().__init__()
        self.word, self.layers = word, nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in word)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for letter, layer in zip(self.word, self.layers, strict=True):
            h = layer(x)
            x = {"b": h.tanh, "c": h.relu, "d": lambda h=h, x=x: x + h.tanh().relu()}[letter]()
        return ((x - y) ** 2).mean()


@pytest.mark.parametrize("word", ["cccccbcb", "ddddcdcdc", "dcdcccdcdcdc", "bcbcbccbcb"])
def test_where_one_repetition_goes_over_into_another_nothing_leaps_too_far(word: str) -> None:
    """Places of values stand for each other at the distance of the steps between."""
    inputs = torch.ones(2, 8, 8, dtype=torch.float64).unbind()
    problem, _ = problem_of(Word(word), inputs, "rtx4090_rtx3060", "flat")
    steps, found = problem.steps, Repetition(problem.steps)
    jumps = [(level, jump) for level in range(len(steps)) if (jump := found.jump(level)) is not None]
    for level, jump in jumps:
        end = level + jump.times * found.before(level)
        live = {at: table for _, table, at in steps[end].live}
        assert {now for now, _, _ in jump.pairs} == set(live)
        assert {before for _, before, _ in jump.pairs} == {at for _, _, at in steps[level].live}
    assert all(
        found.pairs(level, found.before(level)) is None
        for level in range(len(steps))
        if found.before(level) != found.period[level - found.before(level)]
    )
    hapx.plan(Word(word), TWO, inputs, micro_batches=1).verify()


def test_what_stays_is_what_names_say(deep, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = deep[0].steps
    found, levels = Repetition(steps), range(len(steps))
    staying = [level for level in levels if found.stays[level]]
    quick = [(found.moved(level), found.continues(level)) for level in staying]
    assert len(staying) > len(steps) // 2
    assert sum(goes_on for _, goes_on in quick) > len(staying) // 2
    monkeypatch.setattr(Repetition, "stays", [False] * (len(steps) + 1))
    by_names = Repetition(steps)
    assert quick == [(by_names.moved(level), by_names.continues(level)) for level in staying]


@pytest.mark.parametrize("width", (Width(4), Width(8, apart=True)))
def test_beams_follow_what_repeats_itself(deep, monkeypatch, width: Width) -> None:
    """They find what they would find layer by layer, in no more steps."""
    _, domain = deep
    found = []
    for settled in (2, inf):
        monkeypatch.setattr(hapx.synth.domain, "SETTLED", settled)
        statistics = Statistics()
        best = beam(domain, width, statistics)
        assert best is not None
        found.append((best.estimate, statistics.expansions))
    (early, few), (late, many) = found
    assert early == pytest.approx(late, rel=1e-9)
    assert few <= many
