"""Several stages on every submesh: cut as well as enumeration does it, and as long as the closed form says."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from math import inf

import pytest

from hapx.stages.costs import ONE_F_ONE_B, Answer, Assigned, Pipeline, Prices, latency
from hapx.stages.interleaved import interleavings
from hapx.stages.simulated import simulated
from hapx.stages.submeshes import Shape, ordered, shape_of
from support.clusters import slow_devices

CLUSTER = slow_devices(["fast", "fast"], ["slow", "slow"], ["medium"])
GROUPS = ((0, 1), (2, 3), (4,))


def prices(work: list[float], micro_batches: int, most: int = 100, crossing: float = 0.0) -> Prices:
    """A layer takes its work by the speed of the devices; the update takes a tenth."""

    def ask(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        seconds = sum(work[start:stop]) / sum(CLUSTER.device_types[t].speed("fp32") for t in shape.types)
        return (Answer(seconds, 0.0, most), Answer(1.5 * seconds, 0.0, 2 * most))

    return Prices(micro_batches, ask, lambda *run: ask(*run)[0], lambda *_: crossing)


def pipeline(ends: list[int], given: Prices, groups: tuple[tuple[int, ...], ...] = GROUPS) -> Pipeline:
    stages = []
    for i, (start, stop) in enumerate(pairwise(ends)):
        devices = ordered(CLUSTER, groups[i])
        shape = shape_of(CLUSTER, devices)
        crossing = given.crossing(stop, shape, shape, CLUSTER.inter) if i + 1 < len(groups) else 0.0
        stages.append(Assigned(start, stop, shape, devices, given.ask(start, stop, shape)[0], len(groups) - i, crossing))
    time = latency(given.micro_batches, ONE_F_ONE_B, [(s.answer.micro, s.crossing, s.answer.iteration) for s in stages])
    return Pipeline(time, given.micro_batches, ONE_F_ONE_B, tuple(stages))


@pytest.mark.parametrize("seed", range(20))
def test_cut_as_enumeration_cuts(seed: int) -> None:
    chance = random.Random(seed)
    work = [chance.uniform(0.5, 2.0) * 1e6 for _ in range(9)]
    given = prices(work, 6)
    plain = pipeline([0, 5, 6, 9], given)
    (found, *more) = interleavings(plain, len(work), CLUSTER, given)
    assert [s.devices for s in found.stages] == [s.devices for s in plain.stages] * 2
    assert [s.start for s in found.stages] + [9] == [0] + [s.stop for s in found.stages]
    assert all(len(p.stages) == 9 for p in more)  # three on each; there are no layers for four
    best = inf
    for cuts in combinations(range(1, 9), 5):
        runs = pairwise((0, *cuts, 9))
        best = min(best, max(given.ask(a, b, plain.stages[j % 3].shape)[0].micro for j, (a, b) in enumerate(runs)))
    assert max(s.answer.micro for s in found.stages) == pytest.approx(best)


def test_room_decides_which_answers_are_taken() -> None:
    """Of two per submesh the first keeps (2 - 1) * 3 + 2 * 2 + 1 = 8 micro-batches, the second 6, the third 4."""
    for most, expected in ((8, [8, 8, 8]), (7, [14, 7, 7]), (5, [10, 10, 5])):
        given = prices([1e6] * 12, 6, most)
        found = next(interleavings(pipeline([0, 4, 8, 12], given), 12, CLUSTER, given))
        assert [s.answer.most_in_flight for s in found.stages] == expected * 2
    given = prices([1e6] * 12, 6, 3)
    assert not list(interleavings(pipeline([0, 4, 8, 12], given), 12, CLUSTER, given))


def test_stages_of_a_submesh_share_its_memory() -> None:
    """Parameters take most of it: a quick way has room for one micro-batch beside those of 4 layers, for 12 beside those of 2."""

    def ask(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        seconds = (stop - start) / sum(CLUSTER.device_types[t].speed("fp32") for t in shape.types)
        return Answer(seconds, 0.0, 1 if stop - start > 3 else 12, "quick"), Answer(1.2 * seconds, 0.0, 40, "thrifty")

    given = Prices(6, ask, lambda *run: ask(*run)[0], lambda *_: 0.0)
    found = next(interleavings(pipeline([0, 4, 8, 12], given), 12, CLUSTER, given))
    assert {s.answer.plan for s in found.stages} == {"thrifty"}


@pytest.mark.parametrize("micro_batches", [4, 8, 64])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_equal_stages_take_what_the_closed_form_says(micro_batches: int, rounds: int) -> None:
    """(n + (G - 1) / v) seconds of a submesh; n = 64 is extrapolated."""
    given = prices([1e6] * 12, micro_batches)
    plain = pipeline([0, 6, 12], given, ((0,), (1,)))
    whole = plain.stages[0].answer.micro
    found = plain if rounds == 1 else list(interleavings(plain, 12, CLUSTER, given))[rounds - 2]
    assert len(found.stages) == 2 * rounds
    assert simulated(found, CLUSTER) == pytest.approx((micro_batches + 1 / rounds) * whole)
    assert rounds == 1 or found.time == simulated(found, CLUSTER)


def test_slow_links_make_it_slower() -> None:
    quick, slow = (prices([1e6] * 12, 4, crossing=x) for x in (0.0, 2.0))
    plain = [pipeline([0, 6, 12], p, ((0,), (1,))) for p in (quick, slow)]
    assert min(p.time for p in interleavings(plain[0], 12, CLUSTER, quick)) < simulated(plain[0], CLUSTER)
    assert min(p.time for p in interleavings(plain[1], 12, CLUSTER, slow)) > simulated(plain[1], CLUSTER)
