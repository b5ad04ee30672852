"""Choices that programs may not make, to ask what the next best program without them is (see `hapx.report.alternatives`).

In: triples, and changes of state along one axis. Out: whether they are forbidden. Nothing that is free can be forbidden: a change communicates.
"""

from __future__ import annotations

from dataclasses import dataclass

from hapx.ir import OpCall
from hapx.plan import Triple
from hapx.states import Property, State

Change = tuple[int, type[State], type[State]]


@dataclass(frozen=True, slots=True)
class Forbidden:
    """What programs may not do: make a tensor in a placement; call this at a node (node, target); change a tensor on an axis from one kind of
    state to another (tensor, axis, source, target). To ask what the next best program is (see `hapx.report.alternatives`)."""

    made: frozenset[Property] = frozenset()
    calls: frozenset[tuple[int, str]] = frozenset()
    changes: frozenset[tuple[str, int, type[State], type[State]]] = frozenset()

    def triple(self, triple: Triple) -> bool:
        called = isinstance(triple.body, OpCall) and triple.node is not None and (triple.node, triple.body.target) in self.calls
        return called or not self.made.isdisjoint(triple.post)

    def of(self, tensor: str) -> frozenset[Change]:
        """The changes of one tensor."""
        return frozenset((axis, source, target) for name, axis, source, target in self.changes if name == tensor)


NOTHING = Forbidden()
