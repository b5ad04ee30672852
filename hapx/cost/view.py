"""A mesh laid over a cluster, as the cost terms see it: kinds of devices, and how much of a tensor each kind holds.

In: a mesh and a cluster, or also concrete lengths. Out: kinds (coordinates along the uneven axis whose devices are alike), per-kind numbers of
the devices, and *fractions*: the part of a tensor (or of an instruction's work) that a device has, as an affine piece in the shares of cuts

    fraction(placement) = product over axes of share(cut of the axis);  1 / size for an even axis, rounded up to whole units.

Invariant: at most one axis is uneven, so a fraction has at most one slope. Where an even axis cuts again what an uneven one dealt out, a device has
ceil(length / size) units of length / size; how much this is depends on the length, so a part of one unit is allowed for it: all
that it can be (size - 1) / size where `bound`, half of that, its mean, otherwise. With concrete lengths there is nothing to allow for:
coordinates of a kind also have equal lengths, and fractions are constants, those of `hapx.layout`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from hapx.cluster.spec import ClusterSpec
from hapx.cost.terms import Piece
from hapx.layout import Lengths
from hapx.plan import Mesh
from hapx.states import REPLICATED, Cut, Placement, Sharded, State

Kind = tuple[int, ...]


@dataclass(frozen=True)
class View:
    """`lengths`: None for terms in the shares; else for terms at these lengths (of all cuts of the uneven axis that are asked for)."""

    mesh: Mesh
    cluster: ClusterSpec
    lengths: Lengths | None = None
    _fractions: dict[tuple[Placement, bool], Piece] = field(default_factory=dict, repr=False, compare=False)
    _works: dict[tuple[Cut | None, ...], Piece] = field(default_factory=dict, repr=False, compare=False)  # where no more than one axis divides it

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Coordinates along the uneven axis, those whose devices are alike together, in order of appearance."""
        if self.mesh.uneven is None:
            return ((0,),)
        coordinates = range(self.mesh.sizes[self.mesh.uneven])
        chosen = [own for cut, own in (self.lengths or {}).items() if cut.row.kind != "even"]
        alike: dict[object, list[int]] = {}
        for c in coordinates:
            alike.setdefault((self._appearance(c), *(own[c] for own in chosen)), []).append(c)
        return tuple(map(tuple, alike.values()))

    def _appearance(self, coordinate: int) -> object:
        """What the costs see of the devices at a coordinate of the uneven axis."""
        machines, numbers = self.cluster.machines, self._numbers
        found = []
        for d in self._at[coordinate]:
            at = self.cluster.devices[d]
            found.append((numbers[at.type], machines[at.machine].intra, self._mates[at.machine]))
        return tuple(found)

    @cached_property
    def _numbers(self) -> dict[str, tuple[object, ...]]:
        """What the costs see of each device type."""
        return {
            name: (tuple(sorted(t.flops.items())), t.efficiency, t.kernel_latency, t.memory, t.memory_bandwidth, t.is_cpu)
            for name, t in self.cluster.device_types.items()
        }

    @cached_property
    def _mates(self) -> Counter[int]:
        """Devices of the mesh in each machine."""
        return Counter(self.cluster.devices[d].machine for d in self.mesh.devices)

    @cached_property
    def _at(self) -> tuple[tuple[int, ...], ...]:
        """Devices at each coordinate of the uneven axis (all devices at the only one without one)."""
        uneven = self.mesh.uneven
        if uneven is None:
            return (self.mesh.devices,)
        sizes = self.mesh.sizes
        inner = prod(sizes[uneven + 1 :])
        found: list[list[int]] = [[] for _ in range(sizes[uneven])]
        for i, d in enumerate(self.mesh.devices):
            found[i // inner % sizes[uneven]].append(d)
        return tuple(map(tuple, found))

    @cached_property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each kind."""
        return tuple(tuple(d for c in kind for d in self._at[c]) for kind in self.kinds)

    @property
    def size(self) -> int:
        return len(self.kinds)

    def worst(self, number: Callable[[int], float], worst: Callable[[Sequence[float]], float] = max) -> tuple[float, ...]:
        """Per kind, the worst of a number of the devices at its first coordinate: at the others they are alike."""
        return tuple(float(worst([number(d) for d in self._at[kind[0]]])) for kind in self.kinds)

    def constant(self, value: float) -> Piece:
        """A piece with the same value on every kind."""
        return Piece((float(value),) * self.size)

    # --- fractions ------------------------------------------------------------------------------------------------------------------

    def fraction(self, placement: Placement, bound: bool = False) -> Piece:
        """Largest part of a tensor in `placement` that a device of each kind holds."""
        key = (placement, bound)
        if key not in self._fractions:
            self._fractions[key] = self._exact(placement) if self.lengths is not None else self._affine(placement, bound)
        return self._fractions[key]

    def work(self, work: tuple[Cut | None, ...], placements: Sequence[Placement]) -> Piece:
        """Largest part of an instruction's work that a device of each kind does. `placements`: of its operands and outputs; they say
        whether two axes cut one factor."""
        if len(work) - work.count(None) > 1:
            return self.fraction(work_placement(work, placements))
        if work not in self._works:
            self._works[work] = self.fraction(work_placement(work, ()))
        return self._works[work]

    def _affine(self, placement: Placement, bound: bool) -> Piece:
        factor, nested, cut = 1.0, 0.0, None
        dealt: list[tuple[Sharded, int | None]] = []  # splits so far: units that the largest piece has, None where the lengths are chosen
        for axis in placement.order():
            state = placement.states[axis]
            if not isinstance(state, Sharded):
                continue
            size = self.mesh.sizes[axis]
            before = next((units for other, units in reversed(dealt) if other.same_split(state)), 0)
            if before == 0 and state.cut.row.kind != "even":
                assert cut is None, f"two cuts of the uneven axis in {placement}"
                cut = state.cut
                dealt.append((state, None))
            elif before is None:
                factor /= size
                nested = (1.0 if bound else 0.5) * (size - 1) / state.cut.units
                dealt.append((state, None))
            else:
                units = before or state.cut.units
                most = -(-units // size)
                factor *= most / units
                dealt.append((state, most))
        if cut is None:
            return self.constant(factor)
        return Piece((nested * factor,) * self.size, ((cut, (factor,) * self.size),))

    def _exact(self, placement: Placement) -> Piece:
        assert self.lengths is not None
        values = []
        for kind in self.kinds:
            factor = 1.0
            held: list[tuple[Sharded, int]] = []
            for axis in placement.order():
                state = placement.states[axis]
                if not isinstance(state, Sharded):
                    continue
                before = next((units for other, units in reversed(held) if other.same_split(state)), None)
                if before is None and state.cut.row.kind != "even":
                    mine = self.lengths[state.cut][kind[0]]
                else:
                    mine = -(-(state.cut.units if before is None else before) // self.mesh.sizes[axis])
                units = state.cut.units if before is None else before
                factor *= mine / units if units else 0.0
                held.append((state, mine))
            values.append(factor)
        return Piece(tuple(values))

    def shares(self, lengths: Mapping[Cut, tuple[int, ...]]) -> dict[Cut, tuple[float, ...]]:
        """Per kind, the largest share of each cut of the uneven axis."""
        return {cut: tuple(max(own[c] for c in kind) / cut.units for kind in self.kinds) for cut, own in lengths.items() if cut.row.kind != "even"}


def work_placement(work: tuple[Cut | None, ...], placements: Sequence[Placement]) -> Placement:
    """A placement whose fraction is the part of the work: the one in `placements` where two axes cut one factor, else a dim per axis."""
    axes = [a for a, cut in enumerate(work) if cut is not None]
    for p in placements:
        shards = [s for a in axes if isinstance(s := p.states[a], Sharded) and s.cut == work[a]]
        if len(shards) == len(axes) > 1 and all(s.same_split(shards[0]) for s in shards):
            return Placement(tuple(s if a in axes else REPLICATED for a, s in enumerate(p.states)), p.nest)
    states: list[State] = [REPLICATED if cut is None else Sharded(a, 1, 1, cut) for a, cut in enumerate(work)]
    return Placement(tuple(states))
