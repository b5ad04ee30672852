"""How many bytes the tensors of a program, their temporaries and their collectives' buffers take on every kind of devices.

In: a mesh, a graph, a cost model at exact lengths, placements of parameters and buffers. Out: one number per kind. Invariant: sizes are
those of `hapx.layout`, of the largest device of a kind where even axes leave a rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import numpy as np

from hapx.cost.memory import states_of
from hapx.cost.model import CostModel
from hapx.cost.on_cpu import vector_of_cpu
from hapx.cost.terms import Vector
from hapx.cost.transients import (
    FEW_SAMPLES,
    UPDATE_TEMPORARIES,
    Reordered,
    Shards,
    Sizes,
    exchange_buffers,
    gather_buffers,
    rows_of,
    scatter_buffers,
)  # fmt: skip
from hapx.ir import Graph, Kind, TensorRef
from hapx.layout import axis_lengths, local_shape
from hapx.plan import Communication, Mesh
from hapx.states import Placement, Property, Sharded, is_recut


class LocalSizes:
    """See above. `cpu`: per kind, whether its devices are processors."""

    def __init__(self, mesh: Mesh, graph: Graph, exact: CostModel, stored: Mapping[str, Placement]):
        self.mesh, self.graph, self.exact, self.stored = mesh, graph, exact, stored
        self.lengths = exact.view.lengths or {}
        self._fractions: dict[Placement, Vector] = {}
        self.none: Vector = np.zeros(len(exact.kinds))
        self.cpu = np.array(exact.view.worst(lambda d: exact.cluster.type_of(d).is_cpu, min)) > 0

    def part(self, placement: Placement, size: float) -> Vector:
        """Bytes per kind of a tensor of `size` bytes."""
        return self._fraction(placement) * size

    def _fraction(self, placement: Placement) -> Vector:
        fraction = self._fractions.get(placement)
        if fraction is None:
            fraction = self._fractions[placement] = np.array(self.exact.view.fraction(placement, True).const)
        return fraction

    def local(self, properties: Sequence[Property]) -> list[Vector]:
        """Bytes per kind of tensors in placements."""
        if not properties:
            return []
        whole = np.array([float(self.graph.refs[p.tensor].bytes) for p in properties])
        return list(np.array([self._fraction(p.placement) for p in properties]) * whole[:, None])

    def stored_bytes(self) -> Vector:
        """What is there all the time: parameters, optimizer state, buffers, the batch (of a stage, what it receives of one micro-batch)."""
        states = states_of(self.exact.optimizer) if self.exact.mode == "train" else 0
        alike: Counter[tuple[Placement, float]] = Counter()
        for name, placement in self.stored.items():
            ref = self.graph.refs[name]
            trained = ref.requires_grad and ref.kind is Kind.PARAMETER
            alike[placement, ref.bytes + (4.0 * states * ref.size if trained else 0.0)] += 1
        sizes = [times * self.part(placement, size) for (placement, size), times in alike.items()]
        return sum(sizes, np.zeros(len(self.exact.kinds))) + float(sum(r.bytes for r in self.graph.sources))

    def received(self) -> Vector:
        """What other stages send."""
        sizes = [self.part(placement, float(ref.bytes)) for n, placement in self.stored.items() if (ref := self.graph.refs[n]).kind is Kind.RECEIVED]
        return sum(sizes, np.zeros(len(self.exact.kinds)))

    def update(self) -> Vector:
        """The optimizer's temporaries: of one parameter after the other on CPUs, whose old ones are freed when new ones are there; else of all."""
        single, together = UPDATE_TEMPORARIES[self.exact.optimizer.lower()]
        trained = [(self.stored[r.name], float(r.bytes)) for r in self.graph.of_kind(Kind.PARAMETER) if r.requires_grad and r.name in self.stored]
        if not trained:
            return np.zeros(len(self.exact.kinds))
        alike = Counter(trained)
        own = {key: self.part(*key) for key in alike}
        pairs = dict.fromkeys(pairwise(trained))
        one = np.max([single * own[trained[0]], *(single * own[now] + (own[old] if single > 1 else 0.0) for old, now in pairs)], axis=0)
        whole: Vector = np.where(self.cpu, one, together * sum(times * own[key] for key, times in alike.items()))
        return whole

    def sum(self, sizes: Sizes, placements: Mapping[str, Placement]) -> Vector:
        """Bytes per kind of several tensors."""
        total = self.none
        for name, size in sizes:
            total = total + self.part(placements[name], size)
        return total

    def temporaries(self, sizes: Sizes, on_cpu: Sizes, copied: Sequence[Reordered], placements: Mapping[str, Placement]) -> Vector:
        """`sizes`, `on_cpu` on processors, and what a kernel copies into a layout of its own."""
        total = self.sum(sizes, placements) + self.cpu * self.sum(on_cpu, placements)
        for own in copied:
            total = total + self._in_vectors(own, placements)
        return total

    def _in_vectors(self, copied: Reordered, placements: Mapping[str, Placement]) -> Vector:
        """Bytes of a tensor whose local channels are rounded up to whole vectors on CPUs."""
        ref, found = self.graph.refs[copied.name], []
        for kind, cpu in zip(self.exact.kinds, self.cpu, strict=True):
            shape = list(self._shape(copied.name, placements, kind))
            for dim in copied.channels if cpu else ():
                whole = vector_of_cpu()
                shape[dim] = -(-shape[dim] // whole) * whole
            in_place = cpu and copied.unless_few is not None and self._shape(copied.unless_few, placements, kind)[0] < FEW_SAMPLES
            found.append(0.0 if in_place else float(prod(shape) * ref.bytes) / max(ref.size, 1))
        return np.array(found)

    def _shape(self, name: str, placements: Mapping[str, Placement], kind: tuple[int, ...]) -> tuple[int, ...]:
        return local_shape(self.graph.refs[name].shape, placements[name], self.mesh.sizes, self.lengths, self._at(kind))

    def _at(self, kind: tuple[int, ...]) -> tuple[int, ...]:
        """Coordinates of a device of a kind."""
        return tuple(kind[0] if a == self.mesh.uneven else 0 for a in range(len(self.mesh.axes)))

    def buffers(self, name: str, ref: TensorRef, step: Communication, before: Placement, after: Placement) -> Vector:
        """Temporaries of an operation that leads from `before` to `after` along the step's axis."""
        held, made = self.part(before, float(ref.bytes)), self.part(after, float(ref.bytes))
        if name not in ("all_gather", "reduce_scatter", "all_to_all"):
            return 0.0 * held
        if name == "all_to_all":
            if not is_recut(step.source, step.target):
                return exchange_buffers(held, made)
            state = after.states[step.axis]  # where units are not consecutive, they go to the front and back again
            assert isinstance(state, Sharded)
            return held + made if rows_of(ref.shape, state.dim) > 1 or state.outer > 1 else 0.0 * held
        gathers = name == "all_gather"
        own, whole, cut = (held, made, before) if gathers else (made, held, after)
        state = cut.states[step.axis]
        assert isinstance(state, Sharded)
        largest = np.full_like(own, own.max()) if step.axis == self.mesh.uneven else own
        strided = rows_of(ref.shape, state.dim) > 1 or state.outer > 1
        shards = Shards(own, whole, largest, self._uneven(cut, step.axis), self.mesh.sizes[step.axis], strided)
        return gather_buffers(shards, step.form) if gathers else scatter_buffers(shards, step.form)

    def _uneven(self, cut: Placement, axis: int) -> Vector:
        """Per kind, whether the axis cuts a tensor in unequal lengths."""
        sizes = self.mesh.sizes
        return np.array([len(set(axis_lengths(cut, axis, sizes, self.lengths, self._at(kind)))) > 1 for kind in self.exact.kinds])
