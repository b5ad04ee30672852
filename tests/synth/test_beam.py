"""The beam, on trees whose costs are written down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

import pytest

from hapx.synth.astar import TOLERANCE, Front, Statistics, Width, beam


@dataclass
class Leaf:
    """A partial solution: the decisions so far."""

    path: str
    level: int
    estimate: float
    spent: float = 0.0
    dead: bool = False

    @property
    def place(self) -> int:
        return hash(self.path) & 0xFFFF


@dataclass
class Tree:
    """Words over two letters. bound, guess: by word; what is not there is that of the longest word that is. leaping: words that lead to others.
    repeating: levels at which what is good repeats itself. quick: lower bounds, by word, of what is made in haste."""

    depth: int
    sharp, eager = False, True
    bound: dict[str, float]
    guess: dict[str, float] = field(default_factory=dict)
    leaping: dict[str, str] = field(default_factory=dict)
    kinship: dict[str, int] = field(default_factory=dict)
    repeating: frozenset[int] = frozenset()
    quick: dict[str, float] = field(default_factory=dict)
    expanded: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def start(self) -> Leaf:
        return Leaf("", 0, self._of("", self.bound))

    def successors(self, node: Leaf, limit: float, most: int | None = None, front: Front[Leaf] | None = None, hasty: bool = False) -> Iterator[Leaf]:
        self.expanded.append(node.path)
        for path in (node.path + "a", node.path + "b"):
            leaf = Leaf(path, len(path), self.quick[path]) if hasty and path in self.quick else self._leaf(path)
            if leaf.estimate < limit:
                yield leaf

    def estimated(self, node: Leaf) -> float:
        self.asked.append(node.path)
        return self._of(node.path, self.bound)

    def again(self, node: Leaf, limit: float) -> list[Leaf] | None:
        if node.path not in self.leaping:
            return None
        leaf = self._leaf(self.leaping[node.path])
        return [leaf] if leaf.estimate < limit else []

    def leaps(self, node: Leaf, limit: float) -> list[Leaf]:
        return self.again(node, limit) or []

    def settled(self, level: int) -> bool:
        return level in self.repeating

    def dominates(self, a: Leaf, b: Leaf) -> bool:
        return False

    def likely(self, node: Leaf) -> float:
        return self._of(node.path, self.guess or self.bound)

    def kin(self, node: Leaf) -> int:
        return self.kinship.get(node.path, hash(node.path))

    def _leaf(self, path: str) -> Leaf:
        return Leaf(path, len(path), self._of(path, self.bound))

    def _of(self, path: str, known: dict[str, float]) -> float:
        return next(known[path[:n]] for n in range(len(path), -1, -1) if path[:n] in known)


def test_of_equal_bounds_the_likely_one_is_kept() -> None:
    """The bound says the same of everything until the end, and the first nodes of a level lead nowhere."""
    bound = {"": 1.0} | {a + b + c: 5.0 for a in "ab" for b in "ab" for c in "ab"} | {"bba": 2.0}
    blind = beam(Tree(3, bound), Width(2), Statistics())
    guided = beam(Tree(3, bound, {"": 3.0, "b": 2.5, "bb": 2.0}), Width(2), Statistics())
    assert blind is not None and blind.estimate == 5.0
    assert guided is not None and guided.path == "bba"


def test_the_narrowest_beam_asks_for_the_bounds_of_what_may_be_best() -> None:
    """Others have a quick one above the least that is known; and of what is left nothing may be below the limit."""
    bound = {"": 1.0, "a": 2.0, "b": 1.5, "ba": 1.6, "bb": 1.55, "bba": 3.0, "bbb": 4.0}
    quick = {"a": 1.9, "b": 1.0, "ba": 1.5, "bb": 1.52}
    tree, patient = Tree(3, bound, quick=quick), Tree(3, bound)
    found, same = (beam(t, Width(1), Statistics()) for t in (tree, patient))
    assert found is not None and same is not None
    assert found.path == same.path == "bba"
    assert [path for path in tree.asked if path in quick] == ["b", "ba", "bb"]
    incumbent, statistics = Leaf("aaa", 3, 1.4), Statistics()
    assert beam(Tree(3, bound, quick=quick), Width(1), statistics, incumbent) is incumbent
    assert (statistics.bounded, statistics.cut) == (1, 0), "b is asked, a is above the limit by its quick one"


def test_the_one_of_least_bound_is_kept_beside_the_likely_ones() -> None:
    """A guess that misleads costs half of the width, not the solution."""
    bound = {"": 1.0, "a": 1.5, "b": 1.0, "bb": 1.0, "ba": 1.6, "bbb": 1.2, "bba": 3.0, "aaa": 4.0}
    guess = {"": 2.0, "a": 1.5, "b": 9.0}
    found = beam(Tree(3, bound, guess), Width(2), Statistics())
    assert found is not None and found.path == "bbb"


def test_kin_do_not_crowd_out_others() -> None:
    """Variants of one beginning look best until the end."""
    bound = {"": 1.0, "a": 1.0, "b": 1.5, "baa": 2.0, "bab": 5.0} | {"a" + b + c: 5.0 for b in "ab" for c in "ab"}
    kinship = {"aa": 1, "ab": 1, "ba": 2, "bb": 2}
    assert [beam(Tree(3, bound, kinship=kinship), Width(2, apart), Statistics()).estimate for apart in (False, True)] == [5.0, 2.0]  # type: ignore[union-attr]


def test_what_leaps_is_followed_to_its_end_first() -> None:
    """Its cost limits what would be followed level by level; with a tolerance also what is hardly better."""
    bound = {"": 1.0, "a": 1.0, "b": 1.1, "aaaaa": 1.05, "ba": 1.12, "bb": 1.02}
    for tolerance, followed in ((TOLERANCE, {"b", "bb"}), (0.06, set())):
        tree = Tree(5, bound, leaping={"a": "aaaaa"})
        found = beam(tree, Width(4), Statistics(), None, tolerance)
        assert found is not None
        assert found.estimate == (1.02 if followed else 1.05)
        assert ("bb" in tree.expanded) == bool(followed)
        assert "ba" not in tree.expanded


def test_what_leaps_waits_at_its_level_where_nothing_is_gained_by_an_early_answer() -> None:
    tree = Tree(5, {"": 1.0, "a": 1.0, "b": 1.1, "aaaaa": 1.05, "ba": 1.12, "bb": 1.02}, leaping={"a": "aaaaa"})
    tree.eager = False
    found = beam(tree, Width(4), Statistics())
    assert found is not None
    assert found.estimate == 1.02
    assert {"ba", "bb"} <= set(tree.expanded), "nothing limits it"


def test_what_leaps_later_with_a_higher_bound_waits_at_its_level() -> None:
    """Of many rounds that end as they began each may leap, and each again further on: all of them followed at once take many times as long."""
    bound = {"": 1.0, "a": 1.0, "b": 1.1, "aaaa": 1.05, "aaaaa": 9.0, "aaaab": 8.0, "baaab": 1.5, "baaaba": 7.0, "baaabb": 2.0}
    bound |= {"bb": 1.2} | {"bb" + a + b: 3.0 for a in "ab" for b in "ab"}
    tree = Tree(6, bound, leaping={"a": "aaaa", "ba": "baaab"})
    found = beam(tree, Width(4), Statistics())
    assert found is not None and found.path == "baaabb"
    assert tree.expanded.index("aaaa") < tree.expanded.index("bb"), "followed at once"
    assert tree.expanded.index("baaab") > tree.expanded.index("bba"), "when the others are there"


def test_where_all_repeats_itself_only_leaps_are_followed() -> None:
    """Once there is one; that of another, with a higher bound, still is."""
    bound = {"": 1.0, "a": 1.1, "b": 1.0, "aaa": 1.2, "aaab": 1.15, "ba": 1.1, "bb": 1.0, "baab": 1.05}
    for repeating, found in ((frozenset[int](), "bb"), (frozenset({2}), "baab")):
        tree = Tree(4, bound, leaping={"a": "aaab", "ba": "baab"}, repeating=repeating)
        best = beam(tree, Width(4), Statistics())
        assert best is not None and best.path.startswith(found)
        assert ("bb" in tree.expanded) == (not repeating)
    alone = Tree(4, bound, repeating=frozenset({2}))
    best = beam(alone, Width(4), Statistics())
    assert best is not None and best.path.startswith("bb"), "nothing leaps"


@pytest.mark.parametrize("cost", (0.5, 7.0))
def test_an_incumbent_is_kept_unless_something_is_better(cost: float) -> None:
    incumbent = Leaf("known", 3, cost)
    found = beam(Tree(3, {"": 1.0}), Width(2), Statistics(), incumbent)
    assert found is not None and (found is incumbent) == (cost < 1.0)
    assert found.estimate < inf
