"""What a conversion between two states does on the devices of one axis, forward and backward, by name.

In: the types of the source and target state. Out: names of local or collective operations. Invariant: the backward entry of
(a, b) maps the dual of b to the dual of a, and is the transpose of the forward entry as a linear map between reference tensors
(differentiate e_target = e_source; the states and their duals are those of `hapx.states`).

    all_reduce, all_gather, reduce_scatter, all_to_all   move data between devices
    slice   keep the own shard          pad    the own shard, zeros around it
    mask    keep on the first device, zeros elsewhere (not 1/m of it everywhere: that rounds)
    none    nothing

Executed by `hapx.collectives.conversion`, priced by `hapx.cost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hapx.states import Invariant, Partial, Replicated, Sharded, State

COLLECTIVES = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})

TRANSPOSES: Mapping[tuple[type, type], tuple[str, str]] = MappingProxyType(
    {
        (Partial, Invariant): ("all_reduce", "none"),
        (Invariant, Partial): ("mask", "none"),
        (Invariant, Replicated): ("none", "all_reduce"),
        (Replicated, Invariant): ("none", "mask"),
        (Partial, Replicated): ("all_reduce", "all_reduce"),
        (Replicated, Partial): ("mask", "mask"),
        (Sharded, Replicated): ("all_gather", "reduce_scatter"),
        (Replicated, Sharded): ("slice", "pad"),
        (Sharded, Invariant): ("all_gather", "slice"),
        (Invariant, Sharded): ("slice", "all_gather"),
        (Partial, Sharded): ("reduce_scatter", "all_gather"),
        (Sharded, Partial): ("pad", "slice"),
        (Sharded, Sharded): ("all_to_all", "all_to_all"),
    }
)


def forward_collective(source: State, target: State) -> str | None:
    """The collective that runs forward in the conversion source -> target, or None when nothing moves between devices."""
    return _collective(source, target, _FORWARD)


def backward_collective(source: State, target: State) -> str | None:
    """The collective that runs backward in the conversion source -> target, or None when nothing moves between devices."""
    return _collective(source, target, _BACKWARD)


_FORWARD, _BACKWARD = ({ends: names[way] if names[way] in COLLECTIVES else None for ends, names in TRANSPOSES.items()} for way in (0, 1))


def _collective(source: State, target: State, names: Mapping[tuple[type, type], str | None]) -> str | None:
    if source is target or source == target:
        return None
    return names[type(source), type(target)]
