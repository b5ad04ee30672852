"""Layers cut for given submeshes: as enumeration cuts them."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from math import inf

import pytest

from hapx.stages.costs import Answer, Prices
from hapx.stages.cutting import Cutter, busy
from hapx.stages.submeshes import Shape, shape_of
from support.clusters import slow_devices

CLUSTER = slow_devices(["fast", "fast"], ["slow", "slow"], ["medium"])
SHAPES = [shape_of(CLUSTER, group) for group in ((0, 1), (2, 3), (4,))]


def random_prices(chance: random.Random, layers: int, micro_batches: int) -> Prices:
    """A quick answer with little room and a slow one with much of it, for every run of layers."""
    work, held = ([chance.uniform(0.5, 2.0) for _ in range(layers)] for _ in range(2))
    factor = {shape: chance.uniform(0.8, 1.25) for shape in SHAPES}

    def ask(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        seconds = factor[shape] * sum(work[start:stop])
        room = int(8 / sum(held[start:stop]))
        return tuple(Answer(f * seconds, sum(held[start:stop]) / f, r) for f, r in ((1.0, room), (1.4, 2 * room)) if r)

    return Prices(micro_batches, ask, lambda *run: Answer(0.5 * sum(work[run[0] : run[1]]), 0.0, 100), lambda *_: 0.0)


@pytest.mark.parametrize("seed", range(40))
def test_the_busiest_stage_is_as_quick_as_it_can_be(seed: int) -> None:
    chance = random.Random(seed)
    layers, n = chance.randint(3, 9), chance.randint(1, 6)
    prices = random_prices(chance, layers, n)
    shapes = [chance.choice(SHAPES) for _ in range(chance.randint(1, 3))]
    kept = [chance.randint(1, 4) for _ in shapes]

    def quickest(start: int, stop: int, stage: int) -> float:
        fits = [busy(a, n) for a in prices.ask(start, stop, shapes[stage]) if a.most_in_flight >= kept[stage]]
        return min(fits, default=inf)

    every = [(0, *cuts, layers) for cuts in combinations(range(1, layers), len(shapes) - 1)]
    best = min(max(quickest(a, b, i) for i, (a, b) in enumerate(pairwise(ends))) for ends in every)
    cutter = Cutter(layers, prices)
    found = cutter.cut(shapes, kept)
    if best == inf:
        assert found is None
        return
    assert found is not None
    assert [start for start, _, _ in found] + [layers] == [0] + [stop for _, stop, _ in found]
    assert all(a.most_in_flight >= k for (_, _, a), k in zip(found, kept, strict=True))
    assert max(busy(a, n) for _, _, a in found) == pytest.approx(best)
    assert cutter.cut(shapes, kept, best * 0.999) is None
    assert cutter.cut(shapes, kept, best * 1.001) is not None


def test_too_few_layers() -> None:
    assert Cutter(2, random_prices(random.Random(0), 2, 1)).cut(SHAPES, [1, 1, 1]) is None
