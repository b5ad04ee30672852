"""The background theory of a graph on a mesh: all its Hoare triples, as data (HAP section 4.1, generalised to several axes).

`triples[i]` are those of node i. Conversions are not listed: `hapx.theory.conversion` says which exist between two placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hapx.ir import Graph
from hapx.plan import Mesh, Triple
from hapx.states import Placement, Sharded
from hapx.theory.triples import Names


@dataclass(frozen=True)
class Theory:
    """`stored`: for each parameter and buffer, the placements it may be kept in (Invariant or Sharded on each axis).
    `outputs`: for each output tensor of the graph, the placements in which it may be given. `batch`: (tensor, state) pairs that split the batch.
    `alike`: a number per node, equal where the triples are the same, in the same order, but for names (empty: nothing is known). `names`: its
    properties."""

    graph: Graph
    mesh: Mesh
    triples: Sequence[Sequence[Triple]]
    stored: Mapping[str, tuple[Placement, ...]]
    outputs: Mapping[str, tuple[Placement, ...]]
    batch: frozenset[tuple[str, Sharded]]
    alike: tuple[int, ...] = ()
    names: Names = field(default_factory=Names, repr=False, compare=False)

    def with_triples(self, triples: Iterable[Sequence[Triple]]) -> Theory:
        """With other triples, of which it is not known which nodes have alike ones."""
        return replace(self, triples=tuple(triples), alike=())
