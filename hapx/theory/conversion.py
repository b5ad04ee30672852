"""Conversions: paths of single-axis communications between two placements of one tensor.

Every state converts to every other (the twenty pairs of `hapx.transposes`), forward and transposed. With several axes a path
changes one axis at a time; which orders are legal follows from the nesting: the outer of two axes that split one dim alike may
not enter or leave that state while the inner one splits it (the pieces would come out permuted).

A direct path changes each axis at most once. On two levels, what the outer axis does to a tensor that is whole or Partial along the inner one
is done by every device of the inner axis, over the same link between machines. A path through shards cuts the tensor along the inner axis first
and puts it together last, so that the link carries it once:  reduce_scatter inside, all_reduce between machines, all_gather inside.

A *re-cut* leads from one ratio row to another: the same dim in the same units, in other lengths. Data moves between all devices of the axis and
of those inside that split the same factor.
"""

from __future__ import annotations

from functools import cache
from itertools import permutations, product

from hapx.ir import CONTINUOUS, Kind, TensorRef
from hapx.layout import compatible, followers
from hapx.plan import Communication, Form, Mesh
from hapx.states import INVARIANT, REPLICATED, Cut, Invariant, Partial, Placement, Replicated, Sharded, State, is_recut
from hapx.transposes import backward_collective, forward_collective

Path = tuple[Communication, ...]

OUTER, INNER = 0, 1  # axes of a mesh of two levels
# collectives whose form is a choice
FORMED = frozenset({"all_gather", "reduce_scatter"})
# collectives between machines that the devices of one may share
SHARED = FORMED | {"all_reduce"}
# kinds of tensors of which they do
VALUES = (Kind.VALUE, Kind.RECEIVED)


def paths(ref: TensorRef, mesh: Mesh, source: Placement, target: Placement, forms: frozenset[str]) -> tuple[Path, ...]:
    """All paths from one placement to another: the direct ones, then those through shards of the inner axis."""
    return (*direct_paths(ref, mesh, source, target, forms), *shared_paths(ref, mesh, source, target, forms))


def direct_paths(ref: TensorRef, mesh: Mesh, source: Placement, target: Placement, forms: frozenset[str]) -> tuple[Path, ...]:
    """All paths that change each axis once, in every legal order and with every allowed form.

    `((),)` if nothing changes; `()` if there is no path."""
    if source == target:
        return ((),)
    return _paths(ref.requires_grad, mesh, source, target, forms) if _may_convert(ref, source, target) else ()


def may_change(ref: TensorRef, source: Placement, target: Placement, axis: int) -> bool:
    """Whether one communication along `axis`, the only one on which they differ, leads from source to target."""
    return _may_convert(ref, source, target) and (len(source.states) == 1 or _legal(source, target, axis))


def _may_convert(ref: TensorRef, source: Placement, target: Placement) -> bool:
    if source.nest != target.nest:  # steps change states only
        return False
    if ref.mutated:  # a converted copy would be written, not the buffer
        return False
    # integers and booleans are Partial only where an operator sums; a conversion does not make them so
    return ref.dtype in CONTINUOUS or not any(isinstance(t, Partial) and t != s for s, t in zip(source.states, target.states, strict=True))


@cache
def _paths(gradient: bool, mesh: Mesh, source: Placement, target: Placement, forms: frozenset[str]) -> tuple[Path, ...]:
    changed = [a for a, (s, t) in enumerate(zip(source.states, target.states, strict=True)) if s != t]
    found = []
    for order in permutations(changed):
        at, steps = source, []
        for axis in order:
            after = at.with_state(axis, target.states[axis])
            if not _legal(at, after, axis):
                break
            steps.append(
                [
                    Communication(axis, at.states[axis], after.states[axis], f, gradient)
                    for f in _choices(at.states[axis], after.states[axis], gradient, forms)
                ]
            )
            at = after
        else:
            found += [tuple(p) for p in product(*steps)]
    return tuple(dict.fromkeys(found))


def shared_paths(ref: TensorRef, mesh: Mesh, source: Placement, target: Placement, forms: frozenset[str]) -> tuple[Path, ...]:
    """The paths that cut along the inner axis before the outer one changes, and put together afterwards. Of values only: gradients of parameters
    are summed so in any case (`hapx.runtime.sums`), and what is gathered of parameters is better stored in shards of both axes."""
    passed = shared_placements(ref, mesh, source, target)
    return _shared_paths(ref.requires_grad, passed, forms) if passed else ()


def shares(mesh: Mesh, source: Placement, target: Placement) -> bool:
    """Whether the devices of the inner axis can share what the outer one does."""
    if len(mesh.axes) != 2 or mesh.uneven == INNER or min(mesh.sizes) == 1 or source.nest or target.nest:
        return False
    (s, inside), (t, after) = source.states, target.states
    ends = (INVARIANT, REPLICATED) if isinstance(inside, Partial) else (inside,)
    return s != t and not isinstance(inside, Sharded) and after in ends


def shared_placements(ref: TensorRef, mesh: Mesh, source: Placement, target: Placement) -> tuple[Placement, ...]:
    """The placements that such a path passes, source and target included; none if there is no such path."""
    if ref.kind not in VALUES or not shares(mesh, source, target):
        return ()
    between = _inner_shards(ref.shape, mesh, source.states[OUTER], target.states[OUTER])
    return _shared_placements(ref.requires_grad, source, target, between) if between is not None else ()


@cache
def _shared_placements(gradient: bool, source: Placement, target: Placement, between: Sharded) -> tuple[Placement, ...]:
    (s, _), (t, _) = source.states, target.states
    if not SHARED & {forward_collective(s, t), backward_collective(s, t) if gradient else None}:
        return ()
    passed = (source, source.with_state(INNER, between), target.with_state(INNER, between), target)
    legal = all(_legal(a, b, axis) for a, b, axis in zip(passed, passed[1:], (INNER, OUTER, INNER), strict=False))
    return passed if legal else ()


