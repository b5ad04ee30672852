"""Prices of many communications at once, against the price of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest

from hapx.cost.edges import Bundle, Moved
from hapx.cost.model import CostModel, StepCost
from hapx.ir import Kind, TensorRef
from hapx.layout import compatible
from hapx.plan import Axis, Mesh
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Cut, Placement, Sharded, State
from hapx.theory.conversion import direct_paths, may_change
from support.clusters import TWO_MACHINES
from support.theories import described, mlp
from support.toy import edges_of

FLAT = Mesh("flat", (Axis("devices", 4, "devices"),), (0, 1, 2, 3), 0)
SQUARE = Mesh("2x2", (Axis("machines", 2, "machines"), Axis("devices", 2, "devices")), (0, 1, 2, 3), 0)


def every_placement(mesh: Mesh) -> list[Placement]:
    per_axis: list[list[State]] = []
    for axis in range(len(mesh.axes)):
        cut = [Sharded(dim, 1, 1, Cut(mesh.row(axis), units)) for dim, units in ((0, 12), (1, 7))]
        per_axis.append([REPLICATED, INVARIANT, PARTIAL, *cut])
    return [Placement(states) for states in product(*per_axis) if compatible(states)]


@pytest.mark.parametrize("mesh", [FLAT, SQUARE], ids=["flat", "2x2"])
@pytest.mark.parametrize("kind", [Kind.VALUE, Kind.PARAMETER])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("forms", [("padded", "grouped", "point_to_point"), ("grouped",)], ids=["all", "grouped"])
def test_the_price_of_an_edge_is_that_of_its_cheapest_form(mesh: Mesh, kind: Kind, mode: str, forms: tuple[str, ...]) -> None:
    costs = CostModel(described(mlp(), mesh), TWO_MACHINES, "fp32", "adamw", mode)  # type: ignore[arg-type]
    ref = TensorRef("t", (12, 7), "float32", kind, True)
    free = (False, True) if kind is Kind.PARAMETER and mode == "train" else (False,)
    every, bundles = every_placement(mesh), []
    for axis in range(len(mesh.axes)):
        pairs = [(i, j) for (i, p), (j, q) in permutations(enumerate(every), 2) if differ(p, q) == [axis] and may_change(ref, p, q, axis)]
        sources, targets = np.array(pairs).T
        bundles.append(Bundle(ref, axis, every, sources, targets, np.full(len(pairs), False in free), np.full(len(pairs), True in free)))
    edges = [edge for bundle in bundles for edge, _ in edges_of(bundle)]
    cuts = {s.cut for e in edges for p in (e.before, e.after) for s in p.states if isinstance(s, Sharded) and s.cut.row.kind != "even"}
    shares = {cut: np.array([0.3 + 0.01 * i, 0.2 - 0.01 * i]) for i, cut in enumerate(sorted(cuts, key=str))}
    ways = {"forward": np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]), "backward": np.array([[1.0, 0.0], [1.0, 0.0], [0.4, 0.6]])}
    prices = costs.edge_prices(bundles, frozenset(forms))
    priced = prices.at(shares)
    weighted = priced.weighted(ways["forward"], ways["backward"])
    assert len(weighted) < len(edges), "equal ones are priced once"
    for number, (edge, price) in enumerate(zip(edges, weighted[prices.price_of], strict=True)):
        found = []
        for path, frees in product(direct_paths(ref, mesh, edge.before, edge.after, frozenset(forms)), free):
            step = costs.conversion(ref, (replace(path[0], free=frees),), edge.after)
            assert_does(priced.moved(number, path[0].form, frees), step, shares)
            total = np.zeros(3)
            for way, term in (("forward", step.forward), ("backward", step.backward)):
                total += ways[way] @ term.at(shares) if term is not None else 0.0
            for c in step.communication:
                value = c.term.at(shares)
                total += value.max() if c.cuts or c.direction == "synchronise" else ways[c.direction] @ value
            found.append(total)
        assert price == pytest.approx(np.min(found, axis=0), rel=1e-12), edge
    assert len(edges) > 15


def differ(p: Placement, q: Placement) -> list[int]:
    """The axes on which they do."""
    return [a for a, (s, t) in enumerate(zip(p.states, q.states, strict=True)) if s != t]


def assert_does(moved: Moved | None, step: StepCost, shares: Mapping[Cut, np.ndarray]) -> None:
    """That one edge in one form, priced among many, is what its terms say."""
    if moved is None:
        assert step.communication == () and step.forward is None and step.backward is None
        return
    back = "synchronise" if moved.sums else "backward"
    assert Counter(c.direction for c in step.communication) == Counter({"forward": moved.forward, back: moved.backward}) - Counter()
    for c in step.communication:
        assert c.term.at(shares) == pytest.approx(moved.seconds, rel=1e-12) and c.cuts == moved.cuts
    for term, copied in zip((step.forward, step.backward), moved.copied, strict=True):
        assert (term.at(shares) if term is not None else np.zeros(2)) == pytest.approx(copied, rel=1e-12)
