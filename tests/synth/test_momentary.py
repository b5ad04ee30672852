"""The fastest program whose peak fits: what a beam takes peaks to be, and whether it misses programs that an exhaustive walk finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planning_cases import case as random_case
from benchmarks.random_graphs import random_graph
from hapx.cluster.spec import ClusterSpec
from hapx.cost.remat import with_blocks
from hapx.graph.capture import capture
from hapx.ir import Graph
from hapx.synth.astar import Statistics
from hapx.synth.domain import State
from hapx.synth.momentary import Momentary
from hapx.synth.writer import Solution, solution
from hapx.theory.discover import discover
from support.at_lengths import at_lengths
from support.clusters import FOUR
from support.models import GPT

EVERYTHING = 5_000  # partial programs


class Case:
    """A problem at lengths in proportion to speed, and the beam. bytes_: of every device's memory."""

    def __init__(self, graph: Graph, bytes_: float, cluster: ClusterSpec):
        types = {name: replace(kind, memory=int(bytes_)) for name, kind in cluster.device_types.items()}
        at = at_lengths(graph, replace(cluster, device_types=types), "speed")
        self.problem, self.key, self.part = at.problem, at.fitting.key, at.part
        self.domain = Momentary(at.problem, at.exact, at.lengths)

    def fastest(self, part: float = 1.0, price: float = 0.0) -> list[Solution]:
        return list(self.domain.fastest(self.key, Statistics(), part, price=price))


def taken(domain: Momentary, last: State) -> float:
    """The part of what may be used that a complete program takes, by what the beam knows."""
    n = domain.kinds
    k, g, *_, f, b = (np.array(last.memory[i * n : (i + 1) * n]) for i in range(6))
    update = k + (1.0 + np.array(domain.update)) * g
    return float((np.maximum(np.maximum(f, b), update) / np.array(domain.capacity)).max())


def test_peaks_of_partial_programs_become_those_of_programs() -> None:
    model = GPT(100, 32, 4, 2, 16)
    own = Case(discover(capture(model, model.example(8))), 10 * 2**20, FOUR)
    roomy = min(own.part(found) for found in own.fastest(1.0))
    for part in (1.2 * roomy, roomy, 0.8 * roomy, 0.6 * roomy):
        for found in own.fastest(part)[:3]:
            state = next(s for s in own.domain.complete if solution(own.problem, s, 0.0, own.key, Statistics()).choices == found.choices)
            assert taken(own.domain, state) <= part
            assert taken(own.domain, state) == pytest.approx(own.part(found), rel=0.08)


def everything(own: Case) -> list[tuple[float, float]]:
    """(seconds, part of what may be used) of all programs: nothing is left out for its memory, and nothing dominates."""
    domain, found, waiting = own.domain, [], [own.domain.start()]
    domain.most, domain.below, made = (float("inf"),) * domain.kinds, float("inf"), 0
    while waiting:
        state = waiting.pop()
        if state.level == domain.depth:
            found.append((state.estimate, own.part(solution(own.problem, state, state.estimate, own.key, Statistics()))))
            continue
        following = domain.level_after([state])
        waiting += [following.state(number) for number in range(len(following))]
        made += 1
        assert made < EVERYTHING, "another seed"
    return found


@pytest.mark.parametrize("seed", [5, 13])
def test_nothing_that_fits_is_faster(seed: int) -> None:
    """At several limits, the first of its programs that fits beside the fastest of all that do."""
    graph = random_graph(seed, operators=3, batch=48, widths=(8, 16))
    own = Case(graph, 64 * sum(r.bytes for r in graph.refs.values()), random_case(seed).setting.cluster)
    programs = sorted(everything(own))
    least, fast = min(part for _, part in programs), programs[0][1]
    assert fast > 1.05 * least, "memory makes a difference"
    for part in np.linspace(least, fast, 6)[1:-1]:
        best = next(seconds for seconds, taken_ in programs if taken_ <= part)
        for price in (0.0, 1.0, 3.0):  # what beams follow, not what programs cost
            met = [f.cost for times in (1.0, 1.2, 1.6) for f in own.fastest(times * part, price) if own.part(f) <= part]
            assert met, "something fits"
            assert best * (1 - 1e-9) <= min(met) <= best * (1 + 1e-9)


@pytest.mark.parametrize("again", [False, True])
def test_all_at_once_is_as_one_by_one(again: bool) -> None:
    """Inside of checkpoint regions what follows has the memory that the beam for the least peak knows of it, too."""
    model = GPT(100, 32, 4, 3, 16)
    graph = capture(model, model.example(8))
    own = Case(discover(with_blocks(graph) if again else graph), 10 * 2**20, FOUR)
    domain = own.domain
    list(own.fastest(0.8))
    assert domain.complete
    chains = [path_to(last) for last in domain.complete[:6]]
    inside = 0
    for states in zip(*chains, strict=True):
        if states[0].level == domain.depth:
            break
        together, numbers = domain.level_after(states), iter(range(10**6))
        for state in states:
            alone = domain.level_after([state])
            for i in range(len(alone)):
                one, other = alone.state(i), together.state(next(numbers))
                assert (one.place, one.move, one.parent) == (other.place, other.move, other.parent)
                assert (one.cost, one.forward, one.backward, one.memory) == (other.cost, other.forward, other.backward, other.memory)
                assert (one.estimate, one.spent) == (other.estimate, other.spent)
                if domain.region[state.level] >= 0:
                    assert one.move is not None
                    assert one.memory == pytest.approx(domain._grown(state, one.move.effect.memory, one.place))
                    inside += 1
        assert next(numbers) == len(together)
    assert (inside > 100) is again


def path_to(last: State) -> list[State]:
    path, state = [last], last.parent
    while state is not None:
        path.append(state)
        state = state.parent
    return path[::-1]
