"""Operators that are another one with arguments that are written down otherwise, or just by another name.

In: an operator and its arguments by name. Out: the operator that the tables know, and its arguments; None for one that is no alias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from hapx.graph.normalize_args import name_of
from hapx.graph.normalize_flatten import Slot
from hapx.graph.normalize_names import canonical

aten = torch.ops.aten
Bound = Mapping[str, Any]
Alias = tuple[torch._ops.OpOverload, dict[str, Any]]


def _shape(slot: Slot) -> tuple[int, ...]:
    assert slot.fake is not None
    return tuple(slot.fake.shape)


def _reshaped(shape: Callable[[Bound], Sequence[int]]) -> Callable[[Bound], Alias]:
    return lambda b: (aten.reshape.default, {"self": b["self"], "shape": list(shape(b))})


def _expanded(shape: Callable[[Bound], Sequence[int]]) -> Callable[[Bound], Alias]:
    return lambda b: (aten.expand.default, {"self": b["self"], "size": list(shape(b)), "implicit": False})


def _at_least(rank: int) -> Callable[[Bound], Sequence[int]]:
    """Shapes of torch.atleast_1d, 2d, 3d."""

    def shape(b: Bound) -> Sequence[int]:
        own = _shape(b["self"])
        if len(own) >= rank:
            return own
        return {0: (1,) * rank, 1: (1, *own, 1)[:rank], 2: (*own, 1)}[len(own)]

    return shape


ADJOINTS = ("aten.adjoint.default", "aten.mH.default", "aten.matrix_H.default")


def _adjoint(b: Bound) -> Alias:
    """Real tensors are their own conjugates. (Of complex ones: see `hapx.graph.normalize_spectra`.)"""
    return aten.transpose.int, {"self": b["self"], "dim0": -2, "dim1": -1}


def _sections(dim: Callable[[int], int]) -> Callable[[Bound], Alias]:
    return lambda b: (aten.tensor_split.sections, {"self": b["self"], "sections": b["sections"], "dim": dim(len(_shape(b["self"])))})


def _pieces(dim: Callable[[int], int] | None) -> Callable[[Bound], Alias | None]:
    """A tensor cut at given places."""

    def alias(b: Bound) -> Alias | None:
        shape = _shape(b["self"])
        at = b["dim"] if dim is None else dim(len(shape))
        places = [0, *b["indices"], shape[at]]
        if any(x > y for x, y in pairwise(places)) or min(places) < 0:
            return None
        return aten.split_with_sizes.default, {"self": b["self"], "split_sizes": [y - x for x, y in pairwise(places)], "dim": at}

    return alias


def _joined(dim: Callable[[int], int], stacked: int) -> Callable[[Bound], Alias | None]:
    """Tensors joined along the dim that their rank says, or stacked where they have no such dim yet."""

    def alias(b: Bound) -> Alias | None:
        ranks = {len(_shape(t)) for t in b["tensors"]}
        if len(ranks) > 1 or ranks == {0}:
            return None
        (rank,) = ranks
        if dim(rank) < rank:
            return aten.cat.default, {"tensors": b["tensors"], "dim": dim(rank)}
        return (aten.stack.default, {"tensors": b["tensors"], "dim": stacked}) if stacked <= rank else None

    return alias


def _view(b: Bound) -> Alias:
    """Whether a view is possible depends on strides, which differ between devices."""
    return aten.reshape.default, {"self": b["self"], "shape": b["size"]}


_ALIASES: Mapping[str, Callable[[Bound], Alias | None]] = {
    "aten.view.default": _view,
    "aten.view_as.default": _reshaped(lambda b: _shape(b["other"])),
    "aten.reshape_as.default": _reshaped(lambda b: _shape(b["other"])),
    "aten.expand_as.default": _expanded(lambda b: _shape(b["other"])),
    "aten.broadcast_to.default": _expanded(lambda b: b["size"]),
    "aten.atleast_1d.default": _reshaped(_at_least(1)),
    "aten.atleast_2d.default": _reshaped(_at_least(2)),
    "aten.atleast_3d.default": _reshaped(_at_least(3)),
    **dict.fromkeys(ADJOINTS, _adjoint),
    "aten.hsplit.int": _sections(lambda rank: min(1, rank - 1)),
    "aten.vsplit.int": _sections(lambda rank: 0),
    "aten.dsplit.int": _sections(lambda rank: 2),
    "aten.hsplit.array": _pieces(lambda rank: min(1, rank - 1)),
    "aten.vsplit.array": _pieces(lambda rank: 0),
    "aten.dsplit.array": _pieces(lambda rank: 2),
    "aten.tensor_split.indices": _pieces(None),
    "aten.hstack.default": _joined(lambda rank: min(1, rank - 1), 0),
    "aten.vstack.default": _joined(lambda rank: 0 if rank > 1 else rank, 0),
    "aten.row_stack.default": _joined(lambda rank: 0 if rank > 1 else rank, 0),
    "aten.dstack.default": _joined(lambda rank: 2, 2),
    "aten.column_stack.default": _joined(lambda rank: 1, 1),
}


def plain_form(op: torch._ops.OpOverload, bound: Bound) -> Alias | None:
    """The operator that `op` stands for, and its arguments."""
    alias = _ALIASES.get(name_of(op))
    if alias is not None:
        return alias(bound)
    other = canonical(op)
    return (other, dict(bound)) if other is not op else None
