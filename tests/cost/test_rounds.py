"""Repeated layers that the walk of the peak leaves out: what it finds is what it finds of the whole program, and it leaves out nothing that is not
repeated."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest

import hapx.cost.liveness as liveness
import hapx.cost.rounds as rounds
from hapx.cost.liveness import Peak
from hapx.cost.model import CostModel
from hapx.cost.rounds import Folded, folded, whole
from hapx.ir import Graph, Region
from hapx.lower import Candidate
from hapx.planner import Counters, Setting, key_of, plan_spmd
from hapx.restriction import restriction
from support.clusters import FOUR, TWO_MACHINES
from support.theories import deep

STRATEGIES = ("auto", "dp-even", "zero", "tensor-parallel")


def candidates(graph: Graph, cluster: object, strategy: str) -> list[Candidate]:
    return plan_spmd(Setting(graph, key_of(graph), cluster, restriction(strategy), "fp32", "adamw"), Counters())  # type: ignore[arg-type]


def walked(candidate: Candidate, short: Folded) -> Peak | None:
    graph = candidate.theory.graph
    return liveness._Walk(candidate.program, graph, candidate.exact, candidate.storage_of, short).run()


def shortened(candidate: Candidate) -> Folded | None:
    return folded(candidate.program, candidate.exact)


def equal(one: Peak | None, other: Peak | None) -> bool:
    assert one is not None
    if other is None:
        return False
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("stored", "total", "running", "left", "kept")]
    return all(np.array_equal(a, b) for a, b in pairs) and one.moments == other.moments


@pytest.mark.parametrize(
    ("kind", "strategy", "cluster"),
    [
        pytest.param(kind, strategy, FOUR, marks=[pytest.mark.slow] if strategy == "auto" else [])
        for kind in ("plain", "one weight", "a mask for all")
        for strategy in STRATEGIES
    ]
    + [("plain", "zero", TWO_MACHINES)],
)
def test_peaks_are_those_of_the_whole_program(kind: str, strategy: str, cluster: object) -> None:
    found = candidates(deep(kind=kind), cluster, strategy)
    shorter = [(c, short) for c in found if (short := shortened(c)) is not None]
    assert shorter
    for candidate, short in shorter:
        assert short.left_out >= rounds.FEWEST
        assert equal(walked(candidate, whole(candidate.program)), walked(candidate, short))


@pytest.mark.parametrize("layers", [9, 10, 40])
def test_of_any_depth(layers: int) -> None:
    for candidate in candidates(deep(layers), FOUR, "zero"):
        short = shortened(candidate)
        assert short is not None
        assert len(short.instructions) <= 7 * len(candidate.program.instructions) / layers
        assert equal(walked(candidate, whole(candidate.program)), walked(candidate, short))


def test_in_evaluation() -> None:
    for candidate in candidates(replace(deep(), mode="eval"), FOUR, "dp-even"):
        short = shortened(candidate)
        assert short is not None
        assert equal(walked(candidate, whole(candidate.program)), walked(candidate, short))


REGIONS = {
    "layers": [(3 * i, 3 * i + 3) for i in range(18)],
    "all layers but the last": [(3 * i, 3 * i + 3) for i in range(17)],
    "every other layer": [(3 * i, 3 * i + 3) for i in range(0, 18, 2)],
    "parts of layers": [(3 * i, 3 * i + 2) for i in range(18)],
    "across layers": [(3 * i + 1, 3 * i + 4) for i in range(17)],
    "the first half": [(3 * i, 3 * i + 3) for i in range(9)],
}


def again(name: str) -> Graph:
    """The deep graph with checkpoint regions."""
    return replace(deep(), regions=tuple(Region("checkpoint", start, stop) for start, stop in REGIONS[name]))


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("strategy", ["zero", "dp-even"])
def test_layers_that_are_computed_again(name: str, strategy: str) -> None:
    for candidate in candidates(again(name), FOUR, strategy):
        program, short = candidate.program, shortened(candidate)
        assert short is not None
        regions = rounds.computed_again(program, candidate.theory.graph)
        borders = {short.instructions[start] for start, stop in short.spans if start < stop}
        assert len(regions) == len(REGIONS[name])
        assert not any(start < border < stop for border in borders for start, stop in regions.items())
        assert equal(walked(candidate, whole(program)), walked(candidate, short))


def test_a_program_is_shortened_for_what_is_computed_again() -> None:
    candidate = candidates(again("layers"), FOUR, "zero")[0]
    plain = replace(candidate, theory=replace(candidate.theory, graph=deep()))
    costs = CostModel(plain.theory, FOUR, "fp32", "adamw", "train")
    before, now = rounds.short(candidate.program, candidate.costs), rounds.short(candidate.program, costs)
    assert before is not now
    assert now is rounds.short(candidate.program, costs)
    assert before is rounds.short(candidate.program, candidate.costs)


@pytest.mark.parametrize("kind", ["all are read", "some are read", "a mask for each"])
def test_layers_that_are_not_alike_are_walked(kind: str) -> None:
    assert all(shortened(c) is None for c in candidates(deep(kind=kind), FOUR, "dp-even"))


def test_short_runs_are_walked() -> None:
    assert all(shortened(c) is None for c in candidates(deep(5), FOUR, "dp-even"))


@pytest.mark.parametrize("kind", ["all are read", "some are read"])
def test_what_is_asked_of_runs_is_needed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out all the same, their peaks are others', or the rounds that are walked differ."""
    monkeypatch.setattr(rounds._Run, "_closed", lambda run: True)
    for candidate in candidates(deep(kind=kind), FOUR, "dp-even"):
        short = shortened(candidate)
        assert short is not None
        with pytest.MonkeyPatch.context() as own:
            own.setattr(rounds._Run, "_closed", lambda run: False)
            assert not equal(walked(candidate, whole(candidate.program)), walked(candidate, short))


