"""The program of the least peak: what the beam takes its peak to be, and that sums alone do not find it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
import torch

import hapx.synth.lean
from benchmarks.planning_cases import case as random_case
from hapx.alternation import Alternation
from hapx.balancer.lp import Objective, objective
from hapx.balancer.rounding import Lengths, per_device, round_ratios
from hapx.cost.remat import with_blocks
from hapx.graph.capture import capture
from hapx.ir import Graph
from hapx.planner import key_of, views
from hapx.progress import Teller
from hapx.restriction import AUTO, BASELINES
from hapx.setting import Counters, Setting
from hapx.squeezing import FAR, VERY_FEW_STEPS, Family, Ratios, Squeezing, Tight
from hapx.synth.astar import Statistics, beam
from hapx.synth.domain import moves_of
from hapx.synth.lean import WIDTHS, Lean, leanest
from hapx.synth.search import least_memory
from hapx.synth.writer import Solution
from hapx.theory.derive import derive
from hapx.theory.discover import discover
from support.at_lengths import AtLengths, at_lengths
from support.clusters import FOUR
from support.models import GPT, MLP

# moments are counted in grains of what may be used, so that has to be near what is needed
SCARCE = replace(FOUR, device_types={name: replace(kind, memory=300 * 2**10) for name, kind in FOUR.device_types.items()})

LAYERS = 8


def leanest_of(own: AtLengths) -> Solution:
    found = leanest(own.problem, own.exact, own.lengths, own.fitting.key)
    assert found is not None
    return found


def least_sum(own: AtLengths) -> Solution:
    return least_memory(own.problem, own.costs.lengths_to_shares(own.lengths), tuple(own.fitting.capacity), own.fitting.key)


@pytest.fixture(scope="module")
def gpt() -> Graph:
    model = GPT(100, 32, 4, 2, 16)
    return discover(capture(model, model.example(8)))


@pytest.mark.parametrize(("shares", "repeats"), [("even", 1), ("speed", 1), ("speed", 2)])
def test_the_peak_of_a_partial_program_becomes_that_of_the_program(gpt: Graph, shares: str, repeats: int) -> None:
    own = at_lengths(gpt, SCARCE, shares, repeats)
    found = leanest_of(own)
    assert found.cost == pytest.approx(own.part(found), rel=0.05)


def test_blocks_that_are_computed_again_take_less(gpt: Graph) -> None:
    plain, thrifty = at_lengths(gpt, SCARCE, "even"), at_lengths(with_blocks(gpt), SCARCE, "even")
    found = leanest_of(thrifty)
    assert found.cost == pytest.approx(thrifty.part(found), rel=0.25)
    assert thrifty.part(found) < 0.9 * plain.part(leanest_of(plain))


def test_it_is_no_larger_than_that_of_the_least_sum(gpt: Graph) -> None:
    for graph in (gpt, with_blocks(gpt)):
        for shares in ("even", "speed"):
            own = at_lengths(graph, SCARCE, shares)
            assert own.part(leanest_of(own)) <= 1.1 * own.part(least_sum(own))


@pytest.mark.parametrize("blocks", [0, 5, LAYERS])
def test_a_leap_takes_as_much_as_all_of_its_rounds(blocks: int) -> None:
    model = GPT(13, 16, 2, LAYERS, 16)
    graph = discover(capture(model, model.example(8)))
    own = at_lengths(with_blocks(graph, blocks) if blocks else graph, SCARCE, "speed")
    lean = Lean(own.problem, own.exact, own.lengths)
    last = beam(lean, WIDTHS[0], Statistics())
    assert last is not None
    leaps, state = [], last
    while state.parent is not None:
        leaps += [state] if state.move is None else []
        state = state.parent
    assert leaps, "of layers that are alike"
    for leapt in leaps:
        state, period = lean.start(), leapt.rounds[0]
        for level, move in enumerate(moves_of(leapt)):
            made = lean.following[lean.region[level] >= 0].made(level, move)
            (state,) = lean._follow(state, [(move, made)], inf)
        assert (state.level, state.place) == (leapt.level, leapt.place)
        assert state.memory == pytest.approx(leapt.memory, rel=1e-12)
        regions = [lean.region[at : at + period] for at in range(leapt.parent.level - period, leapt.level, period)]
        assert len({tuple(r >= 0 for r in own) for own in regions}) == 1, "not over a border"


def test_what_repeats_itself_is_as_lean_as_what_is_found_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(13, 16, 2, LAYERS, 16)
    own = at_lengths(discover(capture(model, model.example(8))), SCARCE, "speed")
    found = []
    for settled in (hapx.synth.lean.SETTLED, LAYERS):
        monkeypatch.setattr(hapx.synth.lean, "SETTLED", settled)
        statistics = Statistics()
        best = beam(Lean(own.problem, own.exact, own.lengths), WIDTHS[0], statistics)
        assert best is not None
        found.append((best.estimate, statistics.expansions))
    (early, few), (late, many) = found
    assert early <= late * (1 + 1e-3)
    assert few < 0.8 * many


def test_partial_peaks_never_fall() -> None:
    model = MLP((16, 16, 16), dtype=torch.float32)
    own = at_lengths(discover(capture(model, model.example(8))), SCARCE, "even")
    domain = Lean(own.problem, own.exact, own.lengths)

    def paths(depth: int) -> Iterator[float]:
        state = domain.start()
        while state.level < domain.depth:
            followers = list(domain.successors(state, float("inf")))
            assert followers, "every step can be done"
            assert all(after.estimate >= state.estimate and after.level == state.level + 1 for after in followers)
            state = followers[depth % len(followers)]
        yield state.estimate

    assert all(value > 0 for depth in range(5) for value in paths(depth))


def test_other_ratios_take_the_peak_down(gpt: Graph) -> None:
    own = at_lengths(gpt, SCARCE, "speed")
    rows = [own.problem.theory.mesh.row(0, kind, 0) for kind in ("compute", "storage")]
    one = np.array([1.0 if k == 0 else 0.0 for k in range(len(own.costs.sizes))]) / own.costs.sizes[0]  # all of it on one kind
    movable = sorted(own.problem.cuts, key=str)

    def lengths(ratios: Ratios) -> Lengths:
        return round_ratios({row: per_device(np.asarray(s).tolist(), own.costs.kinds) for row, s in ratios.items()}, movable)

    def goal(solution: Solution) -> Objective:
        return objective(solution.steps, solution.storage, len(own.costs.sizes))

    own.fitting.capacity = own.fitting.capacity * 1e-6  # nothing fits
    found = {}
    for free in (False, True):
        squeezing = Squeezing(own.problem, own.fitting, goal, lengths, free=free, fixed={})
        found[free] = squeezing.tightest([dict.fromkeys(rows, one)])
    assert 1 < found[True].part < 0.9 * found[False].part
    tight = found[True]
    assert tight.part == pytest.approx(float((own.fitting.peak(tight.solution, tight.lengths)[0] / own.fitting.capacity).max()))


def test_where_the_beam_leads_nowhere_the_least_sum_is_the_answer(gpt: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it did for tensor parallelism at some lengths: of what allows few programs a beam may keep nothing that leads on."""
    setting = Setting(gpt, key_of(gpt), SCARCE, BASELINES["tensor-parallel"], "fp32", "adamw")
    counters = Counters()
    own = Alternation(setting, derive(gpt, views(SCARCE, AUTO)[0]), counters, Teller(None, counters.search, "flat", 1, 1, float("inf")))
    monkeypatch.setattr("hapx.squeezing.leanest", lambda *_: None)
    tight = own.tightest
    assert tight.part == pytest.approx(float((own.fitting.peak(tight.solution, tight.lengths)[0] / own.fitting.capacity).max()))
    least = least_memory(own.problem, own.costs.lengths_to_shares(tight.lengths), tuple(own.fitting.capacity), setting.key)
    assert least.cost <= tight.part  # of the sum, whose peak is more


