"""The algebra of effects: composition is what applying one after the other does; `excess` bounds every context."""

from __future__ import annotations

import random

import pytest

from hapx.synth.effect import Effect, Effects, compose, excess


def random_effect(rng: random.Random) -> Effect:
    def vector():
        return tuple(rng.choice((0.0, rng.random())) for _ in range(3))

    return Effect(rng.random(), rng.choice((None, vector())), vector(), rng.choice((None, vector())), vector(), vector())


def apply(e: Effect, cost, forward, backward):
    cost += e.const
    for_, back = [], []
    for pre, post, pending, out in ((e.forward_pre, e.forward, forward, for_), (e.backward_pre, e.backward, backward, back)):
        if pre is None:
            out.extend(p + q for p, q in zip(pending, post, strict=True))
        else:
            cost += max(p + q for p, q in zip(pending, pre, strict=True))
            out.extend(post)
    return cost, tuple(for_), tuple(back)


@pytest.mark.parametrize("seed", range(30))
def test_compose_is_one_after_the_other(seed):
    rng = random.Random(seed)
    a, b = random_effect(rng), random_effect(rng)
    start = (1.0, (0.3, 0.0, 2.0), (0.0, 1.0, 0.5))
    both = apply(compose(a, b), *start)
    apart = apply(b, *apply(a, *start))
    assert both[0] == pytest.approx(apart[0])
    assert both[1] == pytest.approx(apart[1]) and both[2] == pytest.approx(apart[2])


def test_arrays_of_effects_are_effects_one_by_one():
    rng = random.Random(0)
    effects = [random_effect(rng) for _ in range(40)]
    start = (1.0, (0.3, 0.0, 2.0), (0.0, 1.0, 0.5))
    for effect, *found in zip(effects, *Effects(effects).after(*start), strict=True):
        cost, forward, backward = apply(effect, *start)
        assert found[0] == pytest.approx(cost)
        assert tuple(found[1]) == pytest.approx(forward) and tuple(found[2]) == pytest.approx(backward)


@pytest.mark.parametrize("seed", range(60))
def test_excess_bounds_every_context(seed):
    rng = random.Random(seed)
    a, b = random_effect(rng), random_effect(rng)
    limit = excess(a, b)
    for _ in range(50):
        start = (0.0, *(tuple(rng.uniform(0, 3) for _ in range(3)) for _ in range(2)))
        pre = [tuple(rng.uniform(0, 3) for _ in range(3)) for _ in range(2)]
        then = random_effect(rng)._replace(forward_pre=pre[0], backward_pre=pre[1])
        more = apply(then, *apply(a, *start))[0] - apply(then, *apply(b, *start))[0]
        assert more <= limit + 1e-12
