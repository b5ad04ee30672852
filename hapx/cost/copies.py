"""What a device does around a communication: copies through its memory, and kernels. The network's part is `hapx.cost.network`.

In: what runs on the devices of an axis (an operation of `hapx.transposes`), its form, whether pieces are of unequal length, whether a piece is
strided (cut along an inner dim, or in blocks). Out: how often each byte of the shorter and of the longer tensor passes the memory, and kernels.
Read from `hapx.collectives` and `hapx.runtime.gradients`:

    all_reduce       sums a clone                                                    2 whole
    all_gather       padded: unequal pieces are put together; else the own piece is put in its place        2 whole; 2 shard
    reduce_scatter   padded: unequal pieces are padded and put together, the own one is cloned; grouped: a clone of every piece;
                     point to point: m pieces are added up, here counted as the whole            4 whole + 2 shard; 2 whole; 3 whole
    all_to_all       pieces are selected, put together and put in their places       4 before + 2 after
    re-cut           what goes and what comes lies in the order of the devices       nothing
    slice, pad       2 shard;  2 shard + 1 whole
    mask             a clone, or zeros                                               2 whole
    strided          units go to the front and back again                            2 shard + 2 whole more
    bucket           of gradients: each is copied to its place in a bucket           2 whole, and entering it takes a launch in either direction

Free conversions cost nothing (see `hapx.cost.model`), so these are counted only where something moves between devices in one of the directions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hapx.plan import Form
from hapx.states import Sharded, State, is_recut
from hapx.transposes import TRANSPOSES


class Copies(NamedTuple):
    """Passes over the bytes of the shard (all-to-all: of the tensor before) and of the whole (after), and kernels."""

    first: float = 0.0
    second: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: tuple[float, ...]) -> Copies:  # type: ignore[override]
        return Copies(*(a + b for a, b in zip(self, other, strict=True)))


BEFORE, AFTER, WHOLE = range(3)  # a tensor before it is converted along an axis, after it, and after it but not in shards along the axis
NO_COPIES = Copies()
ENTERED, BUCKET = Copies(kernels=1.0), Copies(second=2.0, kernels=1.0)
_OF_ANY_FORM = {
    "none": NO_COPIES, "mask": Copies(second=2.0, kernels=1.0), "all_reduce": Copies(second=2.0, kernels=1.0),
    "slice": Copies(first=2.0, kernels=1.0), "pad": Copies(first=2.0, second=1.0, kernels=2.0), "all_to_all": Copies(4.0, 2.0, 3.0),
}  # fmt: skip
_GATHER = {
    Form.PADDED: Copies(second=2.0, kernels=1.0), Form.GROUPED: Copies(first=2.0, kernels=1.0), Form.POINT_TO_POINT: Copies(first=2.0, kernels=1.0),
}  # fmt: skip
_SCATTER = {
    Form.PADDED: Copies(2.0, 4.0, 3.0), Form.GROUPED: Copies(second=2.0, kernels=1.0), Form.POINT_TO_POINT: Copies(second=3.0, kernels=1.0),
}  # fmt: skip
_EQUAL = {"all_gather": NO_COPIES, "reduce_scatter": Copies(first=2.0, kernels=1.0)}
_STRIDED = Copies(2.0, 2.0, 2.0)


def copies(operation: str, form: Form, equal: bool, strided: bool) -> Copies:
    """Around one operation. equal: its pieces are equally long."""
    if operation == "re-cut":
        return _STRIDED if strided else NO_COPIES
    if operation in _OF_ANY_FORM:
        return _OF_ANY_FORM[operation]
    of_form = _GATHER if operation == "all_gather" else _SCATTER
    found = _EQUAL[operation] if equal and form in (Form.PADDED, Form.NONE) else of_form[form]
    return found + _STRIDED if strided else found


def operations(source: State, target: State) -> tuple[str, str]:
    """What runs forward and backward when a tensor is converted along one axis."""
    if is_recut(source, target):
        return "re-cut", "re-cut"
    return TRANSPOSES[type(source), type(target)]


def strided(source: State, target: State) -> bool:
    """Whether the shards are not consecutive in the memory of the whole."""
    return any(isinstance(s, Sharded) and (s.dim > 0 or s.outer > 1) for s in (source, target))


def sort(state: State) -> tuple[Any, ...]:
    """Of two different states with others of the same sorts, neither a re-cut, the same runs and is copied."""
    return (Sharded, state.dim > 0 or state.outer > 1, state.cut.row.kind == "even") if isinstance(state, Sharded) else (type(state),)


def copied(source: State, target: State) -> tuple[int, int]:
    """The shorter and the longer tensor that `Copies` speak of, of those that a communication has to do with."""
    if isinstance(source, Sharded):
        return BEFORE, AFTER if isinstance(target, Sharded) else WHOLE
    return AFTER, WHOLE
