"""What of the conversions of a tensor depends on neither costs, ratios nor the cluster: which of its placements follow from which.

In: a tensor and its placements. Out: a `Reach`: for free, by one communication along one axis, through shards of the inner axis. Tensors that are
alike share one, in all problems of a process: searches on many views and submeshes of a cluster meet the same placements again and again. Most of it
does not even depend on how large the dims are, but on how states are related: tensors of other shapes share that as a `Pattern`.

Invariant: bit q of `closure(p)` is set iff a tensor in placement p is in placement q without communication in either direction.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import combinations, permutations, product

import numpy as np
import numpy.typing as npt

from hapx.ir import CONTINUOUS, TensorRef
from hapx.layout import compatible
from hapx.plan import Mesh
from hapx.states import Placement, Sharded, State
from hapx.theory.conversion import INNER, VALUES, free, may_change, shared_placements, stays

Numbers = npt.NDArray[np.int64]
Passed = tuple[Placement, ...]

_known: dict[Hashable, Reach] = {}
_patterns: dict[Hashable, Pattern] = {}


def reach(ref: TensorRef, placements: Sequence[Placement]) -> Reach:
    """Of a tensor in these placements; one object for all that are alike."""
    key = _kind(ref), tuple(placements)
    if key not in _known:
        _known[key] = Reach(ref, key[1])
    return _known[key]


def _kind(ref: TensorRef) -> tuple[bool, bool, bool]:
    """What of a tensor its conversions depend on, beside its size."""
    return ref.requires_grad, ref.mutated, ref.dtype in CONTINUOUS


class Reach:
    """See the module. Placements have the numbers of `placements`; behind these, in `all_placements`, come those that lie between them (after one
    axis has changed). states: of each axis, by code; codes, at_code: see `Pattern`."""

    def __init__(self, ref: TensorRef, placements: tuple[Placement, ...]):
        """ref: any of the tensors that are alike."""
        self.placements = placements
        self.number = {p: i for i, p in enumerate(placements)}
        number: list[dict[State, int]] = [{} for _ in placements[0].states]
        codes = tuple([tuple([of.setdefault(s, len(of)) for of, s in zip(number, p.states, strict=True)]) for p in placements])
        self.states = tuple(map(tuple, number))
        key = _kind(ref), codes, tuple([p.nest for p in placements]), _related(self.states)
        if key not in _patterns:
            _patterns[key] = Pattern(ref, placements, self.states, codes)
        self.pattern = pattern = _patterns[key]
        between = [Placement(_states(self.states, code)) for code in pattern.codes[len(placements) :]]
        self.all_placements = (*placements, *between)
        self.codes, self.at_code, self.closure = pattern.codes, pattern.at_code, pattern.closure
        self._shared: dict[Hashable, dict[tuple[int, int], Passed]] = {}

    def shared(self, ref: TensorRef, mesh: Mesh) -> dict[tuple[int, int], Passed]:
        """By source and target, the placements on the path through shards of the inner axis, where there is one. ref: one of the tensors."""
        if len(self.states) != 2 or ref.kind not in VALUES:
            return {}
        key = ref.shape, mesh.uneven, min(mesh.sizes) == 1, mesh.sizes[INNER]
        if key not in self._shared:
            whole_inside = [i for i, p in enumerate(self.placements) if not isinstance(p.states[INNER], Sharded)]
            ways = ((p, q, shared_placements(ref, mesh, self.placements[p], self.placements[q])) for p, q in permutations(whole_inside, 2))
            self._shared[key] = {(p, q): passed for p, q, passed in ways if passed}
        return self._shared[key]


def _related(states: Sequence[Sequence[State]]) -> Hashable:
    """All that free conversions, and those along one axis, depend on of the states of each axis, by code: whether they split a factor, and which
    factors do not nest."""
    split: dict[Hashable, tuple[int, Sharded]] = {}  # by factor: its number, and a state that splits it

    def sort(state: State) -> int | type[State]:
        return split.setdefault(state.factor, (len(split), state))[0] if isinstance(state, Sharded) else type(state)

    sorts = tuple([tuple(map(sort, of)) for of in states])
    return sorts, tuple(map(compatible, combinations([s for _, s in split.values()], 2))) if len(states) > 1 else ()


def _states(states: Sequence[Sequence[State]], code: Sequence[int]) -> tuple[State, ...]:
    """Those of a code. states: of each axis."""
    return tuple([of[k] for of, k in zip(states, code, strict=True)])


class Pattern:
    """What tensors have in common whose placements are related in the same way, as numbers of placements. states: of each axis, by code. codes: of
    every placement and of those between them, per axis. at_code: its number."""

    def __init__(self, ref: TensorRef, placements: tuple[Placement, ...], states: Sequence[Sequence[State]], codes: Sequence[tuple[int, ...]]):
        """Of any of the tensors."""
        self._ref, self._states, self._axes = ref, states, range(len(states))
        own = {code for code, p in zip(codes, placements, strict=True) if not p.nest}
        several = product(*(range(len(of)) for of in states)) if len(states) > 1 else ()
        ways = ((code, _states(states, code)) for code in several if code not in own)
        between = {code: Placement(at) for code, at in ways if compatible(at)}
        self._every = (*placements, *between.values())
        self.codes = [*codes, *between]
        self.at_code = {code: i for i, code in enumerate(self.codes)}
        self.count, self._coded = len(placements), np.array(self.codes)
        self._closure: dict[int, int] = {}

    def closure(self, source: int) -> int:
        """The bit set of placements that are free from `source`, itself included."""
        if source not in self._closure:
            p = self._every[source]
            possible = np.logical_and.reduce([
                np.array([stays(self._ref, p.states[a], t) for t in self._states[a]])[self._coded[: self.count, a]] for a in self._axes  # by code
            ])  # fmt: skip
            self._closure[source] = sum(1 << i for i in np.flatnonzero(possible).tolist() if free(self._ref, p, self._every[i]))
        return self._closure[source]

    @cached_property
    def along(self) -> tuple[tuple[Numbers, Numbers], ...]:
        """Per axis, sources and targets of all pairs of placements between which one communication along it leads."""
        pairs = (np.array(list(self._neighbours(axis)), dtype=np.int64).reshape(-1, 2) for axis in self._axes)
        return tuple((own[:, 0], own[:, 1]) for own in pairs)

    def _neighbours(self, axis: int) -> Iterator[tuple[int, int]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for p, code in enumerate(self.codes):
            groups.setdefault(code[:axis] + code[axis + 1 :], []).append(p)
        every = self._every
        for group in groups.values():
            yield from ((p, q) for p, q in permutations(group, 2) if may_change(self._ref, every[p], every[q], axis))

    @cached_property
    def orders(self) -> tuple[tuple[tuple[int, Numbers, Numbers], ...], ...]:
        """Of the ways between any two placements (sources x targets), for each order of the axes: the axis, where it begins to change and where that
        leads, one after the other. A number behind the last placement: there is no such placement."""
        codes, n, size = self._coded, self.count, len(self.codes)
        lookup = np.full(codes.max(axis=0) + 2, size)
        lookup[tuple(codes.T)] = np.arange(size)
        found = []
        for order in permutations(self._axes):
            at, place, path = np.repeat(codes[:n, None], n, axis=1), np.repeat(np.arange(n)[:, None], n, axis=1), []
            for axis in order:
                at = at.copy()
                at[:, :, axis] = codes[None, :n, axis]
                after = lookup[tuple(np.moveaxis(at, 2, 0))]
                path.append((axis, place, after))
                place = after
            found.append(tuple(path))
        return tuple(found)
