"""Steps that read several values: what these cost together is in the bound of the search."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hapx.restriction import Restriction
from hapx.synth import joins, relaxation
from hapx.synth.astar import Statistics, search
from hapx.synth.domain import Synthesis
from hapx.synth.problem import build
from hapx.synth.search import program_key, solve
from support import toy
from support.completions import KINDS, Unbounded, walk
from support.problems import problem_of

TABLES = 8


def branching(seed: int, branches: int) -> Synthesis:
    """Of a graph whose node after so many ones reads all of them; or where nodes read values as it happens."""
    mesh, kinds = (toy.FLAT, KINDS[seed % 3 + 1]) if seed % 2 else (toy.SQUARE, ((0,), (1,)))
    theory = toy.random_theory(seed, mesh, nodes=7, triples=3, states=2, parameters=2, branches=branches)
    problem = build(theory, toy.ToyCosts(mesh, seed, kinds), Restriction(forms=frozenset({"padded"})))
    return Synthesis(problem, toy.shares(theory, len(kinds), seed), None)


def test_bound_never_exceeds_the_cheapest_completion() -> None:
    checked = wide = between = 0
    for seed in range(300, 340):
        domain = branching(seed, (0, 4, 5, 0)[seed % 4])
        for number in range(3):
            for state in walk(domain, Random(number)):
                best = search(Unbounded(domain, state), Statistics())
                assert best is not None
                assert state.estimate <= best.estimate * (1 + 1e-9), (seed, number, state.level)
                ahead = [join for join, made in domain.bound.outline.joined[state.level] if made]
                checked, wide = checked + bool(ahead), wide + any(len(j.parts) >= joins.MANY for j in ahead)
                between += any(j.waiting(state.level) is not None for j in ahead)
    print(f"{checked} states before a join, {wide} of four values or more, {between} with a value that is read in between")
    assert wide > 100
    assert between > 10


def test_bounds_of_choices_never_exceed_the_cheapest_completion() -> None:
    checked = 0
    for seed in range(300, 312):
        domain = branching(seed, 4)
        for state in walk(domain, Random(seed)):
            estimates = domain.bound.choices(state.level, state.place, state.cost, state.forward, state.backward)
            for following in domain.successors(state, float("inf")):
                best = search(Unbounded(domain, following), Statistics())
                assert best is not None and following.move is not None
                assert estimates[following.move.choice.index] <= best.estimate * (1 + 1e-9), (seed, state.level)
                checked += bool(domain.bound.outline.joined[state.level])
    assert checked > 100


@pytest.mark.parametrize("coming", [False, True])
def test_joins_sharpen_the_bound(monkeypatch: pytest.MonkeyPatch, coming: bool) -> None:
    """coming: with what a parameter's second use adds, which is counted from a higher table on then, and lifts that less."""
    if not coming:
        monkeypatch.setattr(relaxation.Relaxation, "coming", lambda *_: None)
    starts = []
    for many, near in ((99, -1), (joins.MANY, joins.NEAR)):
        monkeypatch.setattr(joins, "MANY", many)
        monkeypatch.setattr(joins, "NEAR", near)
        found = [branching(seed, 4).start() for seed in range(300, 360)]
        starts.append([state.estimate for state in found if state is not None])
    assert all(a <= b * (1.02 if coming else 1 + 1e-12) for a, b in zip(*starts, strict=True))
    assert sum(a < 0.99 * b for a, b in zip(*starts, strict=True)) >= 20


class Recommender(nn.Module):
    """A DLRM: embeddings and a dense part, stacked; products of all pairs; a head."""

    def __init__(self, tables: int, width: int):
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(100_000 * (1 + i % 4), width) for i in range(tables))
        self.head = nn.Linear(width + (tables + 1) ** 2, 1)

    def forward(self, dense: Tensor, sparse: Tensor, clicks: Tensor) -> Tensor:
        x = self.dense(dense)
        stacked = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        return functional.binary_cross_entropy_with_logits(self.head(torch.cat([x, pairs], 1)).squeeze(1), clicks)


class Heads(nn.Module):
    """Layers that concatenate what four products of their input give."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(width, width // 4) for _ in range(4)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for heads in self.layers:
            x = x + torch.cat([torch.relu(head(x)) for head in heads], -1)
        return x.sum()


@pytest.mark.parametrize(("cluster", "view"), [("v100x2_p100x6", "8x8"), ("a100x2_p100x2", "2x2"), ("a100x2_p100x2", "flat")])
def test_recommenders_are_solved_to_the_end(cluster: str, view: str) -> None:
    """What tables and their stack cost one by one says little: before joins were in the bound, searches ended with their budget, and what they had
    found took up to three times as long as the best."""
    with torch.device("meta"):
        model = Recommender(TABLES, 32)
        inputs = torch.zeros(4096, 13), torch.zeros(4096, TABLES, dtype=torch.int64), torch.zeros(4096)
    problem, costs = problem_of(model, inputs, cluster, view)
    best = solve(problem, dict.fromkeys(problem.cuts, costs.speeds), None, program_key(problem.theory))
    print(f"{cluster} {view}: {best.cost * 1e3:.3f} ms, {best.statistics.expansions} expansions")
    assert best.statistics.gap < 1e-6
    assert best.statistics.unproven == 0


def test_joins_in_equal_layers_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the last layer, and what is added to them, are those of the others: lower by little at most than if each were made."""
    with torch.device("meta"):
        model, x = Heads(8, 256), torch.zeros(64, 256)
    problem, costs = problem_of(model, (x,), "v100x2_p100x6", "flat")
    shares = dict.fromkeys(problem.cuts, costs.speeds)
    made: list[int] = []
    own = relaxation.Relaxation._join

    def counted(tables: relaxation.Relaxation, level: int, *rest: object) -> None:
        made.append(level)
        own(tables, level, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(relaxation.Relaxation, "_join", counted)
    short = Synthesis(problem, shares, None).bound.relaxation
    few = len(made)
    monkeypatch.setattr(joins.Join, "repeats", lambda *_: False)
    problem.outline = problem.sheet = None
    full = Synthesis(problem, shares, None).bound.relaxation
    print(f"{few} steps before joins tabulated instead of {len(made) - few}")
    assert few < (len(made) - few) / 2
    assert short.ahead.keys() == full.ahead.keys()
    assert len(short.ahead) == 8
    for level, ahead in full.ahead.items():
        other = short.ahead[level].tables
        assert ahead.tables.keys() == other.keys()
        for at, table in ahead.tables.items():
            assert (other[at] <= table * (1 + 1e-9)).all()
            assert (other[at] >= table * 0.99).all()