@pytest.mark.parametrize("seed", [38, 137])
def test_in_very_small_problems_other_families_of_programs_may_lead_to_less(seed: int) -> None:
    of, counters = random_case(seed), Counters()
    types = {name: replace(kind, memory=100) for name, kind in of.setting.cluster.device_types.items()}
    setting = replace(of.setting, cluster=replace(of.setting.cluster, device_types=types))
    alternation = Alternation(setting, derive(of.graph, of.mesh), counters, Teller(None, counters.search, of.mesh.name, 1, 1, float("inf")))

    def tightest(families: bool) -> Tight:
        own = Squeezing(alternation.problem, alternation.fitting, alternation.goal, alternation.lengths, free=True, fixed={})
        assert len(own.families) == 3
        own.families = own.families if families else [None]
        return own.tightest(alternation.starts.tight())

    plain, found = tightest(False), tightest(True)
    assert 1 < found.part < 0.95 * plain.part
    peak, _ = alternation.fitting.peak(found.solution, found.lengths)
    assert found.part == pytest.approx(float((peak / alternation.fitting.capacity).max()))


@pytest.mark.parametrize("room", [4.0, 0.001])
def test_plain_families_are_asked_before_all_programs(gpt: Graph, room: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In problems that are not very small: they have few moves, and where one fits nothing else is asked."""
    own, asked = at_lengths(gpt, SCARCE, "even"), list[Family]()
    own.fitting.capacity = own.fitting.capacity * room

    def seen(*of: Any) -> Solution | None:
        asked.append(of[-1])
        return leanest(*of)

    monkeypatch.setattr("hapx.squeezing.leanest", seen)
    squeezing = Squeezing(
        own.problem, own.fitting, lambda s: objective(s.steps, s.storage, len(own.costs.sizes)), lambda _: own.lengths, free=False, fixed={}
    )
    tight = squeezing.tightest([{}])
    assert len(own.problem.steps) > VERY_FEW_STEPS
    if room > 1:
        assert tight.part <= 1 and len(asked) == 1 and asked[0] is not None
    else:
        assert tight.part > FAR and [family is None for family in asked] == [False, False, True]


def test_a_family_that_cannot_do_a_step_leads_nowhere(gpt: Graph) -> None:
    own = at_lengths(gpt, SCARCE, "even")
    nothing = {id(step.kind): np.zeros(len(step.kind.choices), dtype=bool) for step in own.problem.steps}
    assert leanest(own.problem, own.costs.at_lengths(own.lengths), own.lengths, own.fitting.key, nothing) is None
