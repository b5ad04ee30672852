"""Neighbours of a pipeline: what is near it, and that going to the best of them again and again leads to good pipelines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from hapx.cluster.spec import ClusterSpec
from hapx.stages.costs import ONE_F_ONE_B, Answer, Pipeline, Prices
from hapx.stages.exhaustive import sequences
from hapx.stages.neighbours import arrangements, at_least, neighbours
from hapx.stages.plain import pipeline_by_hand
from hapx.stages.simulated import simulated
from hapx.stages.submeshes import Shape
from support.clusters import slow_devices

MACHINES = slow_devices(["fast", "fast"], ["slow", "slow"], ["slow", "slow"])
ONE_MACHINE = slow_devices(["fast", "fast", "slow", "slow"])
LAYERS = 7


def random_prices(chance: random.Random, cluster: ClusterSpec, micro_batches: int) -> Prices:
    """By work and speed, worse on more devices; crossing is up to as much as a stage."""
    work = [chance.uniform(0.5, 2.0) * 1e6 for _ in range(LAYERS)]
    crossing = [chance.uniform(0.0, 0.5) for _ in range(LAYERS + 1)]
    loss = chance.uniform(0.0, 0.1)

    def ask(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        seconds = sum(work[start:stop]) / sum(cluster.device_types[t].speed("fp32") for t in shape.types)
        return (Answer(seconds * (1 + loss * shape.num_devices), loss * shape.num_devices, 100),)

    return Prices(micro_batches, ask, lambda *run: ask(*run)[0], lambda b, *_: crossing[b])


def every(cluster: ClusterSpec, prices: Prices) -> Iterator[Pipeline]:
    for _, _, devices in sequences(cluster, LAYERS, idle=False):
        for cuts in combinations(range(1, LAYERS), len(devices) - 1):
            made = pipeline_by_hand((0, *cuts, LAYERS), devices, cluster, prices, ONE_F_ONE_B)
            assert made is not None
            yield made


def test_arrangements_of_machines() -> None:
    """Each has every device once; a machine moved, two exchanged, stages in another order, apart and together."""
    found = list(arrangements(((0, 1), (2, 3, 4, 5)), MACHINES))
    assert found[0] == ((0, 1), (2, 3, 4, 5))
    assert sorted(found) == sorted([
        ((0, 1), (2, 3, 4, 5)),
        ((0, 1, 2, 3), (4, 5)), ((2, 3), (0, 1, 4, 5)), ((2, 3, 4, 5), (0, 1)),
        ((0, 1), (2, 3), (4, 5)), ((0,), (1,), (2, 3, 4, 5)),
    ])  # fmt: skip
    three = list(arrangements(((2, 3), (0, 1), (4, 5)), MACHINES))
    assert ((2, 3), (0, 1, 4, 5)) in three  # together
    assert ((0, 1), (2, 3), (4, 5)) in three
    assert all(sorted(sum(groups, ())) == list(range(6)) for groups in (*found, *three))


def test_arrangements_of_one_machine_move_devices() -> None:
    found = list(arrangements(((0, 1, 2), (3,)), ONE_MACHINE))
    assert ((0, 1), (2, 3)) in found
    assert ((1, 2), (0, 3)) in found
    assert ((0, 1), (2,), (3,)) in found
    assert ((2,), (0, 1), (3,)) in found


def test_a_part_of_a_machine_stays_where_it_is() -> None:
    """But for parts of one machine, which are joined."""
    found = list(arrangements(((0,), (1,), (2, 3), (4, 5)), MACHINES))
    assert ((0, 1), (2, 3), (4, 5)) in found
    assert all(groups[:2] == ((0,), (1,)) for groups in found if groups[0] != (0, 1))
    assert ((0,), (1,), (2, 3, 4, 5)) in found


def test_a_machine_is_halved() -> None:
    """At a power of two; both ways round where the halves are unlike."""
    cluster = slow_devices(["fast", "fast", "slow"], ["slow", "slow"])
    found = list(arrangements(((0, 1, 2), (3, 4)), cluster))
    assert {((0, 1), (2,), (3, 4)), ((2,), (0, 1), (3, 4)), ((0, 1, 2), (3,), (4,))} <= set(found)
    assert ((0,), (1,), (2,), (3, 4)) in list(arrangements(((0, 1), (2,), (3, 4)), cluster))


def test_a_layer_moved_over_a_boundary_is_a_neighbour() -> None:
    prices = random_prices(random.Random(0), MACHINES, 4)
    given = pipeline_by_hand((0, 3, LAYERS), ((0, 1), (2, 3, 4, 5)), MACHINES, prices, ONE_F_ONE_B)
    assert given is not None
    found = [(tuple(s.devices for s in p.stages), tuple(s.stop for s in p.stages)) for p in neighbours(given, LAYERS, MACHINES, prices)]
    assert {(((0, 1), (2, 3, 4, 5)), (stop, LAYERS)) for stop in (2, 4)} <= set(found)
    assert len(found) == len(set(found))


@pytest.mark.parametrize("seed", range(10))
def test_going_from_neighbour_to_neighbour_ends_near_the_best(seed: int) -> None:
    chance = random.Random(seed)
    cluster = chance.choice([MACHINES, ONE_MACHINE])
    prices = random_prices(chance, cluster, chance.randint(2, 8))
    half = cluster.num_devices // 2
    here = pipeline_by_hand((0, 3, LAYERS), (tuple(range(half)), tuple(range(half, cluster.num_devices))), cluster, prices, ONE_F_ONE_B)
    assert here is not None
    while True:
        near = min(neighbours(here, LAYERS, cluster, prices), key=lambda p: simulated(p, cluster))
        if simulated(near, cluster) >= simulated(here, cluster):
            break
        here = near
    for p in [here, *neighbours(here, LAYERS, cluster, prices)]:
        assert [s.start for s in p.stages] + [LAYERS] == [0] + [s.stop for s in p.stages]
        assert sorted(d for s in p.stages for d in s.devices) == list(range(cluster.num_devices))
        assert at_least(p) <= simulated(p, cluster) * (1 + 1e-9)
    best = min(simulated(p, cluster) for p in every(cluster, prices) if len(p.stages) > 1)
    assert simulated(here, cluster) <= 1.12 * best
