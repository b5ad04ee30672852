"""Where memory binds in small problems: beams that know peaks find what sums of memory do not, and estimates of peaks are those of walks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planning_cases import case, case_with
from hapx.affine_peaks import AffinePeak
from hapx.alternation import Alternation
from hapx.balancer.rounding import Lengths, deal
from hapx.by_peaks import around
from hapx.cost.liveness import moments, peak
from hapx.cost.terms import Shares
from hapx.planner import plan_spmd
from hapx.progress import Teller
from hapx.setting import Counters
from hapx.states import Cut, Row
from hapx.synth.search import alternatives
from hapx.synth.writer import Solution
from hapx.theory.derive import derive
from hapx.turns import Turns

ROW, STORAGE = Row("compute", 0, 0), Row("storage", 0, 0)


def alternation(seed: int) -> Alternation:
    of, counters = case(seed), Counters()
    return Alternation(of.setting, derive(of.graph, of.mesh), counters, Teller(None, counters.search, of.mesh.name, 1, 1, np.inf))


@pytest.mark.parametrize("seed", [0, 5, 10])
def test_estimated_peaks_are_those_of_walks(seed: int) -> None:
    own, rng = alternation(seed), np.random.default_rng(seed)
    best = min(own.candidates(np.inf), key=lambda c: c.cost)
    cuts = [c for c in best.lengths if c in own.goal_of(best)[1].cuts]
    estimate = AffinePeak(best.program, own.costs, best.storage_of, best.lengths, cuts)
    assert cuts and estimate.error < 1e-6
    for _ in range(10):
        trial = {**best.lengths, **{c: deal(c.units, rng.dirichlet(np.ones(len(best.lengths[c]))).tolist()) for c in cuts}}
        np.testing.assert_allclose(estimate.at(trial), own.fitting.peak(best, trial)[0], rtol=1e-6)


def test_moments_are_those_of_the_peak() -> None:
    own = alternation(5)
    for candidate in own.candidates(np.inf)[:5]:
        exact = candidate.exact
        every = moments(candidate.program, candidate.theory.graph, exact, candidate.storage_of)
        np.testing.assert_array_equal(every.max(axis=0), peak(candidate.program, candidate.theory.graph, exact, candidate.storage_of).total)


# bytes per kind of devices, of random cases where temporaries are large
SHORT = {9: (18537, 23676, 19572), 144: (11048, 8991, 7899, 7597), 149: (1493, 1733)}


@pytest.mark.parametrize(("seed", "gain"), [*(pytest.param(*case, marks=pytest.mark.slow) for case in ((9, 0.10), (144, 0.15))), (149, 0.10)])
def test_sums_miss_what_peaks_allow(seed: int, gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    of = case_with(seed, SHORT[seed])
    setting = replace(of.setting, strict=True)
    found = plan_spmd(setting, Counters(), [of.mesh])[0]
    monkeypatch.setattr(Turns, "by_peaks", lambda *_: None)
    before = plan_spmd(setting, Counters(), [of.mesh])[0]
    assert found.fits and before.fits
    assert found.cost < (1 - gain) * before.cost


def test_lengths_around_others() -> None:
    one, two, kept = Cut(ROW, 16), Cut(ROW, 4), Cut(STORAGE, 8)
    lengths, kinds = {one: (8, 4, 4), two: (2, 1, 1), kept: (4, 2, 2)}, ((0,), (1, 2))
    trials = list(around(lengths, kinds, [one, two, kept], [np.array([0.0, 0.5])]))
    assert {**lengths, one: (0, 8, 8)} in trials  # dealt out as given
    assert {**lengths, one: (4, 6, 6), two: (1, 2, 1)} in trials  # a quarter of the row moved
    assert all(trial != lengths and all(sum(trial[c]) == c.units for c in trial) for trial in trials)
    assert all(trial[kept] == lengths[kept] for trial in around(lengths, kinds, [one, two], []))


@pytest.mark.parametrize("seed", [39, 119])
def test_where_what_fits_by_sums_does_not_by_peaks_what_was_found_before_is_asked(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    aside, looked = Turns._aside, []

    def recorded(own: Turns, shares: Shares, lengths: Lengths, refused: set[tuple[int, ...]]) -> Solution | None:
        found = aside(own, shares, lengths, refused)
        known = list(alternatives(own.problem, shares, own.setting.key))
        looked.append(found)
        fits = [solution.cost for solution in known if own.fitting.holds(solution, lengths)]
        if found is None:
            assert not fits
        else:
            assert own.fitting.holds(found, lengths)
            assert found.cost == min(fits)
        return found

    monkeypatch.setattr(Turns, "_aside", recorded)
    of = case(seed)
    best = plan_spmd(of.setting, Counters(), [of.mesh])[0]
    assert best.fits
    assert any(found is not None for found in looked)
