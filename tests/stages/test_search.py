"""One search on a book in which everything was asked: it finds the best pipeline by itself, without the repetitions of `solve`."""

from __future__ import annotations

import math

import pytest

from hapx.cluster.spec import ClusterSpec
from hapx.stages import exhaustive
from hapx.stages.book import Book
from hapx.stages.costs import GPIPE, ONE_F_ONE_B, UNLIMITED, Answer, Discipline, Prices
from hapx.stages.frontier import POSITIONS, Frontier
from hapx.stages.search import Choice, Searcher
from hapx.stages.space import Space, space
from hapx.stages.submeshes import Shape
from support.stage_prices import cluster_of, random_cluster, random_worlds


def _full(layers: str | tuple[str, ...], dealt: Space, prices: Prices) -> Book:
    book = Book(layers, dealt, prices)
    for shape in range(len(dealt.shapes)):
        for start, stop in book.alike:
            book.ask(shape, start, stop)
    return book


def _best(book: Book, discipline: Discipline, limit: float = math.inf, positions: int = POSITIONS) -> tuple[float, list[Choice]]:
    found = Searcher(Frontier(book, discipline, *book.arrays(False), limit, positions)).cheapest()
    assert found is not None
    return (found[0][0], found[0][1].choices()) if found else (math.inf, [])


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_a_search_is_equal_to_enumeration(first: int) -> None:
    """Whatever the bound knows of positions, and with any limit that is above the optimum."""
    for seed in range(first, first + 20):
        cluster, idle = random_cluster(seed), seed % 4 == 0
        layers, worlds, disciplines = random_worlds(seed)
        for world in worlds:
            book = _full(layers, space(cluster, idle), world.prices())
            for discipline in disciplines:
                best = exhaustive.cheapest(len(layers), cluster, world.prices(), discipline, idle)
                time = best.time if best is not None else math.inf
                for limit in (math.inf, time * 1.5, time * (1 + 1e-6)):
                    assert math.isclose(_best(book, discipline, limit)[0], time, rel_tol=1e-9), (seed, discipline, limit)
                assert math.isclose(_best(book, discipline, positions=1)[0], time, rel_tol=1e-9), seed
                assert _best(book, discipline, time * (1 - 1e-6))[0] == math.inf or best is None


def _table(seconds: dict[tuple[int, int, int], Answer]) -> Prices:
    """Answers by (start, stop, devices); everything else does not fit."""

    def ask(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        return tuple(a for a in [seconds.get((start, stop, shape.num_devices))] if a is not None)

    return Prices(4, ask, lambda *_: Answer(0.0, 0.0, UNLIMITED), lambda *_: 0.0)


FOUR: ClusterSpec = cluster_of(["fast"] * 4)


def test_a_dearer_suffix_with_fewer_stages_is_kept() -> None:
    """The first stage has room for three micro-batches only: three stages, although four would be quicker from the second stage on."""
    one, two = Answer(1.0, 0.0, UNLIMITED), Answer(1.3, 0.0, UNLIMITED)
    first, quick = Answer(1.0, 0.0, 3), Answer(0.6, 0.0, 9)
    prices = _table({(0, 1, 1): first, (1, 2, 1): one, (2, 3, 1): quick, (3, 4, 1): quick, (2, 4, 2): two})
    for positions in (1, 8):
        book = _full("abcd", space(FOUR), prices)
        assert [c.start for c in _best(book, ONE_F_ONE_B, positions=positions)[1]] == [0, 1, 2]
        assert _best(book, GPIPE)[1] == []


def test_a_dearer_suffix_that_is_better_to_reach_is_kept() -> None:
    """The second stage is quicker on one device, which the first one reaches slowly."""
    seconds = {(0, 1, 1): 1.0, (1, 2, 1): 1.0, (2, 3, 2): 0.9, (1, 2, 2): 1.0, (2, 3, 1): 1.0}
    prices = _table({run: Answer(t, 0.0, UNLIMITED) for run, t in seconds.items()})
    prices = Prices(4, prices.ask, prices.bound, lambda b, front, back, link: 1.0 if b == 1 and back.num_devices == 1 else 0.0)
    dealt = space(FOUR)
    choices = _best(_full("abc", dealt, prices), ONE_F_ONE_B)[1]
    assert [dealt.shapes[c.move.shape].num_devices for c in choices] == [1, 2, 1]


def test_bounds_that_are_none_are_refused() -> None:
    """A bound that an answer beats would make a proof of nothing."""
    prices = _table({(0, 1, 4): Answer(1.0, 0.0, 2)})
    for bound in (Answer(1.1, 0.0, 2), Answer(1.0, 0.1, 2), Answer(1.0, 0.0, 1)):
        book = Book("a", space(FOUR), Prices(4, prices.ask, lambda *_, b=bound: b, prices.crossing))
        with pytest.raises(AssertionError, match="better than its bound"):
            _full_of(book)
    wrong = Prices(4, _two_stages, lambda *_: Answer(0.0, 0.0, UNLIMITED), lambda *_: 0.5, lambda *_: 0.6)
    with pytest.raises(AssertionError, match="faster than possible"):
        _best(_full("ab", space(FOUR), wrong), ONE_F_ONE_B)


def _two_stages(start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
    return (Answer(1.0, 0.0, UNLIMITED),) if stop - start == 1 else ()


def _full_of(book: Book) -> None:
    for shape in range(len(book.space.shapes)):
        book.ask(shape, 0, 1)
