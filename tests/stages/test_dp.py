"""The inter-operator program: equal to enumeration on random cases, and what it finds where the answer is known."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest

from hapx.cluster.spec import ClusterSpec, Link
from hapx.stages import exhaustive
from hapx.stages.costs import GPIPE, ONE_F_ONE_B, UNLIMITED, Answer, Pipeline, Prices, eager, latency, most_in_flight
from hapx.stages.dp import Solution, solve
from hapx.stages.space import space
from hapx.stages.submeshes import Shape, shape_of
from support.stage_prices import cluster_of, random_cluster, random_worlds

CASES = 160


@cache
def _case(seed: int, epsilon: float = 0.0) -> tuple[Solution, Pipeline | None, ClusterSpec]:
    """Solution, the oracle's best, the cluster. Every fourth case may leave devices out."""
    cluster, idle = random_cluster(seed, most=5 if seed % 3 else 6), seed % 4 == 0
    layers, worlds, disciplines = random_worlds(seed)
    found = solve(layers, space(cluster, idle), [w.prices() for w in worlds], disciplines, epsilon=epsilon)
    assert sum(w.asked for w in worlds) == found.asked <= found.pairs
    oracle = [exhaustive.cheapest(len(layers), cluster, w.prices(), d, idle) for w in worlds for d in disciplines]
    return found, min((p for p in oracle if p is not None), key=lambda p: p.time, default=None), cluster


@pytest.mark.parametrize("first", range(0, CASES, 20))
def test_equal_to_enumeration(first: int) -> None:
    """The time of the best pipeline, and that what is returned is a pipeline of that time."""
    for seed in range(first, first + 20):
        found, best, cluster = _case(seed)
        assert bool(found.pipelines) == (best is not None), seed
        if best is not None:
            assert math.isclose(found.pipelines[0].time, best.time, rel_tol=1e-9), seed
            assert found.gap < 1e-9
            assert [p.time for p in found.pipelines] == sorted(p.time for p in found.pipelines)
        for pipeline in found.pipelines:
            _check(pipeline, cluster)


def test_random_cases_are_of_every_sort() -> None:
    """Mixed machines, several stages, stages on mixed types, each discipline, nothing fits: all of it is among the cases."""
    seen: Counter[str] = Counter()
    for seed in range(CASES):
        found, _, cluster = _case(seed)
        best = found.pipelines[0] if found.pipelines else None
        seen["nothing fits"] += best is None
        seen["mixed machines"] += any(len({*m.devices}) > 1 for m in cluster.machines)
        if best is not None:
            seen["several stages"] += len(best.stages) > 1
            seen["mixed stage"] += any(len({*s.shape.types}) > 1 for s in best.stages)
            seen["slices"] += len(best.stages) > len(cluster.machines)
            seen["bound by memory"] += any(s.answer.most_in_flight < 2 * s.in_flight for s in best.stages)
            seen[best.discipline.name] += 1
    expected = {"nothing fits", "mixed machines", "several stages", "mixed stage", "slices", "bound by memory", "1f1b", "gpipe", "1f1b-warm"}
    assert expected <= {name for name, n in seen.items() if n >= 5}, seen


def test_epsilon_is_kept_and_saves_asks() -> None:
    asked = exact = 0
    for seed in range(30):
        found, best, _ = _case(seed, epsilon=0.1)
        asked, exact = asked + found.asked, exact + _case(seed)[0].asked
        if best is not None:
            assert found.bound <= best.time * (1 + 1e-9) and found.pipelines[0].time <= 1.1 * best.time * (1 + 1e-9)
    assert asked < exact


def _check(pipeline: Pipeline, cluster: ClusterSpec) -> None:
    n, stages = pipeline.micro_batches, pipeline.stages
    assert stages[0].start == 0 and all(a.stop == b.start for a, b in pairwise(stages))
    devices = [d for s in stages for d in s.devices]
    assert len({*devices}) == len(devices)
    for i, s in enumerate(stages):
        assert shape_of(cluster, s.devices) == s.shape
        assert s.in_flight == pipeline.discipline.in_flight(n, len(stages) - i) <= s.answer.most_in_flight
    assert math.isclose(pipeline.time, latency(n, pipeline.discipline, [(s.answer.micro, s.crossing, s.answer.iteration) for s in stages]))


# -- cases with a known answer ----------------------------------------------------------------------------------------------------------------------