@cache
def _shared_paths(gradient: bool, passed: tuple[Placement, ...], forms: frozenset[str]) -> tuple[Path, ...]:
    steps = [(axis, a.states[axis], b.states[axis]) for axis, a, b in zip((INNER, OUTER, INNER), passed, passed[1:], strict=False)]
    choices = ([Communication(axis, a, b, f, gradient) for f in _choices(a, b, gradient, forms)] for axis, a, b in steps)
    return tuple(product(*choices))


@cache
def _inner_shards(shape: tuple[int, ...], mesh: Mesh, *outside: State) -> Sharded | None:
    """How the inner axis shares out a tensor: along the dim that can be cut most evenly, the first of those, but none that the outer axis cuts."""
    size, taken = mesh.sizes[INNER], {s.dim for s in outside if isinstance(s, Sharded)}
    found = [(-(-n // size) * size / n, dim) for dim, n in enumerate(shape) if n >= size and dim not in taken]
    return Sharded(min(found)[1], 1, 1, Cut(mesh.row(INNER), shape[min(found)[1]])) if found else None


def _forms(source: State, target: State, gradient: bool, forms: frozenset[str]) -> tuple[Form, ...]:
    used = {forward_collective(source, target)} | ({backward_collective(source, target)} if gradient else set())
    if used & FORMED:
        return tuple(f for f in (Form.PADDED, Form.GROUPED, Form.POINT_TO_POINT) if f.value in forms)
    return (Form.NONE,)


def _choices(source: State, target: State, gradient: bool, forms: frozenset[str]) -> tuple[Form, ...]:
    """Forms worth choosing from: between equal shares nothing is padded, so one form is as good as any."""
    found = _forms(source, target, gradient, forms)
    even = all(s.cut.row.kind == "even" for s in (source, target) if isinstance(s, Sharded))
    return found[:1] if even else found


def storages(stored: tuple[Placement, ...], use: Placement) -> tuple[Placement, ...]:
    """Of the placements that the theory allows for a parameter, those in which it may be stored if its only use is in placement `use`
    (part of the space that is searched): on each axis in shards as it is used, else whole or in storage shards that are gathered.
    Where none is like that, all of them."""
    fitting = tuple(
        p
        for p in stored
        if all(
            s == u if isinstance(u, Sharded) else not isinstance(s, Sharded) or (not isinstance(u, Partial) and _for_keeping(s))
            for s, u in zip(p.states, use.states, strict=True)
        )
    )
    return fitting or stored


def _for_keeping(state: Sharded) -> bool:
    return state.cut.row.kind != "compute" and state.outer == 1 and state.inner == 1


def _legal(before: Placement, after: Placement, axis: int) -> bool:
    """Whether `axis` may change: no axis further inside splits the same factor, or all of them do before and after; and the result nests."""
    if is_recut(before.states[axis], after.states[axis]):
        return all(a > axis for a in followers(before, axis)) and compatible(after.states)
    order = before.order()
    for state in (before.states[axis], after.states[axis]):
        if isinstance(state, Sharded):
            for inner in order[order.index(axis) + 1 :]:
                other = before.states[inner]
                if isinstance(other, Sharded) and other.same_split(state):
                    return False
    return compatible(after.states)


def step_is_legal(ref: TensorRef, before: Placement, communication: Communication) -> bool:
    """Whether one communication may be applied to a tensor in placement `before` (for `replay`)."""
    axis = communication.axis
    if (
        ref.mutated
        or not 0 <= axis < len(before.states)
        or before.states[axis] != communication.source
        or communication.source == communication.target
    ):
        return False
    if communication.gradient != ref.requires_grad or (not ref.requires_grad and isinstance(communication.target, Invariant)):
        return False
    if ref.dtype not in CONTINUOUS and isinstance(communication.target, Partial):
        return False
    if communication.form not in _forms(communication.source, communication.target, communication.gradient, ALL_FORMS):
        return False
    if isinstance(communication.target, Sharded) and not _fits(ref, communication.target, axis):
        return False
    return _legal(before, before.with_state(axis, communication.target), axis)


def _fits(ref: TensorRef, state: Sharded, axis: int) -> bool:
    return state.cut.row.axis == axis and 0 <= state.dim < len(ref.shape) and state.outer * state.cut.units * state.inner == ref.shape[state.dim]


ALL_FORMS = frozenset(f.value for f in Form)


def free(ref: TensorRef, source: Placement, target: Placement) -> bool:
    """Whether `target` follows from `source` without communication in either direction."""
    if source == target:
        return True
    return (
        _may_convert(ref, source, target)
        and all(stays(ref, s, t) for s, t in zip(source.states, target.states, strict=True))
        and _some_order(source, target)
    )


def stays(ref: TensorRef, source: State, target: State) -> bool:
    """Whether nothing moves along an axis in either direction when a tensor changes its state there."""
    return source == target or (forward_collective(source, target) is None and (not ref.requires_grad or backward_collective(source, target) is None))


@cache
def _some_order(source: Placement, target: Placement) -> bool:
    changed = [a for a, (s, t) in enumerate(zip(source.states, target.states, strict=True)) if s != t]
    for order in permutations(changed):
        at, legal = source, True
        for axis in order:
            after = at.with_state(axis, target.states[axis])
            legal = legal and _legal(at, after, axis)
            at = after
        if legal:
            return True
    return False


def whole(mesh: Mesh, invariant: bool) -> Placement:
    """The placement in which every device has the whole tensor."""
    return Placement(((INVARIANT if invariant else Replicated()),) * len(mesh.axes))