def test_regions_inside_of_regions_are_part_of_them() -> None:
    assert liveness._between({}, 0, 4) == ((0, 4),)
    assert liveness._between({2: 9, 3: 5, 9: 11}, 0, 14) == ((0, 2), (2, 9), (9, 11), (11, 14))
    assert liveness._between({0: 3}, 0, 3) == ((0, 3),)
    assert liveness._between({2: 9, 9: 11, 14: 16}, 9, 14) == ((9, 11), (11, 14))
    assert liveness._between({2: 9}, 9, 9) == ()


def test_what_is_found_out_about_a_program_is_not_sent_along() -> None:
    candidate = candidates(deep(), FOUR, "dp-even")[0]
    program = candidate.program
    assert program.numbered is program.numbered
    assert rounds.short(program, candidate.costs) is rounds.short(program, candidate.costs) is not None
    copy = pickle.loads(pickle.dumps(program))
    assert copy == program
    assert set(vars(copy)) == {f.name for f in fields(program)}
    assert copy.numbered == program.numbered


def test_a_heap_does_a_stretch_again() -> None:
    from hapx.cost.heap import Heap, Place, Repeat, Stretch, moved

    def size(what: str, number: int) -> np.ndarray:
        return np.array([100.0 * number])

    heap = Heap(np.array([10.0]))
    heap.note("first")
    start = heap.place
    heap.new(np.array([1.0]))
    heap.note("second", np.array([0.5]))
    heap.note_unknown("third", "bucket")
    repeats = [Repeat(Stretch(start, heap.place), (2, 0))]
    end = heap.place
    heap.new(np.array([3.0]))
    heap.note("last")
    levels = heap.levels(repeats, size)
    assert levels.after[:, 0].tolist() == [10.0, 11.0, 12.0, 15.0]
    assert levels.noted[:, 0].tolist() == [10.0, 11.5, 211.0, 12.5, 12.0, 15.0]
    assert [heap.moments[k] for k in levels.notes] == ["first", "second", "third", "second", "third", "last"]
    assert levels.rounds.tolist() == [0, 2, 2, 0, 0, 0]
    assert moved(end, repeats) == Place(3, 5)
    assert moved(start, repeats) == start
