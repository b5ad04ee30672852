"""How much of a tensor moves when it is cut again in other lengths along the uneven axis.

In: a view, the placements before and after. Out: affine pieces, parts of the tensor; each device sends and receives at most their maximum.
With shares s before and t after, device j has the units [sum_{i<j} s_i, sum_{i<=j} s_i), so it sends at most

    max(0, D_j+1) + max(0, -D_j)        and receives at most        max(0, -D_j+1) + max(0, D_j),        D_j = sum_{i<j} (s_i - t_i).

For a kind whose n devices are the first along the axis, D_j = j (s - t); where they are the last, the same counted from the end: no more than
n |s - t| moves. For others, and for kinds of many devices, the bound is all that a device has before or after. At shares of whole units some
units more may move; at concrete lengths (a view that has them) the pieces are exact.
"""

from __future__ import annotations

from hapx.cost.terms import Piece
from hapx.cost.view import View
from hapx.states import REPLICATED, Cut, Placement, Sharded

# devices of a kind from which on all that a device has is the better bound: ratios of two segments rarely differ by more than a sixth
MANY = 6


def moved(view: View, before: Placement, after: Placement, axis: int) -> tuple[Piece, ...]:
    """Pieces of the part of a tensor that a device of each kind sends or receives at most when `axis` cuts it again."""
    source, target = before.states[axis], after.states[axis]
    assert isinstance(source, Sharded) and isinstance(target, Sharded) and axis == view.mesh.uneven
    rest = view.fraction(after.with_state(axis, REPLICATED)).const  # what the even axes leave
    if view.lengths is not None:
        part = _exact(view, view.lengths[source.cut], view.lengths[target.cut])
        return (Piece(tuple(p / source.cut.units * r for p, r in zip(part, rest, strict=True))),)
    m, kinds = view.mesh.sizes[axis], view.kinds
    counts = [len(k) if len(k) <= MANY and k in (tuple(range(len(k))), tuple(range(m - len(k), m))) else 0 for k in kinds]
    one, other = ([float(n or 1) * r for n, r in zip(counts, rest, strict=True)] for _ in "ab")
    less = [-float(n) * r for n, r in zip(counts, rest, strict=True)]
    return _piece(source.cut, one, target.cut, less), _piece(target.cut, other, source.cut, less)


def _piece(cut: Cut, slope: list[float], other: Cut, less: list[float]) -> Piece:
    return Piece((0.0,) * len(slope), ((cut, tuple(slope)), (other, tuple(less))))


def _exact(view: View, held: tuple[int, ...], wanted: tuple[int, ...]) -> list[float]:
    """Units that the busiest device of each kind sends or receives."""
    busiest, first, second = [], 0, 0
    for n, k in zip(held, wanted, strict=True):
        stays = max(0, min(first + n, second + k) - max(first, second))
        busiest.append(max(n, k) - stays)
        first, second = first + n, second + k
    return [float(max(busiest[c] for c in kind)) for kind in view.kinds]
