"""What of the conversions of a tensor depends on neither costs, ratios nor the cluster: which of its placements follow from which.

In: a tensor and its placements. Out: a `Reach`: for free, by one communication along one axis, through shards of the inner axis. Tensors that are
alike share one, in all problems of a process: searches on many views and submeshes of a cluster meet the same placements again and again.

Invariant: bit q of `closure(p)` is set iff a tensor in placement p is in placement q without communication in either direction.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import permutations, product

import numpy as np
import numpy.typing as npt

from hapx.ir import FLOATING, TensorRef
from hapx.layout import compatible
from hapx.plan import Mesh
from hapx.states import Placement, Sharded, State
from hapx.theory.conversion import INNER, VALUES, free, may_change, shared_placements, stays

Numbers = npt.NDArray[np.int64]
Passed = tuple[Placement, ...]

_known: dict[Hashable, Reach] = {}


def reach(ref: TensorRef, placements: Sequence[Placement]) -> Reach:
    """Of a tensor in these placements; one object for all that are alike."""
    key = ref.requires_grad, ref.mutated, ref.dtype in FLOATING, tuple(placements)
    if key not in _known:
        _known[key] = Reach(ref, key[3])
    return _known[key]


class Reach:
    """See the module. Placements have the numbers of `placements`; behind these, in `all_placements`, come those that lie between them (after one
    axis has changed). states: of each axis, by code. codes: of every placement, per axis. at_code: its number."""

    def __init__(self, ref: TensorRef, placements: tuple[Placement, ...]):
        """ref: any of the tensors that are alike."""
        self._ref, self.placements, self._axes = ref, placements, range(len(placements[0].states))
        self.number = {p: i for i, p in enumerate(placements)}
        number: list[dict[State, int]] = [{} for _ in self._axes]
        for p in placements:
            for a in self._axes:
                number[a].setdefault(p.states[a], len(number[a]))
        several = product(*number) if len(self._axes) > 1 else ()
        between = [q for states in several if compatible(states) and (q := Placement(states)) not in self.number]
        self.all_placements = (*placements, *between)
        self.states = tuple(tuple(states) for states in number)
        self.codes = [tuple(number[a][p.states[a]] for a in self._axes) for p in self.all_placements]
        self.at_code = {code: i for i, code in enumerate(self.codes)}
        self._closure: dict[int, int] = {}
        self._shared: dict[Hashable, dict[tuple[int, int], Passed]] = {}

    def closure(self, source: int) -> int:
        """The bit set of placements that are free from `source`, itself included."""
        if source not in self._closure:
            p = self.placements[source]
            stay = [[stays(self._ref, p.states[a], t) for t in self.states[a]] for a in self._axes]  # by code
            possible = (i for i in range(len(self.placements)) if all(stay[a][self.codes[i][a]] for a in self._axes))
            self._closure[source] = sum(1 << i for i in possible if free(self._ref, p, self.placements[i]))
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
        every = self.all_placements
        for group in groups.values():
            yield from ((p, q) for p, q in permutations(group, 2) if may_change(self._ref, every[p], every[q], axis))

    @cached_property
    def orders(self) -> tuple[tuple[tuple[int, Numbers, Numbers], ...], ...]:
        """Of the ways between any two placements (sources x targets), for each order of the axes: the axis, where it begins to change and where that
        leads, one after the other. A number behind the last placement: there is no such placement."""
        codes, n, size = np.array(self.codes), len(self.placements), len(self.codes)
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

    def shared(self, ref: TensorRef, mesh: Mesh) -> dict[tuple[int, int], Passed]:
        """By source and target, the placements on the path through shards of the inner axis, where there is one. ref: one of the tensors."""
        if len(self._axes) != 2 or ref.kind not in VALUES:
            return {}
        key = ref.shape, mesh.uneven, min(mesh.sizes) == 1, mesh.sizes[INNER]
        if key not in self._shared:
            whole_inside = [i for i, p in enumerate(self.placements) if not isinstance(p.states[INNER], Sharded)]
            ways = ((p, q, shared_placements(ref, mesh, self.placements[p], self.placements[q])) for p, q in permutations(whole_inside, 2))
            self._shared[key] = {(p, q): passed for p, q, passed in ways if passed}
        return self._shared[key]