def _simple(n: int, crossing: float = 0.0, together: float = 1.0, iteration: float = 0.0, fits: int = UNLIMITED) -> Prices:
    """A second per layer and iteration on one device; `together`: how well devices work together."""

    def ask(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        return (Answer((stop - start) / n / shape.num_devices**together, iteration, fits),)

    def bound(start: int, stop: int, shape: Shape) -> Answer:
        return Answer((stop - start) / n / shape.num_devices, 0.0, UNLIMITED)

    return Prices(n, ask, bound, lambda b, front, back, link: crossing)


def test_one_stage_where_devices_work_together_without_loss() -> None:
    best = solve("aaaa", space(cluster_of(["fast"] * 4)), [_simple(4)]).pipelines[0]
    assert [(s.start, s.stop, s.devices) for s in best.stages] == [(0, 4, (0, 1, 2, 3))]
    assert best.time == pytest.approx(1.0)


def test_a_stage_per_device_where_they_do_not() -> None:
    best = solve("aaaa", space(cluster_of(["fast"] * 4)), [_simple(100, together=0.0)]).pipelines[0]
    assert [(s.start, s.stop, s.devices) for s in best.stages] == [(i, i + 1, (i,)) for i in range(4)]
    assert best.time == pytest.approx((4 + 99) / 100)
    assert [s.in_flight for s in best.stages] == [4, 3, 2, 1]
    assert str(best).splitlines() == [
        "1.03 s, 1f1b, 100 micro-batches",
        "  layers 0..0 on 1 fast: 0.01 s + 0 s, 0 s per iteration, 4 in flight",
        "  layers 1..1 on 1 fast: 0.01 s + 0 s, 0 s per iteration, 3 in flight",
        "  layers 2..2 on 1 fast: 0.01 s + 0 s, 0 s per iteration, 2 in flight",
        "  layers 3..3 on 1 fast: 0.01 s + 0 s, 0 s per iteration, 1 in flight",
    ]


def test_more_micro_batches_until_their_overhead_is_more() -> None:
    def ask(n: int):
        return lambda start, stop, shape: (Answer((stop - start) / n + 0.01, 0.0, UNLIMITED),)

    prices = [Prices(n, a, lambda *run, a=a: a(*run)[0], lambda *_: 0.0) for n in (1, 2, 4, 8, 16, 32, 64) for a in [ask(n)]]
    found = solve("aaaa", space(cluster_of(["fast"] * 4)), prices, epsilon=0.0)
    assert found.pipelines[0].micro_batches == 16  # (n + 3) (1 / n + 0.01) with four stages


def test_crossing_is_in_the_cost_and_hidden_where_the_discipline_hides_it() -> None:
    dealt, prices = space(cluster_of(["fast"] * 2)), [_simple(10, crossing=0.09, together=0.2)]
    assert len(solve("aaaa", dealt, prices, [ONE_F_ONE_B]).pipelines[0].stages) == 2
    times = {d: solve("aaaa", dealt, prices, [d], epsilon=0.0).pipelines[0].time for d in (ONE_F_ONE_B, GPIPE, eager(2))}
    assert times[ONE_F_ONE_B] == pytest.approx(0.2 * 2 + 0.09 + 9 * 0.29) and times[GPIPE] == times[eager(2)] == pytest.approx(
        0.2 * 2 + 0.09 + 9 * 0.2
    )
    assert len(solve("aaaa", dealt, [_simple(10, crossing=9.0, together=0.2)]).pipelines[0].stages) == 1


def test_neighbours_in_a_machine_use_its_link() -> None:
    """The slow link is crossed once, between the machines."""

    def crossing(_boundary: int, _front: Shape, _back: Shape, link: Link) -> float:
        return 0.02 if link.bandwidth < 1e9 else 0.001

    prices = Prices(16, _simple(16, together=0.0).ask, _simple(16).bound, crossing)
    best = solve("aaaa", space(cluster_of(["fast"] * 2, ["fast"] * 2)), [prices], epsilon=0.0).pipelines[0]
    assert [s.crossing for s in best.stages] == [0.001, 0.02, 0.001, 0.0]
    assert [s.devices for s in best.stages] == [(0,), (1,), (2,), (3,)]


def test_the_slowest_stage_goes_to_the_quickest_machine() -> None:
    """A mixed cluster: layers as speeds are, machine types in the order that suits the layers."""
    speed = {"fast": 4.0, "slow": 1.0}

    def ask(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        return (Answer(sum("abcd".index(c) + 1 for c in "aaad"[start:stop]) / sum(speed[t] for t in shape.types) * len(shape.types), 0.0, UNLIMITED),)

    prices = Prices(16, ask, lambda *run: ask(*run)[0], lambda *_: 0.0)
    best = solve("aaad", space(cluster_of(["fast"], ["slow"])), [prices]).pipelines[0]
    assert [(s.start, s.stop, s.shape.types) for s in best.stages] == [(0, 1, ("slow",)), (1, 4, ("fast",))]


def test_early_stages_keep_less_where_memory_is_short() -> None:
    """Of two answers, the slower one that keeps less is for the stages that have more in flight."""

    def ask(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        return () if stop - start > 1 else (Answer(1.0, 0.0, 2), Answer(1.2, 0.0, 8))

    prices = Prices(8, ask, lambda *_: Answer(0.5, 0.0, UNLIMITED), lambda *_: 0.0)
    dealt = space(cluster_of(["fast"] * 4))
    best = solve("aaaa", dealt, [prices], [ONE_F_ONE_B]).pipelines[0]
    assert [(s.answer.micro, s.in_flight) for s in best.stages] == [(1.2, 4), (1.2, 3), (1.0, 2), (1.0, 1)]
    assert [s.answer.micro for s in solve("aaaa", dealt, [prices], [GPIPE]).pipelines[0].stages] == [1.2] * 4
    assert solve("aaaa", dealt, [prices], [ONE_F_ONE_B, GPIPE]).pipelines[0].discipline is ONE_F_ONE_B


def test_nothing_fits() -> None:
    found = solve("aa", space(cluster_of(["fast"] * 2)), [_simple(4, fits=0)])
    assert found.pipelines == () and found.bound == math.inf and found.gap == 0.0
    assert found.asked == 2  # both layers on both devices; a layer on a device, asked once


def test_devices_are_left_out_only_if_allowed() -> None:
    """A card that makes everything slower."""

    def ask(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        return (Answer((stop - start) * (10.0 if "slow" in shape.types else 1.0), 0.0, UNLIMITED),)

    prices = Prices(4, ask, lambda *run: ask(*run)[0], lambda *_: 0.0)
    cluster = cluster_of(["fast", "slow"], ["fast"])
    assert sorted(d for s in solve("aa", space(cluster), [prices]).pipelines[0].stages for d in s.devices) == [0, 1, 2]
    assert sorted(d for s in solve("aa", space(cluster, idle=True), [prices]).pipelines[0].stages for d in s.devices) == [0, 2]


def test_equal_layers_are_asked_once_and_few_pairs_are_asked() -> None:
    found = solve("a" * 16, space(cluster_of(*[["fast"] * 8] * 4)), [_simple(n, together=0.9) for n in (16, 64)], epsilon=0.01)
    assert found.pairs == 2 * 16 * 7
    assert found.asked < found.pairs / 4 and found.gap <= 0.01


def test_an_end_to_asking() -> None:
    told = []
    case = {"layers": "a" * 12, "space": space(cluster_of(["fast"] * 8)), "prices": [_simple(16, together=0.5)]}
    full = solve(**case, epsilon=0.0)
    guided = solve(**case, epsilon=0.0, prove=False)
    short = solve(**case, epsilon=0.0, most_asks=2, watch=lambda *args: told.append(args))
    assert short.asked <= guided.asked <= full.asked and short.asked < full.asked and len(told) == short.asked
    assert short.bound <= guided.bound <= full.bound == pytest.approx(full.pipelines[0].time)
    assert full.pipelines[0].time <= guided.pipelines[0].time <= short.pipelines[0].time


def test_several_pipelines_are_returned() -> None:
    found = solve("a" * 8, space(cluster_of(["fast"] * 8)), [_simple(n, together=0.9) for n in (8, 16)], [ONE_F_ONE_B, GPIPE], epsilon=0.0, keep=6)
    assert len(found.pipelines) == len({*found.pipelines}) == 6
    assert len({len(p.stages) for p in found.pipelines}) > 1


def test_what_fits() -> None:
    assert most_in_flight([100, 50], [20, 10], [10, 5], [10, 0]) == 7
    assert most_in_flight([100], [95], [1], [10]) == 0
    assert most_in_flight([100], [10], [0], [10]) == UNLIMITED
